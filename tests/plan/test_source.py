"""Where sizes come from, and what is said when there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from oomb_accel.plan import read_shape
from oomb_accel.plan.known import KNOWN, known_name


def offline(*_: object, **__: object) -> str:
    raise OSError("the hub cannot be reached")


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that cannot be reached."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    return tmp_path / "cache"


def write_config(folder: Path, name: str = "qwen2.5-0.5b") -> Path:
    folder.mkdir(parents=True)
    path = folder / "config.json"
    path.write_text(json.dumps(KNOWN[name]), encoding="utf-8")
    return path


def test_a_file_a_folder_and_a_mapping(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model")
    for source in (path, str(path), path.parent, KNOWN["qwen2.5-0.5b"]):
        assert read_shape(source).num_parameters == 494_032_768


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", "unsloth/Qwen2.5-7B", "QWEN2.5-7B-base"])
def test_known_models_need_no_hub(name: str) -> None:
    assert read_shape(name).hidden == 3584


def test_variants_have_the_sizes_of_their_base() -> None:
    assert known_name("meta-llama/Meta-Llama-3.1-8B-Instruct") == "llama-3.1-8b"
    assert known_name("Qwen/Qwen3-4B-Instruct-2507") == "qwen3-4b"


@pytest.mark.parametrize(("name", "tokens"), [("7B", 131072), ("7B-Instruct", 32768), ("3B", 32768), ("72B", 131072)])
def test_positions_of_base_and_instruct_models_differ(name: str, tokens: int) -> None:
    assert read_shape(f"Qwen/Qwen2.5-{name}").trained_tokens == tokens


def test_the_cache_comes_before_what_is_known(no_hub: Path) -> None:
    cached = no_hub / "models--Qwen--Qwen2.5-7B"
    write_config(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc", encoding="utf-8")
    assert read_shape("Qwen/Qwen2.5-7B").hidden == 896


def test_a_revision_is_read_from_the_cache_or_the_hub(no_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of its branch, or by its commit; of others than main nothing is known."""
    name = "Qwen/Qwen2.5-7B"
    cached = no_hub / "models--Qwen--Qwen2.5-7B"
    write_config(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "wide").write_text("abc", encoding="utf-8")
    found = [read_shape(name, revision=revision).hidden for revision in ("wide", "abc", "main", None)]
    assert found == [896, 896, 3584, 3584]
    with pytest.raises(ValueError, match=r"in revision 'v2'\.\n.*cannot be reached\.\n.*leave revision out"):
        read_shape(name, revision="v2")
    asked = []
    monkeypatch.setattr("oomb_accel.plan.source.unreachable", lambda: None)

    def download(*names: str, **options: object) -> str:
        asked.append((*names, options["revision"]))
        return str(cached / "snapshots" / "abc" / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert read_shape(name, revision="v2").hidden == 896 and asked == [(name, "config.json", "v2")]


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    path = write_config(tmp_path / "model")
    for source in (path, path.parent):
        with pytest.raises(ValueError, match="A folder has no revisions"):
            read_shape(str(source), revision="v2")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("qwen2.7-7b", r"'qwen2.7-7b' was not found\.\n.*ORGANISATION/NAME\.\n  Did you mean qwen2.5-7b\?"),
        (
            "nobody/nothing-at-all",
            r"'nobody/nothing-at-all' was not found\.\n.*; the hub cannot be reached\.\n  Known ",
        ),
        ("./missing", r"There is no file ./missing\.\n  Looked in .*\n  Pass a config.json"),
        ("missing.json", r"There is no file missing.json\.\n"),
    ],
)
def test_what_is_not_there(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_shape(source)


def test_files_that_are_no_configs(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="is no model folder"):
        read_shape(empty)
    for text, message in (("{", "is not JSON"), ("[1]", "is no config"), ("{}", "does not say how large")):
        path = tmp_path / "config.json"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=message) as error:
            read_shape(path)
        assert len(str(error.value).splitlines()) == 3


def test_models_of_all_recipes_are_known() -> None:
    recipes = sorted((Path(__file__).parents[2] / "configs" / "recipes").glob("*.yaml"))
    names = {path.name: yaml.safe_load(path.read_text())["model_name_or_path"] for path in recipes}
    assert names and all(read_shape(name).num_parameters for name in names.values())
    assert read_shape("Qwen/Qwen2.5-7B-Instruct-1M").trained_tokens == 1_010_000
