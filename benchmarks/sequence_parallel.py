"""The peer on several GPUs: DeepSpeed's ALST, which divides one document over all ranks.

Ulysses exchanges heads for tokens around attention, so every rank has all tokens of some heads there, and some
tokens of everything else. Activations are checkpointed; Liger's norms, RoPE, SwiGLU and fused loss run where they
can. MLPs are not tiled: that saves memory which these lengths do not need, for another forward. (arXiv 2506.13996)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from benchmarks.whole_step import switch_on
from oomb_accel.integrations.support import base_model_of

_IGNORED = -100
_ATTENTION = "sdpa"


@contextmanager
def divided(model: PeftModel, *, offload: bool) -> Iterator[Any]:
    """Have attention exchange tokens for heads, and layers checkpointed.

    Args:
        offload: checkpoints wait in host memory.

    Yields:
        The groups of ranks, for `deepspeed.initialize`.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    undo = switch_on(model, "peer-offload" if offload else "peer", chunk_tokens=0)
    plain = ALL_ATTENTION_FUNCTIONS[_ATTENTION]
    try:
        yield UlyssesSPAttentionHF.register_with_transformers(
            base_model_of(model),
            core_attn_implementation=_ATTENTION,
            sequence_parallel_size=dist.get_world_size(),
            micro_batch_size=1,
        )
    finally:
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = plain
        # DeepSpeed would keep both for the rest of the process.
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None
        groups.mpu = None
        undo()


def step_of(engine: Any) -> Callable[[Tensor], float]:
    """An optimizer step on one document ``[1, tokens]``, the same on all ranks; returns its mean loss."""

    def step(ids: Tensor) -> float:
        loss = _loss(engine, ids)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _loss(engine: Any, ids: Tensor) -> Tensor:
    """Mean over the targets of all ranks, with the gradient of each rank's part."""
    ranks, rank, tokens = dist.get_world_size(), dist.get_rank(), ids.shape[1]
    if tokens % ranks:
        raise ValueError(
            f"Every rank has equally many tokens of a document.\n  Got {tokens} tokens for {ranks} ranks.\n"
            f"  Use --lengths {tokens // ranks * ranks}."
        )
    here = slice(tokens // ranks * rank, tokens // ranks * (rank + 1))
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], _IGNORED)], dim=1)[:, here]
    positions = torch.arange(tokens, device=ids.device)[None, here]
    out = engine(input_ids=ids[:, here], position_ids=positions, labels=targets, shift_labels=targets, use_cache=False)
    counted = (targets != _IGNORED).sum()
    losses, counts = torch.stack(all_gather(out.loss)), torch.stack(all_gather(counted))
    return (losses * counts).sum() / counts.sum()
