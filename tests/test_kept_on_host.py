"""Results of the forward sweep that lie in host memory: the same bits, whenever copies happen."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import mmap
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.host import HostMemoryError, HostStack
from oomb_accel.host.mapping import HostMapping
from oomb_accel.integrations import step_memory
from oomb_accel.integrations.attachment import attachment_of
from oomb_accel.keep import KeptChunks, ResultKind, place_results
from oomb_accel.kept_on_host import ChunkOnHost, KeptOnHost
from oomb_accel.kept_results import HEAD, ChunkResults
from oomb_accel.memory import StreamMemory
from oomb_accel.plan import sizes
from oomb_accel.plan.places import ALIGNED_BYTES
from oomb_accel.progress import GIB
from oomb_accel.schedule import Chunk, ChunkSchedule
from tests.harness.batches import Layout, documents_of, packed, padded
from tests.harness.kept import What, num_kept
from tests.harness.late import LateMover
from tests.harness.models import sgd_step, tiny_model, twin, with_lora
from tests.harness.parity import chunked, config, parameter_gradients, switched_on
from tests.harness.slabs import PlainArena, as_arena
from tests.harness.sparse import sparse
from tests.harness.stop import stopping
from tests.harness.tolerance import assert_same_bits
from tests.host.machines import machine, make_arena
from tests.test_kept_products import STAGING, Around, beside, counted

LAYOUTS: dict[str, Layout] = {
    "one document": padded(documents_of(150)),
    "odd lengths": packed(documents_of(101, 21, 70)),
    "side by side": padded(documents_of(90, 47, 3, 16)),
}
SETTINGS: dict[str, OombConfig] = {
    "dense": config(),
    "sparse": sparse(),
    "all run again": sparse(keep_last_graph=False),
    "bf16 page gradients": sparse(page_grad_dtype="bfloat16"),
}
MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return with_lora(tiny_model(), lora_dropout=0.0)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateMover:
    mover = LateMover(seed=3)
    monkeypatch.setattr("oomb_accel.offload.HostMover", lambda: mover)
    return mover


Placed = list[dict[str, dict[int, int]]]


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placed:
    """Of each pass that begins, what the stream keeps: by kind, on the host where its name says so."""
    seen, begin = Placed(), StreamMemory.begin

    def noted(memory: StreamMemory, *arguments: Any) -> None:
        kinds: tuple[What, ...] = ("head", "attention", "products")
        here = {str(kind): num_kept(memory, kind) for kind in kinds}
        seen.append(here | {f"{kind} on the host": num_kept(memory, kind, on_host=True) for kind in kinds})
        begin(memory, *arguments)

    monkeypatch.setattr(StreamMemory, "begin", noted)
    return seen


Rooms = Callable[[int, int], None]


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Rooms:
    """Called with the bytes that a step finds free on the device and on the host."""

    def given(device: int, host: int) -> None:
        monkeypatch.setattr(step_memory, "_spare_bytes", lambda *_: device)
        monkeypatch.setattr(step_memory, "_host_spare_bytes", lambda *_: host)

    return given


def step(model: nn.Module, layout: Layout, **batch: Any) -> Tensor:
    loss: Tensor = model(**layout.batch, **batch).loss
    loss.backward()
    return loss.detach()


def assert_given_back(model: nn.Module) -> None:
    gc.collect()
    arena = attachment_of(model).offload.arena
    assert arena is not None and arena.free_bytes == arena.num_bytes > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.filterwarnings("ignore:No target in row")
def test_the_same_bits(
    settings: str, layout: str, model: nn.Module, rooms: Rooms, late: LateMover, placed: Placed
) -> None:
    wanted = chunked(twin(model), LAYOUTS[layout], dataclasses.replace(SETTINGS[settings], keep_outputs=False))
    assert not late.num_copies
    for device in (STAGING, STAGING + 100_000):
        rooms(device, 64 * MIB)
        placed.clear()
        with counted() as counts:
            found = chunked(twin(model), LAYOUTS[layout], SETTINGS[settings])
        kept, again = placed[0], len(placed[0]["head"]) + len(placed[0]["head on the host"])
        assert again >= 6
        for what, layers in (("head", 1), ("attention", 3), ("products", 6)):
            here, there = kept[what], kept[f"{what} on the host"]
            assert sum(here.values()) + sum(there.values()) == again * layers
            assert max(here, default=again) >= max(there, default=-1), "the latest stay"
        assert kept["attention on the host"]
        assert counts["kept"] == 6 * again, "nothing is made again"
        assert_same_bits(found.loss, wanted.loss)
        assert_same_bits(torch.cat(found.log_probs), torch.cat(wanted.log_probs))
        assert_same_bits(found.gradients, wanted.gradients)
    assert late.num_copies > 200 and late.num_late > 20


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("haste", [0.0, 0.1, 0.5, 1.0])
def test_copies_at_any_time(
    seed: int, haste: float, model: nn.Module, rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = LateMover(seed=seed, haste=haste)
    monkeypatch.setattr("oomb_accel.offload.HostMover", lambda: mover)
    wanted = chunked(twin(model), LAYOUTS["odd lengths"], sparse(keep_outputs=False))
    rooms(STAGING, 64 * MIB)
    found = chunked(twin(model), LAYOUTS["odd lengths"], sparse())
    assert_same_bits(found.loss, wanted.loss)
    assert_same_bits(found.gradients, wanted.gradients)
    assert mover.num_copies > 200


@pytest.mark.parametrize("kind", ["bf16", "autocast", "gemma2", "full fine-tuning", "experts"])
def test_other_models(kind: str, rooms: Rooms, late: LateMover) -> None:
    models: dict[str, Callable[[], nn.Module]] = {
        "bf16": lambda: with_lora(tiny_model()).bfloat16(),
        "autocast": lambda: with_lora(tiny_model().bfloat16()),
        "gemma2": lambda: with_lora(tiny_model("gemma2")),
        "full fine-tuning": tiny_model,
        "experts": lambda: with_lora(tiny_model("qwen3_moe"), target_modules=["q_proj", "o_proj"]),
    }
    of, results = models[kind](), []
    rooms(STAGING, 64 * MIB)
    for keep in (False, "auto"):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            results.append(chunked(twin(of), LAYOUTS["odd lengths"], config(keep_outputs=keep)))
    assert_same_bits(results[1].loss, results[0].loss)
    assert_same_bits(results[1].gradients, results[0].gradients)
    assert min(late.num_bytes.values()) > 0


def test_checkpointed_layers_ask_twice(rooms: Rooms, late: LateMover) -> None:
    of, results = with_lora(tiny_model()), []
    of.gradient_checkpointing_enable({"use_reentrant": False})
    rooms(STAGING, 64 * MIB)
    for keep in (False, "auto"):
        results.append(chunked(twin(of), LAYOUTS["odd lengths"], sparse(keep_outputs=keep)))
    assert_same_bits(results[1].gradients, results[0].gradients)
    assert min(late.num_bytes.values()) > 0


@pytest.mark.parametrize("haste", [0.0, 1.0])
@pytest.mark.parametrize(
    ("use", "more"),
    [
        (lambda mlp, x: mlp(x).mul_(2), -1),
        (lambda mlp, x: mlp(x) + 3 * mlp(x * 2), 1),
        (beside(torch.no_grad), 0),
        (beside(torch.enable_grad), 0),
    ],
    ids=["changed while it is copied, or behind that", "called twice", "no gradient", "a gradient in both sweeps"],
)
def test_an_mlp_that_is_used_otherwise(
    use: Callable[[Any, Tensor], Tensor], more: int, haste: float, rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many results are taken as on the device, whenever copies happen."""
    monkeypatch.setattr("oomb_accel.offload.HostMover", lambda: LateMover(seed=0, haste=haste))
    of: Any = with_lora(tiny_model())
    first = of.base_model.model.model.layers[0]
    first.mlp = Around(first.mlp, use)
    found = []
    for device, host in ((10**9, 0), (STAGING, 64 * MIB)):
        rooms(device, host)
        with counted() as counts:
            found.append(chunked(twin(of), LAYOUTS["one document"], config()))
        assert counts["kept"] == 9 * (6 + more)
    assert_same_bits(found[1].gradients, found[0].gradients)


def test_the_device_has_no_more_than_a_few_layers_at_a_time(
    model: nn.Module, rooms: Rooms, late: LateMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, seen, ahead = set[KeptOnHost](), list[int](), list[int]()
    send, bring, arrived = KeptOnHost.send, KeptOnHost.bring, KeptOnHost.arrived

    def sending(self: KeptOnHost, result: Any) -> Any:
        sent = send(self, result)
        seen.append(self.device_bytes)
        return sent

    def bringing(self: KeptOnHost, result: Any) -> None:
        hosts.add(self)
        bring(self, result)
        seen.append(self.device_bytes)

    def asked(self: KeptOnHost, result: Any) -> Any:
        ahead.append(len(self.coming))
        return arrived(self, result)

    for name, function in {"send": sending, "bring": bringing, "arrived": asked}.items():
        monkeypatch.setattr(KeptOnHost, name, function)
    rooms(STAGING, 64 * MIB)
    with switched_on(twin(model), config()) as ours:
        step(ours, LAYOUTS["one document"])
    assert STAGING // 2 < max(seen) <= STAGING
    assert [host.device_bytes for host in hosts] == [0]
    # Of a chunk's ten results the last few have few behind them.
    assert sum(count >= 7 for count in ahead) >= len(ahead) // 3


def test_what_is_kept_is_counted(model: nn.Module, rooms: Rooms, late: LateMover) -> None:
    device, host = list[int](), list[int]()
    rooms(STAGING, 64 * MIB)
    with switched_on(twin(model), config()) as ours:
        offload = attachment_of(ours).offload

        def noted(event: Any) -> None:
            device.append(event.kept()["kept_outputs"])
            host.append(offload.host_bytes()["page_memory_used"])

        attachment_of(ours).listen(noted)
        step(ours, LAYOUTS["one document"])
        assert len(device) == 20
        assert 0 < max(device) <= STAGING + 16 * 3 * 272, "and attention outputs of a chunk that runs again"
        assert host[:10] == sorted(host[:10]) and host[9] >= 9 * 16 * (9 * 272 + 260)
        assert host[10:] == sorted(host[10:], reverse=True) and host[-1] == 0
        assert offload.copied_bytes()["up"] == offload.copied_bytes()["down"] == 9 * 16 * (3 * 3 * 272 + 260)


def test_host_memory_is_flat(model: nn.Module, rooms: Rooms, late: LateMover) -> None:
    sizes = list[int]()
    rooms(STAGING, 64 * MIB)
    with switched_on(twin(model), sparse()) as ours:
        for number in range(100):
            if number % 10 == 3:
                ours(**LAYOUTS["odd lengths"].batch)  # a loss that is dropped
            elif number % 10 == 7:
                with torch.no_grad():
                    ours(**LAYOUTS["odd lengths"].batch)
            else:
                step(ours, LAYOUTS["one document"])
            arena = attachment_of(ours).offload.arena
            assert arena is not None
            sizes.append(arena.num_bytes)
        assert_given_back(ours)
    assert len(set(sizes[4:])) == 1, "from the first stream of the longest on"


def test_steps_and_accumulation(model: nn.Module, rooms: Rooms, late: LateMover) -> None:
    results, layouts = [], list(LAYOUTS.values())[:2]
    total = sum(oomb_accel.count_targets(layout.batch) for layout in layouts)
    rooms(STAGING + 50_000, 64 * MIB)
    for keep in (False, "auto"):
        with switched_on(twin(model), sparse(keep_outputs=keep)) as ours:
            for _ in range(3):
                losses = [step(ours, layout, num_targets=total) for layout in layouts]
                sgd_step(ours)
            results.append((torch.stack(losses), [p.detach().clone() for p in ours.parameters()]))
    assert_same_bits(results[0][0], results[1][0])
    for ours_, theirs in zip(results[0][1], results[1][1], strict=True):
        assert_same_bits(ours_, theirs)


def test_two_forwards_before_one_backward(model: nn.Module, rooms: Rooms, late: LateMover) -> None:
    results = []
    rooms(STAGING, 64 * MIB)
    for keep in (False, "auto"):
        with switched_on(twin(model), config(keep_outputs=keep)) as ours:
            losses = [ours(**layout.batch).loss for layout in LAYOUTS.values()]
            torch.stack(losses).sum().backward()
            results.append(parameter_gradients(ours))
            if keep:
                assert_given_back(ours)
    assert_same_bits(results[0], results[1])


@pytest.mark.parametrize("kib", [184, 260])
def test_what_was_made_for_pages_of_another_stream_is_left_to_them(
    kib: int, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stream's gradients come into being when the second's results lie on the host."""
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, mmap.PAGESIZE)
    monkeypatch.setattr(step_memory, "_spare_bytes", lambda *_: STAGING)
    monkeypatch.setattr(step_memory, "_host_spare_bytes", lambda state, _: state.offload.spare_bytes())
    settings = config(span_tokens=8, device_pages_gib=150 * 1024 / GIB, host_memory_gib=kib * 1024 / GIB)
    with switched_on(twin(model), settings) as ours:
        first, second = (ours(**padded(documents_of(length)).batch).loss for length in (200, 60))
        first.backward()
        second.backward()
        assert_given_back(ours)


@pytest.mark.parametrize("call", [5, 14, 18], ids=["forward sweep", "backward sweep", "later"])
def test_a_step_that_fails_gives_everything_back(call: int, model: nn.Module, rooms: Rooms, late: LateMover) -> None:
    rooms(STAGING, 64 * MIB)
    wanted = chunked(twin(model), LAYOUTS["one document"], config(keep_outputs=False))
    with switched_on(twin(model), config()) as ours:
        with stopping(ours.get_submodule("base_model.model.model.layers.1"), call):
            step(ours, LAYOUTS["one document"])
        assert_given_back(ours)
        ours.zero_grad(set_to_none=True)
        step(ours, LAYOUTS["one document"])
        assert_same_bits(parameter_gradients(ours), wanted.gradients)
        assert_given_back(ours)


def refuse_every_third(monkeypatch: pytest.MonkeyPatch) -> itertools.count[int]:
    """Results that the host has no place for. Returns what counts the calls."""
    calls, take = itertools.count(1), HostStack.take

    def refuse(self: HostStack, num_bytes: int) -> Any:
        if next(calls) % 3 == 0:
            raise HostMemoryError("no memory")
        return take(self, num_bytes)

    monkeypatch.setattr(HostStack, "take", refuse)
    return calls


def test_host_memory_that_is_refused_is_done_without(
    model: nn.Module, rooms: Rooms, placed: Placed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the step, and within it."""
    wanted = chunked(twin(model), LAYOUTS["one document"], config(keep_outputs=False))
    rooms(STAGING, 64 * MIB)
    placed.clear()
    with monkeypatch.context() as patch:
        patch.setattr(HostMapping, "touch", Mock(side_effect=OSError("no memory")))
        found = chunked(twin(model), LAYOUTS["one document"], config())
    assert not any(placed[0].values())
    assert_same_bits(found.gradients, wanted.gradients)

    num_calls = refuse_every_third(monkeypatch)
    rooms(STAGING, 64 * MIB)
    with switched_on(twin(model), config()) as ours:
        step(ours, LAYOUTS["one document"])
        assert_same_bits(parameter_gradients(ours), wanted.gradients)
        assert_given_back(ours)
    assert next(num_calls) > 100


@pytest.mark.parametrize(("offload", "expected"), [("auto", True), (True, False), (False, False)])
def test_only_where_the_host_may_be_used(offload: Any, expected: bool, model: nn.Module) -> None:
    """On a GPU; on a CPU the host is the device."""
    with switched_on(twin(model), config(offload=offload)) as ours:
        state = attachment_of(ours)
        assert step_memory._host_spare_bytes(state, torch.device("cpu")) == 0
        assert (step_memory._host_spare_bytes(state, torch.device("cuda")) > 0) == expected


def test_as_much_as_the_setting_allows(model: nn.Module) -> None:
    with switched_on(twin(model), config(host_memory_gib=0.5)) as ours:
        offload, device = attachment_of(ours).offload, torch.device("cpu")
        spare = offload.spare_bytes()
        assert spare == 2**29
        kept = offload.kept_on_host(spare, 0, device)
        assert kept is not None and offload.arena is not None and offload.arena.num_bytes <= 2**29
        assert offload.spare_bytes() == spare
        kept._stack.take(spare)
        assert offload.spare_bytes() == 0 and offload.kept_on_host(spare, 0, device) is None


@pytest.mark.parametrize("trains", [True, False])
def test_more_than_the_machine_has_is_refused_where_no_page_needs_it_too(model: nn.Module, trains: bool) -> None:
    """As a dry run says. Else the setting would be without a word as if it were not there: nothing was kept."""
    with (
        switched_on(twin(model), config(host_memory_gib=1e6)) as ours,
        torch.set_grad_enabled(trains),
        pytest.raises(ValueError, match="host_memory_gib is more than this machine can give"),
    ):
        ours(**padded(documents_of(60)).batch)


def test_a_share_of_what_the_machine_has_left(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no setting says how much. What others take meanwhile is theirs."""
    available = [104 * GIB]
    monkeypatch.setattr("oomb_accel.offload.host_limits", lambda: machine(available[0]))
    with switched_on(twin(model), config()) as ours:
        offload = attachment_of(ours).offload
        assert offload.spare_bytes() == 50 * GIB
        offload.arena = make_arena(2, slab_bytes=GIB)
        offload.arena.reserve(GIB)
        offload.arena.wait(GIB)
        for left, spare in ((103, 50), (24, 11), (6, 2), (4, 1), (0, 1)):
            available[0] = left * GIB
            assert offload.spare_bytes() == spare * GIB
        offload.arena.take()
        available[0] = 103 * GIB
        assert offload.spare_bytes() == 49 * GIB


def test_as_much_as_comes_is_used(
    model: nn.Module, rooms: Rooms, late: LateMover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is refused behind half of it."""
    for name in ("_SMALLEST_SLAB_BYTES", "LARGEST_SLAB_BYTES"):
        monkeypatch.setattr(sizes, name, mmap.PAGESIZE)
    wanted = chunked(twin(model), LAYOUTS["one document"], config(keep_outputs=False))
    rooms(STAGING, 64 * MIB)
    touch, calls, sent = HostMapping.touch, itertools.count(), [0]

    def fail_late(self: HostMapping, start: int, end: int) -> None:
        if next(calls) >= 20:
            raise OSError("no memory")
        touch(self, start, end)

    for making in (touch, fail_late):
        monkeypatch.setattr(HostMapping, "touch", making)
        with switched_on(twin(model), config()) as ours:
            step(ours, LAYOUTS["one document"])
            assert_same_bits(parameter_gradients(ours), wanted.gradients)
            assert_given_back(ours)
            sent.append(late.num_bytes["down"])
    whole, part = sent[1], sent[2] - sent[1]
    assert whole > 90 * mmap.PAGESIZE and 10 * mmap.PAGESIZE < part <= 20 * mmap.PAGESIZE


def test_with_keep_outputs_true_attention_stays_on_the_device(
    model: nn.Module, rooms: Rooms, placed: Placed, late: LateMover
) -> None:
    rooms(9 * 16 * 3 * 272 + STAGING, 64 * MIB)
    chunked(twin(model), LAYOUTS["one document"], config(keep_outputs=True))
    assert placed[0]["attention"] == dict.fromkeys(range(9), 3)
    assert not placed[0]["attention on the host"]
    assert placed[0]["products on the host"]


# By themselves.


def chunks_of(*lengths: int) -> tuple[Chunk, ...]:
    return ChunkSchedule.build([sum(lengths)], range(sum(lengths) - 1), chunk_tokens=lengths[0], page_tokens=1).chunks


def test_places() -> None:
    """Four chunks of 10 tokens; layers of 5 and 3 bytes a token, two of each, and 2 for the head."""
    kinds = [ResultKind((HEAD,), 2), ResultKind((0, 1), 10), ResultKind(("a", "b"), 6)]
    chunks, staging = chunks_of(10, 10, 10, 10), 3 * 10 * 8

    def found(device: int, host_chunks: int) -> KeptChunks:
        return place_results(kinds, chunks, device, host_chunks * (160 + 8 * ALIGNED_BYTES))

    everything = {index: [HEAD, 0, 1, "a", "b"] for index in range(4)}
    assert found(4 * 180, 9) == KeptChunks(dict(reversed(everything.items())), {}, 0, 0)
    assert found(4 * 180 - 1, 0).on_device == {**everything, 0: [HEAD, 0, 1]}
    assert found(staging - 1, 9).on_host == {}
    least = found(staging, 9)
    assert least.on_device == {} and least.on_host == everything and least.staging_bytes == staging
    assert least.host_bytes == 4 * (180 + 10 * ALIGNED_BYTES)
    some = found(staging + 80 + 100, 9)
    assert some.on_device == {0: [HEAD], 1: [HEAD], 2: [HEAD], 3: [HEAD, 0, 1]}
    assert some.on_host == {0: [0, 1, "a", "b"], 1: [0, 1, "a", "b"], 2: [0, 1, "a", "b"], 3: ["a", "b"]}
    assert found(-1, 9) == KeptChunks() and found(staging, 0).on_host == {}
    assert found(staging + 80, 1).on_host == {3: [0, 1, "a", "b"]}


SLAB = 1 << 18
TENSORS: dict[str, Callable[[], Tensor]] = {
    "in a row": lambda: torch.randn(7, 5),
    "transposed": lambda: torch.randn(300, 4, 64).transpose(0, 1),
    "with gaps": lambda: torch.randn(40, 9)[:, :7],
    "a part of another": lambda: torch.randn(100, 64)[3:77],
    "expanded": lambda: torch.randn(5, 1).expand(5, 9),
    "nothing": lambda: torch.randn(0, 64),
    "one number": lambda: torch.randn(()),
    "of a slab": lambda: torch.randn(SLAB // 4),
    "of several slabs": lambda: torch.randn(9 * SLAB // 16 + 5),
    "odd bytes": lambda: torch.randn(SLAB // 3).to(torch.bfloat16),
}


@pytest.fixture
def host() -> Iterator[tuple[KeptOnHost, LateMover]]:
    mover, arena = LateMover(seed=1), PlainArena(SLAB)
    kept = KeptOnHost(HostStack(as_arena(arena)), mover, torch.device("cpu"), 1000, MIB)
    yield kept, mover
    assert kept.device_bytes == 0 and not kept.leaving and not kept.coming and arena.num_taken == 0


@pytest.mark.parametrize("which", TENSORS)
def test_any_tensor(which: str, host: tuple[KeptOnHost, LateMover]) -> None:
    kept, mover = host
    tensors = [TENSORS[which](), torch.arange(10)]
    wanted = [tensor.clone() for tensor in tensors]
    kept.send((torch.zeros(3),))
    result = kept.send(tuple(tensors))
    kept.settle()
    mover.synchronize()
    for tensor in tensors:
        tensor.set_()  # type: ignore[call-overload]
    kept.bring(result)
    found = kept.arrived(result)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same_bits(ours, theirs)
    kept.free([result], 0)


def test_results_come_in_the_order_of_their_calls_whatever_else_is_asked_for(
    host: tuple[KeptOnHost, LateMover],
) -> None:
    kept, _ = host
    results = ChunkResults(("here",), ChunkOnHost(("a", "b"), kept))
    values = {key: [torch.full((20,), float(n + 10 * len(key))) for n in range(3)] for key in ("a", "b", "here")}
    for n in range(3):
        for key, tensors in values.items():
            results.put(key, tensors[n].clone())
        results.put("nobody", torch.zeros(3))
    assert results.device_bytes == 3 * 80
    kept.settle()
    results.bring(recomputes=True)
    for key, count in (("b", 3), ("here", 2), ("a", 2)):
        for n in range(count):
            found = results.take(key)
            assert found is not None
            assert_same_bits(found[0], values[key][n])
    assert results.take("b") is None and results.take("nobody") is None
    results.put("b", torch.ones(2))
    found = results.take("b")
    assert found is not None and found[0].tolist() == [1, 1], "within the recompute it stays here"
    results.release()


@pytest.mark.parametrize("begun", ["sent", "brought", "taken"])
def test_what_gives_way_is_lost_once_its_copies_are_ordered(begun: str, host: tuple[KeptOnHost, LateMover]) -> None:
    """In either sweep; what was taken before stays right, whoever writes to the slabs next."""
    kept, mover = host
    chunks = [ChunkResults((), ChunkOnHost(("a",), kept)) for _ in range(2)]
    for chunk in chunks:
        for n in range(3):
            chunk.put("a", torch.full((20,), float(n)))
    if begun != "sent":
        kept.settle()
        chunks[1].bring(recomputes=True)
    first = chunks[1].take("a") if begun == "taken" else None
    stack = kept._stack
    kept.give_way()
    assert stack.num_bytes == kept.device_bytes == kept.host_bytes == 0 and not kept.leaving and not kept.coming
    mover.synchronize()
    if begun == "taken":
        assert first is not None and first[0].tolist() == [0.0] * 20
    if begun == "sent":
        chunks[1].put("a", torch.ones(3))
    for chunk in reversed(chunks):
        chunk.bring(recomputes=True)
        assert all(chunk.take("a") is None for _ in range(4))
        chunk.release()
    assert mover.num_bytes["up"] == {"sent": 0, "brought": 240, "taken": 240}[begun]


@pytest.mark.parametrize("offload", ["auto", True, False])
def test_outputs_have_host_memory_only_where_offload_is_auto(offload: Any) -> None:
    with switched_on(tiny_model(), config(offload=offload)) as ours:
        spare = step_memory._host_spare_bytes(attachment_of(ours), torch.device("cuda"))
    assert (spare > 0) == (offload == "auto")
