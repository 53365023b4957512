"""Where the time of a step goes: microseconds per token by part beside the least that each can take, largest gap first.

python -m benchmarks.run profile_step --lengths 65536 --sides oomb-sparse-16-no-kept oomb-no-kept --out profile.jsonl

The wall time is that of steps without the profiler. Sides of the peer have floors of a step that recomputes everything.
Floors of parts are at rates that libraries reach, and count bytes too; the row's own floor is that of all benchmarks,
which is lower.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.floor import floor_seconds
from benchmarks.registry import Row, benchmark
from benchmarks.step_parts import GAPS, Launch, floors, part_of
from benchmarks.whole_step import SIDES, config_of, switch_on
from oomb_accel import OombConfig
from oomb_accel.bench.models import LORA_RANK, SHAPES, lora_model
from oomb_accel.bench.step import training_step
from oomb_accel.integrations.liger import use_liger
from oomb_accel.plan.shape import ModelShape, shape_of

_MOST_LARGEST = 40


@benchmark("profile_step", SIDES, default_sides=("oomb", "peer"), default_lengths=(8192, 32768))
def profile_step(
    *, shape: str, lengths: list[int], sides: list[str], chunk_tokens: int, timed: int, device: torch.device
) -> Iterator[Row]:
    """One row per length and side, with a table of parts; its details hold the same and the largest launches."""
    sizes = shape_of(SHAPES[shape], shape)
    model = lora_model(shape, device)
    liger = use_liger(model, device, fused_loss=True) is None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for tokens in lengths:
        ids = torch.randint(0, sizes.vocabulary, (1, tokens), device=device)
        for side in sides:
            undo = switch_on(model, side, chunk_tokens)
            training_step(model, optimizer, ids)
            row = Row("profile_step", side, tokens, note="" if liger else "without liger")
            seconds = []
            for _ in range(timed):
                start = time.perf_counter()
                training_step(model, optimizer, ids)
                seconds.append(time.perf_counter() - start)
            row.seconds = statistics.median(seconds)
            launches = recorded(lambda: training_step(model, optimizer, ids), device)  # noqa: B023
            undo()
            config = config_of(side, tokens, chunk_tokens)
            row.details = _by_part(launches, sizes, tokens, row.seconds, config)
            row.floor_seconds = floor_seconds(sizes, tokens, config)
            row.text = parts_table(row.details)
            yield row


def recorded(step: Callable[[], object], device: torch.device) -> list[Launch]:
    """What a step launches on the device, each with the operation that launched it. On the CPU: its operations."""
    if device.type != "cuda":
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            step()
        return [
            Launch(event.name, event.self_cpu_time_total, event.name, _shapes(event.input_shapes))
            for event in profiler.events()
            if event.name.startswith("aten::")
        ]
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        step()
        torch.cuda.synchronize(device)
    return device_launches(profiler.profiler.kineto_results.events())


def device_launches(events: Sequence[Any]) -> list[Launch]:
    """The launches among the profiler's raw events, in which a launch names its operation by a number.

    Calls of the driver are numbered as well, by another count. Ranges that somebody named appear on the device too,
    around their kernels: they are left out.
    """
    ops = {
        event.correlation_id(): event
        for event in events
        if event.device_type() == DeviceType.CPU and event.name().startswith("aten::")
    }
    found = []
    for event in events:
        if event.device_type() != DeviceType.CUDA or event.is_user_annotation():
            continue
        op = ops.get(event.linked_correlation_id()) if event.linked_correlation_id() else None
        name, shapes = ("", ()) if op is None else (op.name(), _shapes(op.shapes()))
        found.append(Launch(event.name(), event.duration_ns() / 1e3, name, shapes))
    return found


def _shapes(shapes: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Inputs that are no tensors have none."""
    return tuple(tuple(shape) if all(isinstance(side, int) for side in shape) else () for shape in shapes)


def _by_part(
    launches: Sequence[Launch], sizes: ModelShape, tokens: int, seconds: float, config: OombConfig
) -> dict[str, Any]:
    """Microseconds per token, for JSON."""
    taken: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    largest: Counter[tuple[str, str, str, str]] = Counter()
    for launch in launches:
        part = part_of(launch, LORA_RANK, sizes.vocabulary)
        taken[part] += launch.us / tokens  # type: ignore[assignment]
        counts[part] += 1
        key = (part, launch.op, launch.name[:90], " ".join(map(str, launch.shapes[:3])))
        largest[key] += launch.us / tokens  # type: ignore[assignment]
    wall, busy = seconds / tokens * 1e6, sum(taken.values())
    taken[GAPS] = max(0.0, wall - busy)  # type: ignore[assignment]
    least = {part: of / tokens * 1e6 for part, of in floors(sizes, tokens, config, LORA_RANK).items()}
    parts = [
        {"part": part, "us": taken[part], "floor_us": least.get(part, 0.0), "launches": counts[part]}
        for part in {*taken, *least}
        if taken[part] or least.get(part)
    ]
    return {
        "parts": sorted(parts, key=lambda part: part["floor_us"] - part["us"]),
        "total": {"us": wall, "floor_us": sum(least.values()), "busy": busy / wall, "launches": len(launches)},
        "largest": [
            dict(zip(("part", "op", "name", "shapes"), key, strict=True)) | {"us": us}
            for key, us in largest.most_common(_MOST_LARGEST)
        ],
    }


def parts_table(details: dict[str, Any]) -> str:
    """A markdown table for docs/performance.md, the part with the largest gap first."""
    total = details["total"]
    lines = ["| part | us a token | floor | gap | launches |", "|---|---|---|---|---|"]
    for part in details["parts"]:
        gap = part["us"] - part["floor_us"]
        lines.append(
            f"| {part['part']} | {part['us']:.2f} | {part['floor_us']:.2f} | {gap:.2f} | {part['launches']:,} |"
        )
    gap = total["us"] - total["floor_us"]
    lines.append(f"| whole step | {total['us']:.2f} | {total['floor_us']:.2f} | {gap:.2f} | {total['launches']:,} |")
    return "\n".join([*lines, "", f"The device was busy for {total['busy']:.1%} of the step."])
