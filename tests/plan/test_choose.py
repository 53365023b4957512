"""Settings that are "auto": the chunk that fits and is fastest, and the storage of page gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomb_accel.plan import GPUS, Found, Job, choose, estimate, read_shape
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
    chunk, storage = choose(job(M), chunk_tokens=True, page_grad_dtype=True).reasons
    assert chunk.startswith("chunk_tokens=8192 for 1,048,576 tokens: the usual one")
    assert storage == (
        "page_grad_dtype=bfloat16 for 1,048,576 tokens: with float32, pages of 167 GiB do not fit on the device "
        "beside a usual chunk"
    )
    (tight,) = choose(job(M // 16, found=found(15, 20)), chunk_tokens=True, page_grad_dtype=False).reasons
    assert "chunk_tokens=2048 for 65,536 tokens: with 4096 " in tight and "GiB" in tight
    (none,) = choose(job(M // 16, found=found(1)), chunk_tokens=True, page_grad_dtype=False).reasons
    assert none == "chunk_tokens=512 for 65,536 tokens: none fits by the estimate"


def test_short_chunks_are_no_remedy_for_little_host_memory() -> None:
    assert chunk_of(job(M, found=found(60, host_gib=20))) == 8192
