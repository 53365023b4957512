"""What is reckoned of runs of chunks is what chunk by chunk comes out, on documents short enough to look at each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomb_accel.plan import Estimate, Job, estimate, fit, largest_tokens, page_demand, read_shape, suggestions
from oomb_accel.plan.runs import ChunkRun, runs_of, runs_of_document
from oomb_accel.plan.sizes import GIB
from oomb_accel.schedule import ChunkSchedule

MODELS = {name: read_shape(name) for name in ("qwen2.5-7b", "qwen2.5-0.5b")}
LAYERS = MODELS["qwen2.5-7b"].num_layers
MODELS["windows"] = replace(MODELS["qwen2.5-7b"], windows=(None, 512, 1000, 1 << 20) * (LAYERS // 4))
MODELS["only windows"] = replace(MODELS["qwen2.5-7b"], windows=(512,) * LAYERS)


def one_by_one(runs: Sequence[ChunkRun]) -> list[ChunkRun]:
    """Every chunk as a run of its own."""
    return [run.part(number, number + 1) for run in runs for number in range(run.count)]


def chunk_by_chunk(job: Job) -> list[ChunkRun]:
    """As the engine cuts it."""
    targets = range(job.tokens - 1)
    sizes = {"chunk_tokens": job.chunk_tokens, "page_tokens": job.page_tokens}
    return runs_of(ChunkSchedule.build([job.tokens], targets, **sizes))


@given(tokens=st.integers(1, 400), chunk_tokens=st.integers(4, 60), page_tokens=st.integers(1, 20))
def test_runs_are_the_chunks_of_the_engine(tokens: int, chunk_tokens: int, page_tokens: int) -> None:
    sizes = {"chunk_tokens": max(chunk_tokens, page_tokens), "page_tokens": page_tokens}
    engine = runs_of(ChunkSchedule.build([tokens], range(tokens - 1), **sizes))
    assert one_by_one(runs_of_document(tokens, **sizes)) == engine


@given(
    model=st.sampled_from(list(MODELS)),
    tokens=st.integers(1, 100_000),
    chunk_tokens=st.sampled_from([128, 300, 1024, 8192]),
    memory_mib=st.integers(0, 80 * 1024),
    link=st.sampled_from([50e9, 1e9]),
    settings_of_job=st.fixed_dictionaries(
        {
            "page_tokens": st.sampled_from([16, 128]),
            "attention": st.sampled_from(["dense", "sparse"]),
            "top_k": st.sampled_from([4, 16]),
            "page_budget": st.sampled_from([None, 20]),
            "distinct": st.sampled_from([None, 0.1]),
            "dense_layers": st.sampled_from([(), (0, 3)]),
            "keep_outputs": st.sampled_from([True, False, "auto"]),
            "keep_last_graph": st.booleans(),
            "page_grad_dtype": st.sampled_from(["float32", "bfloat16"]),
            "page_dtype": st.sampled_from(["model", "float8"]),
            "offload": st.sampled_from(["auto", True]),
            "device_pages_bytes": st.sampled_from([None, GIB // 4, GIB]),
            "lora_r": st.sampled_from([0, 16]),
        }
    ),
)
@settings(max_examples=200, deadline=None)
def test_estimates_are_those_chunk_by_chunk(
    model: str, tokens: int, chunk_tokens: int, memory_mib: int, link: float, settings_of_job: dict[str, Any]
) -> None:
    """On GPUs of all sizes, so that more or less is kept, and pages leave, also over a slow link."""
    of = Job(model=MODELS[model], tokens=tokens, chunk_tokens=chunk_tokens, **settings_of_job)
    gpu = replace(of.gpu, memory_bytes=17 * GIB + (memory_mib << 20), host_bytes_per_second=link)
    job = replace(of, gpu=gpu)
    found = estimate(job)
    times, sizes = _times(found), _sizes(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "chunks", chunk_by_chunk)
        wanted = estimate(job)
        assert times == pytest.approx(_times(wanted), rel=1e-9)
        assert sizes == _sizes(wanted)


@given(
    pages=st.integers(1, 400),
    chunk_pages=st.integers(1, 9),
    distinct=st.sampled_from([None, 0.0, 0.2]),
    grad_dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_the_most_that_exists_at_one_moment_is_looked_for_as_long_as_there_may_be_more(
    pages: int, chunk_pages: int, distinct: float | None, grad_dtype: Any
) -> None:
    """Values of the chunks up to one, and gradients that later ones and it have made of what is before it."""
    job = Job(model=MODELS["qwen2.5-7b"], tokens=1, attention="sparse", top_k=2, distinct=distinct)
    layout = replace(job.pages, grad_dtype=grad_dtype, recent_pages=0, page_tokens=16)
    runs = runs_of_document(pages * 16, chunk_tokens=chunk_pages * 16, page_tokens=16)
    most, untouched = 0.0, 1.0
    for chunk in one_by_one(runs)[:0:-1]:
        past = chunk.past_pages
        untouched *= 1 - layout.distinct_pages(past, chunk.num_tokens) / past
        values = (past + chunk.own_pages) * layout.value_record
        most = max(most, values + past * (1 - untouched) * layout.gradient_record)
    records = 4 * LAYERS * runs[-1].past_pages
    found = page_demand(layout, runs).most_bytes
    assert found == (int(most / runs[-1].past_pages * records) if records else None)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4), chunk_pages=st.integers(1, 5))
def test_values_of_other_documents_exist_as_well(lengths: list[int], chunk_pages: int) -> None:
    """Gradients too, once the sweep comes to a document's last chunk."""
    layout = Job(model=MODELS["qwen2.5-7b"], tokens=1, attention="sparse", top_k=2, page_tokens=4).pages
    schedule = ChunkSchedule.build(lengths, range(sum(lengths) - 1), chunk_tokens=4 * chunk_pages, page_tokens=4)
    most, untouched, values = 0.0, dict[int, float](), schedule.num_pages
    for chunk in reversed(schedule.chunks):
        past, document = len(chunk.past_pages), chunk.segments[0].document
        if past:
            touched = layout.distinct_pages(past, chunk.num_tokens) / past
            untouched[document] = untouched.get(document, 1.0) * (1 - touched)
        gradients = past * (1 - untouched.get(document, 1.0))
        most = max(most, values * layout.value_record + gradients * layout.gradient_record)
        values -= len(chunk.own_pages)
    found = page_demand(layout, runs_of(schedule)).most_bytes
    assert found == (pytest.approx(4 * LAYERS * most, abs=1) if schedule.num_pages else None)


def _times(found: Estimate) -> dict[str, float]:
    """Of the step, though it may not fit."""
    time = found.time
    return {**time.parts, "up": round(time.up_bytes), "down": round(time.down_bytes), "all": time.seconds}


def _sizes(found: Estimate) -> list[Any]:
    memory = found.memory
    kept = [len(of.chunks) for of in (memory.kept.attention, memory.kept.mlp, memory.kept.o_proj, memory.kept.head)]
    return [memory.device, memory.pinned, memory.host_most_bytes, kept, found.refusal]


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_a_document_of_a_million_pages_takes_no_minute(attention: Any) -> None:
    """Each length that is looked at took 10 us for each chunk, and the time of a step the square of their number."""
    job = Job(model=MODELS["qwen2.5-7b"], tokens=1 << 20, chunk_tokens=16, page_tokens=16, attention=attention)
    start = time.process_time()
    assert estimate(job).fits and largest_tokens(job) >= job.tokens
    assert time.process_time() - start < 15


@pytest.mark.parametrize("tokens", [1 << 20, 1 << 22])
def test_time_is_reckoned_of_what_fits_alone(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a million chunks it takes seconds each, and most changes do not make such a job fit."""
    job = Job(model=MODELS["qwen2.5-7b"], tokens=tokens, attention="sparse", host_bytes=32 * GIB)
    spy = mock.Mock(side_effect=fit.estimate_time)
    monkeypatch.setattr(fit, "estimate_time", spy)
    found = suggestions(job)
    assert found and spy.call_count == len(found)
