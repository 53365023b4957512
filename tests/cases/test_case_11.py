"""Case 11: checkpointing, caches, frozen embeddings and dropout, as a Trainer leaves them switched on."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oomb_accel
from oomb_accel import dense_parts
from oomb_accel.pages import PagedKVCache
from oomb_accel.progress import ChunkEvent
from tests.harness.batches import documents_of, only_targets, packed, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import (
    assert_same_result,
    check_parity,
    chunked,
    config,
    reference,
    switched_on,
)
from tests.harness.tolerance import assert_same_bits

LENGTH = 70


@pytest.mark.parametrize("keep_outputs", [True, False])
@pytest.mark.parametrize("keep_last_graph", [True, False])
@pytest.mark.parametrize("length", [12, LENGTH])
def test_checkpointing(length: int, keep_last_graph: bool, keep_outputs: bool) -> None:
    documents = documents_of(length, 9)
    wanted = reference(with_lora(tiny_model()), documents)
    model = with_lora(tiny_model())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    settings = config(keep_last_graph=keep_last_graph, keep_outputs=keep_outputs)
    assert_same_result(chunked(model, padded(documents), settings), wanted)


def test_checkpointing_of_a_bare_model() -> None:
    documents = documents_of(LENGTH)
    wanted = reference(tiny_model("mistral"), documents)
    model = tiny_model("mistral")
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same_result(chunked(model, padded(documents)), wanted)


@pytest.mark.parametrize("where", ["config", "call"])
def test_a_cache_that_is_left_on(where: str) -> None:
    documents = documents_of(LENGTH)
    layout = padded(documents)
    model = tiny_model(use_cache=where == "config")
    if where == "call":
        layout = layout.with_inputs(use_cache=True)
    assert_same_result(chunked(model, layout), reference(tiny_model(), documents))


def test_frozen_embeddings() -> None:
    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    check_parity(model, padded(documents_of(LENGTH, 9)))


class Capture:
    """Outputs of every layer and of every LoRA dropout, by sweep and first position of the chunk."""

    def __init__(self, model: nn.Module) -> None:
        self.events: list[ChunkEvent] = []
        self.seen: dict[str, dict[tuple[int, str], list[Tensor]]] = {
            "forward": defaultdict(list),
            "backward": defaultdict(list),
        }
        self._pass: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind.endswith("DecoderLayer") or kind == "Dropout":
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            tensor = output if isinstance(output, Tensor) else output[0]
            self._pass[-1, name].append(tensor.detach().clone())

        return hook

    def on_progress(self, event: ChunkEvent) -> None:
        chunk = event.chunk if event.sweep == "forward" else event.num_chunks + 1 - event.chunk
        for (_, name), tensors in self._pass.items():
            self.seen[event.sweep][chunk, name] = tensors
        self._pass = defaultdict(list)
        self.events.append(event)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("keep_outputs", [True, False])
def test_the_recompute_sees_the_same_dropout_masks(keep_outputs: bool, checkpointing: bool) -> None:
    model = with_lora(tiny_model(), lora_dropout=0.1)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    capture = Capture(model)
    settings = config(keep_last_graph=False, keep_outputs=keep_outputs)
    torch.manual_seed(3)
    chunked(model, padded(documents_of(LENGTH)), settings, on_progress=capture.on_progress)
    forward, backward = capture.seen["forward"], capture.seen["backward"]
    assert len({chunk for chunk, _ in forward}) == 5
    assert forward.keys() == backward.keys()
    for key, tensors in forward.items():
        for again in backward[key]:  # twice under checkpointing
            assert_same_bits(again, tensors[0])
    dropped = [tensors[0].eq(0).float().mean().item() for (_, name), tensors in forward.items() if "dropout" in name]
    assert 0.05 < sum(dropped) / len(dropped) < 0.15, "dropout was on"


def test_dropout_differs_from_chunk_to_chunk_and_from_step_to_step() -> None:
    model = with_lora(tiny_model(), lora_dropout=0.5)
    layout = padded(documents_of(LENGTH))
    torch.manual_seed(3)
    first = chunked(model, layout)
    second = chunked(model, layout)
    assert not torch.equal(first.loss, second.loss)
    torch.manual_seed(3)
    assert_same_bits(chunked(model, layout).gradients, first.gradients)


@pytest.mark.parametrize("keep_last_graph", [True, False])
def test_the_callers_generator_goes_on_as_if_there_were_one_forward(keep_last_graph: bool) -> None:
    """The backward sweep must not move the generator: data loaders and the next step depend on it."""
    model = with_lora(tiny_model(), lora_dropout=0.1)
    with switched_on(model, config(keep_last_graph=keep_last_graph)):
        loss = model(**padded(documents_of(LENGTH)).batch).loss
        before = torch.get_rng_state()
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_gradients_are_those_of_the_loss() -> None:
    """A finite difference along the gradient, with the masks fixed by the seed."""
    model = with_lora(tiny_model(), lora_dropout=0.1).double()
    batch = padded(documents_of(LENGTH)).batch
    parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model(**batch).loss

    oomb_accel.enable(model, config(keep_last_graph=False))
    loss().backward()
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    slope = sum(g.square().sum().item() for g in gradients)
    step = 1e-4 / slope**0.5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=sign * step)
            values.append(loss().item())
            torch._foreach_add_(parameters, gradients, alpha=-sign * step)
    measured = (values[0] - values[1]) / (2 * step)
    # The loss is computed in fp32 by the models' norms and RoPE; a wrong mask would be off by a tenth.
    assert abs(measured / slope - 1) < 1e-2


def test_each_key_is_attended_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of K and V is that of the document, in both sweeps: nothing is appended twice."""
    sizes: list[tuple[int, int]] = []
    original = dense_parts._keys_of

    def spy(part: Any, k: Tensor, v: Tensor, layer: Any, run: Any) -> tuple[Tensor, Tensor]:
        keys, values = original(part, k, v, layer, run)
        if layer.layer == 1:
            sizes.append((run.chunk.index, keys.shape[1]))
        return keys, values

    monkeypatch.setattr(dense_parts, "_keys_of", spy)
    chunked(tiny_model(), padded(documents_of(LENGTH)), config(keep_last_graph=False, keep_outputs=False))
    total: dict[int, int] = defaultdict(int)
    for chunk, keys in sizes:
        total[chunk] += keys
    # forward, recompute and backward each see the chunk and its past once
    assert total == {chunk: 3 * min(16 * (chunk + 1), LENGTH) for chunk in range(5)}


def test_each_page_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[tuple[int, int]] = []
    original = PagedKVCache.store

    def spy(self: PagedKVCache, layer: int, chunk: Any, k: Tensor, v: Tensor) -> None:
        stored.append((layer, chunk.index))
        assert k.shape[1] == v.shape[1] == chunk.num_tokens
        original(self, layer, chunk, k, v)

    monkeypatch.setattr(PagedKVCache, "store", spy)
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    chunked(model, padded(documents_of(LENGTH)), config(keep_last_graph=False))
    assert sorted(stored) == [(layer, chunk) for layer in range(3) for chunk in range(5)]


def test_all_at_once() -> None:
    model = with_lora(tiny_model("qwen3", use_cache=True), lora_dropout=0.1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    documents = documents_of(21, 8, 50)
    documents[1] = only_targets(documents[1], [])
    torch.manual_seed(0)
    with_checkpoints = chunked(model, packed(documents).with_inputs(use_cache=True))
    model.gradient_checkpointing_disable()
    torch.manual_seed(0)
    without = chunked(model, packed(documents))
    assert_same_result(with_checkpoints, without)
