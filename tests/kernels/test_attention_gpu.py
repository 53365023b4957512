"""The library backends on a GPU, against fp64; parts get the output and LSE of the whole softmax."""

import pytest
import torch
from torch import Tensor

from oomb_kernels import (
    AttentionCall,
    available_backends,
    choose_backend,
    dense_attention_backward,
    dense_attention_forward,
    merge_attention_,
)
from tests.kernels.reference import (
    ON_GPU,
    Attention,
    assert_equal_by_definition,
    assert_twice_plain,
    plain_attention,
    token_major,
)

pytestmark = ON_GPU
NAMES = ("out", "dq", "dk", "dv")


def need(backend: str) -> None:
    reason = available_backends(torch.device("cuda", torch.cuda.current_device()))[backend]
    if reason:
        pytest.skip(f"{backend}: {reason}")


def inputs(
    heads: int, groups: int, num_q: int, num_k: int, dim: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout with token-major memory."""
    torch.manual_seed(0)
    q, dout = (token_major(heads, num_q, dim, dtype, "cuda") for _ in range(2))
    k, v = (token_major(groups, num_k, dim, dtype, "cuda") for _ in range(2))
    return q, k, v, dout


def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: AttentionCall, backend: str) -> Attention:
    out, lse = dense_attention_forward(q, k, v, call, backend)
    return Attention(out, lse, *dense_attention_backward(dout, q, k, v, out, lse, call, backend))


def check(ours: Attention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, call: AttentionCall) -> None:
    truth = plain_attention(q, k, v, dout, call, torch.float64)
    plain = plain_attention(q, k, v, dout, call, q.dtype)
    assert ours.lse.dtype == torch.float32
    assert_equal_by_definition(ours.lse, truth.lse, "lse")
    for name in NAMES:
        value = getattr(ours, name)
        assert value.dtype == q.dtype, name
        assert_twice_plain(value, getattr(plain, name), getattr(truth, name), name)


@pytest.mark.parametrize("num_q", [777, 1024, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cudnn", "flash", "torch"])
def test_spans_with_global_output_and_lse(backend: str, dtype: torch.dtype, num_q: int) -> None:
    """Two earlier spans and the causal chunk, 28 query heads over 4 KV heads."""
    need(backend)
    heads, groups, dim, past = 28, 4, 128, (512, 256)
    q, k, v, dout = inputs(heads, groups, num_q, sum(past) + num_q, dim, dtype)
    lengths = (*past, num_q)
    spans = [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(3)]
    calls = [AttentionCall(scale=dim**-0.5, causal=i == 2) for i in range(3)]

    acc = torch.zeros(num_q, heads, dim, device="cuda").transpose(0, 1)
    lse = torch.full((heads, num_q), float("-inf"), device="cuda")
    for span, call in zip(spans, calls, strict=True):
        out, part_lse = dense_attention_forward(q, k[:, span], v[:, span], call, backend)
        assert out.transpose(0, 1).is_contiguous() and out.dtype == dtype
        merge_attention_(acc, lse, out, part_lse)
    parts = [
        dense_attention_backward(dout, q, k[:, s], v[:, s], acc.to(dtype), lse, call, backend)
        for s, call in zip(spans, calls, strict=True)
    ]
    dq = torch.stack([part[0].float() for part in parts]).sum(0).to(dtype)
    dk, dv = (torch.cat([part[i] for part in parts], 1) for i in (1, 2))
    whole = AttentionCall(scale=dim**-0.5, causal=True)
    check(Attention(acc.to(dtype), lse, dq, dk, dv), q, k, v, dout, whole)


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
@pytest.mark.parametrize("backend", ["cudnn", "flash"])
def test_groups_and_head_dims(backend: str, group: int, dim: int) -> None:
    need(backend)
    call = AttentionCall(scale=dim**-0.5, causal=True)
    tensors = inputs(2 * group, 2, 300, 300, dim)
    check(run(*tensors, call, backend), *tensors, call)


FLASH_CALLS = {
    "bottom-right": (AttentionCall(scale=0.09, causal=True), 333, 1000),
    "window": (AttentionCall(scale=0.09, causal=True, window=100), 333, 1000),
    "window of one": (AttentionCall(scale=0.09, causal=True, window=1), 333, 333),
    "left window": (AttentionCall(scale=0.09, window=300), 333, 1000),
    "one query": (AttentionCall(scale=0.09, causal=True, window=100), 1, 1000),
    "rows without keys": (AttentionCall(scale=0.09, causal=True), 500, 300),
    "segments": (AttentionCall(scale=0.09, segments=(300, 1, 77, 399)), 777, 777),
    "windowed segments": (AttentionCall(scale=0.09, segments=(300, 1, 77, 399), window=64), 777, 777),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("call", "num_q", "num_k"), FLASH_CALLS.values(), ids=FLASH_CALLS.keys())
def test_flash_masks(call: AttentionCall, num_q: int, num_k: int, deterministic: bool) -> None:
    need("flash")
    call = AttentionCall(call.scale, call.causal, call.window, call.softcap, call.segments, deterministic=deterministic)
    tensors = inputs(8, 2, num_q, num_k, 128)
    check(run(*tensors, call, "flash"), *tensors, call)


def test_flash_large_heads() -> None:
    need("flash")
    call = AttentionCall(scale=1 / 16, causal=True)
    tensors = inputs(4, 2, 200, 300, 256)
    check(run(*tensors, call, "flash"), *tensors, call)


@pytest.mark.parametrize("segments", [None, (1000, 24, 1024)])
def test_deterministic_flash_repeats_its_bits(segments: tuple[int, ...] | None) -> None:
    need("flash")
    call = AttentionCall(scale=0.09, causal=True, segments=segments, deterministic=True)
    tensors = inputs(28, 4, 2048, 2048, 128)
    first = run(*tensors, call, "flash")
    assert not torch.are_deterministic_algorithms_enabled()
    for _ in range(3):
        for a, b in zip(first, run(*tensors, call, "flash"), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["cudnn", "flash"])
@pytest.mark.parametrize("layout", ["heads first", "fused projection", "unaligned"])
def test_layouts_of_inputs(backend: str, layout: str) -> None:
    need(backend)
    heads, groups, tokens, dim = 8, 2, 256, 64
    call = AttentionCall(scale=dim**-0.5, causal=True)
    q, k, v, dout = inputs(heads, groups, tokens, tokens, dim)
    if layout == "heads first":
        q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    elif layout == "fused projection":
        fused = torch.cat([x.transpose(0, 1).flatten(1) for x in (q, k, v)], 1)
        fused_THD = fused.unflatten(1, (-1, dim)).transpose(0, 1)
        q, k, v = fused_THD[:heads], fused_THD[heads : heads + groups], fused_THD[heads + groups :]
    else:
        q, k, v, dout = (torch.nn.functional.pad(x, (0, 1))[..., :dim] for x in (q, k, v, dout))
    ours = run(q, k, v, dout, call, backend)
    assert ours.out.transpose(0, 1).is_contiguous() and ours.dq.transpose(0, 1).is_contiguous()
    check(ours, q, k, v, dout, call)


def test_library_backends_take_an_fp32_output() -> None:
    """The merged output is kept in fp32; a backward may get it as it is."""
    call = AttentionCall(scale=0.1, causal=True)
    q, k, v, dout = inputs(8, 2, 256, 256, 64)
    for backend in ("cudnn", "flash"):
        need(backend)
        out, lse = dense_attention_forward(q, k, v, call, backend)
        grads = dense_attention_backward(dout, q, k, v, out.float(), lse, call, backend)
        check(Attention(out, lse, *grads), q, k, v, dout, call)


def test_auto_on_this_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    need("cudnn")
    call = AttentionCall(scale=0.1, causal=True)
    sizes = {"device": device, "head_dim": 128, "num_q": 777, "num_k": 777}
    assert choose_backend("auto", dtype=torch.bfloat16, call=call, **sizes) == "cudnn"
    assert choose_backend("auto", dtype=torch.float32, call=call, **sizes) == "torch"
