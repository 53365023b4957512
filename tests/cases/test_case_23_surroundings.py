"""Case 23, wider: what users do to a model around a step. Each works exactly or is refused clearly."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlavaConfig, LlavaForConditionalGeneration

import oomb_accel
from tests.harness.batches import documents_of, padded
from tests.harness.models import tiny_model, twin, with_lora
from tests.harness.parity import check_parity, chunked, config, parameter_gradients, reference
from tests.harness.tolerance import assert_same_bits, assert_same_gradients, assert_same_total


@pytest.mark.parametrize("length", [12, 70], ids=["one chunk", "five chunks"])
def test_a_parameter_hook_fires_once_on_the_whole_gradient(length: int) -> None:
    """A hook that halves would halve each chunk's part, and then the sum again."""
    plain, hooked = tiny_model(), tiny_model()
    calls: list[str] = []

    def halve(grad: torch.Tensor, name: str) -> torch.Tensor:
        calls.append(name)
        return grad * 0.5

    for name, parameter in hooked.named_parameters():
        parameter.register_hook(partial(halve, name=name))
    layout = padded(documents_of(length))
    wanted = {name: grad * 0.5 for name, grad in chunked(plain, layout).gradients.items()}
    got = chunked(hooked, layout).gradients
    assert sorted(calls) == sorted(name for name, _ in hooked.named_parameters())
    assert_same_bits(got, wanted)


def test_hooks_are_back_after_a_failed_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    model = oomb_accel.enable(tiny_model(), config(keep_last_graph=False))
    parameter = next(model.parameters())
    parameter.register_hook(lambda grad: grad)
    loss = model(**padded(documents_of(50)).batch).loss
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        loss.backward()
    assert len(parameter._backward_hooks or {}) == 1


def test_a_copy_would_train_the_original_and_is_refused() -> None:
    model = oomb_accel.enable(tiny_model(), config())
    with pytest.raises(RuntimeError, match=r"(?s)cannot be copied.*disable"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="cannot be copied"):
        torch.save(model, io.BytesIO())
    oomb_accel.disable(model)
    assert_same_bits(dict(copy.deepcopy(model).state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("what", ["scaling", "data"])
def test_quiet_changes_between_forward_and_backward(what: str) -> None:
    model = oomb_accel.enable(with_lora(tiny_model()), config())
    loss = model(**padded(documents_of(50)).batch).loss
    for name, module in model.named_modules():
        if what == "scaling" and hasattr(module, "scaling") and hasattr(module, "lora_A"):
            module.scaling["default"] = 3.0
        if what == "data" and name.endswith("q_proj.lora_A.default"):
            module.weight.data = module.weight.data + 1
    with pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()


def test_an_optimizer_step_in_between_is_named() -> None:
    model = oomb_accel.enable(tiny_model(), config())
    loss = model(**padded(documents_of(50)).batch).loss
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(RuntimeError, match=r"between forward and backward.*parameters"):
        loss.backward()


def test_two_models_may_share_a_config_object_but_not_lose_attention_silently() -> None:
    first = tiny_model()
    second = type(first)(first.config)
    oomb_accel.enable(first, config())
    oomb_accel.enable(second, config())
    oomb_accel.disable(first)
    with pytest.raises(RuntimeError, match=r"(?s)attention implementation was changed.*shares its config"):
        second(**padded(documents_of(50)).batch)


def test_modules_to_save_on_attention() -> None:
    """PEFT deep-copies the module, with a config of its own."""
    model = with_lora(tiny_model(), target_modules=["gate_proj"], modules_to_save=["self_attn"])
    check_parity(model, padded(documents_of(70)), config())


def test_a_wrapper_for_images_is_not_taken_for_its_language_model() -> None:
    text = tiny_model("llama").config
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    wrapper = LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config={"model_type": "clip_vision_model", "image_size": 28, **vision})
    )
    with pytest.raises(ValueError, match="llava"):
        oomb_accel.enable(wrapper, config())


def test_autocast_in_one_half_only() -> None:
    """The recompute runs as the forward did, whatever mode the caller is in by then."""
    layout, model = padded(documents_of(70)), tiny_model()
    wanted = chunked(twin(model), layout, config(keep_last_graph=False)).gradients
    oomb_accel.enable(model, config(keep_last_graph=False))
    loss = model(**layout.batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert_same_bits(parameter_gradients(model), wanted)


@pytest.mark.parametrize("length", [12, 70], ids=["one chunk", "five chunks"])
@pytest.mark.parametrize("keep_last_graph", [True, False])
def test_checkpointing_under_autocast_with_dropout(length: int, keep_last_graph: bool) -> None:
    """What Trainer does with bf16, gradient_checkpointing and lora_dropout."""
    layout = padded(documents_of(length))
    results = []
    for checkpointing in (False, True):
        model = with_lora(tiny_model(), lora_dropout=0.1).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        oomb_accel.enable(model, config(keep_last_graph=keep_last_graph))
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**layout.batch).loss
        loss.backward()
        results.append(parameter_gradients(model))
    for name, gradient in results[0].items():  # rounding differs by where PEFT casts; other masks would give 0.5
        assert (results[1][name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_a_users_own_cast_setting_survives() -> None:
    model = with_lora(tiny_model())
    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    oomb_accel.enable(model, config())
    setattr(layers[0], "cast_input_dtype_enabled", False)  # noqa: B010  unknown to the type checker
    with torch.autocast("cpu", torch.bfloat16):
        model(**padded(documents_of(50)).batch).loss.backward()
    assert [getattr(m, "cast_input_dtype_enabled", True) for m in layers] == [False] + [True] * (len(layers) - 1)


def test_an_instance_forward_of_the_rotary_module_survives() -> None:
    model = tiny_model(
        "llama", max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    )
    rotary = model.model.rotary_emb
    hook = rotary.forward
    rotary.forward = hook  # as accelerate's device hooks do
    oomb_accel.enable(model, config())
    oomb_accel.disable(model)
    assert vars(rotary)["forward"] is hook


@pytest.mark.parametrize("count", [0, -5])
def test_num_targets_must_be_positive(count: int) -> None:
    model = oomb_accel.enable(tiny_model(), config())
    with pytest.raises(ValueError, match=rf"(?s)num_targets.*{count}.*count_targets"):
        model(**padded(documents_of(50)).batch, num_targets=count)


def test_an_empty_cache_is_refused_too() -> None:
    from transformers import DynamicCache

    model = oomb_accel.enable(tiny_model(), config())
    with pytest.raises(ValueError, match="past_key_values"):
        model(**padded(documents_of(50)).batch, past_key_values=DynamicCache())


def test_a_row_that_is_all_padding() -> None:
    documents = documents_of(40, 20)
    layout = padded(documents)
    batch = {name: torch.cat([value, value[:1]]) for name, value in layout.batch.items()}
    batch["attention_mask"][2], batch["labels"][2] = 0, -100
    model = oomb_accel.enable(tiny_model(), config())
    with pytest.warns(UserWarning, match="No target in row 2"):
        loss = model(**batch).loss
    loss.backward()
    wanted = reference(tiny_model(), documents)
    assert_same_total(loss.detach(), wanted.loss)
    assert_same_gradients(parameter_gradients(model), wanted.gradients)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("banner_first", [False, True])
def test_models_sharded_by_fully_shard_are_refused(one_rank: None, banner_first: bool) -> None:
    model = oomb_accel.enable(tiny_model(), config())
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    if banner_first:  # as `oomb train` does
        oomb_accel.banner(model)
    with pytest.raises(ValueError, match=r"(?s)FSDP.*DDP"):
        model(**padded(documents_of(50)).batch)


def test_layers_wrapped_by_the_older_fsdp_are_refused() -> None:
    """That class needs a GPU to be made; what counts is its name in a layer's bases."""
    wrapper = type("FullyShardedDataParallel", (nn.Module,), {})
    model = tiny_model()
    model.model.layers[0].extra = wrapper()
    oomb_accel.enable(model, config())
    with pytest.raises(ValueError, match=r"(?s)FSDP.*DDP"):
        model(**padded(documents_of(50)).batch)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: config(chunk_token=5), "Did you mean 'chunk_tokens'"),
        (lambda: oomb_accel.enable(tiny_model(), {"chunk_tokens": 16}), "from_dict"),  # type: ignore[arg-type]
        (lambda: oomb_accel.enable(torch.compile(tiny_model()), config()), "compiled"),  # type: ignore[type-var]
    ],
)
def test_wrong_calls_say_what_would_work(call: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()


def test_the_banner_is_seen_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = oomb_accel.enable(tiny_model(), config(progress="auto"))
    for _ in range(2):
        model(**padded(documents_of(50)).batch)
    assert capsys.readouterr().err.count("oomb_accel on Qwen2ForCausalLM") == 1


def test_an_autocast_inside_the_forward_and_one_around_the_step() -> None:
    """As with a forward that Accelerate has wrapped: weights cast in the forward sweep are cached without a graph."""
    layout = padded(documents_of(70))
    wanted = None
    for wrapped in (False, True):
        model = with_lora(tiny_model())
        if wrapped:
            vars(model)["forward"] = torch.autocast("cpu", torch.bfloat16)(model.forward)
        oomb_accel.enable(model, config())
        with torch.autocast("cpu", torch.bfloat16):
            model(**layout.batch).loss.backward()
        gradients = parameter_gradients(model)
        assert all(bool(gradient.any()) for gradient in gradients.values())
        if wanted is not None:
            assert_same_bits(gradients, wanted)
        wanted = gradients


def test_a_forward_replaced_after_enable_is_refused() -> None:
    """As TRL does it for its fused head: full attention would be trained without a word."""
    model = oomb_accel.enable(tiny_model(), config())
    model.forward = lambda input_ids, **_: model.model(input_ids=input_ids)
    ids = documents_of(40)[0].ids[None]
    with pytest.raises(RuntimeError, match=r"(?s)bypass the chunks.*OombCallback"):
        model(input_ids=ids, labels=ids)
    with torch.no_grad():
        assert model(input_ids=ids).last_hidden_state.shape[1] == 40


def test_log_probabilities_are_no_item_in_evaluation() -> None:
    """Trainer takes every item but the loss for logits and hands them to compute_metrics."""
    model = oomb_accel.enable(tiny_model(), config())
    layout = padded(documents_of(40))
    with torch.no_grad():
        output = model(**layout.batch)
    assert list(output) == ["loss"]
    assert output.log_probs.shape == layout.batch["input_ids"].shape
    assert list(model(**layout.batch)) == ["loss", "log_probs"]
