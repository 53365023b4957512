"""Settings that are "auto": the chunk that fits and is fastest, and the storage of page gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomb_accel.plan import GPUS, Found, Job, choose, estimate, rates, read_shape
from oomb_accel.plan.sizes import GIB

M = 1 << 20


def job(tokens: int, model: str = "qwen2.5-7b", **changes: Any) -> Job:
    return Job(model=read_shape(model), tokens=tokens, **changes)


def chunk_of(of: Job) -> int:
    choice = choose(of, chunk_tokens=True, page_grad_dtype=False)
    assert choice.page_grad_dtype == of.page_grad_dtype and len(choice.reasons) == 1
    return choice.chunk_tokens


def storage_of(of: Job) -> str:
    choice = choose(of, chunk_tokens=False, page_grad_dtype=True)
    assert choice.chunk_tokens == of.chunk_tokens and len(choice.reasons) == 1
    return choice.page_grad_dtype


def found(gib: float, host_gib: float = 0.0, per_token: float = 4.5e6) -> Found:
    return Found(device_bytes=int(gib * GIB), host_bytes=int(host_gib * GIB), graph_bytes_per_token=per_token)


def test_the_chunk_is_the_usual_one_until_it_does_not_fit() -> None:
    assert chunk_of(job(M // 8)) == 8192
    small = job(M // 4, "qwen3-8b", gpu=GPUS["rtx4090"])
    smaller = chunk_of(small)
    assert smaller < 8192
    assert estimate(replace(small, chunk_tokens=smaller)).fits
    assert not estimate(replace(small, chunk_tokens=2 * smaller)).fits
    assert chunk_of(job(M, page_tokens=16384, chunk_tokens=16384)) == 16384


@pytest.mark.parametrize(("gib", "chunk"), [(100, 8192), (30, 4096), (15, 2048), (8, 1024), (1, 512)])
def test_what_is_free_decides(gib: float, chunk: int) -> None:
    """A document of 64K has 10.5 GiB of pages; a token's graph takes 4.5 MB. The host takes what does not fit."""
    assert chunk_of(job(M // 16, found=found(gib, host_gib=20))) == chunk


def test_a_model_that_holds_more_takes_a_smaller_chunk() -> None:
    assert chunk_of(job(M // 16, found=found(60, per_token=5e6))) == 8192
    assert chunk_of(job(M // 16, found=found(60, per_token=9e6))) == 4096


def test_page_gradients_are_wide_while_everything_stays_on_the_device() -> None:
    assert storage_of(job(M // 4)) == "float32"
    assert storage_of(job(M)) == "bfloat16"
    pages = estimate(job(M // 8)).memory.pages
    rest = 8192 * 4.5e6 + 3 * GIB
    whole = (pages.value_bytes + pages.gradient_bytes + rest) / GIB
    assert storage_of(job(M // 8, found=found(whole + 1, host_gib=100))) == "float32"
    assert storage_of(job(M // 8, found=found(whole - 3, host_gib=100))) == "bfloat16"
    assert storage_of(job(M // 8, found=found(whole - 3), offload=False)) == "bfloat16"


def test_both_together() -> None:
    """A chunk of 4,096 is not too short for wide gradients; what is shorter would cost more than they are worth."""
    for gib, chosen in [(80, (8192, "float32")), (56, (4096, "float32")), (34, (4096, "bfloat16"))]:
        of = job(M // 8, found=found(gib), offload=False, keep_outputs=False)
        choice = choose(of, chunk_tokens=True, page_grad_dtype=True)
        assert (choice.chunk_tokens, choice.page_grad_dtype) == chosen
        assert estimate(replace(of, chunk_tokens=choice.chunk_tokens, page_grad_dtype=choice.page_grad_dtype)).fits


def test_reasons_say_what_and_why() -> None:
    chunk, storage = choose(job(M, keep_outputs=False), chunk_tokens=True, page_grad_dtype=True).reasons
    assert chunk.startswith("chunk_tokens=8192 for 1,048,576 tokens: the usual one")
    assert storage == (
        "page_grad_dtype=bfloat16 for 1,048,576 tokens: with float32, pages of 166.7 GiB do not fit on the device "
        "beside a usual chunk"
    )
    (tight,) = choose(job(M // 16, found=found(15, 20)), chunk_tokens=True, page_grad_dtype=False).reasons
    assert tight.startswith(
        "chunk_tokens=2048 for 65,536 tokens: 4096 does not fit. The GPU has no room for one chunk "
    )
    assert " at once. These pages take " in tight and "GiB" in tight and tight.endswith(".")
    (none,) = choose(job(M // 16, found=found(1)), chunk_tokens=True, page_grad_dtype=False).reasons
    assert none == "chunk_tokens=512 for 65,536 tokens: none fits by the estimate"


def test_models_that_the_host_bounds_take_larger_chunks() -> None:
    """Sparse, since inside a chunk attention is dense: a chunk of 32,768 costs more than it saves."""
    small = job(M // 16, "qwen2.5-0.5b", attention="sparse", top_k=16)
    usual, larger = (estimate(replace(small, chunk_tokens=tokens)) for tokens in (8192, 16384))
    assert usual.time.by_host and larger.time.seconds < 0.97 * usual.time.seconds
    share = 1 - larger.time.seconds / usual.time.seconds
    (reason,) = choose(small, chunk_tokens=True, page_grad_dtype=False).reasons
    assert chunk_of(small) == 16384 and reason == (
        f"chunk_tokens=16384 for 65,536 tokens: by the estimate {share:.0%} faster than 8192, with which the host "
        "bounds a step"
    )
    both = choose(small, chunk_tokens=True, page_grad_dtype=True)
    assert (both.chunk_tokens, both.page_grad_dtype) == (16384, "float32")


@pytest.mark.parametrize("tokens", [M // 16, M // 8, M])
@pytest.mark.parametrize("model", ["qwen2.5-7b", "qwen3-8b", "qwen2.5-3b"])
def test_models_that_the_device_bounds_keep_the_usual_chunk(model: str, tokens: int) -> None:
    of = job(tokens, model, attention="sparse", top_k=16, page_grad_dtype="bfloat16", host_bytes=1024 * GIB)
    assert not estimate(of).time.by_host
    (reason,) = choose(of, chunk_tokens=True, page_grad_dtype=False).reasons
    assert reason == f"chunk_tokens=8192 for {tokens:,} tokens: the usual one, which fits"


def test_no_larger_chunk_without_room_or_gain() -> None:
    """For its graph; or for all pages beside it; or where a step is as long as the attention to the own chunk."""
    small = job(M // 16, "qwen2.5-0.5b", attention="sparse", top_k=16)
    tight = replace(small, gpu=replace(small.gpu, memory_bytes=22 * GIB))
    assert estimate(tight).time.by_host and not estimate(replace(tight, chunk_tokens=16384)).fits
    assert chunk_of(tight) == 8192
    long = replace(small, tokens=M, gpu=replace(small.gpu, memory_bytes=58 * GIB), host_bytes=256 * GIB)
    usual, larger = (estimate(replace(long, chunk_tokens=tokens)) for tokens in (8192, 16384))
    assert larger.fits and larger.memory.plan.offloads and not usual.memory.plan.offloads
    assert usual.time.by_host and chunk_of(long) == 8192
    slow = replace(small, gpu=replace(small.gpu, flops_per_second=small.gpu.flops_per_second / 4))
    assert not estimate(slow).time.by_host and chunk_of(slow) == 8192


def test_scores_that_are_formed_twice_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven products instead of five, with top_k 64 in chunks that are larger than the usual one."""
    jobs = [job(M // 8, attention="sparse", top_k=64, chunk_tokens=tokens) for tokens in (8192, 16384)]
    found = [estimate(of).time.parts for of in jobs]
    monkeypatch.setattr(rates, "BACKWARD_TWICE", rates.BACKWARD)
    five = [estimate(of).time.parts for of in jobs]
    assert found[0] == five[0]
    more = {part: seconds - five[1][part] for part, seconds in found[1].items()}
    pairs = 28 * 16384 * (64 * 128 + rates.LIST_KEYS) * 7  # of all chunks but the first, which has no past
    assert more.pop("attention to the past") == pytest.approx(pairs * 4 * 28 * 128 / 342e12)
    assert set(more.values()) == {0.0}


def test_short_chunks_are_no_remedy_for_little_host_memory() -> None:
    assert chunk_of(job(M, found=found(60, host_gib=20))) == 8192
