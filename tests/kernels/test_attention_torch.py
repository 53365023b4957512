"""The plain torch backend against the textbook formula and autograd, on CPU."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oomb_kernels import (
    AttentionCall,
    attention_torch,
    dense_attention_backward,
    dense_attention_forward,
    merge_attention_,
)
from tests.kernels.reference import (
    Attention,
    assert_close_in,
    assert_equal_by_definition,
    assert_twice_plain,
    plain_attention,
    token_major,
)


def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: AttentionCall) -> Attention:
    out, lse = dense_attention_forward(q, k, v, call, "torch")
    return Attention(out, lse, *dense_attention_backward(dout, q, k, v, out, lse, call, "torch"))


def check(
    call: AttentionCall,
    *,
    group: int,
    num_groups: int,
    num_q: int,
    num_k: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    q, dout = (token_major(group * num_groups, num_q, head_dim, dtype) for _ in range(2))
    k, v = (token_major(num_groups, num_k, head_dim, dtype) for _ in range(2))
    ours = run(q, k, v, dout, call)
    truth = plain_attention(q, k, v, dout, call, torch.float64)
    plain = plain_attention(q, k, v, dout, call, dtype)
    assert ours.out.dtype == ours.dq.dtype == ours.dk.dtype == ours.dv.dtype == dtype
    assert ours.out.transpose(0, 1).is_contiguous() and ours.dq.transpose(0, 1).is_contiguous()
    assert_equal_by_definition(ours.lse, truth.lse, "lse")
    for name in ("out", "dq", "dk", "dv"):
        assert_close_in(dtype, getattr(ours, name), getattr(plain, name), getattr(truth, name), name)


CALLS = {
    "full": AttentionCall(scale=0.3),
    "causal": AttentionCall(scale=0.3, causal=True),
    "window": AttentionCall(scale=0.3, causal=True, window=5),
    "left window": AttentionCall(scale=0.3, window=5),
    "softcap": AttentionCall(scale=0.9, causal=True, softcap=1.5),
    "segments": AttentionCall(scale=0.3, segments=(4, 1, 6, 2)),
    "windowed segments": AttentionCall(scale=0.3, segments=(4, 1, 6, 2), window=3, softcap=2.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_masks_and_dtypes(call: AttentionCall, dtype: torch.dtype) -> None:
    check(call, group=2, num_groups=2, num_q=13, num_k=13, head_dim=16, dtype=dtype)


@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_groups_and_head_dims(group: int, head_dim: int) -> None:
    call = AttentionCall(scale=head_dim**-0.5, causal=True)
    check(call, group=group, num_groups=2, num_q=5, num_k=9, head_dim=head_dim, dtype=torch.float32)


@pytest.mark.parametrize(("num_q", "num_k"), [(3, 11), (1, 11), (11, 3), (4, 0), (0, 4), (0, 0)])
@pytest.mark.parametrize("mask", ["causal", "window", "left window", "full"])
def test_unequal_counts_and_rows_without_keys(mask: str, num_q: int, num_k: int) -> None:
    check(CALLS[mask], group=2, num_groups=2, num_q=num_q, num_k=num_k, head_dim=8, dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    segments = data.draw(st.none() | st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    num_q = sum(segments) if segments else data.draw(st.integers(1, 12))
    num_k = num_q if segments else data.draw(st.integers(0, 14))
    call = AttentionCall(
        scale=data.draw(st.sampled_from([0.1, 0.5, 1.0])),
        causal=data.draw(st.booleans()),
        window=data.draw(st.none() | st.integers(1, 15)),
        softcap=data.draw(st.none() | st.sampled_from([0.5, 20.0])),
        segments=segments,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_torch, "_MAX_SCORES_CPU", data.draw(st.sampled_from([1, 64, 10**6])))
        check(
            call,
            group=data.draw(st.sampled_from([1, 3])),
            num_groups=data.draw(st.integers(1, 2)),
            num_q=num_q,
            num_k=num_k,
            head_dim=data.draw(st.sampled_from([1, 5, 8])),
            dtype=torch.float32,
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_parts_with_global_lse_equal_one_call(dtype: torch.dtype) -> None:
    """Two earlier spans and the causal chunk, merged; each part's backward gets the merged output and LSE."""
    torch.manual_seed(1)
    borders, chunk, heads, groups, dim = [0, 8, 13, 22], 9, 6, 2, 16
    q, dout = (token_major(heads, chunk, dim, dtype) for _ in range(2))
    k, v = (token_major(groups, borders[-1], dim, dtype) for _ in range(2))
    whole = AttentionCall(scale=0.25, causal=True)
    spans = [slice(a, b) for a, b in pairwise(borders)]
    calls = [AttentionCall(scale=0.25, causal=span == spans[-1]) for span in spans]

    acc = torch.zeros(heads, chunk, dim, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    lse = torch.full((heads, chunk), float("-inf"), dtype=acc.dtype)
    for span, call in zip(spans, calls, strict=True):
        merge_attention_(acc, lse, *dense_attention_forward(q, k[:, span], v[:, span], call, "torch"))
    parts = [
        dense_attention_backward(dout, q, k[:, s], v[:, s], acc, lse, call, "torch")
        for s, call in zip(spans, calls, strict=True)
    ]
    ours = {
        "out": acc,
        "dq": torch.stack([p[0].to(acc.dtype) for p in parts]).sum(0),
        "dk": torch.cat([p[1] for p in parts], 1),
        "dv": torch.cat([p[2] for p in parts], 1),
    }
    truth = plain_attention(q, k, v, dout, whole, torch.float64)
    plain = plain_attention(q, k, v, dout, whole, dtype)
    assert_equal_by_definition(lse, truth.lse, "lse")
    for name, value in ours.items():
        if dtype == torch.float64:
            assert_equal_by_definition(value, getattr(truth, name), name)
        else:
            assert_twice_plain(value.to(dtype), getattr(plain, name), getattr(truth, name), name)


def test_strided_inputs_equal_contiguous_ones() -> None:
    torch.manual_seed(2)
    fused = torch.randn(7, 4 + 2 + 2, 8).transpose(0, 1)  # one projection's output, sliced by heads
    q, k, v = fused[:4], fused[4:6], fused[6:]
    dout = torch.randn(4, 7, 8)
    call = AttentionCall(scale=0.4, causal=True)
    strided = run(q, k, v, dout, call)
    contiguous = run(q.contiguous(), k.contiguous(), v.contiguous(), dout, call)
    for a, b in zip(strided, contiguous, strict=True):
        assert torch.equal(a, b)


def test_autocast_does_not_lower_the_precision() -> None:
    torch.manual_seed(3)
    q, k, v, dout = (token_major(2, 6, 8, torch.float32) for _ in range(4))
    call = AttentionCall(scale=0.4, causal=True)
    expected = run(q, k, v, dout, call)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(q, k, v, dout, call)
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a, b)


def test_inputs_that_require_grad_leave_no_graph() -> None:
    q, k, v = (token_major(2, 3, 4, torch.float32).requires_grad_() for _ in range(3))
    out, lse = dense_attention_forward(q, k, v, AttentionCall(scale=1.0), "torch")
    assert not out.requires_grad and not lse.requires_grad
