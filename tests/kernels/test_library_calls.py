"""The library backends' calls against the operator schemas of the installed torch, on meta tensors."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from oomb_kernels import AttentionCall, attention_cudnn, attention_flash


def borders_on_meta(segments: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty(len(segments) + 1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    ("backend", "call", "num_q", "num_k"),
    [
        (attention_flash, AttentionCall(scale=0.1, causal=True), 5, 9),
        (attention_flash, AttentionCall(scale=0.1, causal=True), 9, 5),
        (attention_flash, AttentionCall(scale=0.1, causal=True, window=3, deterministic=True), 5, 9),
        (attention_flash, AttentionCall(scale=0.1, segments=(4, 5)), 9, 9),
        (attention_cudnn, AttentionCall(scale=0.1, causal=True), 777, 777),
        (attention_cudnn, AttentionCall(scale=0.1), 777, 1024),
        (attention_cudnn, AttentionCall(scale=0.1), 512, 1024),
    ],
)
def test_arguments_and_layouts(
    monkeypatch: pytest.MonkeyPatch,
    backend: ModuleType,
    call: AttentionCall,
    num_q: int,
    num_k: int,
    heads_first: bool,
) -> None:
    monkeypatch.setattr(attention_flash, "_cumulative_lengths", borders_on_meta)
    heads, groups, dim = 8, 2, 64

    def tensor(num_heads: int, tokens: int) -> Tensor:
        x = torch.empty(tokens, num_heads, dim, dtype=torch.bfloat16, device="meta").transpose(0, 1)
        return x.contiguous() if heads_first else x

    q, dout, k, v = tensor(heads, num_q), tensor(heads, num_q), tensor(groups, num_k), tensor(groups, num_k)
    deterministic_before = torch.are_deterministic_algorithms_enabled()
    out, lse = backend.forward(q, k, v, call)
    dq, dk, dv = backend.backward(dout, q, k, v, out.float(), lse, call)
    assert torch.are_deterministic_algorithms_enabled() == deterministic_before
    assert out.shape == dq.shape == q.shape and dk.shape == dv.shape == k.shape
    assert lse.shape == (heads, num_q) and lse.dtype == torch.float32
    assert out.dtype == dq.dtype == dk.dtype == dv.dtype == torch.bfloat16
    assert out.transpose(0, 1).is_contiguous() and dq.transpose(0, 1).is_contiguous()
