"""What is counted as the arithmetic of a step, against numbers counted by hand and against what a step really runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.bench import ceiling
from oomb_accel.bench.ceiling import Attention, Product, measure_ceiling, step_work
from oomb_accel.bench.models import SHAPES, lora_model
from oomb_accel.bench.step import training_step
from oomb_accel.bench.timing import host_times
from oomb_accel.integrations import float8_base
from oomb_accel.integrations.float8_base import Float8Weight, LastInput
from oomb_accel.plan.shape import shape_of
from tests.bench.sizes import CPU

TINY = shape_of(SHAPES["tiny"], "tiny")
LAYER_WEIGHTS = 128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 256
HEAD_WEIGHTS = 128 * 512


def flops_by_part(tokens: int, config: OombConfig) -> dict[str, float]:
    found: Counter[str] = Counter()
    for part, call, times in step_work(TINY, tokens, config):
        found[part] += call.flops * times  # type: ignore[assignment]
    return dict(found)


def test_operations_of_a_sparse_step() -> None:
    """Four chunks of 4 pages. The first three attend to all of their past, since 1 + 4 + 4 pages are no fewer."""
    found = flops_by_part(2048, OombConfig(chunk_tokens=512, attention="sparse", top_k=4, keep_outputs=False))
    layers, forward = 2, 2.0 * 2048 * 2 * LAYER_WEIGHTS
    pair = 4 * 4 * 32 * layers
    assert found == {
        ceiling.FORWARD: forward,
        ceiling.RECOMPUTE: forward * 3 / 4,  # the last chunk's graph is kept
        ceiling.GRADIENT: forward,
        ceiling.HEAD: 2.0 * HEAD_WEIGHTS * (2047 + 1536 + 2047),
        ceiling.OWN: pair * 512 * 513 / 2 * (4 + 3 + 4 * 2.5),
        ceiling.PAST: pair * 512 * (512 + 1024) * (2 + 2.5),
        ceiling.ALWAYS: pair * 512 * 640 * (1 + 2.5),
        ceiling.SELECTED: pair * 512 * 512 * (1 + 2.5),
    }


def test_a_list_with_room_for_all_pages_selects_none() -> None:
    """The third chunk has 8 earlier pages, and 1 + 4 + 3 are attended to."""
    found = flops_by_part(1536, OombConfig(chunk_tokens=512, attention="sparse", top_k=3))
    assert ceiling.SELECTED not in found and found[ceiling.PAST] == 4 * 4 * 32 * 2 * 512 * (512 + 1024) * 3.5


def test_operations_of_a_dense_step_with_a_short_last_chunk() -> None:
    found = flops_by_part(1100, OombConfig(chunk_tokens=512, keep_last_graph=False, keep_outputs=False))
    pair = 4 * 4 * 32 * 2
    assert found[ceiling.RECOMPUTE] == found[ceiling.FORWARD] == 2.0 * 1100 * 2 * LAYER_WEIGHTS
    assert found[ceiling.OWN] == pair * (2 * 512 * 513 / 2 + 76 * 77 / 2) * 4.5
    assert found[ceiling.PAST] == pair * (512 * 512 + 76 * 1024) * 4.5
    assert not {ceiling.ALWAYS, ceiling.SELECTED} & set(found)


def test_outputs_that_are_kept_are_not_made_again() -> None:
    found = flops_by_part(1024, OombConfig(chunk_tokens=512))
    assert found[ceiling.OWN] == 4 * 4 * 32 * 2 * 512 * 513 / 2 * 2 * 3.5
    assert found[ceiling.FORWARD] == 2.0 * 1024 * 2 * LAYER_WEIGHTS
    assert found[ceiling.RECOMPUTE] == 2.0 * 512 * 2 * (LAYER_WEIGHTS - 128 * 256 - 128 * 128)
    assert found[ceiling.HEAD] == 2.0 * HEAD_WEIGHTS * 2 * 1023


def test_a_last_token_alone_costs_nothing() -> None:
    """It is no target, and the chunk that it would have is not run."""
    config = OombConfig(chunk_tokens=512)
    assert flops_by_part(1025, config)[ceiling.FORWARD] == 2.0 * 1024 * 2 * LAYER_WEIGHTS


def test_only_base_products_are_in_8_bits() -> None:
    plain, float8 = (
        step_work(TINY, 1100, OombConfig(chunk_tokens=512, base_dtype=dtype)) for dtype in ("model", "float8")
    )
    products = {ceiling.FORWARD, ceiling.RECOMPUTE, ceiling.GRADIENT}
    assert {item.part for item in float8 if isinstance(item.call, Product) and item.call.float8} == products
    assert [(item.part, item.call.flops, item.times) for item in float8] == [
        (item.part, item.call.flops, item.times) for item in plain
    ]
    assert all(item.call.float8 for item in float8 if isinstance(item.call, Product) and item.part in products)


def test_8_bits_are_summed_as_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(ceiling, "float8_product", lambda *_, fast: found.append(fast))
    weight = Float8Weight.of(torch.randn(16, 4112), LastInput())
    for product in (
        Product(2, 4096, 16, False, True),
        Product(2, 4112, 16, False, True),
        Product(2, 16, 4096, True, True),
    ):
        task = product.task(CPU, torch.float32)
        task.run(task.prepare())
    monkeypatch.setattr(float8_base, "float8_product", lambda *_, fast: found.append(fast))
    weight.product(torch.randn(2, 4112), None, torch.empty(2, 16))
    weight.input_gradient(torch.randn(2, 16))
    assert found == [True, False, False, False, False]


def test_the_7b_costs_what_its_weights_say() -> None:
    shape = shape_of(SHAPES["qwen2.5-7b"], "qwen2.5-7b")
    work = step_work(shape, 65536, OombConfig(attention="sparse", top_k=16, keep_outputs=False))
    assert Product(8192, 3584, 18944, False) in {item.call for item in work}
    assert Attention(28, 4, 128, 8192, 2048, False, True) in {item.call for item in work}
    times = Counter({part: sum(item.times for item in work if item.part == part) for part in ceiling.PARTS})
    assert times[ceiling.FORWARD] == 7 * 28 * 8 and times[ceiling.SELECTED] == 28 * (7 + 6 + 7)
    products = sum(item.call.flops * item.times for item in work if item.part == ceiling.FORWARD)
    assert products / 65536 == pytest.approx(13.05e9, rel=1e-3)


class _Products(TorchDispatchMode):
    """Counts the operations of matrix products by frozen weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.flops = 0.0
        self.weights = {p.data_ptr() for p in model.parameters() if not p.requires_grad and p.ndim == 2}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in ("linear", "mm", "addmm", "addmm_"):
            left, right = args[:2] if name == "linear" else args[-2:]
            if right.data_ptr() in self.weights:
                self.flops += 2.0 * left.numel() * right.shape[0 if name == "linear" else 1]
        return func(*args, **(kwargs or {}))


def test_a_step_runs_the_products_that_are_counted() -> None:
    config = OombConfig(chunk_tokens=256, page_tokens=32, attention="sparse", top_k=4, q_block=64, keep_outputs=False)
    model = lora_model("tiny", CPU, torch.float32)
    oomb_accel.enable(model, config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with _Products(model) as run:
        training_step(model, optimizer, torch.randint(0, 512, (1, 700)), autocast=False)
    found = flops_by_part(700, config)
    counted = sum(found[part] for part in (ceiling.FORWARD, ceiling.RECOMPUTE, ceiling.GRADIENT, ceiling.HEAD))
    # Embeddings are frozen, so q, k and v of the first layer have no gradient of their input.
    unneeded = 2.0 * 700 * (128 * 128 + 2 * 128 * 64)
    assert run.flops == counted - unneeded


def test_parts_add_up_what_their_calls_take() -> None:
    work = step_work(TINY, 1100, OombConfig(chunk_tokens=512, attention="sparse", top_k=1, page_tokens=64))
    ran: list[str] = []

    def measure(tasks: Any) -> dict[str, float]:
        ran.extend(tasks)
        return dict.fromkeys(tasks, 2.0)

    parts = measure_ceiling(work, measure, CPU, torch.float32)
    assert [part.name for part in parts] == [p for p in ceiling.PARTS if p in {item.part for item in work}]
    assert len(ran) == len(set(ran)) == len({item.call for item in work})
    for part in parts:
        assert part.seconds == pytest.approx(0.002 * sum(item.times for item in work if item.part == part.name))
        assert part.flops > 0


def test_every_call_runs_with_the_shapes_of_its_name() -> None:
    calls = [Product(6, 16, 32, back, float8) for float8 in (False, True) for back in (False, True)]
    shapes = []
    for call in calls:
        task = call.task(CPU, torch.float32)
        shapes.append(tuple(task.run(task.prepare()).shape))  # type: ignore[attr-defined]
    assert shapes == [(6, 32), (6, 16)] * 2
    attention = [
        Attention(4, 2, 32, 8, keys, causal, back)
        for keys, causal in ((8, True), (24, False))
        for back in (False, True)
    ]
    ms = host_times(1)({repr(call): call.task(CPU, torch.float32) for call in attention})
    assert len(ms) == 4 and all(value > 0 for value in ms.values())
