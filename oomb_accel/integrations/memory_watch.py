"""A memory report for a model that is switched on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oomb_accel.integrations.attachment import Attachment, attachment_of
from oomb_accel.integrations.support import whole_numel
from oomb_accel.memory_report import MemoryReport, MemorySources, What


def watch_memory(model: nn.Module, *, optimizer: Any = None, path: str | Path | None = None) -> MemoryReport:
    """Report where memory goes, from now on: a sample behind every chunk of every step.

    Sampling costs no time of the device. It resets ``torch.cuda.max_memory_allocated`` at every chunk.

    Args:
        model: switched on.
        optimizer: whose state is to be counted; without it, it counts as activations.
        path: a file to which a line per sample is appended, for ``oomb report``; see `MemoryReport.write_to`.

    Returns:
        The report: ``report.table()`` has the peaks in words, ``report.peaks`` in bytes.

    Raises:
        ValueError: the model is not switched on.
    """
    state = attachment_of(model)
    memory = _ModelMemory(state, optimizer)
    report = MemoryReport(
        MemorySources(
            memory.standing, state.offload.host_bytes, state.offload.copied_bytes, state.offload.waited_seconds
        )
    )
    if path is not None:
        report.write_to(Path(path))
    state.listen(report)
    return report


class _ModelMemory:
    """Device memory of a model and its optimizer. What does not change is counted once."""

    def __init__(self, state: Attachment, optimizer: Any) -> None:
        self._state, self._optimizer = state, _innermost(optimizer)
        self._parameters: dict[str, int] = {}
        self._optimizer_bytes = 0
        self._trained = [p for p in state.model.parameters() if p.requires_grad]
        # Sums over chunks are in fp32 at least, and whole on every rank.
        self._sums = sum(whole_numel(p) * max(4, p.element_size()) for p in self._trained)

    def standing(self, device: str, what: What) -> dict[str, int]:
        """Bytes by tier on the device while a sweep runs."""
        place = torch.device(device)
        if not self._parameters:
            model = self._state.model
            frozen = [p for p in model.parameters() if not p.requires_grad]
            copies = () if self._state.float8_base is None else self._state.float8_base.tensors()
            self._parameters = {
                "weights": _num_bytes([*_parts(frozen), *model.buffers(), *copies], place),
                "trained": _num_bytes(_parts(self._trained), place),
            }
        if not self._optimizer_bytes:  # it comes into being with the first update
            self._optimizer_bytes = _num_bytes(self._optimizer_state(), place)
        has_gradients = any(p.grad is not None for p in self._trained[:1])
        gradients = self._parameters["trained"] if has_gradients else 0
        if what == "backward":
            gradients += self._sums
        return {**self._parameters, "optimizer": self._optimizer_bytes, "gradients": gradients}

    def _optimizer_state(self) -> Iterator[Tensor]:
        """Moments, and weights that the optimizer keeps for itself."""
        if self._optimizer is None:
            return
        own = {id(p) for p in self._trained}
        for group in self._optimizer.param_groups:
            yield from (p for p in group["params"] if id(p) not in own)
        for moments in self._optimizer.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))


def _innermost(optimizer: Any) -> Any:
    """The optimizer of torch below those of Accelerate and DeepSpeed."""
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    return optimizer


def _parts(parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """What a rank holds of its parameters; under ZeRO 3 their own memory is empty between passes."""
    for parameter in parameters:
        yield parameter
        shard = getattr(parameter, "ds_tensor", None)
        if shard is not None:
            yield shard


def _num_bytes(tensors: Any, device: torch.device) -> int:
    """Of the tensors on a device; what several of them share counts once."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor.device.type == device.type
    }
    return sum(sizes.values())
