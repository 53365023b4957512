"""What was measured, in one place: rates that one H200 reaches in whole steps. Other GPUs are scaled by their peaks.

Where from: `python -m benchmarks.run whole_step --lengths 32768 131072 --sides oomb oomb-no-kept` and
`python -m benchmarks.run profile_step --lengths 32768 --sides oomb` for dense steps, `... --sides
oomb-sparse-16-no-kept oomb-sparse-64-no-kept` for sparse ones, `python -m benchmarks.run zero` for what DeepSpeed adds.
`tests/plan/test_measured.py` holds the estimates against every row of docs/benchmarks.md.
"""

from __future__ import annotations

from oomb_accel.plan.sizes import GIB

# Shares of a GPU's peak of matrix products.
MATRIX = 650 / 989
"""Matrix products of linear layers and head, where all weights are trained, or PEFT runs the layers with adapters."""
FUSED_MATRIX = 690 / 989
"""The same with frozen weights, adapters within their products (6.62 s at 64K, sparse, nothing kept)."""
FLOAT8 = 1.65
"""How much faster base products in 8 bits are, with quantising (`oomb bench step`: 5.26 s, not 6.73)."""
ATTENTION_FORWARD, ATTENTION_BACKWARD = 573 / 989, 505 / 989
"""Dense attention by library kernels, head_dim 128, with merging."""
SELECTED_FORWARD, SELECTED_BACKWARD = 560 / 989, 342 / 989
"""Attention to selected pages, lists at random."""
LIST_KEYS = 500
"""A list takes as long as this many keys more, whatever its length: `oomb bench attention` with lists of 16, 32 and 64
pages says 530 forward (0.45, 0.80, 1.52 ms at 128K) and 430 backward (1.60, 2.96, 5.57 ms), whole steps a little
more."""
SCORING = 190 / 989
"""Scoring the mean keys of pages (`oomb bench attention`: 1.36 ms at 1M tokens, 0.23 at 128K)."""

BACKWARD = 2.5
"""Attention's backward over its forward: five matrix products instead of two."""
BACKWARD_TWICE = 3.5
"""The same where scores are formed twice (`sizes.scores_are_formed_twice`): seven products. By their number, not
measured."""
HEAD_DIM = 128
"""Of the measurements. Smaller heads are taken to be slower by the square root."""

ELEMENTWISE_TURNS = 3.0
"""How often a forward reads or writes what it keeps for the backward (norms, activations, RoPE, residuals); a backward
twice as often."""
PEFT_TURNS = 3.0
"""How often the output of a linear layer with an adapter is read or written more where PEFT runs it, operation by
operation (6.86 and 7.30 s at 64K, sparse); never where `integrations.fused_lora` does, within the matrix products,
also where ZeRO 3 gathers whole layers. Measured with plain LoRA: dropout's masks and DoRA's norms come on top."""
LAYER_PASS_SECONDS = 0.25e-3
"""Of a layer in one pass, whatever its size: launches, small kernels."""
SPARSE_LAYER_SECONDS = 0.8e-3
"""Of a layer that selects pages, in one forward: scores, lists, merging."""

HOST_PASS_SECONDS = 2.8e-3
"""What the host takes to launch a layer in one pass: measured with adapters (1.55 s for a 0.5B at 64K, the device busy
for 56 % of it), taken for layers without them too, which take less."""
HOST_LAYER_SECONDS, HOST_RECORD_SECONDS = 0.7e-3, 0.47e-6
"""What the host does for pages in a sparse layer of a chunk while some are away, and for each record that moves: three
steps with lists at random that waited for it (docs/benchmarks.md). Copies are handed over in calls of 64 now, and it
runs beside the computation: 256K take 27.99 s with a seventh of the pages on the device, 27.7 with all."""

ZERO3_LAYER_SECONDS = 0.75e-3
"""What DeepSpeed's hooks add to a layer in one pass."""
ZERO3_HOST_SECONDS = 11e-3
"""Least time of a layer with adapters in one pass under ZeRO 3 on several ranks: the host's."""
ZERO_STEP_SHARE = 0.007
"""What ZeRO 1 and 2 add to a step."""
HOST_ADAMW_SECONDS = 0.55e-9
"""torch's fused AdamW on 16 cores, per number."""

# Memory.
LOGIT_COPIES = 1
"""A chunk's logits at the worst moment: their gradient overwrites them."""
WORKSPACE_BYTES = int(0.2 * GIB)
"""Buffers of kernels, scores of pages, small tensors; that of the sparse backward is reckoned."""
CONTEXT_BYTES = int(0.6 * GIB)
"""CUDA context and libraries: device memory that torch does not count."""
PROCESS_BYTES = 2 * GIB
"""Host memory of a process with torch and transformers."""
ZERO3_BUCKET_BYTES = 2 * 500_000_000
"""DeepSpeed's default reduce_bucket_size, in bf16."""
DEVICE_RESERVE = 0.06
"""Share of the device that is never planned for: workspaces and fragmentation."""
