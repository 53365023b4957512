"""What a query sees of earlier chunks where pages are stored in 8 bits, written from the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from oomb_accel.schedule import ChunkSchedule


def as_stored(x_GTD: Tensor, page: int) -> Tensor:
    """K or V of a document as pages give them back; tokens behind the last whole page as they are. The gradient goes
    straight through."""
    whole = x_GTD.shape[1] // page * page
    pages_GNPD = x_GTD[:, :whole].detach().unflatten(1, (-1, page))
    top = pages_GNPD.abs().amax((2, 3), keepdim=True)
    scale = torch.where(top > 0, 2.0 ** torch.ceil(torch.log2(top / 448)), 1.0)
    read_GTD = ((pages_GNPD / scale).to(torch.float8_e4m3fn).to(x_GTD.dtype) * scale).flatten(1, 2)
    change = torch.nn.functional.pad(read_GTD - x_GTD[:, :whole].detach(), (0, 0, 0, x_GTD.shape[1] - whole))
    return x_GTD + change


def same_chunk(schedule: ChunkSchedule, document: int, num_tokens: int) -> Tensor:
    """Which keys of a document are in the chunk of the query, ``[T, T]``."""
    number_T = torch.full((num_tokens,), -1)
    for chunk in schedule.chunks:
        for segment in chunk.segments:
            if segment.document == document:
                number_T[segment.past_tokens : segment.past_tokens + segment.num_tokens] = chunk.index
    return number_T[:, None] == number_T
