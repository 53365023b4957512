"""Whole estimates: what fits, the longest document, suggestions that hold what they promise, and how figures move."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.plan import (
    GPUS,
    Job,
    estimate,
    gpu_named,
    largest_tokens,
    longest_on_this_machine,
    nearest,
    rates,
    read_shape,
    suggestions,
)
from oomb_accel.plan.sizes import GIB

ROOT = Path(__file__).resolve().parents[2]
M = 1 << 20


def job(model: str = "qwen2.5-7b", tokens: int = M, **changes: Any) -> Job:
    return Job(model=read_shape(model), tokens=tokens, **changes)


SPARSE: dict[str, Any] = {"attention": "sparse", "page_grad_dtype": "bfloat16"}
JOBS = [
    job(**SPARSE),
    job(page_grad_dtype="bfloat16"),
    job(tokens=300_000, gpu=GPUS["h100"], model="qwen3-8b"),
    job(tokens=100_000, gpu=GPUS["rtx4090"], model="qwen2.5-3b", chunk_tokens=1024, host_bytes=64 * GIB),
    job(num_gpus=2, zero_stage=3, **SPARSE),
]


@pytest.mark.parametrize("of", JOBS)
def test_the_longest_document_fits_and_a_page_more_does_not(of: Job) -> None:
    longest = largest_tokens(of)
    assert longest % of.page_tokens == 0 and longest > of.chunk_tokens
    assert estimate(replace(of, tokens=longest)).fits
    assert not estimate(replace(of, tokens=longest + of.page_tokens)).fits


REFUSED = [
    job(tokens=2 * M, **SPARSE),
    job(tokens=3 * M // 2),
    job(tokens=M, offload=False),
    job(tokens=M // 2, attention="sparse", offload=True, host_bytes=64 * GIB),
    job(tokens=3 * M // 8, keep_outputs=True, offload=False),
    job(tokens=M // 2, keep_outputs=True),
    job(tokens=M // 8, lora_r=0, weights_dtype="float32"),
    job(model="qwen2.5-32b", tokens=M // 8),
    job(model="qwen3-8b", tokens=M // 4, gpu=GPUS["rtx4090"]),
    job(model="llama-3.1-8b", tokens=M // 8, host_bytes=16 * GIB, gpu=GPUS["l40s"]),
    job(tokens=M // 8, gpu=GPUS["rtx4090"], base_dtype="float8"),
    job(model="qwen2.5-14b", tokens=M // 32, gpu=GPUS["h100"], base_dtype="float8", chunk_tokens=4096),
]


@pytest.mark.parametrize("of", REFUSED)
def test_suggestions_make_it_fit(of: Job) -> None:
    found = estimate(of)
    assert not found.fits and len(found.refusal.splitlines()) == 3
    changes = suggestions(of)
    assert changes
    for change in changes:
        assert change.estimate.fits and change.estimate.job != of
        assert change.estimate.memory.device_bytes <= of.gpu.memory_bytes
    machines = [change for change in changes if "host memory" in change.change]
    settings = [change for change in changes if change not in machines]
    assert changes == settings + machines
    for part in (settings, machines):
        assert [c.estimate.time.seconds for c in part] == sorted(c.estimate.time.seconds for c in part)


RIVALS = [
    job("qwen2.5-72b", num_gpus=8, zero_stage=3),
    job("qwen2.5-72b", num_gpus=8),
    job("qwen2.5-72b", M // 32, num_gpus=8, base_dtype="float8"),
    job(tokens=4 * M, gpu=GPUS["rtx4090"]),
    job(tokens=M, gpu=GPUS["rtx4090"], chunk_tokens=512, device_pages_bytes=GIB // 4),
    job("qwen2.5-72b", M // 8),
]


LIMITED = [
    job(
        attention="sparse", device_pages_bytes=4 * GIB
    ),  # less than a chunk needs; the least would leave the host short
    job(attention="sparse", device_pages_bytes=GIB // 2, host_bytes=512 * GIB),  # the least will do
    job(attention="sparse", device_pages_bytes=4 * GIB, host_bytes=64 * GIB),  # all that is free will not do
    job(attention="sparse", device_pages_bytes=100 * GIB),  # more than is free
    job(attention="sparse", device_pages_bytes=100 * GIB, host_bytes=64 * GIB),
    job(attention="sparse", device_pages_bytes=20 * GIB),  # enough for a chunk, and too little for the host
    job(attention="sparse", device_pages_bytes=4 * GIB, chunk_tokens=65536),  # the GPU has no room for a chunk
    job(attention="sparse", device_pages_bytes=4 * GIB, host_memory_bytes=16 * GIB),
    job(attention="sparse", host_memory_bytes=16 * GIB),
    job(attention="sparse", host_memory_bytes=16 * GIB, host_bytes=64 * GIB),  # the whole host will not do
    job(attention="sparse", page_grad_dtype="bfloat16", host_memory_bytes=4 * GIB, num_gpus=2, zero_stage=3),
]


@pytest.mark.parametrize("of", LIMITED)
def test_limits_that_settings_put(of: Job) -> None:
    """`auto` is among the changes where it alone is enough, and nothing that takes more is; a number in the refusal is
    the least that will do."""
    found, changes = estimate(of), suggestions(of)
    assert not found.fits and all(change.estimate.fits for change in changes)
    named = [change.change for change in changes]
    for name in ("device_pages", "host_memory"):
        free = _with(of, f"{name}_bytes", None)
        enough = free != of and estimate(free).fits
        assert (f"{name}_gib: auto" in named) == enough
        if enough:
            assert not [change for change in named if "auto, " in change or change.endswith(f", {name}_gib: auto")]
            assert not [change for change in named if "GPUs" in change and f"{name}_gib" in change]
    for name, number in re.findall(r"Set (\w+)_gib=([\d.]+) or more, or 'auto'\.", found.refusal):
        assert not estimate(_with(of, f"{name}_bytes", int((float(number) - 0.1) * GIB))).fits
        assert estimate(_with(of, f"{name}_bytes", int((float(number) + 5) * GIB))).fits


GIVEN_BACK: dict[str, Any] = {
    "device_pages_bytes": None,
    "host_memory_bytes": None,
    "keep_outputs": "auto",
    "offload": "auto",
}
KEPT: dict[str, Any] = {"model": "qwen3-8b", "gpu": GPUS["h100"], "tokens": M // 16, "keep_outputs": True}


@pytest.mark.parametrize(
    "of",
    [
        *LIMITED,
        job(**KEPT, attention="sparse", host_memory_bytes=4 * GIB),  # with which outputs would fit
        job(**KEPT, device_pages_bytes=30 * GIB),  # of which outputs have what is free
    ],
)
def test_what_only_needs_to_be_given_back_is_named(of: Job) -> None:
    remedy = estimate(of).refusal.splitlines()[2]
    changes = ({name: value} for name, value in GIVEN_BACK.items() if getattr(of, name) != value)
    if any(estimate(replace(of, **change)).fits for change in changes):
        assert remedy.startswith("  Set "), remedy


def _with(of: Job, name: str, num_bytes: int | None) -> Job:
    settings: dict[str, Any] = {name: num_bytes}
    return replace(of, **settings)


@pytest.mark.parametrize(
    ("of", "what", "remedy"),
    [
        (LIMITED[0], "device_pages_gib is less than the pages that a chunk needs at once.", "  Set device_pages_gib="),
        (LIMITED[1], "device_pages_gib is less than the pages that a chunk needs at once.", "  Set device_pages_gib=7"),
        (
            LIMITED[2],
            "device_pages_gib is less than the pages that a chunk needs at once.",
            "  device_pages_gib='auto' ",
        ),
        (LIMITED[3], "device_pages_gib is more than the GPU has free for pages.", "  Set device_pages_gib=79"),
        (LIMITED[4], "device_pages_gib is more than the GPU has free for pages.", "  device_pages_gib='auto' is part"),
        (LIMITED[5], "Host memory is too small for the pages of this document.", "  Set device_pages_gib="),
        (LIMITED[6], "The GPU has no room for one chunk and the pages that it needs at once.", "  Set chunk_tokens="),
        (LIMITED[8], "Host memory is too small for the pages of this document.", "  Set host_memory_gib=8"),
    ],
)
def test_each_limit_has_words_of_its_own(of: Job, what: str, remedy: str) -> None:
    first, _, last = estimate(of).refusal.splitlines()
    assert first == what and last.startswith(remedy)


def test_a_larger_machine_is_not_named_with_what_is_enough_on_this_one() -> None:
    """Where several settings are needed, too."""
    for of in (*REFUSED, *RIVALS, *LIMITED):
        changes = suggestions(of)
        here = [_changed(of, change.estimate.job) for change in changes if not change.other_machine]
        for change in changes:
            if change.other_machine:
                assert not [settings for settings in here if settings <= _changed(of, change.estimate.job)], (
                    change.change
                )


def _changed(of: Job, to: Job) -> set[tuple[str, object]]:
    names = [field.name for field in fields(Job) if field.name not in ("num_gpus", "host_bytes")]
    return {(name, getattr(to, name)) for name in names if getattr(to, name) != getattr(of, name)}


@pytest.mark.parametrize("of", [*REFUSED, *RIVALS, *LIMITED])
def test_a_refusal_says_set_only_where_that_is_enough(of: Job) -> None:
    remedy = estimate(of).refusal.splitlines()[2]
    values = {name: eval(value) for name, value in re.findall(r"(\w+)=('\w+'|\d+(?:\.\d+)?)", remedy)}
    for name in ("device_pages", "host_memory"):
        if f"{name}_gib" in values:
            gib = values.pop(f"{name}_gib")
            values[f"{name}_bytes"] = None if gib == "auto" else int(gib * GIB)
    if values:
        enough = estimate(replace(of, **values)).fits
        assert remedy.startswith("  Set ") == enough and ("part of it" in remedy) != enough, remedy


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (RIVALS[0], "with 3,712 GiB of host memory: page_grad_dtype: bfloat16, chunk_tokens: 4096, page_dtype: float8"),
        (RIVALS[1], "zero_stage: 3, page_grad_dtype: bfloat16, chunk_tokens: 4096, page_dtype: float8"),
        (RIVALS[2], "zero_stage: 3, chunk_tokens: 4096, base_dtype: model"),
        (RIVALS[3], "with 480 GiB of host memory: chunk_tokens: 1024, page_grad_dtype: bfloat16"),
        (RIVALS[5], "with 2 GPUs with ZeRO 3, 256 GiB of host memory: chunk_tokens: 2048"),
    ],
)
def test_settings_together_and_with_a_larger_machine(of: Job, expected: str) -> None:
    """None that is named can be left out, and less host memory is not enough."""
    changes = suggestions(of)
    assert all(change.estimate.fits for change in changes)
    (found,) = [change for change in changes if change.change.endswith(expected)]
    assert found.other_machine == ("host memory" in found.change)
    works = found.estimate.job
    for name in ("zero_stage", "chunk_tokens", "page_dtype"):
        if getattr(works, name) != getattr(of, name) and works.num_gpus == of.num_gpus:
            assert not estimate(replace(works, **{name: getattr(of, name)})).fits, name
    if works.num_gpus == of.num_gpus and works.host_bytes > of.host_bytes:
        assert not estimate(replace(works, host_bytes=works.host_bytes - 32 * GIB)).fits


def test_pages_that_need_not_leave_stay_where_the_host_is_small() -> None:
    (of,) = [of for of in REFUSED if of.offload is True]
    assert estimate(of).refusal.endswith("Set offload='auto', which keeps on the GPU what it has room for.")
    assert "offload: auto" in [change.change for change in suggestions(of)]


def test_zero_3_is_tried_where_there_are_gpus() -> None:
    of = job("qwen2.5-72b", M // 128, num_gpus=8, chunk_tokens=1024)
    assert estimate(of).refusal.endswith("Set zero_stage=3, which divides it among the 8 GPUs (--zero 3).")
    assert [change.change for change in suggestions(of)] == ["zero_stage: 3"]


def test_the_longest_document_with_other_settings() -> None:
    of = RIVALS[0]
    longest = longest_on_this_machine(of)
    assert longest is not None and longest.estimate.fits and longest.estimate.job.tokens > 20 * largest_tokens(of)
    assert longest.estimate.job.num_gpus == 8 and longest.estimate.job.host_bytes == of.host_bytes
    more = replace(longest.estimate.job, tokens=longest.estimate.job.tokens + of.page_tokens)
    assert not estimate(more).fits


def test_several_settings_come_before_another_machine() -> None:
    """None of them is enough alone."""
    first, *others = suggestions(job(model="qwen3-8b", tokens=2 * M))
    assert (
        first.change == "page_grad_dtype: bfloat16, attention: sparse, page_dtype: float8, page_budget: 64, top_k: 16"
    )
    assert first.estimate.memory.host_bytes <= 128 * GIB
    assert all("host memory" in change.change for change in others)


def test_a_suggestion_changes_what_it_says() -> None:
    by_change = {s.change: s.estimate.job for s in suggestions(REFUSED[0])}
    assert by_change["page_dtype: float8"] == replace(REFUSED[0], page_dtype="float8")
    assert "160 GiB of host memory" in by_change and not estimate(replace(REFUSED[0], host_bytes=128 * GIB)).fits


def test_what_no_setting_can_help() -> None:
    huge = job(model="llama-3.1-70b", tokens=M // 8, num_gpus=4, zero_stage=3, gpu=GPUS["rtx4090"])
    assert "Divide it among more GPUs" in estimate(huge).refusal
    assert suggestions(huge) == [] and largest_tokens(huge) == 0 and longest_on_this_machine(huge) is None
    found = re.search(r"each GPU is short by (\d+) GiB; on (\d+) such GPUs", nearest(huge))
    assert found is not None and found[2] == "16"
    larger = replace(huge.gpu, memory_bytes=huge.gpu.memory_bytes + int(found[1]) * GIB)
    assert suggestions(replace(huge, gpu=larger))


def test_under_zero_3_weights_are_divided_but_for_what_is_at_work() -> None:
    """A layer of the 70B has 0.86e9 numbers, its head 1.05e9: two heads in bf16. The 7B's head has 0.54e9."""
    parts = estimate(job(model="llama-3.1-70b", tokens=M // 8, num_gpus=8, zero_stage=3)).memory.device
    assert parts["weights"] / GIB == pytest.approx(131.4 / 8, rel=0.02)
    assert parts["gathered weights"] == 2 * 2 * 128256 * 8192
    small = estimate(job(num_gpus=2, zero_stage=3)).memory.device
    assert small["gathered weights"] == 2 * 2 * 152064 * 3584
    assert estimate(job(num_gpus=2, zero_stage=2)).memory.device["gathered weights"] == 0


def test_base_weights_in_8_bits() -> None:
    """Two bytes for each number of the linear layers, 6.5e9 in a 7B; only their products are faster."""
    of = job(tokens=M // 8, **SPARSE)
    plain, copied = estimate(of), estimate(replace(of, base_dtype="float8"))
    assert plain.memory.device["weights in 8 bits"] == 0
    layer = 3584 * (3584 + 512) * 2 + 3 * 3584 * 18944
    assert copied.memory.device["weights in 8 bits"] == 2 * 28 * layer
    gained = plain.time.parts["linear layers"] - copied.time.parts["linear layers"]
    assert 0.2 < gained / plain.time.parts["linear layers"] < 0.4
    assert plain.time.seconds - copied.time.seconds == pytest.approx(gained)
    by_change = {s.change: s.estimate.job for s in suggestions(REFUSED[-1])}
    assert by_change["base_dtype: model"] == replace(REFUSED[-1], base_dtype="model")
    assert (
        estimate(REFUSED[-2]).refusal.endswith("is part of it.")
        and "which takes 12.2 GiB less" in estimate(REFUSED[-2]).refusal
    )


@pytest.mark.parametrize(("more", "what"), [({"lora_r": 0}, "adapters"), ({"zero_stage": 3, "num_gpus": 2}, "ZeRO 2")])
def test_base_weights_that_cannot_be_in_8_bits(more: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match="frozen, and whole") as error:
        job(base_dtype="float8", **more)
    assert str(error.value).endswith(
        f"Set base_dtype='model', or use {what}{' (lora_r: 16)' if what == 'adapters' else ''}."
    )


def test_a_72b_on_eight_gpus() -> None:
    """128K tokens per GPU, 560 GiB of host memory. By hand: activations of 80 layers are 2 x (4 x 8192 + 2 x 8192 +
    2 x 1024 + 3 x 29568) bytes a token and layer and some for adapters and LSE, 171 GiB for 8,192 tokens, more than
    the GPU has. Weights are 135.4 / 8, K and V 320 KiB a token. What is said to fit does."""
    of = job("qwen2.5-72b", M // 8, num_gpus=8, zero_stage=3, host_bytes=560 * GIB)
    found = estimate(of)
    parts = found.memory.device
    assert parts["activations of one chunk"] / GIB == pytest.approx(8192 * 80 * 2 * 139_904 / GIB, rel=0.01)
    assert parts["weights"] / GIB == pytest.approx(135.4 / 8, rel=0.01)
    assert found.memory.pages.value_bytes == (M // 8 - 8192) * 320 * 1024
    assert not found.fits and found.refusal.splitlines()[2] == "  Set chunk_tokens=2048."
    assert not estimate(replace(of, chunk_tokens=4096)).fits and estimate(replace(of, chunk_tokens=2048)).fits
    both, alone = suggestions(of)
    assert both.change == "chunk_tokens: 4096, page_grad_dtype: bfloat16" and alone.change == "chunk_tokens: 2048"
    assert both.estimate.time.seconds < alone.estimate.time.seconds


def test_optimizers_on_a_small_host_are_refused() -> None:
    of = job("qwen2.5-7b", M // 16, lora_r=0, num_gpus=8, zero_stage=1, zero_offload=True, host_bytes=100 * GIB)
    assert "Host memory" in estimate(of).refusal
    assert estimate(replace(of, host_bytes=600 * GIB)).fits


def seconds(of: Job) -> float:
    return estimate(of).time.seconds


def test_figures_move_as_they_should() -> None:
    base = job(tokens=M // 4, keep_outputs=False)
    memory = estimate(base).memory
    assert estimate(replace(base, chunk_tokens=4096)).memory.peak_bytes < memory.peak_bytes
    assert estimate(replace(base, page_grad_dtype="bfloat16")).memory.peak_bytes < memory.peak_bytes
    assert seconds(replace(base, attention="sparse")) < seconds(base) / 3
    assert seconds(replace(base, keep_outputs=True, gpu=replace(base.gpu, memory_bytes=500 * GIB))) < seconds(base)
    assert seconds(replace(base, gpu=GPUS["a100"])) > 2.5 * seconds(base)
    assert estimate(base).is_scaled is False and estimate(replace(base, gpu=GPUS["a100"])).is_scaled
    as_reported = replace(base.gpu, memory_bytes=base.gpu.memory_bytes + 4096)  # by the driver of this machine
    assert estimate(replace(base, gpu=as_reported)).is_scaled is False
    whole = replace(base, lora_r=0, weights_dtype="float32", zero_stage=1)
    shared = estimate(replace(whole, num_gpus=4)).memory.device
    assert shared["optimizer"] == estimate(whole).memory.device["optimizer"] // 4


@pytest.mark.parametrize("keep_last_graph", [True, False])
def test_the_sparse_backward_works_in_memory_that_logits_have_left(keep_last_graph: bool) -> None:
    shape = read_shape("qwen2.5-7b")
    for vocabulary, counts in ((1000, True), (shape.vocabulary, False)):
        of = replace(job(tokens=M // 8, **SPARSE, top_k=16), model=replace(shape, vocabulary=vocabulary))
        device = estimate(replace(of, keep_last_graph=keep_last_graph, keep_outputs=False)).memory.device
        workspace = device["workspace of the sparse backward"]
        assert (workspace > GIB // 2, device["logits of one chunk"] == 0) == (counts, counts)
    kept = estimate(replace(of, model=replace(shape, vocabulary=1000), keep_outputs=True)).memory.device
    assert kept["workspace of the sparse backward"] > GIB // 2
    assert kept["activations of one chunk"] == device["activations of one chunk"], (
        "the last chunk makes its own outputs"
    )
    dense = estimate(replace(of, attention="dense", model=replace(shape, vocabulary=1000))).memory.device
    assert dense["workspace of the sparse backward"] == 0


def test_adapters_run_within_the_products_under_zero_3_too() -> None:
    """Whole layers are gathered there, so that nobody watches a single module."""
    of = job(tokens=M // 8)
    parts = [estimate(replace(of, zero_stage=stage)).time.parts for stage in (2, 3)]
    assert parts[0]["norms, activations, adapters"] == parts[1]["norms, activations, adapters"]


def test_windows_cost_their_window() -> None:
    shape = replace(read_shape("qwen2.5-7b"), windows=(4096,) * 28)
    full, windowed = estimate(job(tokens=M // 4)), estimate(replace(job(tokens=M // 4), model=shape))
    assert windowed.memory.pages.value_bytes < full.memory.pages.value_bytes
    assert windowed.time.parts["attention to the past"] < full.time.parts["attention to the past"] / 30


def test_nothing_moves_where_everything_fits() -> None:
    found = estimate(job(tokens=M // 16))
    assert found.time.up_bytes == found.time.down_bytes == found.memory.plan.host_bytes == 0
    assert found.time.parts["waiting for host memory"] == 0


def test_traffic_of_a_small_pool() -> None:
    resident = job(tokens=M // 4, **SPARSE)
    small = estimate(replace(resident, device_pages_bytes=10 * GIB))
    pages = small.memory.pages
    # K and V that the pool has no room for go to the host once; what is read comes back more often.
    assert small.time.down_bytes > pages.value_bytes - 10 * GIB
    assert small.time.up_bytes > small.time.down_bytes
    real = estimate(replace(resident, device_pages_bytes=10 * GIB, distinct=0.25))
    assert real.time.up_bytes < small.time.up_bytes
    assert small.time.seconds >= estimate(resident).time.seconds
    slow = replace(resident.gpu, host_bytes_per_second=1e9)
    assert seconds(replace(resident, device_pages_bytes=10 * GIB, gpu=slow)) > 2 * small.time.seconds


def test_the_hosts_work_for_pages_runs_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as launches leave the host time: none where the GPU is quicker than these."""
    of = job(tokens=M // 4, device_pages_bytes=4 * GIB, keep_outputs=False, **SPARSE)
    quick = replace(of, gpu=replace(of.gpu, flops_per_second=1e20, memory_bytes_per_second=1e20))
    what, passes = "host's work for pages", 3 * 32 - 1

    def parts(of: Job) -> dict[str, float]:
        return estimate(of).time.parts

    work = parts(quick)[what]
    assert 1 < work < 5 and parts(of)[what] == 0
    monkeypatch.setattr(rates, "HOST_RECORD_SECONDS", 20 * rates.HOST_RECORD_SECONDS)
    monkeypatch.setattr(rates, "HOST_LAYER_SECONDS", 20 * rates.HOST_LAYER_SECONDS)
    found = parts(of)
    beside = sum(found.values()) - found[what] - found["waiting for host memory"] - found["optimizer"]
    assert found[what] == pytest.approx(20 * work - (beside - 28 * passes * rates.HOST_PASS_SECONDS))
    assert parts(quick)[what] == pytest.approx(20 * work)


def test_traffic_of_dense_attention_by_hand() -> None:
    """What the pool has no room for is read in the forward sweep, when a chunk runs again, and in its backward, where
    its gradients are read too, but for the last chunk, which makes them."""
    shape = replace(read_shape("qwen2.5-7b"), num_layers=2, windows=(None,) * 2)
    chunk = 2 * 4 * 2 * 1024 * 128 * 2  # layers, KV heads, K and V, tokens, head_dim, bytes
    tiny = Job(model=shape, tokens=5 * 1024, chunk_tokens=1024, span_tokens=128, page_grad_dtype="bfloat16")
    plan = estimate(tiny).memory.pages
    tiny = replace(tiny, device_pages_bytes=plan.least_value_bytes + plan.least_gradient_bytes, keep_outputs=False)
    found = estimate(tiny)
    pool = found.memory.plan.device_value_bytes
    absent = [past * chunk - min(pool, past * chunk) for past in range(5)]  # chunks 1 to 5
    reads = [4, 4, 4, 4, 2]  # the last one runs once
    assert found.time.up_bytes == pytest.approx(sum(a * n for a, n in zip(absent, reads, strict=True)), rel=1e-6)
    kept = estimate(replace(tiny, keep_outputs=True)).time.up_bytes
    assert kept == pytest.approx(found.time.up_bytes - sum(absent[:-1]), rel=1e-6)


def test_cost_follows_from_time() -> None:
    found = estimate(job(tokens=M // 8))
    per_hour = 3600 * found.tokens_per_second
    assert found.cost_per_million_tokens(3.5) == pytest.approx(3.5 / per_hour * 1e6)


@pytest.mark.parametrize(
    "name",
    [
        "H200",
        "nvidia h100",
        "A100-80GB",
        "RTX 4090",
        "4090",
        "rtx_3090",
        "L40S",
        "B200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA A100-SXM4-80GB",
        "h100-sxm",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA A100 80GB PCIe",
    ],
)
def test_gpus_by_the_names_that_people_write(name: str) -> None:
    assert gpu_named(name) in GPUS.values()


def test_an_unknown_gpu_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'H20'.*\n.*'h200'\?\n.*--gpu_gib"):
        gpu_named("H20")
    for other in ("H100 PCIe", "H100 NVL", "NVIDIA H200 NVL"):  # other rates
        with pytest.raises(ValueError, match=rf"Unknown GPU '{other}'.*\n.*'h[12]00'\?\n.*--gpu_gib 48 --tflops 300"):
            gpu_named(other)


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "a100-sxm4-40gb", "A100 40GB"])
def test_a_known_chip_with_other_memory_is_answered_with_the_options_for_it(name: str) -> None:
    """All A100s have the same peaks."""
    with pytest.raises(ValueError) as refused:
        gpu_named(name)
    what, why, remedy = str(refused.value).splitlines()
    assert what == f"Unknown GPU {name!r} in --gpu." and "A100 80 GB" in why and "--gpu a100 --gpu_gib 39" in remedy


@pytest.mark.parametrize(
    ("name", "gib"), [("Tesla V100-SXM2-32GB", 31), ("NVIDIA H100 80GB PCIe", 78), ("Tesla T4", 48), ("x 999999GB", 48)]
)
def test_another_gpu_is_answered_with_the_memory_in_its_name(name: str, gib: int) -> None:
    with pytest.raises(ValueError, match=f"--gpu_gib {gib} --tflops 300"):
        gpu_named(name)


def test_layers_that_stay_dense() -> None:
    of = job(tokens=M // 4, **SPARSE, dense_layers=(0, -1))
    assert of.sparse_layers == frozenset(range(1, 27))
    assert seconds(of) > 1.1 * seconds(replace(of, dense_layers=()))


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys, types\n"
        "facade = sys.modules['oomb_accel'] = types.ModuleType('oomb_accel')\n"
        "facade.__path__ = ['oomb_accel']\n"
        "from oomb_accel.cli import main\n"
        "code = main(['estimate', 'qwen2.5-7b', '--length', '1M', '--attention', 'sparse'])\n"
        "assert code == 0 and not {'torch', 'transformers', 'numpy'} & set(sys.modules), code\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert found.returncode == 0, found.stderr
