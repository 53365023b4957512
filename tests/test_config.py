"""OombConfig: what it accepts, and messages that say what to change."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from typing import Any

import pytest

from oomb_accel import OombConfig
from oomb_accel.config import SPARSE_SETTINGS


def test_the_defaults_are_valid_and_survive_json() -> None:
    config = OombConfig()
    assert OombConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_numbers_of_tokens_with_a_unit() -> None:
    config = OombConfig.from_dict({"chunk_tokens": "8K", "span_tokens": "0.5M"})
    assert (config.chunk_tokens, config.span_tokens) == (8192, 1 << 19)
    with pytest.raises(ValueError, match="top_k"):
        OombConfig.from_dict({"attention": "sparse", "top_k": "1K"})


@pytest.mark.parametrize("text", ["0.3K", "8,1,2K", "8,K", ",8K", "8__1K", "8.K", "0.1M", "1" * 40 + "K"])
def test_what_is_no_whole_number_of_tokens(text: str) -> None:
    """307.2 tokens, and commas that part no thousands."""
    with pytest.raises(ValueError) as error:
        OombConfig.from_dict({"chunk_tokens": text})
    what, got, remedy = str(error.value).splitlines()
    assert "chunk_tokens" in what and text in got and "or 8K" in remedy


def test_every_field_has_a_docstring() -> None:
    """The field docstrings are the manual, so none may be missing."""
    tree = ast.parse(inspect.getsource(OombConfig))
    body = tree.body[0].body  # type: ignore[attr-defined]
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            assert documented, ast.unparse(node)


def test_settings_are_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        OombConfig(True)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        OombConfig().chunk_tokens = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("chunk_token", "chunk_tokens"),
        ("chunk_size_tokens", "chunk_tokens"),
        ("page_grad_type", "page_grad_dtype"),
        ("determinstic", "deterministic"),
        ("Enabled", "enabled"),
    ],
)
def test_an_unknown_key_names_place_key_and_the_nearest_valid_one(key: str, nearest: str) -> None:
    with pytest.raises(ValueError) as caught:
        OombConfig.from_dict({key: 1}, place="recipe.yaml, block oomb")
    message = str(caught.value)
    assert "recipe.yaml, block oomb" in message and repr(key) in message and repr(nearest) in message


def test_an_unknown_key_with_nothing_near_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"Valid keys: .*chunk_tokens"):
        OombConfig.from_dict({"zzzzzz": 1})


def test_a_key_that_is_no_string_is_an_unknown_key() -> None:
    with pytest.raises(ValueError, match="Unknown key '8192'"):
        OombConfig.from_dict({8192: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("chunk_tokens", "8192", "a whole number"),
        ("chunk_tokens", 8192.0, "a whole number"),
        ("chunk_tokens", True, "a whole number"),
        ("chunk_tokens", None, "a whole number"),
        ("enabled", 1, "True or False"),
        ("enabled", "true", "True or False"),
        ("backend", "cuda", "'cudnn'"),
        ("attention", "spars", "'sparse'"),
        ("q_block", 96, "64 or 128"),
        ("q_block", "64", "64 or 128"),
        ("q_block", 64.0, "64 or 128"),
        ("top_k", True, "a whole number"),
        ("dense_layers", 3, "a list of whole numbers"),
        ("dense_layers", [1, 2.5], "a list of whole numbers"),
        ("dense_layers", [True], "a list of whole numbers"),
        ("dense_layers", "0,1", "a list of whole numbers"),
        ("page_budget", "none", "None"),
        ("select_per", "head", "'kv_head'"),
        ("causal_selection", "yes", "True or False"),
        ("page_grad_dtype", "float16", "'bfloat16'"),
        ("offload", "yes", "'auto'"),
        ("offload", 1, "True or False"),
        ("device_pages_gib", "40", "a number or 'auto'"),
        ("device_pages_gib", True, "a number or 'auto'"),
        ("host_memory_gib", None, "a number or 'auto'"),
        ("host_memory_gib", "Auto", "a number or 'auto'"),
        ("keep_outputs", "yes", "'auto'"),
        ("keep_outputs", 1, "True or False"),
        ("progress", "on", "'auto'"),
        ("beyond_trained_length", "warn", "'allow'"),
    ],
)
def test_a_wrong_value_names_place_setting_value_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as caught:
        OombConfig.from_dict({name: value}, place="ds.json")
    message = str(caught.value)
    assert "ds.json" in message and f"{name}={value!r}" in message and allowed in message
    with pytest.raises(ValueError, match=name):
        OombConfig(**{name: value})


SPARSE: dict[str, Any] = {
    "top_k": 8,
    "q_block": 64,
    "sink_pages": 2,
    "recent_pages": 0,
    "dense_layers": [0, -1],
    "select_per": "layer",
    "page_budget": 64,
    "causal_selection": True,
}


def test_every_sparse_setting_is_listed() -> None:
    assert set(SPARSE) == set(SPARSE_SETTINGS)


def test_sparse_settings_survive_json_and_compare_by_value() -> None:
    config = OombConfig(attention="sparse", **SPARSE)
    assert config.dense_layers == (0, -1)
    assert config.to_dict()["dense_layers"] == [0, -1]
    assert OombConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config == OombConfig(attention="sparse", **{**SPARSE, "dense_layers": (0, -1)})
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize("name", SPARSE)
def test_a_sparse_setting_beside_dense_attention_is_a_contradiction(name: str) -> None:
    for settings in ({name: SPARSE[name]}, {name: SPARSE[name], "attention": "dense"}):
        with pytest.raises(ValueError) as caught:
            OombConfig.from_dict(settings, place="ds.json")
        message = str(caught.value)
        assert "ds.json" in message and f"{name}={SPARSE[name]!r} with attention='dense'" in message
        assert "attention='sparse'" in message
    default = OombConfig().to_dict()[name]
    with pytest.raises(ValueError, match=name):
        OombConfig(**{name: default})
    OombConfig(attention="sparse", **{name: SPARSE[name]})


def test_a_copy_contradicts_itself_only_by_what_was_changed() -> None:
    sparse = OombConfig(attention="sparse")
    assert dataclasses.replace(sparse, attention="dense") == OombConfig()
    assert OombConfig.from_dict(OombConfig().to_dict()) == OombConfig()
    with pytest.raises(ValueError, match="top_k=8 with attention='dense'"):
        dataclasses.replace(OombConfig(attention="sparse", top_k=8), attention="dense")


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        ({"top_k": 0}, ("top_k must be at least 1", "top_k=0", "Set top_k=")),
        ({"sink_pages": -1}, ("sink_pages must be at least 0", "Set sink_pages=1")),
        ({"recent_pages": -2}, ("recent_pages must be at least 0", "recent_pages=-2")),
        ({"top_k": 8, "page_budget": 7}, ("page_budget=7 with top_k=8", "Set page_budget=8")),
        ({"page_budget": 0}, ("budget", "page_budget=0", "leave it out")),
    ],
)
def test_ranges_of_sparse_settings(settings: dict[str, Any], texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        OombConfig(attention="sparse", **settings)
    for text in texts:
        assert text in str(caught.value), str(caught.value)


MEMORY: dict[str, Any] = {"offload": "auto", "device_pages_gib": 40, "host_memory_gib": 0.5}


def test_memory_settings_survive_json() -> None:
    settings = OombConfig(**MEMORY)
    assert settings.device_pages_gib == 40.0 and type(settings.device_pages_gib) is float
    assert OombConfig.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert settings == OombConfig(**{**MEMORY, "device_pages_gib": 40.0})
    assert OombConfig().offload == OombConfig().device_pages_gib == OombConfig().host_memory_gib == "auto"


@pytest.mark.parametrize("name", ["device_pages_gib", "host_memory_gib"])
@pytest.mark.parametrize("value", [0, -1, -0.5, float("inf"), float("nan")])
def test_sizes_of_memory(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"(?s){name} must be a size in GiB.*Got {name}=.*{name}='auto'"):
        OombConfig.from_dict({name: value})


@pytest.mark.parametrize("name", ["device_pages_gib", "host_memory_gib"])
def test_sizes_of_memory_contradict_no_offload(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        OombConfig.from_dict({"offload": False, name: 8})
    assert f"{name}=8.0 with offload=False" in str(caught.value) and "offload='auto'" in str(caught.value)
    OombConfig.from_dict({"offload": "auto", name: 8})
    OombConfig.from_dict({"offload": False, name: "auto"})


@pytest.mark.parametrize("name", ["chunk_tokens", "page_tokens", "span_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"(?s){name} must be positive.*Set {name}=\d+"):
        OombConfig.from_dict({name: value})


def test_contradictions_say_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"(?s)chunk_tokens=64 with page_tokens=128.*chunk_tokens=128"):
        OombConfig(chunk_tokens=64)
    with pytest.raises(ValueError, match=r"(?s)span_tokens=64 with page_tokens=128.*span_tokens=\d+"):
        OombConfig(span_tokens=64)
    with pytest.raises(ValueError, match=r"(?s)deterministic=True.*backend='auto'"):
        OombConfig(backend="cudnn", deterministic=True)


def test_a_remedy_is_a_value_that_works() -> None:
    with pytest.raises(ValueError):
        OombConfig(chunk_tokens=8, page_tokens=16)
    OombConfig(chunk_tokens=16, page_tokens=16)
    OombConfig(chunk_tokens=8, page_tokens=8)
