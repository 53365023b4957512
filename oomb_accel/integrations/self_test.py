"""Before training: prove that the gradients of several passes add up under the user's own DeepSpeed settings.

A tiny model is trained for one step under the same ZeRO stage, precision and offload settings, with more chunks on
one rank than on the next, and compared with full attention over all ranks' data. What this guards against trains
silently wrong: a DeepSpeed that reduces the gradient of one chunk only, or of each chunk again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from oomb_accel.config import OombConfig
from oomb_accel.integrations.transformers import attach
from oomb_accel.integrations.zero3_layers import gather_whole_layers
from oomb_accel.rng import forked_rng

_KEPT = ("zero_optimization", "bf16", "torch_autocast", "data_types", "communication_data_type", "prescale_gradients")
"""What of a DeepSpeed config decides how gradients are reduced and stored."""
_CHUNK, _PAGE, _WIDTH, _RATE = 16, 8, 32, 1.0
_ALLOWED = {torch.float32: 0.02, torch.bfloat16: 0.1}
"""Largest relative error of an update by the type of the weights; fp32 may be TF32. Lost chunks give 0.3 to 1.5."""
MARK = "_oomb_self_test"
"""Attribute of the tiny model, whose steps are nobody's training."""

logger = logging.getLogger("oomb_accel")


def self_test(config: Mapping[str, Any], initialize: Callable[..., tuple[Any, ...]]) -> float:
    """Train a tiny model under a DeepSpeed config and compare. Collective; takes seconds.

    Args:
        config: the user's; its ZeRO, precision and offload settings are used. A process group must exist.
        initialize: DeepSpeed's own ``initialize``.

    Returns:
        The relative error of the update (L2, over all parameters).

    Raises:
        RuntimeError: gradients do not add up.
    """
    import deepspeed

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(deepspeed.get_accelerator().current_device_name())
    ours_config = _small_config(config)
    with forked_rng(device):
        torch.manual_seed(0)
        model = _tiny_model().to(device)
        documents = [torch.randint(0, 64, (1, _length(r)), device=device) for r in range(num_ranks)]
    if (config.get("bf16") or {}).get("enabled"):
        model.to(torch.bfloat16)
    wanted = _update_by_full_attention(model, documents)
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    setattr(model, MARK, True)
    attach(model, OombConfig(chunk_tokens=_CHUNK, page_tokens=_PAGE, progress=False, beyond_trained_length="allow"))
    if ours_config["zero_optimization"].get("stage") == 3:
        gather_whole_layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    engine, *_ = initialize(model=model, optimizer=optimizer, config=ours_config)
    total = sum(document.shape[1] - 1 for document in documents)
    loss = engine(input_ids=documents[rank], labels=documents[rank], num_targets=total).loss
    engine.backward(loss * num_ranks)
    engine.step()
    error = _error(engine, before, wanted)
    dtype = next(model.parameters()).dtype
    engine.destroy()
    if not error <= _ALLOWED[dtype]:
        stage = ours_config["zero_optimization"].get("stage", 0)
        raise RuntimeError(
            f"Gradients of several chunks do not add up under this DeepSpeed ({deepspeed.__version__}, ZeRO {stage}).\n"
            f"  A tiny model's update is off by {error:.2g}; allowed is {_ALLOWED[dtype]:g}.\n"
            "  Training would be silently wrong. Use a DeepSpeed of the tested range, or report this configuration."
        )
    logger.info("self-test: chunks add up under ZeRO, update off by %.2g", error)
    return error


def _small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's ZeRO settings for a model of a few thousand parameters and one micro-batch."""
    small = {name: copy.deepcopy(config[name]) for name in _KEPT if name in config}
    zero = small.setdefault("zero_optimization", {})
    for name, value in list(zero.items()):
        if value == "auto":
            del zero[name]
        elif isinstance(value, Mapping) and value.get("device") == "nvme":
            zero[name] = {"device": "cpu"}  # the disk has no part in how gradients add up
    zero["stage3_param_persistence_threshold"] = 0  # everything really sharded
    for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"):
        zero[name] = 10**5
    return {
        **small,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def _length(rank: int) -> int:
    """Documents of four chunks and of one, in turn."""
    return 3 * _CHUNK + 5 if rank % 2 == 0 else _CHUNK - 3


def _tiny_model() -> nn.Module:
    # Not from_config: under zero.Init that would give a model in parts.
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * _CHUNK,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    return Qwen2ForCausalLM(config).train()


def _update_by_full_attention(model: nn.Module, documents: list[Tensor]) -> dict[str, Tensor]:
    """What one step of gradient descent adds to each parameter, in fp32."""
    exact = copy.deepcopy(model).float()
    total = sum(document.shape[1] - 1 for document in documents)
    for document in documents:
        logits = exact(input_ids=document, use_cache=False).logits[0, :-1]
        (nn.functional.cross_entropy(logits, document[0, 1:], reduction="sum") / total).backward()
    return {name: -_RATE * p.grad for name, p in exact.named_parameters() if p.grad is not None}


def _error(engine: Any, before: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Relative error of the whole update. Single parameters tell little: where weights have no copy in fp32, the
    update of a norm's weight is smaller than the spacing of bf16 numbers around one."""
    from deepspeed.utils import safe_get_full_fp32_param

    error = size = 0.0
    for name, parameter in engine.module.named_parameters():
        now = safe_get_full_fp32_param(parameter)
        now = parameter.detach() if now is None else now
        error += float((now.float() - before[name] - wanted[name]).square().sum())
        size += float(wanted[name].square().sum())
    return (error / size) ** 0.5
