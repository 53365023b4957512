"""Parity on a GPU with the kernels that are used there: bf16 against fp32 by the twice-plain rule, and equal bits
with `deterministic=True`. Chunks of 256 tokens and pages of 64, so that cuDNN and flash really run."""

from __future__ import annotations

import os
from typing import Any

# Deterministic matrix products need a fixed workspace; read when the first handle is made.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from oomb_accel import OombConfig
from oomb_kernels import dense_attention
from tests.harness.batches import Layout, documents_of, only_targets, packed, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import Result, check_parity, check_twice_plain, chunked, config, reference
from tests.harness.tolerance import assert_same_bits, assert_twice_plain, twice_plain_error

pytestmark = pytest.mark.gpu

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2 7:1 d128": ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 128}),
    "llama d64": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}),
    "qwen3 d128": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}),
    "mistral window 100": ("mistral", {"head_dim": 64, "sliding_window": 100}),
    "mistral window 700": ("mistral", {"head_dim": 128, "sliding_window": 700}),
    "gemma2 d256 soft cap": ("gemma2", {"head_dim": 256, "sliding_window": 200}),
    "llama d80": ("llama", {"head_dim": 80}),
}


def gpu_model(name: str, **settings: Any) -> PreTrainedModel:
    model_type, special = MODELS[name]
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 512}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"]} if model_type == "gemma2" else {}
    model = tiny_model(model_type, max_position_embeddings=65536, **{**sizes, **special, **settings})
    return model.cuda()  # type: ignore[call-arg]


def gpu_config(chunk: int = 256, page: int = 64, **settings: Any) -> OombConfig:
    return config(chunk, page, **{"span_tokens": 512, **settings})


def documents(*lengths: int) -> Any:
    return documents_of(*lengths, vocabulary=512)


LAYOUTS: dict[str, Layout] = {
    "even": padded(documents(1536)),
    "ragged": padded(documents(1301)),
    "rows": padded(documents(900, 333, 2, 61), side="left"),
    "packed": packed(documents(700, 65, 130, 601, 1, 3)),
    "one target": padded([only_targets(documents(1100)[0], [1090])]),
}


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["qwen2 7:1 d128", "mistral window 100"])
@pytest.mark.filterwarnings("ignore:No target in row")
def test_layouts(model: str, layout: str) -> None:
    check_twice_plain(gpu_model(model), LAYOUTS[layout], gpu_config())


@pytest.mark.parametrize("model", MODELS)
def test_models(model: str) -> None:
    check_twice_plain(gpu_model(model), LAYOUTS["ragged"], gpu_config())


@pytest.mark.parametrize("keep_outputs", [True, False])
@pytest.mark.parametrize("keep_last_graph", [True, False])
def test_what_is_kept(keep_last_graph: bool, keep_outputs: bool) -> None:
    settings = gpu_config(keep_outputs=keep_outputs, keep_last_graph=keep_last_graph)
    check_twice_plain(with_lora(gpu_model("qwen2 7:1 d128")).cuda(), LAYOUTS["ragged"], settings)


def test_what_is_kept_changes_no_bit() -> None:
    model = with_lora(gpu_model("qwen2 7:1 d128")).cuda().bfloat16()
    kept, again = (
        chunked(twin(model), LAYOUTS["ragged"], gpu_config(keep_outputs=keep, deterministic=True))
        for keep in (True, False)
    )
    assert_same_bits(kept.loss, again.loss)
    assert_same_bits(kept.gradients, again.gradients)


@pytest.mark.parametrize("chunk", [64, 128, 192, 2048])
def test_chunk_sizes(chunk: int) -> None:
    check_twice_plain(gpu_model("qwen2 7:1 d128"), LAYOUTS["ragged"], gpu_config(chunk))


@pytest.mark.parametrize("model", ["qwen2 7:1 d128", "mistral window 100"])
def test_plain_torch_is_exact(model: str) -> None:
    """The same rule as on the CPU. In fp64, as fp32 rounds documents of this length beyond the rule."""
    check_parity(gpu_model(model).double(), LAYOUTS["packed"], gpu_config())


def backends_used(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Filled while a step runs: backends by kind of call."""
    used: dict[str, set[str]] = {"own": set(), "past": set(), "packed": set(), "window": set()}

    def spied(name: str, forward: Any) -> Any:
        def spy(q: Tensor, k: Tensor, v: Tensor, call: Any) -> Any:
            kind = "window" if call.window else "packed" if call.segments else "own" if call.causal else "past"
            used[kind].add(name)
            return forward(q, k, v, call)

        return spy

    for name, backend in dense_attention._BACKENDS.items():
        monkeypatch.setattr(backend, "forward", spied(name, backend.forward))
    return used


@pytest.mark.skipif(not hopper(), reason="needs compute capability 9.0")
def test_the_fast_backends_really_run(monkeypatch: pytest.MonkeyPatch) -> None:
    used = backends_used(monkeypatch)
    chunked(gpu_model("qwen2 7:1 d128").bfloat16(), LAYOUTS["packed"], gpu_config())
    assert used["own"] == used["past"] == {"cudnn"} and used["packed"] <= {"flash", "torch"}
    chunked(gpu_model("mistral window 100").bfloat16(), LAYOUTS["even"], gpu_config())
    assert used["window"] == {"flash"}


@pytest.mark.parametrize("backend", ["cudnn", "flash", "torch"])
def test_each_backend_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "cudnn" and not hopper():
        pytest.skip("needs compute capability 9.0")
    used = backends_used(monkeypatch)
    check_twice_plain(gpu_model("qwen2 7:1 d128"), LAYOUTS["ragged"], gpu_config(backend=backend))
    assert used["own"] == used["past"] == {backend}


@pytest.mark.parametrize("layout", ["ragged", "packed"])
@pytest.mark.parametrize("settings", [{}, {"page_grad_dtype": "bfloat16"}, {"keep_outputs": False}])
@pytest.mark.parametrize("model", ["qwen2 7:1 d128", "mistral window 700"])
@pytest.mark.filterwarnings("ignore:No target in row")
def test_deterministic_gives_the_same_bits_twice(model: str, settings: dict[str, Any], layout: str) -> None:
    lora = with_lora(gpu_model(model), lora_dropout=0.1).cuda().bfloat16()
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(chunked(twin(lora), LAYOUTS[layout], gpu_config(deterministic=True, **settings), embeds=True))
    assert_same_bits(torch.cat(results[1].log_probs), torch.cat(results[0].log_probs))
    assert_same_bits(results[1].gradients, results[0].gradients)


def test_deterministic_by_the_twice_plain_rule() -> None:
    check_twice_plain(gpu_model("qwen2 7:1 d128"), LAYOUTS["ragged"], gpu_config(deterministic=True))


def test_dropout_masks_are_the_same_in_both_sweeps() -> None:
    """Kept or recomputed, the last chunk must have the same gradients up to the order of sums; a redrawn mask would
    change them by tens of per cent."""
    lora = with_lora(gpu_model("qwen2 7:1 d128"), lora_dropout=0.3).cuda()
    results = []
    for keep in (True, False):
        torch.manual_seed(5)
        settings = gpu_config(keep_last_graph=keep, deterministic=True)
        results.append(chunked(twin(lora), LAYOUTS["ragged"], settings))
    assert_same_bits(results[0].gradients, results[1].gradients)


@pytest.mark.parametrize("keep_last_graph", [True, False])
def test_fp32_adapters_under_autocast(keep_last_graph: bool) -> None:
    def make() -> PeftModel:
        return with_lora(gpu_model("qwen2 7:1 d128").bfloat16()).cuda()

    def under_autocast(run: Any, *args: Any) -> Result:
        with torch.autocast("cuda", torch.bfloat16):
            return run(make(), *args)

    layout = LAYOUTS["ragged"]
    exact = reference(make().float(), layout.documents)
    plain = under_autocast(reference, layout.documents)
    ours = under_autocast(chunked, layout, gpu_config(keep_last_graph=keep_last_graph))
    assert_twice_plain(ours.low_precision_view(), plain.low_precision_view(), exact.low_precision_view())


def test_page_gradients_in_bf16() -> None:
    settings = gpu_config(page_grad_dtype="bfloat16")
    check_twice_plain(with_lora(gpu_model("qwen2 7:1 d128")).cuda(), LAYOUTS["ragged"], settings)


def test_200_chunks_are_no_worse_than_10() -> None:
    low = with_lora(gpu_model("llama d64")).cuda().bfloat16()
    layout = padded(documents(200 * 64))
    exact = reference(twin(low).float(), layout.documents)
    plain = reference(twin(low), layout.documents)
    errors = {}
    for chunks in (10, 50, 200):
        settings = gpu_config(200 * 64 // chunks, span_tokens=2048)
        ours = chunked(twin(low), layout, settings)
        assert_twice_plain(ours.low_precision_view(), plain.low_precision_view(), exact.low_precision_view())
        errors[chunks], _ = twice_plain_error(whole(ours), whole(plain), whole(exact), torch.bfloat16)
    assert errors[200] <= 1.25 * errors[10], errors


def test_embeddings_with_nan_at_padding() -> None:
    ours = chunked(
        gpu_model("qwen2 7:1 d128").bfloat16(), LAYOUTS["rows"], gpu_config(), embeds=True, fill_padding=float("nan")
    )
    assert all(g.isfinite().all() for g in ours.gradients.values())


def test_100_steps_take_no_more_memory() -> None:
    model: nn.Module = with_lora(gpu_model("llama d64", num_hidden_layers=1)).cuda().bfloat16()
    layout = padded(documents(600))
    for _ in range(3):
        chunked(model, layout, gpu_config())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        chunked(model, layout, gpu_config())
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def whole(result: Result) -> Tensor:
    return torch.cat([g.flatten().double() for g in result.gradients.values()])
