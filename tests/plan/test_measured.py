"""The estimate against every whole step of docs/benchmarks.md. A new row of a table is a new row of measured.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oomb_accel.plan import Adapters, Estimate, Job, estimate, kept, memory, rates, read_shape
from oomb_accel.plan.sizes import GIB

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "measured.json").read_text(encoding="utf-8"))["rows"]
WITHIN = 0.1
TIMED = [row for row in ROWS if "seconds" in row]


def estimated(row: dict[str, Any], **settings: Any) -> Estimate:
    """By the code of the row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "LOGIT_COPIES", row.get("logit_copies", rates.LOGIT_COPIES))
        if row.get("whole_model_gathered"):
            patch.setattr(memory, "gathered_numbers", lambda total, largest: total)
        if row.get("attention_outputs_only"):
            patch.setattr(kept, "block_ends", lambda job: {})
            patch.setattr(kept, "_can_keep_head", lambda job: False)
        adapters = Adapters(plain=not row.get("plain_lora"))
        model = read_shape(row["model"])
        return estimate(Job(model=model, tokens=row["tokens"], adapters=adapters, **row["job"], **settings))


def seconds(row: dict[str, Any]) -> float:
    """Estimated, with the lists of the row."""
    return estimated(row, distinct=row.get("distinct")).time.seconds


def error(value: float, measured: list[float]) -> float:
    """Relative distance from the range of what was measured."""
    return max(value / max(measured) - 1, 1 - value / min(measured), 0.0)


@pytest.mark.parametrize("row", TIMED, ids=lambda row: row["row"])
def test_step_time(row: dict[str, Any]) -> None:
    assert error(seconds(row), row["seconds"]) < WITHIN


@pytest.mark.parametrize("row", [row for row in ROWS if "peak_gib" in row], ids=lambda row: row["row"])
def test_peak_memory(row: dict[str, Any]) -> None:
    assert error(estimated(row).memory.peak_bytes / GIB, [row["peak_gib"]]) < WITHIN


@pytest.mark.parametrize("row", [row for row in ROWS if "before_gib" in row], ids=lambda row: row["row"])
def test_memory_between_steps(row: dict[str, Any]) -> None:
    device = estimated(row).memory.device
    before = sum(device[part] for part in ("weights", "optimizer", "gradient buckets"))
    # Offload leaves 3.4 GiB where 2.9 are accounted for: DeepSpeed's own buffers, small in any real step.
    assert before / GIB == pytest.approx(row["before_gib"], rel=WITHIN, abs=0.6)


@pytest.mark.parametrize("row", [row for row in ROWS if "host_gib" in row], ids=lambda row: row["row"])
def test_host_memory(row: dict[str, Any]) -> None:
    assert error(estimated(row).memory.host_bytes / GIB, [row["host_gib"]]) < WITHIN


@pytest.mark.parametrize("row", [row for row in ROWS if "kept_on_host_gib" in row], ids=lambda row: row["row"])
def test_kept_outputs_on_the_host(row: dict[str, Any]) -> None:
    assert estimated(row).memory.kept.host_bytes / GIB == pytest.approx(row["kept_on_host_gib"], rel=0.02)


@pytest.mark.parametrize("row", [row for row in ROWS if "host_most_gib" in row], ids=lambda row: row["row"])
def test_host_memory_is_between_its_least_and_its_most(row: dict[str, Any]) -> None:
    """The most is the limit, or all pages that exist at one moment."""
    memory = estimated(row).memory
    assert memory.host_bytes / GIB < row["host_most_gib"] * (1 + WITHIN)
    assert row["host_most_gib"] < memory.host_most_bytes / GIB * 1.03


def test_the_most_that_a_step_takes_of_the_host_is_no_idle_number() -> None:
    """Half of these steps reached it."""
    rows = [row for row in ROWS if "host_most_gib" in row]
    reached = [row["host_most_gib"] > 0.97 * estimated(row).memory.host_most_bytes / GIB for row in rows]
    assert sum(reached) >= len(rows) / 2


def test_on_average_it_is_closer() -> None:
    """A part that is wrong by a few percent of the step would hide in the limit of each row."""
    times = [abs(error(seconds(row), row["seconds"])) for row in TIMED]
    peaks = [abs(error(estimated(row).memory.peak_bytes / GIB, [row["peak_gib"]])) for row in ROWS if "peak_gib" in row]
    assert sum(times) / len(times) < 0.03
    assert sum(peaks) / len(peaks) < 0.006


@pytest.mark.parametrize(
    "rows",
    [
        ("sparse, products kept too: 128K", "sparse, products kept too: top_k 64, 128K"),
        (
            "sparse, pages and results on the host: 1M, top_k 16",
            "sparse, pages and results on the host: 1M, top_k 64",
        ),
    ],
)
def test_more_selected_pages_cost_what_they_did(rows: tuple[str, str]) -> None:
    """Each pair on one machine, by today's code."""
    few, many = (next(row for row in ROWS if row["row"] == name) for name in rows)
    measured = many["seconds"][0] - few["seconds"][0]
    assert estimated(many).time.seconds - estimated(few).time.seconds == pytest.approx(measured, rel=0.2)


def test_every_row_fits_as_it_did() -> None:
    assert [row["row"] for row in ROWS if not estimated(row).fits] == []


def test_rows_that_say_so_would_keep_more_now() -> None:
    """Gradients of the head, or under ZeRO 3 outputs of products."""
    marked = [row for row in ROWS if row.get("attention_outputs_only")]
    today = {"attention_outputs_only": False, "plain_lora": False}
    then, now = ([estimated(row | code).memory.kept for row in marked] for code in ({}, today))
    assert marked and not any(kept.mlp.chunks or kept.o_proj.chunks or kept.head.chunks for kept in then)
    assert [bool(kept.head.chunks) for kept in now] == [row["job"].get("zero_stage") != 3 for row in marked]
    assert all(kept.mlp.chunks or kept.head.chunks for kept in now)


def test_a_wrong_estimate_would_be_noticed() -> None:
    assert error(110.1, [100]) > WITHIN and error(89.9, [100]) > WITHIN
    assert error(1.7, [1.49, 2.03]) == 0
