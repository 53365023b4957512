"""RoPE: the length a model is good for, and frequencies by the length of the whole document."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import oomb_accel
from oomb_accel.integrations.rope import DocumentRope, check_length, trained_tokens
from tests.harness.batches import documents_of, packed, padded
from tests.harness.models import tiny_model
from tests.harness.parity import chunked, config
from tests.harness.tolerance import assert_same_bits

DYNAMIC = {"rope_type": "dynamic", "factor": 8.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "factor": 16.0,
    "original_max_position_embeddings": 64,
}


def rope_model(parameters: dict[str, Any], declared: int) -> PreTrainedModel:
    return tiny_model("llama", max_position_embeddings=declared, rope_parameters=parameters)


@pytest.mark.parametrize(
    ("parameters", "declared", "wanted"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 100, 100),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 100, 400),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 50},
            100,
            200,
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 50},
            300,
            300,
        ),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
            512,
        ),
    ],
)
def test_trained_tokens(parameters: dict[str, Any], declared: int, wanted: int) -> None:
    assert trained_tokens(rope_model(parameters, declared).config) == wanted


def test_a_document_beyond_the_range_is_refused_with_a_scaling_that_reaches() -> None:
    model = rope_model({"rope_type": "default", "rope_theta": 5e5}, 32)
    check_length(model.config, [32, 5])
    with pytest.raises(ValueError, match=r"(?s)Document: 100 tokens.*32 tokens.*factor: 4\.0") as caught:
        check_length(model.config, [5, 100])
    assert "beyond_trained_length 'allow'" in str(caught.value)
    (remedy,) = re.findall(r"(config\.rope_parameters\.update\(\{.*?\}\))", str(caught.value))
    eval(remedy, {"config": model.config})  # the remedy works as it is printed
    check_length(model.config, [100])
    assert model.config.rope_parameters["rope_theta"] == 5e5


def test_a_step_beyond_the_range_is_refused_unless_allowed() -> None:
    model = rope_model({"rope_type": "default", "rope_theta": 1e4}, 32)
    layout = padded(documents_of(50))
    with pytest.raises(ValueError, match="longer than the range"):
        chunked(model, layout)
    chunked(model, layout, config(beyond_trained_length="allow"))
    chunked(model, padded(documents_of(32, 20)))
    chunked(model, packed(documents_of(32, 20)))  # a packed row is no document


def rotary_of(model: PreTrainedModel) -> torch.nn.Module:
    rotary = model.model.rotary_emb
    assert isinstance(rotary, torch.nn.Module)
    return rotary


def of_document(rotary: torch.nn.Module, length: int) -> tuple[Tensor, Tensor]:
    """What a fresh model gives for a document alone."""
    cos, sin = copy.deepcopy(rotary)(torch.zeros(1, length, 64), torch.arange(length)[None])
    return cos, sin


@pytest.mark.parametrize(("parameters", "declared"), [(DYNAMIC, 32), (LONGROPE, 1024)])
def test_a_segment_has_the_frequencies_of_its_document(parameters: dict[str, Any], declared: int) -> None:
    model = rope_model(parameters, declared)
    plain = copy.deepcopy(rotary_of(model))
    rope = DocumentRope(model)
    x = torch.zeros(1, 24, 64)
    for lengths in ((200, 20), (20, 200), (70, 90), (20, 30)):
        # The second segment starts its document, the first is somewhere inside of its own.
        positions = torch.cat([torch.arange(4, 12), torch.arange(16)])[None]
        with rope.segments([(8, lengths[0]), (16, lengths[1])]):
            cos, sin = rotary_of(model)(x, positions)
        one, two = (of_document(plain, length) for length in lengths)
        assert_same_bits(cos, torch.cat([one[0][:, 4:12], two[0][:, :16]], 1))
        assert_same_bits(sin, torch.cat([one[1][:, 4:12], two[1][:, :16]], 1))


def test_outside_of_a_pass_the_module_is_as_before() -> None:
    model = rope_model(DYNAMIC, 32)
    wanted = of_document(rotary_of(model), 100)
    rope = DocumentRope(model)
    with rope.segments([(10, 10)]):
        rotary_of(model)(torch.zeros(1, 10, 64), torch.arange(10)[None])
    assert_same_bits(rotary_of(model)(torch.zeros(1, 100, 64), torch.arange(100)[None])[0], wanted[0])
    rope.remove()
    assert "forward" not in vars(rotary_of(model))
    assert_same_bits(rotary_of(model)(torch.zeros(1, 100, 64), torch.arange(100)[None])[0], wanted[0])


def test_types_that_do_not_depend_on_the_length_are_left_alone() -> None:
    model = rope_model({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 64)
    DocumentRope(model)
    assert "forward" not in vars(rotary_of(model))


def test_a_length_dependent_type_that_differs_by_layer_is_refused() -> None:
    model = tiny_model(
        "gemma3_text",
        max_position_embeddings=32,
        rope_parameters={
            "full_attention": DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    with pytest.raises(ValueError, match=r"(?s)differs by layer type.*yarn"):
        oomb_accel.enable(model, config())
    plain = model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits
    assert plain.shape == (1, 4, 128), "a refused model still works"
