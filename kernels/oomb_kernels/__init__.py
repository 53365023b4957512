"""Attention, page, loss and 8-bit matrix operations on plain tensors: library kernels and Triton on CUDA, plain torch
elsewhere. And copies of page records between host and device memory.

Nothing here knows models, layers or chunks, and no function records an autograd graph: callers own the
gradients.
"""

from oomb_kernels.attention_call import AttentionCall
from oomb_kernels.checksum import checksums
from oomb_kernels.dense_attention import (
    available_backends,
    choose_backend,
    dense_attention_backward,
    dense_attention_forward,
)
from oomb_kernels.determinism import deterministic_algorithms
from oomb_kernels.layout import of_rows
from oomb_kernels.lse_merge import merge_attention_
from oomb_kernels.page_accumulate import accumulate_pages
from oomb_kernels.page_attention import page_attention_backward, page_attention_forward
from oomb_kernels.page_backward import backward_workspace_bytes
from oomb_kernels.page_float8 import FLOAT8, quantize_pages
from oomb_kernels.page_lists import PageLists
from oomb_kernels.page_select import page_centroids, page_mass, pool_queries, top_pages
from oomb_kernels.page_store import add_pages_, load_pages, store_pages
from oomb_kernels.record_copy import CopyMethod, available_copy_methods, best_copy_method, copy_records
from oomb_kernels.row_float8 import float8_product, float8_product_fault, has_float8_product, quantize_rows
from oomb_kernels.slot_update import clear_records, set_slots
from oomb_kernels.token_loss import token_log_probs, token_log_probs_backward_

__all__ = [
    "FLOAT8",
    "AttentionCall",
    "CopyMethod",
    "PageLists",
    "accumulate_pages",
    "add_pages_",
    "available_backends",
    "available_copy_methods",
    "backward_workspace_bytes",
    "best_copy_method",
    "checksums",
    "choose_backend",
    "clear_records",
    "copy_records",
    "dense_attention_backward",
    "dense_attention_forward",
    "deterministic_algorithms",
    "float8_product",
    "float8_product_fault",
    "has_float8_product",
    "load_pages",
    "merge_attention_",
    "of_rows",
    "page_attention_backward",
    "page_attention_forward",
    "page_centroids",
    "page_mass",
    "pool_queries",
    "quantize_pages",
    "quantize_rows",
    "set_slots",
    "store_pages",
    "token_log_probs",
    "token_log_probs_backward_",
    "top_pages",
]
