"""Outputs of linear layers that are kept from the forward sweep: the same bits, without the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn

import oomb_accel
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.integrations.fused_lora import _FusedLinears
from oomb_accel.kept_results import ChunkResults, Product
from oomb_accel.memory import StreamMemory
from tests.harness.batches import documents_of, padded
from tests.harness.kept import num_kept
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import check_parity, chunked, config, switched_on
from tests.harness.sparse import sparse
from tests.harness.tolerance import assert_same_bits

LENGTH, NUM_LAYERS = 150, 3
STAGING = 3 * 16 * (272 + 2 * 272)
"""Of three layers of 16 tokens: attention outputs, and two products."""


def batch() -> Any:
    return padded(documents_of(LENGTH))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How many layers run with a graph, and how many of these have their product already."""
    counts, forward = {"with a graph": 0, "kept": 0}, _FusedLinears.forward

    def noted(ctx: Any, x: Tensor, dtype: Any, group: Any, known: Product | None, *parameters: Tensor) -> Any:
        counts["with a graph"] += 1
        counts["kept"] += known is not None
        return forward(ctx, x, dtype, group, known, *parameters)

    with patch.object(_FusedLinears, "forward", staticmethod(noted)):
        yield counts


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("settings", [config(keep_last_graph=False), sparse(), sparse(base_dtype="float8")])
def test_the_same_bits_without_the_product(settings: Any, dtype: str) -> None:
    model = with_lora(tiny_model())
    model = {"fp32": model, "bf16": model.bfloat16()}.get(dtype) or with_lora(tiny_model().bfloat16())
    results = []
    for keep in (False, True):
        kept = oomb_accel.OombConfig(**{**vars_of(settings), "keep_outputs": keep})
        with counted() as counts, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            results.append(chunked(twin(model), batch(), kept))
        num_again = -(-LENGTH // settings.chunk_tokens) - settings.keep_last_graph
        assert counts["kept"] == (2 * NUM_LAYERS * num_again if keep else 0)
        assert counts["with a graph"] > counts["kept"]
    assert_same_bits(results[1].loss, results[0].loss)
    assert_same_bits(results[1].gradients, results[0].gradients)


def vars_of(settings: oomb_accel.OombConfig) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


@pytest.mark.parametrize(
    ("model_type", "targets", "num_ends"),
    [
        ("qwen2", "all-linear", [3, 3]),
        ("llama", ["q_proj", "v_proj"], [0, 0]),
        ("gemma2", ["down_proj"], [3, 0]),
        ("qwen3_moe", "all-linear", [0, 3]),
    ],
)
def test_which_layers_are_kept(model_type: str, targets: Any, num_ends: list[int]) -> None:
    with switched_on(with_lora(tiny_model(model_type), target_modules=targets), config(keep_outputs=True)) as model:
        assert [len(ends) for ends in attachment_of(model).block_ends] == num_ends


def products_of(room: int, **settings: Any) -> dict[int, int]:
    """By chunk, of how many layers a step keeps products when so many bytes are free beside pages and activations."""
    found: dict[int, int] = {}
    begin = StreamMemory.begin

    def noted(memory: StreamMemory, *arguments: Any) -> None:
        found.update(found or num_kept(memory, "products"))
        begin(memory, *arguments)

    with patch.object(StreamMemory, "begin", noted), patch.object(step_memory, "_spare_bytes", lambda *_: room):
        chunked(with_lora(tiny_model()), batch(), config(**settings))
    return found


def test_attention_outputs_come_first_and_the_latest_chunks_before_others() -> None:
    """Chunks of 16 tokens, of which nine run again. A token's attention outputs are 272 bytes per layer, the output of
    its MLP and LoRA's share 4 * (64 + 4). What the head keeps comes before both."""
    chunk, outputs, product, head = 16 * NUM_LAYERS, 272, 272, 9 * 16 * (4 * 64 + 4)
    before = head + 9 * chunk * outputs
    assert products_of(before) == {}
    assert products_of(before + 2 * chunk * product) == {7: 3, 8: 3}
    assert products_of(before + 2 * chunk * product - 1) == {8: 3}
    assert products_of(before + 10 * chunk * product) == {**dict.fromkeys(range(8), 3), 8: 6}
    assert products_of(10**12) == dict.fromkeys(range(9), 6)
    assert products_of(10**12, keep_outputs=False) == {}


def test_nothing_is_kept_while_pages_leave() -> None:
    seen: list[StreamMemory] = []
    release = StreamMemory.release

    def noted(memory: StreamMemory, chunk: Any) -> None:
        seen.append(memory)
        assert not num_kept(memory, "products") and not num_kept(memory, "head")
        release(memory, chunk)

    with patch.object(StreamMemory, "release", noted):
        chunked(with_lora(tiny_model()), batch(), sparse(offload=True, keep_outputs=True))
    assert seen and all(memory.rooms is not None for memory in seen)


class Around(nn.Module):
    """An MLP that is used in another way."""

    def __init__(self, mlp: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.mlp, self.use = mlp, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.mlp, x)


def beside(mode: Callable[[], AbstractContextManager[Any]]) -> Callable[[Any, Tensor], Tensor]:
    """Another call comes first, in this mode, of which no gradient is wanted."""

    def use(mlp: Any, x: Tensor) -> Tensor:
        with mode():
            other = mlp(x.detach() * 2)
        return mlp(x) + other.detach()

    return use


USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "its output is changed in place, so it is made again": (lambda mlp, x: mlp(x).mul_(2), -1),
    "it is called twice, and gets its outputs in order": (lambda mlp, x: mlp(x) + 3 * mlp(x * 2), 1),
    "one call wants no gradient": (beside(torch.no_grad), 0),
    "one call wants a gradient in both sweeps": (beside(torch.enable_grad), 0),
}
"""And how many products of a chunk more are kept."""


@pytest.mark.parametrize("use", USES)
def test_an_mlp_that_is_used_otherwise(use: str) -> None:
    model: Any = with_lora(tiny_model())
    first, (call, more) = model.base_model.model.model.layers[0], USES[use]
    first.mlp = Around(first.mlp, call)
    with counted() as counts:
        ours = chunked(twin(model), batch(), config(keep_outputs=True))
    wanted = chunked(twin(model), batch(), config(keep_outputs=False))
    assert counts["kept"] == 9 * (2 * NUM_LAYERS + more)
    assert_same_bits(ours.gradients, wanted.gradients)


def only_with(mode: bool) -> Callable[[Any, Tensor], Tensor]:
    """Another call comes first, in one of the sweeps: a condition that the data or the modes of torch decide."""

    def use(mlp: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() == mode:
            mlp(x.detach() * 2)
        return mlp(x)

    return use


@pytest.mark.parametrize("on_host", [False, True], ids=["on the device", "on the host"])
@pytest.mark.parametrize(("mode", "counts"), [(True, "once in the forward sweep, 2 times"), (False, "2 times in the")])
def test_an_mlp_that_runs_another_number_of_times_when_it_runs_again(
    mode: bool, counts: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the product of another call."""
    monkeypatch.setattr(step_memory, "_spare_bytes", lambda *_: STAGING if on_host else 10**9)
    monkeypatch.setattr(step_memory, "_host_spare_bytes", lambda *_: 10**8)
    model: Any = with_lora(tiny_model())
    first = model.base_model.model.model.layers[0]
    first.mlp = Around(first.mlp, only_with(mode))
    with pytest.raises(RuntimeError, match=counts) as caught:
        chunked(twin(model), batch(), config())
    what, measured, remedy = str(caught.value).splitlines()
    assert what == "A layer ran another number of times in the backward sweep than in the forward sweep."
    assert (
        "layers.0.mlp.mlp.down_proj" in measured and "Chunk 9 of 10" in measured and "Set keep_outputs=False" in remedy
    )
    found = chunked(twin(model), batch(), config(keep_outputs=False))
    first.mlp.use = lambda mlp, x: mlp(x)
    assert_same_bits(found.gradients, chunked(model, batch(), config(keep_outputs=False)).gradients)


def test_calls_are_counted_by_what_is_kept() -> None:
    results = ChunkResults([0, "a"])
    for key in (0, "a", "a", "nobody's"):
        results.put(key, torch.zeros(2))
    results.bring(recomputes=True)
    assert results.uneven_calls() == {0: (1, 0), "a": (2, 0)}
    for key in (0, "a", "a", "nobody's", "nobody's"):
        results.take(key)
        results.put(key, torch.ones(2))  # for a layer that runs again within the recompute
    assert results.uneven_calls() == {}
    results.take(0)
    assert results.uneven_calls() == {0: (1, 2)}


def test_what_is_kept_is_counted_and_goes_with_its_chunk() -> None:
    model, seen = with_lora(tiny_model()), list[tuple[str, dict[str, int]]]()
    with switched_on(model, config(keep_outputs=True)):
        attachment_of(model).listen(lambda event: seen.append((event.sweep, event.kept() if event.kept else {})))
        model(**batch().batch).loss.backward()
    kept = [found["kept_outputs"] for sweep, found in seen if sweep == "backward"]
    forward = [found["kept_outputs"] for sweep, found in seen if sweep == "forward"]
    assert forward[8] == 9 * 16 * (NUM_LAYERS * (272 + 2 * 272) + 4 * 64 + 4)
    assert kept[-1] == 0 and sorted(kept, reverse=True) == kept


def test_a_product_that_a_hook_may_change_unseen_is_made_again() -> None:
    """A change of ``.data`` is one of which the tensor does not tell."""

    def halve(_: nn.Module, __: Any, out: Tensor) -> None:
        out.data.mul_(0.5)

    model: Any = with_lora(tiny_model().double()).double()
    for layer in model.base_model.model.model.layers:
        layer.mlp.down_proj.register_forward_hook(halve)
    with counted() as counts:
        check_parity(model, padded(documents_of(LENGTH)), config(keep_outputs=True))
    assert counts["kept"] == 9 * NUM_LAYERS


def test_layers_that_have_lost_their_adapter() -> None:
    model: Any = with_lora(tiny_model())
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("other")
    wanted = chunked(twin(model), batch())
    with switched_on(model, config()):
        model.delete_adapter("default")
        loss = model(**batch().batch).loss
        loss.backward()
    assert_same_bits(loss.detach(), wanted.loss)
