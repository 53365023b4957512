"""Case 24: fp32 adapters under bf16 autocast; settings that must not change gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel

import oomb_accel
from tests.harness.batches import Layout, documents_of, packed, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import Result, check_twice_plain, chunked, config, parameter_gradients, reference, split
from tests.harness.tolerance import assert_same_bits, assert_same_gradients, assert_twice_plain


def layout() -> Layout:
    return padded(documents_of(150, 40))


def mixed(**lora: Any) -> PeftModel:
    """A base in bf16 with adapters in fp32, as PEFT makes them."""
    model = with_lora(tiny_model().bfloat16(), **lora)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    return model


def under_autocast(model: PeftModel, run: Any, *args: Any) -> Result:
    with torch.autocast("cpu", torch.bfloat16):
        result = run(model, *args)
    assert isinstance(result, Result)
    return result


@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("lora", [{}, {"use_dora": True}, {"target_modules": ["q_proj", "v_proj", "lm_head"]}])
@pytest.mark.parametrize("keep_last_graph", [True, False])
def test_fp32_adapters_under_autocast(keep_last_graph: bool, lora: dict[str, Any], backward_inside: bool) -> None:
    exact = reference(mixed(**lora).float(), layout().documents)
    plain = under_autocast(mixed(**lora), reference, layout().documents)
    settings = config(keep_last_graph=keep_last_graph)
    model = mixed(**lora)
    if backward_inside:
        ours = under_autocast(model, chunked, layout(), settings)
    else:
        ours = autocast_around_the_forward_only(model, settings)
    assert {g.dtype for g in ours.gradients.values()} == {torch.float32}
    assert_twice_plain(ours.low_precision_view(), plain.low_precision_view(), exact.low_precision_view())


def autocast_around_the_forward_only(model: PeftModel, settings: Any) -> Result:
    """As accelerate does: the backward runs outside, in autograd's own thread on a GPU."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return chunk_forward(*args, **kwargs)

    oomb_accel.enable(model, settings)
    chunk_forward = model.forward
    model.forward = wrapped  # type: ignore[method-assign]
    output = model(**layout().batch)
    output.loss.backward()
    oomb_accel.disable(model)
    return Result(output.loss.detach(), tuple(split(output.log_probs.detach(), layout())), parameter_gradients(model))


def test_autocast_leaves_pefts_casts_as_they_were() -> None:
    model = mixed()
    under_autocast(model, chunked, layout())
    flags = [getattr(m, "cast_input_dtype_enabled", True) for m in model.modules() if hasattr(m, "lora_A")]
    assert flags and all(flags)


@pytest.mark.parametrize("keep_outputs", [True, False])
@pytest.mark.parametrize("kind", ["fp32", "autocast", "bf16"])
def test_the_last_graph_kept_or_not_gives_the_same_gradients(kind: str, keep_outputs: bool) -> None:
    model = {"fp32": with_lora(tiny_model()), "autocast": mixed(), "bf16": with_lora(tiny_model()).bfloat16()}[kind]
    results = []
    for keep_last_graph in (True, False):
        settings = config(keep_last_graph=keep_last_graph, keep_outputs=keep_outputs)
        run = under_autocast if kind == "autocast" else lambda m, f, *args: f(m, *args)
        results.append(run(twin(model), chunked, layout(), settings))
    assert_same_bits(results[0].loss, results[1].loss)
    assert_same_bits(results[0].gradients, results[1].gradients)


@pytest.mark.parametrize("model_type", ["qwen2", "mistral", "gemma2"])
def test_kept_outputs_change_no_bit(model_type: str) -> None:
    results = [
        chunked(tiny_model(model_type), layout(), config(keep_outputs=keep, keep_last_graph=False))
        for keep in (True, False, "auto")
    ]
    for other in results[1:]:
        assert_same_bits(other.loss, results[0].loss)
        assert_same_bits(other.gradients, results[0].gradients)


@pytest.mark.parametrize("span_tokens", [4, 8, 12, 64])
def test_the_span_changes_nothing_but_rounding(span_tokens: int) -> None:
    ours = chunked(tiny_model(), layout(), config(span_tokens=span_tokens))
    wanted = chunked(tiny_model(), layout(), config())
    assert_same_gradients(ours.gradients, wanted.gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_page_gradients_in_bf16(dtype: torch.dtype) -> None:
    settings = config(page_grad_dtype="bfloat16")
    check_twice_plain(with_lora(tiny_model()), packed(documents_of(150, 40)), settings, dtype=dtype)
