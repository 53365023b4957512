"""Settings from several places: precedence, contradictions that name both places, typos, "auto", files."""

from __future__ import annotations

import base64
import copy
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import oomb_accel
from oomb_accel import OombConfig
from oomb_accel.sources import (
    LAUNCHED_CONFIG,
    ResolvedBlock,
    Source,
    from_deepspeed,
    from_environment,
    from_yaml,
    gather,
    load_deepspeed_config,
    resolve,
    surroundings,
)
from tests.harness.models import tiny_model

PLACES = {"python": "prepare(config=...)", "flag": "OOMB_CHUNK_TOKENS", "yaml": "preset.yaml", "json": "ds.json"}


def source(kind: Any, **values: Any) -> Source:
    return Source(PLACES[kind], kind, values)


def message(*sources: Source) -> str:
    with pytest.raises(ValueError) as caught:
        resolve(*sources)
    return str(caught.value)


@pytest.mark.parametrize("weaker", ["yaml", "json"])
def test_a_flag_replaces_yaml_and_json_and_says_so(weaker: str) -> None:
    for order in itertools.permutations([source("flag", chunk_tokens=512), source(weaker, chunk_tokens=4096)]):
        got = resolve(*order)
        assert got.config.chunk_tokens == 512
        assert got.origins == {"chunk_tokens": "OOMB_CHUNK_TOKENS"}
        line = next(note for note in got.notes if note.startswith("replaced"))
        assert "chunk_tokens=512 (OOMB_CHUNK_TOKENS) replaces 4096" in line and PLACES[weaker] in line


@pytest.mark.parametrize(
    ("first", "second"),
    [("python", "flag"), ("python", "yaml"), ("python", "json"), ("yaml", "json"), ("flag", "flag"), ("json", "json")],
)
def test_any_other_disagreement_is_an_error_that_names_both_places_and_values(first: str, second: str) -> None:
    for order in itertools.permutations([source(first, chunk_tokens=512), source(second, chunk_tokens=4096)]):
        text = message(*order)
        assert "chunk_tokens=512" in text and "chunk_tokens=4096" in text
        assert PLACES[first] in text and PLACES[second] in text


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(PLACES, 2)))
def test_equal_values_and_different_settings_are_no_contradiction(first: str, second: str) -> None:
    got = resolve(source(first, chunk_tokens=512, page_tokens=64), source(second, chunk_tokens=512, backend="torch"))
    assert got.config == OombConfig(chunk_tokens=512, page_tokens=64, backend="torch")
    assert not any(note.startswith("replaced") for note in got.notes)


def test_text_of_the_environment_equals_numbers_and_booleans_elsewhere() -> None:
    variables = {"OOMB_CHUNK_TOKENS": "4_096", "OOMB_DETERMINISTIC": "True", "OOMB_TIMEOUT_MINUTES": "auto"}
    block: dict[str, Any] = {"chunk_tokens": 4096, "deterministic": True, "timeout_minutes": "auto"}
    got = resolve(*gather({"oomb": block}, Source.of_python(block, "here"), environ=variables))
    assert got.config == OombConfig(**block)


def test_only_settings_that_python_wrote_down_count() -> None:
    python = Source.of_python(OombConfig(page_tokens=64), "here")
    assert dict(python.values) == {"page_tokens": 64}
    assert resolve(source("json", chunk_tokens=4096), python).config == OombConfig(chunk_tokens=4096, page_tokens=64)
    written = Source.of_python(OombConfig(chunk_tokens=OombConfig().chunk_tokens), "here")
    assert "here" in message(source("json", chunk_tokens=4096), written)


def test_notes_tell_every_setting_with_its_place_and_what_is_automatic() -> None:
    json_ = source("json", chunk_tokens=4096, page_tokens=64, keep_outputs="auto")
    notes = resolve(json_, source("flag", backend="torch")).notes
    assert notes[0] == (
        "settings   chunk_tokens=4096, page_tokens=64, keep_outputs=auto (ds.json), backend=torch (OOMB_CHUNK_TOKENS)"
    )
    assert notes[1].startswith("auto       keep_outputs")
    assert resolve().notes == ("settings   the defaults",)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("OOMB_CHUNK_TOKEN", "OOMB_CHUNK_TOKENS"), ("OOMB_BACKENDS", "OOMB_BACKEND"), ("OOMB_CONFIGS", "OOMB_CONFIG")],
)
def test_an_unknown_variable_names_the_nearest(variable: str, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"{variable}'[^\n]*environment(?s:.*)'{expected}'"):
        from_environment({variable: "1"})


@pytest.mark.parametrize("variable", ["OOMB_PYTHON", "OOMB_TORCH_INDEX", "OOMB_ALLOW_CUDA_TORCH", "PATH", "oomb_x"])
def test_other_variables_are_left_alone(variable: str) -> None:
    assert from_environment({variable: "anything"}) == ()


@pytest.mark.parametrize(
    ("variable", "text"), [("OOMB_CHUNK_TOKENS", "8kb"), ("OOMB_DETERMINISTIC", "maybe"), ("OOMB_BACKEND", "cuda")]
)
def test_text_that_does_not_fit_names_variable_value_and_what_is_allowed(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{variable}(?s:.*){text}(?s:.*)Allowed:"):
        from_environment({variable: text})


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("0", False), ("off", False), ("YES", True), ("auto", "auto")]
)
def test_booleans_in_the_environment(text: str, expected: object) -> None:
    (found,) = from_environment({"OOMB_KEEP_OUTPUTS": text})
    assert found.values == {"keep_outputs": expected} and found.place_of("keep_outputs") == "OOMB_KEEP_OUTPUTS"


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("OOMB_DENSE_LAYERS", "0,1,-1", (0, 1, -1)),
        ("OOMB_DENSE_LAYERS", " [0, -1] ", (0, -1)),
        ("OOMB_DENSE_LAYERS", "-1", (-1,)),
        ("OOMB_DENSE_LAYERS", "", ()),
        ("OOMB_DENSE_LAYERS", "[]", ()),
        ("OOMB_DENSE_LAYERS", "none", ()),
        ("OOMB_DENSE_LAYERS", "Null", ()),
        ("OOMB_DENSE_LAYERS", "1_0", (10,)),
        ("OOMB_Q_BLOCK", "64", 64),
        ("OOMB_PAGE_BUDGET", "none", None),
        ("OOMB_PAGE_BUDGET", "null", None),
        ("OOMB_PAGE_BUDGET", "128", 128),
        ("OOMB_SELECT_PER", "layer", "layer"),
    ],
)
def test_sparse_settings_in_the_environment(variable: str, text: str, expected: object) -> None:
    (found,) = from_environment({variable: text})
    (value,) = found.values.values()
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("OOMB_DENSE_LAYERS", "0,x", "a list of whole numbers"),
        ("OOMB_DENSE_LAYERS", "1.5", "a list of whole numbers"),
        ("OOMB_DENSE_LAYERS", "²", "a list of whole numbers"),
        ("OOMB_DENSE_LAYERS", "1,٣", "a list of whole numbers"),
        ("OOMB_DENSE_LAYERS", "1_", "a list of whole numbers"),
        ("OOMB_TOP_K", "6²", "a whole number"),
        ("OOMB_TOP_K", "none", "a whole number"),
        ("OOMB_Q_BLOCK", "96", "64 or 128"),
        ("OOMB_Q_BLOCK", "auto", "64 or 128"),
        ("OOMB_PAGE_BUDGET", "many", "None"),
    ],
)
def test_sparse_settings_that_are_wrong_in_the_environment(variable: str, text: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=rf"{variable}(?s:.*)Allowed:[^\n]*{allowed}"):
        from_environment({variable: text})


def test_a_list_means_the_same_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "preset.yaml"
    path.write_text("attention: sparse\ndense_layers: [0, -1]\npage_budget: null\n")
    block = {"attention": "sparse", "dense_layers": [0, -1]}
    variables = {"OOMB_DENSE_LAYERS": "0,-1", "OOMB_CONFIG": str(path)}
    python = Source.of_python(OombConfig(attention="sparse", dense_layers=(0, -1)), "here")
    got = resolve(*gather({"oomb": block}, python, environ=variables))
    assert got.config == OombConfig.from_dict(block)
    assert not any(note.startswith("replaced") for note in got.notes)
    assert json.loads(json.dumps(got.block())) == dict(got.block())
    assert got.block()["dense_layers"] == [0, -1]
    other = resolve(*gather({"oomb": block}, environ={"OOMB_DENSE_LAYERS": "1"}))
    assert "replaced   dense_layers=[1] (OOMB_DENSE_LAYERS) replaces [0, -1] (the DeepSpeed config)" in other.notes
    with pytest.raises(ValueError, match=r"(?s)dense_layers=\[1\] in here.*dense_layers=\[0, -1\] in the DeepSpeed"):
        one = Source.of_python(OombConfig(attention="sparse", dense_layers=(1,)), "here")
        resolve(*gather({"oomb": block}, one, environ={}))


@pytest.mark.parametrize(
    ("text", "expected"), [("40", 40.0), ("0.5", 0.5), ("1e2", 100.0), (" 1_000 ", 1000.0), ("auto", "auto")]
)
@pytest.mark.parametrize("name", ["device_pages_gib", "host_memory_gib"])
def test_sizes_in_the_environment(name: str, text: str, expected: object) -> None:
    (found,) = from_environment({f"OOMB_{name.upper()}": text})
    (value,) = found.values.values()
    assert value == expected and type(value) is type(expected)
    got = resolve(*gather({"oomb": {name: expected}}, environ={f"OOMB_{name.upper()}": text}))
    assert got.config.to_dict()[name] == expected
    assert not any(note.startswith("replaced") for note in got.notes)


@pytest.mark.parametrize("text", ["40GiB", "many", "", "none", "true", "٣"])
def test_sizes_that_are_wrong_in_the_environment(text: str) -> None:
    with pytest.raises(ValueError, match=r"OOMB_HOST_MEMORY_GIB(?s:.*)Allowed: a number or 'auto'"):
        from_environment({"OOMB_HOST_MEMORY_GIB": text})


@pytest.mark.parametrize("text", ["-1", "0", "nan", "inf"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"(?s)OOMB_DEVICE_PAGES_GIB.*must be a size in GiB"):
        resolve(*gather({}, environ={"OOMB_DEVICE_PAGES_GIB": text}))


def test_a_preset_stands_alone_or_under_the_block_name(tmp_path: Path) -> None:
    path = tmp_path / "preset.yaml"
    for text in ("chunk_tokens: 512\n", "oomb:\n  chunk_tokens: 512\n"):
        path.write_text(text)
        found = surroundings({"OOMB_CONFIG": str(path)})
        assert [(s.kind, s.place, s.values) for s in found] == [("yaml", str(path), {"chunk_tokens": 512})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chunk_token: 1\n", "'chunk_tokens'"),
        ("- 1\n", "one mapping"),
        ("chunk_tokens: 1\nchunk_tokens: 2\n", "stands twice"),
        ("a: [\n", "cannot be read"),
        ("span_tokens: auto\n", "set 32768"),
    ],
)
def test_a_wrong_preset_names_the_file(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "preset.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=expected) as caught:
        from_yaml(path)
    assert "preset.yaml" in str(caught.value)


def test_a_missing_preset_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'nowhere\.yaml' cannot be read"):
        from_yaml("nowhere.yaml")


CONFIG = {"zero_optimization": {"stage": 2}, "oomb": {"chunk_tokens": 512}}


def test_a_deepspeed_config_comes_as_mapping_file_text_or_base_64(tmp_path: Path) -> None:
    path, text = tmp_path / "ds.json", json.dumps(CONFIG)
    path.write_text(text)
    for form in (CONFIG, str(path), path, text, base64.urlsafe_b64encode(text.encode()).decode()):
        assert load_deepspeed_config(form) == CONFIG
        (found,) = from_deepspeed(form)
        assert found.values == {"chunk_tokens": 512}
    assert from_deepspeed(str(path))[0].place == str(path)
    assert from_deepspeed({"zero_optimization": {}}) == () == from_deepspeed(None)


def test_a_dict_that_the_launcher_read_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    monkeypatch.setenv(LAUNCHED_CONFIG, str(path))
    assert from_deepspeed(copy.deepcopy(CONFIG))[0].place == str(path)
    assert from_deepspeed({"oomb": {"chunk_tokens": 4096}})[0].place == "the DeepSpeed config"
    monkeypatch.setenv(LAUNCHED_CONFIG, "none")
    assert from_deepspeed(CONFIG)[0].place == "the DeepSpeed config"


@pytest.mark.parametrize("key", ["omb", "ooomb", "OOMB", "oomb_", "oombs", "oomb_acel", "oobm"])
def test_a_misspelt_block_is_an_error(key: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)Unknown key '{key}'.*Did you mean 'oomb'"):
        from_deepspeed({key: {"chunk_tokens": 512}})


def test_no_key_of_deepspeed_counts_as_misspelt() -> None:
    constants = pytest.importorskip("deepspeed.runtime.constants")
    keys = [value for name, value in vars(constants).items() if name.isupper() and isinstance(value, str)]
    assert len(keys) > 50
    assert from_deepspeed(dict.fromkeys([*keys, "zero_optimization", "comms_logger"], 1)) == ()


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"chunk_token": 1}, "(?s)'chunk_token' in the oomb block of the DeepSpeed config.*'chunk_tokens'"),
        ({"chunk_tokens": "8192"}, "(?s)oomb block of the DeepSpeed config.*a whole number"),
        ({"span_tokens": "auto"}, r'(?s)"auto" is not resolved for span_tokens: set 32768'),
        ({"enabled": "auto"}, '(?s)"auto" is not resolved for enabled: set true'),
        (True, "(?s)must be a mapping.*True"),
        ({"chunk_tokens": 64}, "(?s)at least one page.*chunk_tokens=64 with page_tokens=128"),
    ],
)
def test_a_wrong_block_is_an_error_with_a_remedy(block: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        resolve(*from_deepspeed({"oomb": block}))


@pytest.mark.parametrize("text", ["{'a'", '{"a": 1}, 2', "[1]"])
def test_text_that_is_no_config_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ValueError, match="DeepSpeed config"):
        from_deepspeed(tmp_path / "ds.json")
    with pytest.raises(ValueError, match="does not exist"):
        from_deepspeed("nowhere.json")


def test_a_key_that_stands_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'chunk_tokens' stands twice(?s:.*)1024 and 512"):
        from_deepspeed('{"oomb": {"chunk_tokens": 1024, "chunk_tokens": 512}}')


def test_a_resolved_block_has_no_auto_and_keeps_its_sources_through_copies() -> None:
    resolved = resolve(source("json", chunk_tokens=512, keep_outputs="auto"), source("flag", backend="torch"))
    block = resolved.block()
    assert block == {"enabled": True, "chunk_tokens": 512, "backend": "torch"}
    assert json.loads(json.dumps(block)) == dict(block)
    for again in (copy.deepcopy({"oomb": block}), {"oomb": copy.copy(block)}):
        assert isinstance(again["oomb"], ResolvedBlock)
        assert resolve(*from_deepspeed(again)) == resolved


def test_nobody_asking_gives_no_sources() -> None:
    assert gather({"zero_optimization": {}}, environ={"PATH": "x"}) == ()
    assert len(gather({"oomb": {}}, environ={})) == 1


def test_a_source_that_arrives_twice_counts_once() -> None:
    block = resolve(*gather({"oomb": {"page_tokens": 64}}, environ={"OOMB_BACKEND": "torch"})).block()
    assert len(gather({"oomb": block}, environ={"OOMB_BACKEND": "torch"})) == 2


@pytest.mark.parametrize(
    ("config", "texts"),
    [
        ({"plugins": {"oomb": {"chunk_tokens": 64}}}, ("stands inside of 'plugins'", "to the top of the config")),
        ({"oomb_settings": {"chunk_tokens": 64}}, ("Unknown key 'oomb_settings'", "Did you mean 'oomb'?")),
    ],
)
def test_a_block_that_nobody_would_read(config: dict[str, Any], texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        from_deepspeed(config)
    for text in texts:
        assert text in str(error.value)


def test_a_copy_with_one_change_has_not_written_down_the_rest() -> None:
    changed = dataclasses.replace(OombConfig(chunk_tokens=512), self_test=False)
    assert changed.given == {"chunk_tokens", "self_test"}


def test_python_settings_are_a_config_or_a_mapping() -> None:
    with pytest.raises(ValueError, match=r"(?s)takes an OombConfig.*preset.yaml.*OOMB_CONFIG"):
        Source.of_python("preset.yaml", "OombCallback(...)")  # type: ignore[arg-type]


def test_enable_hears_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOMB_CHUNK_TOKENS", "256")
    model = oomb_accel.enable(tiny_model(), OombConfig(page_tokens=64))
    assert "chunks     256 tokens, pages 64" in oomb_accel.banner(model)
    oomb_accel.disable(model)
    with pytest.raises(ValueError, match=r"(?s)chunk_tokens=128 in enable.*chunk_tokens=256 in OOMB_CHUNK_TOKENS"):
        oomb_accel.enable(model, OombConfig(chunk_tokens=128, page_tokens=64))
    monkeypatch.setenv("OOMB_BOGUS", "1")
    with pytest.raises(ValueError, match="OOMB_BOGUS"):
        oomb_accel.enable(tiny_model())
