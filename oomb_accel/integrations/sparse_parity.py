"""The check of sparse attention: exactly full attention, masked to the very pages that were selected.

Which pages are selected is a matter of quality, not of exactness. Given them, loss and gradients are defined, and a
plain model computes them with a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oomb_accel.config import OombConfig
from oomb_accel.integrations.masked_attention import AttendedOnly, attention_replaced
from oomb_accel.integrations.parity import ParityReport, ParityResult, chunked, compare, full_attention, twice_plain
from oomb_accel.integrations.selections import SelectionRecord
from oomb_accel.integrations.support import base_model_of


def check_sparse_parity(model: nn.Module, config: OombConfig, documents: list[Tensor]) -> ParityReport:
    """Compare by fixed limits, on a model in fp64.

    Args:
        model: not switched on; dropout is switched off for the check.
        config: with sparse attention.
        documents: int64 token ids ``[T]`` each; some are long enough for a selection.

    Raises:
        ValueError: nothing was selected, so that nothing would be checked.
    """
    record = SelectionRecord()
    ours = chunked(model, config, documents, on_selection=record)
    return compare(_masked(model, documents, _some(record), config), ours)


def check_sparse_parity_low_precision(
    model: nn.Module, config: OombConfig, documents: list[Tensor], dtype: torch.dtype
) -> ParityReport:
    """The twice-plain rule, as `parity.check_parity_low_precision`: the kernels of this dtype are judged.

    Args:
        model: is cast to ``dtype`` and stays so.
    """
    model.to(dtype)
    record = SelectionRecord()
    ours = chunked(model, config, documents, on_selection=record)
    plain = _masked(model, documents, _some(record), config)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    truth = _masked(model.to(wide), documents, record, config)
    model.to(dtype)
    return twice_plain(compare(truth, ours), compare(truth, plain), dtype)


def _masked(model: nn.Module, documents: list[Tensor], record: SelectionRecord, config: OombConfig) -> ParityResult:
    attend = AttendedOnly(record, config.page_tokens)

    def before(document: int) -> None:
        attend.document = document

    with attention_replaced(base_model_of(model), attend):
        return full_attention(model, documents, before=before)


def _some(record: SelectionRecord) -> SelectionRecord:
    if not record.found:
        raise ValueError(
            "No pages were selected, so nothing can be checked.\n  The documents are too short for these settings.\n"
            "  Use longer documents, or a smaller top_k."
        )
    return record
