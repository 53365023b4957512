"""Under ZeRO 3, gather parameters by decoder layer instead of by module.

DeepSpeed gathers and frees the parameters of each module by hooks, which take about 0.3 ms of the host per module and
pass. With LoRA a layer has some forty modules, and a step runs three passes per chunk: the hooks of a 1.5B model took
0.5 s of every pass, whatever its length. A layer that DeepSpeed calls a *leaf* has one hook and one gather.

It settles mixture-of-experts blocks too: which experts run differs from pass to pass and rank to rank, and a gather
that one rank leaves out would hang the others. A leaf is gathered whole.

Each parameter of a gather costs the host time as well, and a layer with LoRA has fourteen of an adapter, which are next
to nothing: they are not divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from oomb_accel.integrations.support import base_model_of, checkpointed_modules, decoder_layers

WHOLE_ELEMENTS = 1_000_000
"""Parameters up to this size stay whole on every rank: of LoRA with rank 16 on layers up to 60,000 wide, and what else
is as small. Larger adapters are divided as all weights are."""
_THRESHOLDS = ("stage3_param_persistence_threshold", "param_persistence_threshold")
"""DeepSpeed's two names of one setting."""


def keep_adapters_whole(config: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """A DeepSpeed config under which ZeRO 3 divides no small parameters, where some weights are frozen and the config
    does not say itself which parameters are too small to be divided."""
    zero = dict(config.get("zero_optimization") or {})
    is_said = any(name in zero for name in _THRESHOLDS)
    if zero.get("stage") != 3 or is_said or all(parameter.requires_grad for parameter in model.parameters()):
        return dict(config)
    return {**config, "zero_optimization": {**zero, _THRESHOLDS[0]: WHOLE_ELEMENTS}}


def gather_whole_layers(model: nn.Module) -> None:
    """Make the decoder layers of a model leaves for ZeRO 3; before DeepSpeed sees the model.

    A leaf delivers the gradients of its parameters when the gradient of its input is there, so the input of the
    first layer has to want one. With gradient checkpointing only mixture-of-experts blocks are leaves: its recompute
    runs the hooks of a layer within the backward.
    """
    from deepspeed.utils import set_z3_leaf_modules

    base = base_model_of(model)
    leaves = {type(layer) for layer in decoder_layers(base)}
    if not leaves or any(module.gradient_checkpointing for module in checkpointed_modules(base)):
        leaves = {type(m) for m in base.modules() if isinstance(getattr(m, "experts", None), nn.Module)}
    if leaves:
        set_z3_leaf_modules(model, list(leaves))
        base.enable_input_require_grads()
