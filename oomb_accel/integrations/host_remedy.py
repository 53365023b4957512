"""What to set where the pages of a document have no room in host memory: settings that are not set already and of
which each is enough, tried by the arithmetic of the refusal itself; else the longest document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from oomb_accel.integrations.attachment import Attachment
from oomb_accel.integrations.support import check_kernels, compute_dtype
from oomb_accel.schedule import ChunkSchedule

_LEAST_BUDGET = 4
"""Times top_k, see docs/sparsity.md."""


def remedy_for(
    state: Attachment,
    schedule: ChunkSchedule,
    device: torch.device,
    has_room: Callable[[ChunkSchedule], bool],
    enough: Sequence[str],
) -> str:
    """The sentence that ends a refusal.

    Args:
        has_room: whether device and host hold the pages of a stream, by the settings as they are then.
        enough: settings that are known to be enough, as they would be written.
    """

    def works(change: dict[str, Any]) -> bool:
        try:
            with _as_if(state, change):
                check_kernels(state.facts, state.config, compute_dtype(state.base, device), device)
                return has_room(schedule)
        except ValueError:
            return False

    alone = [change for change in _changes(state) if works(change)]
    budget = next((change for change in _budgets(state) if works(change)), None)
    found = [*enough, *map(_text, [*alone, *([budget] if budget else [])])]
    if not found:
        together = _smaller_pages(state)
        found = [_text(together)] if len(together) > 1 and works(together) else []
    if found:
        return f"Set {', or '.join(found)}."
    longest = _longest(state, schedule, has_room)
    if not longest:
        return "No document has room then, however short: free host memory, or take a machine with more of it."
    return f"Train on documents of up to {longest:,} tokens, or take a machine with more host memory."


@contextmanager
def _as_if(state: Attachment, change: dict[str, Any]) -> Iterator[None]:
    """With other settings, to count with."""
    config, chosen = state.config, state.chosen
    state.config, state.chosen = replace(state.settled, **change), None
    try:
        yield
    finally:
        state.config, state.chosen = config, chosen


def _changes(state: Attachment) -> Iterator[dict[str, Any]]:
    """What gives back to pages what another setting has taken, then what makes them smaller."""
    config = state.settled
    if config.offload is True:
        yield {"offload": "auto"}
    if config.device_pages_gib != "auto":
        yield {"device_pages_gib": "auto"}
    if config.keep_outputs is True:
        yield {"keep_outputs": "auto"}
    yield from ({name: value} for name, value in _smaller_pages(state).items())


def _smaller_pages(state: Attachment) -> dict[str, Any]:
    config = state.settled
    wanted = {"page_grad_dtype": "bfloat16", "page_dtype": "float8"}
    # What "auto" will come to is not known in an evaluation, which has no page gradients.
    return {name: value for name, value in wanted.items() if getattr(config, name) not in (value, "auto")}


def _budgets(state: Attachment) -> Iterator[dict[str, Any]]:
    """The largest half, quarter and so on of what a chunk's lists can name: fewer pages have a gradient at one
    moment."""
    config = state.settled
    budget = -(-state.chunk_tokens // config.q_block) * config.top_k // 2 if state.sparse_layers else 0
    while budget >= _LEAST_BUDGET * config.top_k:
        if config.page_budget is None or budget < config.page_budget:
            yield {"page_budget": budget}
        budget //= 2


def _longest(state: Attachment, schedule: ChunkSchedule, has_room: Callable[[ChunkSchedule], bool]) -> int:
    """Tokens of the longest document, in whole pages, that is shorter than the stream and has room; 0 for none."""
    page_tokens = schedule.page_tokens
    good, bad = 0, -(-schedule.num_tokens // page_tokens)
    while bad - good > 1:
        tokens = (good + bad) // 2 * page_tokens
        shorter = ChunkSchedule.build(
            [tokens], range(tokens - 1), chunk_tokens=state.chunk_tokens, page_tokens=page_tokens
        )
        good, bad = ((good + bad) // 2, bad) if _is_true(has_room, shorter) else (good, (good + bad) // 2)
    return good * page_tokens


def _is_true(has_room: Callable[[ChunkSchedule], bool], schedule: ChunkSchedule) -> bool:
    try:
        return has_room(schedule)
    except ValueError:  # the device has none for what a layer needs at once
        return False


def _text(change: dict[str, Any]) -> str:
    return " and ".join(f"{name}={value!r}" for name, value in change.items())
