"""What a decoder layer costs the host: operations that our own code hands to torch, by pass.

On a GPU each takes the host as long as a small kernel takes the device, so where layers are short they bound a step.
Operations of the kernels' references, of the model and of autograd are not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.integrations import stream
from oomb_accel.integrations.parameters import ZERO3
from oomb_accel.memory import StreamMemory
from tests.harness.models import ALL_LINEAR, tiny_model

CHUNK_TOKENS, NUM_CHUNKS, COUNTED_CHUNK = 64, 6, 3
PASSES = ("forward", "recompute", "backward")
PROJECTS = ("oomb_accel.", "oomb_kernels.", "transformers.")


class Operations(TorchDispatchMode):
    """Counts operations by pass, as far as the next of these projects on the stack is the library."""

    def __init__(self) -> None:
        super().__init__()
        self.now: str | None = None
        self.counts: Counter[str | None] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _module(frame).startswith(PROJECTS):
            frame = frame.f_back
        module = "" if frame is None else _module(frame)
        # What the engine does by itself is called from where gradients are asked for.
        if module.startswith("oomb_accel.") and module != "oomb_accel.gradients":
            self.counts[self.now] += 1
        return func(*args, **kwargs or {})


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def counted(num_layers: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Counter[str | None]:
    """Operations of the passes over one chunk, which has a past to select from."""
    model = get_peft_model(tiny_model(num_hidden_layers=num_layers), LoraConfig(r=2, target_modules=list(ALL_LINEAR)))
    config = OombConfig(chunk_tokens=CHUNK_TOKENS, page_tokens=16, keep_outputs=False, progress=False, **settings)
    oomb_accel.enable(model, config)
    ids = torch.arange(CHUNK_TOKENS * NUM_CHUNKS)[None] % 100
    operations, begin = Operations(), StreamMemory.begin

    def noted(memory: StreamMemory, chunk: Any, phase: Any) -> None:
        operations.now = phase if chunk.index == COUNTED_CHUNK else None
        begin(memory, chunk, phase)

    with monkeypatch.context() as patch, operations:
        patch.setattr(StreamMemory, "begin", noted)
        model(input_ids=ids, labels=ids).loss.backward()
    return operations.counts


SPARSE = {"attention": "sparse", "top_k": 2, "q_block": 64, "sink_pages": 1, "recent_pages": 1}


@pytest.mark.parametrize(
    ("settings", "most"),
    [(SPARSE, (66, 56, 72)), ({"attention": "dense"}, (60, 54, 70))],
    ids=["sparse", "dense"],
)
def test_a_layer_takes_no_more_operations(
    settings: dict[str, Any], most: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    two, four = (counted(layers, monkeypatch, **settings) for layers in (2, 4))
    found = {name: (four[name] - two[name]) / 2 for name in PASSES}
    assert all(found[name] <= bound for name, bound in zip(PASSES, most, strict=True)), found


class CountedWalks(dict[str, Any]):
    """Parameters of a module that a walk over all modules comes to last. It has none."""

    count = 0

    def items(self) -> Any:
        self.count += 1
        return super().items()

    def values(self) -> Any:
        self.count += 1
        return super().values()


def test_a_step_walks_over_all_modules_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk over those of a 0.5B with adapters takes 2 to 5 ms, in which the GPU waits. Needed are: what is trained,
    and in both sweeps whether something has changed."""
    monkeypatch.delitem(sys.modules, ZERO3, raising=False)
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=list(ALL_LINEAR)))
    model.register_module("last", torch.nn.Module())
    walks = vars(model.get_submodule("last"))["_parameters"] = CountedWalks()
    oomb_accel.enable(model, OombConfig(chunk_tokens=CHUNK_TOKENS, page_tokens=16, progress=False))
    ids = torch.arange(CHUNK_TOKENS * NUM_CHUNKS)[None] % 100
    for _ in range(2):  # the first step leaves a banner
        before = walks.count
        model(input_ids=ids, labels=ids).loss.backward()
    assert walks.count - before <= 3


def test_a_step_sees_what_is_trained_now() -> None:
    """Nothing of an earlier step is used: weights may have been frozen, thawed or added meanwhile."""
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    oomb_accel.enable(model, OombConfig(chunk_tokens=CHUNK_TOKENS, page_tokens=16, progress=False))
    ids = torch.arange(CHUNK_TOKENS * NUM_CHUNKS)[None] % 100
    norm = model.get_submodule("base_model.model.model.norm").weight
    adapter = next(p for p in model.parameters() if p.requires_grad)
    for thawed, frozen in ((False, False), (True, False), (True, True), (False, False)):
        norm.requires_grad_(thawed)
        adapter.requires_grad_(not frozen)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        wanted = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {name for name, p in model.named_parameters() if p.grad is not None} == wanted


def test_labels_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a GPU that is a wait for all that it has to do."""
    batch, read = {"input_ids": torch.arange(50)[None], "labels": torch.arange(50)[None]}, list[Any]()
    host = stream._host

    def noted(values: Any) -> Any:
        read.append(values)
        return host(values)

    monkeypatch.setattr(stream, "_host", noted)
    stream.build_stream(batch, chunk_tokens=16, page_tokens=4, device=torch.device("cpu"))
    assert len(read) == 1 and read[0] is batch["labels"]
