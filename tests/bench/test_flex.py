"""FlexAttention beside the kernels: on the same lists, and only with the same results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from oomb_accel.bench.attention import AttentionInputs, bench_attention
from oomb_accel.bench.flex import block_mask, flex_tasks
from oomb_accel.bench.lists import KINDS, draw_lists
from tests.bench.sizes import CPU, TINY, made_up


@pytest.mark.parametrize("kind", list(KINDS))
def test_flex_attention_gets_the_same_lists(kind: Any) -> None:
    """Only a compiled one computes with the blocks; that it does is checked before it is timed."""
    lists = draw_lists(kind, num_groups=2, num_blocks=3, num_pages=6, top_k=2, block_tokens=64, device=CPU, seed=1)
    mask = block_mask(lists, num_heads=4, num_queries=150, page_tokens=128)
    assert mask.BLOCK_SIZE == (64, 128) and mask.shape[-2:] == (150, 6 * 128)
    blocks_HBN = mask.to_dense()[0].bool()
    for head in range(4):
        listed = [block.nonzero().flatten().tolist() for block in blocks_HBN[head]]
        assert listed == lists.pages_GBK[head // 2].tolist()
    assert mask.kv_num_blocks.sum() == 0, "a partial block would run the mask function"


def test_other_results_of_flex_attention_are_not_timed() -> None:
    inputs = AttentionInputs(TINY, 64, CPU)
    lists = inputs.lists("random", 3)

    def run(expected: torch.Tensor) -> None:
        flex_tasks(
            inputs.q_HTD,
            inputs.dout_HTD,
            inputs.pool,
            inputs.slots_GN,
            lists,
            scale=TINY.scale,
            expected_HTD=expected,
            compiled=lambda q, k, v, **_: q + 0 * (k.sum() + v.sum()),
        )

    run(inputs.q_HTD)
    with pytest.raises(RuntimeError, match=r"(?s)something else.*0.1.*--no-flex"):
        run(inputs.q_HTD * 0.9)


def test_flex_attention_that_fails_leaves_a_note() -> None:
    def broken() -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError("no compiler\nand many more lines")

        return call

    rows = list(bench_attention(TINY, made_up, CPU, flex=True, compile_flex=broken))
    assert all(row.notes[1] == f"no FlexAttention at past {row.past}: NotImplementedError: no compiler" for row in rows)
    assert all(row.forward.ms == 2.0 and math.isnan(row.flex_forward.ms) for row in rows)
