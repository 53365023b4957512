"""Under ZeRO 3, gather parameters by decoder layer instead of by module.

DeepSpeed gathers and frees the parameters of each module by hooks, which take about 0.3 ms of the host per module and
pass. With LoRA a layer has some forty modules, and a step runs three passes per chunk: the hooks of a 1.5B model took
0.5 s of every pass, whatever its length. A layer that DeepSpeed calls a *leaf* has one hook and one gather.

It settles mixture-of-experts blocks too: which experts run differs from pass to pass and rank to rank, and a gather
that one rank leaves out would hang the others. A leaf is gathered whole.
"""

from __future__ import annotations

from torch import nn

from oomb_accel.integrations.support import base_model_of, checkpointed_modules, decoder_layers


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
