"""Case 21: evaluation, generation after training, saving in between, `model.eval()` and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

import oomb_accel
from oomb_accel.progress import ChunkEvent
from tests.harness.batches import documents_of, packed, padded
from tests.harness.models import sgd_step, tiny_model, twin, with_lora
from tests.harness.parity import chunked, config, reference, split
from tests.harness.tolerance import assert_same_bits, assert_same_total, assert_same_values

Made = PreTrainedModel | PeftModel


def make(kind: str) -> Made:
    return with_lora(tiny_model()) if kind == "lora" else tiny_model(kind)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "lora"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_loss_is_chunked_and_equals_the_reference(kind: str, mode: Any) -> None:
    documents = documents_of(50, 21, 34)
    wanted = reference(make(kind), documents)
    model = make(kind)
    events: list[ChunkEvent] = []
    rows: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, out: rows.append(out.shape[:-1].numel()))
    oomb_accel.enable(model, config(), on_progress=events.append)
    model.eval()
    layout = padded(documents)
    with mode():
        output = model(**layout.batch)
    assert not output.loss.requires_grad
    assert_same_total(output.loss, wanted.loss)
    for ours, theirs in zip(split(output.log_probs, layout), wanted.log_probs, strict=True):
        assert_same_values(ours, theirs, "log-probabilities")
    assert {e.sweep for e in events} == {"forward"} and len(events) == 7
    assert max(rows) <= 16 and sum(rows) == sum(len(d) - 1 for d in documents)


def test_full_logits_cannot_be_had_with_labels() -> None:
    model = oomb_accel.enable(tiny_model(), config())
    with torch.no_grad():
        output = model(**padded(documents_of(50)).batch)
    with pytest.raises(AttributeError, match=r"(?s)not kept.*log_probs.*disable"):
        _ = output.logits


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gemma2", "lora"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_forward_without_labels_is_plain(kind: str, attention: str) -> None:
    model = make(kind).eval()
    model.set_attn_implementation(attention)
    batch = padded(documents_of(30, 12), side="left").batch
    del batch["labels"]
    with torch.no_grad():
        wanted = model(**batch).logits
        oomb_accel.enable(model, config())
        assert_same_bits(model(**batch).logits, wanted)
        oomb_accel.disable(model)
        assert_same_bits(model(**batch).logits, wanted)


def generate(model: nn.Module, **settings: Any) -> Tensor:
    batch = padded(documents_of(20, 12, seed=3), side="left").batch
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with torch.no_grad():
        return model.generate(**inputs, max_new_tokens=8, do_sample=False, **settings)  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "lora"])
def test_generate_after_training(kind: str) -> None:
    model = make(kind)
    plain = twin(model)
    oomb_accel.enable(model, config())
    model(**packed(documents_of(40, 21)).batch).loss.backward()
    sgd_step(model)
    plain.load_state_dict(model.state_dict())
    assert_same_bits(generate(model.eval()), generate(plain.eval()))
    assert_same_bits(generate(model, num_beams=2), generate(plain, num_beams=2))


def test_generate_after_training_with_rope_that_depends_on_the_length() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    model = tiny_model("llama", max_position_embeddings=24, rope_parameters=rope)
    plain = twin(model)
    oomb_accel.enable(model, config())
    model(**padded(documents_of(90)).batch).loss.backward()
    model.zero_grad()
    assert_same_bits(generate(model.eval()), generate(plain.eval()))


def test_saving_in_between_and_going_on(tmp_path: Path) -> None:
    layout = padded(documents_of(50, 9))
    model = oomb_accel.enable(with_lora(tiny_model()), config())
    losses = []
    for step in range(3):
        model.train()
        loss = model(**layout.batch).loss
        loss.backward()
        losses.append(loss.detach())
        sgd_step(model)
        model.save_pretrained(str(tmp_path / str(step)))
        model.eval()
        with torch.no_grad():
            evaluated = model(**layout.batch).loss
        loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / str(step))
        assert_same_total(evaluated, reference(loaded.requires_grad_(True), layout.documents).loss)
    assert losses[2] < losses[1] < losses[0]


def test_eval_and_back_gives_the_same_step() -> None:
    layout = padded(documents_of(50))
    model = tiny_model()
    first = chunked(model, layout)
    oomb_accel.enable(model, config())
    model.eval()
    with torch.no_grad():
        model(**layout.batch)
    generate(model)
    model.train()
    oomb_accel.disable(model)
    assert_same_bits(chunked(model, layout).gradients, first.gradients)


def test_disable_gives_back_a_plain_model() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0})
    before = set(vars(model)), model.config._attn_implementation
    oomb_accel.enable(model, config())
    assert model.config._attn_implementation != before[1]
    oomb_accel.disable(model)
    assert (set(vars(model)), model.config._attn_implementation) == before
    assert "forward" not in vars(model.model.rotary_emb)


def test_a_wrapper_put_around_our_forward_is_plain_after_disable() -> None:
    """As accelerate does when it prepares a model."""
    model = oomb_accel.enable(tiny_model(), config())
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    oomb_accel.disable(model)
    batch = padded(documents_of(30)).batch
    assert model(**batch).logits.shape == (1, 30, 128)


def test_positional_arguments() -> None:
    documents = documents_of(30, 12)
    batch = padded(documents, side="left").batch
    model = oomb_accel.enable(tiny_model(), config())
    output = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"])
    assert_same_total(output.loss.detach(), reference(tiny_model(), documents).loss)


def test_return_dict_false_gives_a_tuple() -> None:
    model = oomb_accel.enable(tiny_model(), config())
    loss, log_probs = model(**padded(documents_of(30)).batch, return_dict=False)
    assert loss.dim() == 0 and log_probs.shape == (1, 30)


def test_the_banner_says_what_is_active() -> None:
    model = oomb_accel.enable(with_lora(tiny_model("mistral")), config(span_tokens=64))
    text = oomb_accel.banner(model)
    for part in ("MistralForCausalLM", "3 layers", "16 tokens", "pages 4", "dense", "torch", "8 tokens", "1,024"):
        assert part in text, text


def test_arguments_by_position_also_in_a_generic_peft_model() -> None:
    """Without a task type, PEFT's forward takes ``*args``: names come from the model inside."""
    batch = padded(documents_of(50)).batch
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    oomb_accel.enable(adapted, config())
    by_name = adapted(**batch).loss
    by_position = adapted(batch["input_ids"], labels=batch["labels"]).loss
    assert_same_bits(by_position, by_name)
    with torch.no_grad():
        assert adapted(batch["input_ids"]).logits.shape == (1, 50, 128)
