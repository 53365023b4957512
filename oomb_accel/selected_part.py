"""The sparse part of a chunk's attention: for each block of queries, the pages of its past that it selected.

Pages are selected where a chunk runs first. What was selected is recorded, and every later run of the chunk, and every
backward, takes the same pages.

Legend: H query heads, G KV heads, T tokens of the chunk, D head_dim, N candidate pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oomb_accel.chunk_pass import ChunkPass, LayerCall
from oomb_accel.pages import WantedLater
from oomb_accel.selection import Reach
from oomb_kernels import PageLists, page_attention_backward, page_attention_forward


@dataclass(frozen=True, slots=True)
class SelectedPages:
    """How a layer divides its past, and which of the candidates its queries attend to."""

    reach: Reach
    lists: PageLists
    touched: WantedLater | None
    """Which candidates the lists name; None where nobody has to know: all pages stay on the device, and may all have a
    gradient."""


def selected_pages(q_HTD: Tensor, layer: LayerCall, run: ChunkPass, *, first_run: bool) -> SelectedPages | None:
    """The selection of a layer: made in the first run of a chunk, replayed afterwards.

    Args:
        q_HTD: queries of the whole chunk, without graph.

    Returns:
        None where the layer attends to all of its past, or to a window.
    """
    selector = run.memory.selector
    if selector is None:
        return None
    reach = selector.reach(layer.layer, run.chunk.past_pages)
    if reach is not None and first_run:
        centroids_GCD = run.memory.cache.centroids(layer.layer, reach.candidates)
        first_HTD = q_HTD[:, run.first_rows]
        selector.select(layer.layer, run.chunk, first_HTD, centroids_GCD, reach, layer.scale, layer.softcap)
    if first_run:
        selector.note_queries(layer.layer, run.chunk, q_HTD)
    if reach is None:
        return None
    lists, touched = selector.recorded(layer.layer, run.chunk), selector.touched(layer.layer, run.chunk)
    return SelectedPages(reach, lists, touched)


def attend_selected(
    q_HTD: Tensor, out_HTD: Tensor, lse_HT: Tensor, selected: SelectedPages, layer: LayerCall, run: ChunkPass
) -> tuple[Tensor, Tensor]:
    """Join the selected pages to the softmax of the dense part.

    Args:
        q_HTD: queries of the chunk's first segment.
        out_HTD, lse_HT: dense part of the same rows.

    Returns:
        Output in q's dtype and LSE of both, new tensors.
    """
    cache, candidates = run.memory.cache, selected.reach.candidates
    slots_GN = cache.value_slots(layer.layer, candidates, selected.touched)
    return page_attention_forward(
        q_HTD,
        cache.value_pool,
        slots_GN,
        selected.lists,
        scale=layer.scale,
        softcap=layer.softcap,
        others=(out_HTD, lse_HT),
        scales_GN2=cache.value_scales(layer.layer, candidates),
    )


def attend_selected_backward(
    dout_HTD: Tensor,
    q_HTD: Tensor,
    out_HTD: Tensor,
    lse_HT: Tensor,
    dq_HTD: Tensor,
    selected: SelectedPages,
    layer: LayerCall,
    run: ChunkPass,
    *,
    need_kv: bool,
) -> Tensor:
    """Gradients through the selected pages. dK and dV go to the gradients of these pages.

    Args:
        out_HTD, lse_HT: of the whole softmax; rows of the first segment, as all others here.
        dq_HTD: what the dense part contributed.
        need_kv: whether page gradients are wanted.

    Returns:
        dQ of both parts, in q's dtype.
    """
    cache, candidates = run.memory.cache, selected.reach.candidates
    slots_GN = cache.value_slots(layer.layer, candidates, selected.touched)
    grad_slots_GN = cache.gradient_slots(layer.layer, candidates, selected.touched) if need_kv else None
    return page_attention_backward(
        dout_HTD,
        q_HTD,
        out_HTD,
        lse_HT,
        cache.value_pool,
        slots_GN,
        cache.gradient_pool if need_kv else None,
        grad_slots_GN,
        selected.lists,
        scale=layer.scale,
        softcap=layer.softcap,
        seed=run.rounding_seed(layer.layer),
        dq_HTD=dq_HTD,
        scales_GN2=cache.value_scales(layer.layer, candidates),
    )
