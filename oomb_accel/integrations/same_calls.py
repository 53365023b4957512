"""A recompute takes kept results in the order of its calls, so it must call its layers as often as the first pass."""

from __future__ import annotations

from torch import nn

from oomb_accel.chunk_pass import ChunkPass
from oomb_accel.kept_results import HEAD, Key

_MOST_SHOWN = 3


def check_same_calls(run: ChunkPass, model: nn.Module, num_chunks: int) -> None:
    """Refuse a recompute that may have taken the results of other calls, when its forward is over.

    Raises:
        RuntimeError: naming the layers.
    """
    if run.sweep == "forward" or not (uneven := run.results.uneven_calls()):
        return
    names = {module: name for name, module in model.named_modules()}
    shown = [
        f"{_name(key, names)}: {_times(made)} in the forward sweep, {_times(asked)} in the backward sweep"
        for key, (made, asked) in list(uneven.items())[:_MOST_SHOWN]
    ]
    more = f"; and {len(uneven) - _MOST_SHOWN} more" if len(uneven) > _MOST_SHOWN else ""
    raise RuntimeError(
        "A layer ran another number of times in the backward sweep than in the forward sweep.\n"
        f"  Chunk {run.chunk.index + 1} of {num_chunks}: {'; '.join(shown)}{more}. Outputs that are kept are taken in "
        "the order of the calls, and would be those of others.\n"
        "  Set keep_outputs=False, with which every layer runs again, or have the model call its layers alike with "
        "and without gradients."
    )


def _name(key: Key, names: dict[nn.Module, str]) -> str:
    if isinstance(key, nn.Module):
        return names.get(key, type(key).__name__)
    return "the head" if key == HEAD else f"attention of layer {key}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
