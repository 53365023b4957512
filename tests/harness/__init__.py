"""The parity harness: tiny models, batches in every layout, the full-attention reference, and three tolerance rules."""
