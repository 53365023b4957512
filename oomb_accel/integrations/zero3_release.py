"""Under ZeRO 3, a pass holds the gathered parameters of the layer at work and no others.

Without this, two things hold them from a chunk's recompute on, and ZeRO 3 saves no memory:

* DeepSpeed takes a forward that runs within a backward for the recompute of a checkpoint. Frozen parameters gathered
  there stay until the backward of the module around it is over, which for a chunk is the whole model: all of the
  base model of a LoRA, until the end of the step.
* Autograd saves views with their storage. DeepSpeed's own linear function saves the parameter itself, which is empty
  once freed; stacks of experts are read through views (``weight[i]``, transposed).

Both gather again in the backward, by DeepSpeed's hooks before each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oomb_accel.integrations.agreement import is_partitioned


def released_after_use(model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """What to enter around the forward of a pass, not its backward. It does nothing where no parameter is in parts."""
    if not is_partitioned(model):
        return nullcontext
    return _views_and_no_checkpoint if _has_stacks(model) else _no_checkpoint


@contextmanager
def _views_and_no_checkpoint() -> Iterator[None]:
    with _views_read_again(), _no_checkpoint():
        yield


@contextmanager
def _no_checkpoint() -> Iterator[None]:
    """Tell DeepSpeed that no forward inside is a checkpoint's recompute. One that a layer makes for itself runs in
    the backward of the pass, outside of this."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    plain = coordinator.update_recompute_parameters
    coordinator.update_recompute_parameters = lambda sub_module, param: None
    try:
        yield
    finally:
        coordinator.update_recompute_parameters = plain


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a parameter without its storage."""

    parameter: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """From where the parameter begins: gathered again, it may begin elsewhere in its storage."""

    def read(self) -> Tensor:
        begin = int(self.parameter.storage_offset())
        return self.parameter.detach().as_strided(self.size, self.stride, begin + self.offset)


def _views_read_again() -> AbstractContextManager[Any]:
    """Save views of gathered parameters as what they are, and read the parameter when the backward wants them. Costs
    some 8 us of the host per saved tensor, so it is left to models that need it."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> Tensor | _View | tuple[Tensor, int]:
    if hasattr(tensor, "ds_id"):
        return tensor
    base = tensor._base
    if base is not None and hasattr(base, "ds_id"):
        offset = int(tensor.storage_offset()) - int(base.storage_offset())
        return _View(base, tuple(tensor.shape), tensor.stride(), offset)
    # The tensor itself may be the result of the node that saves it: neither would ever be freed.
    return tensor.detach(), tensor._version


def _unpack(saved: Tensor | _View | tuple[Tensor, int]) -> Tensor:
    if isinstance(saved, _View):
        return saved.read()
    if isinstance(saved, Tensor):
        return saved
    tensor, version = saved
    if tensor._version != version:  # what autograd itself looks at where there are no hooks
        raise RuntimeError(
            "A tensor that the backward needs was changed in place in the forward of a chunk.\n"
            f"  Got version {tensor._version} of one of shape {tuple(tensor.shape)}; version {version} is needed.\n"
            "  Change the model's code to make a new tensor there, or train without ZeRO 3."
        )
    return tensor


def _has_stacks(model: nn.Module) -> bool:
    return any(len(getattr(parameter, "ds_shape", ())) > 2 for parameter in model.parameters())
