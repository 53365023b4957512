"""Whether a model can be trained with its frozen weights in 8 bits, just before a step."""

from __future__ import annotations

from typing import NoReturn

import torch

from oomb_accel.integrations.agreement import is_partitioned
from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.support import check_float8_device, compute_dtype
from oomb_accel.plan.limits import check_float8_products
from oomb_accel.setting_text import dtype_name
from oomb_kernels import float8_product_fault


def prepare_float8_base(state: Attachment) -> None:
    """Make the copies in 8 bits that are missing, where the settings ask for them; needs no other rank.

    Raises:
        ValueError: they would change nothing, or cannot be used.
    """
    float8 = state.float8_base
    if float8 is None:
        return
    if is_partitioned(state.model):
        refuse_parts()
    device = next(state.model.parameters()).device
    check_device(device, compute_dtype(state.base, device))
    if state.wrapped or any(m.gradient_checkpointing and m.training for m in state.checkpointed):
        raise ValueError(
            "Gradient checkpointing runs layers again outside of chunks, where they would not compute in 8 bits.\n"
            "  Got base_dtype='float8' with checkpointing on; chunks already bound the activations.\n"
            "  Set gradient_checkpointing=False, or base_dtype='model'."
        )
    float8.update()
    if not float8.num_layers:
        trained = sum(layer.weight.requires_grad for layer in float8.layers)
        raise ValueError(
            "base_dtype='float8' has nothing to do: no linear layer of the decoder is frozen and plain.\n"
            f"  Got {len(float8.layers)} of them, {trained} of them trained; 8 bits need frozen nn.Linear layers with "
            "sizes in multiples of 16.\n"
            "  Set base_dtype='model', or train adapters (lora_r: 16) on a model that is not quantised."
        )


def refuse_parts() -> NoReturn:
    """ZeRO 3 has no whole weights.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "ZeRO 3 holds weights in parts, of which there are no copies in 8 bits.\n"
        "  Got base_dtype='float8' with ZeRO stage 3.\n"
        "  Set base_dtype='model', or use ZeRO 2."
    )


def check_device(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a GPU without products in 8 bits.

    Args:
        dtype: that the model computes in.

    Raises:
        ValueError: naming the setting to change.
    """
    check_float8_device("base_dtype", device)
    if device.type == "cuda":
        check_float8_products(dtype_name(dtype))
    fault = float8_product_fault(device) if device.type == "cuda" and dtype == torch.bfloat16 else None
    if fault is not None:
        raise ValueError(
            "This GPU or build of torch has no product of 8-bit matrices with a scale for every row, which "
            "base_dtype='float8' asks for.\n"
            f"  {torch.cuda.get_device_name(device)} with torch {torch.__version__}: {fault}.\n"
            "  Set base_dtype='model', or install torch for a newer CUDA."
        )
