"""What a fine-tune has brought: loss against context length, planted facts, loss by position; and merged adapters."""
