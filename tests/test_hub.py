"""That the hub's client is not asked where its host has no address: it would try for half a minute per file."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from oomb_accel import hub
from oomb_accel.data import sources
from oomb_accel.data.settings import DataSettings
from oomb_accel.plan import read_shape
from oomb_accel.training.model import load_tokenizer, read_config
from oomb_accel.training.recipe import Recipe
from tests.harness.folders import save_tiny_model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Hosts that were looked up, without one of them having an address. Requests fail the test."""
    asked: list[str] = []

    def look_up(host: str, *_: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    def request(_: object, asked_for: httpx.Request, **__: object) -> None:
        if "/resolve/" in asked_for.url.path:
            pytest.fail("the hub was asked")
        raise httpx.ConnectError("no network")  # the client's own business, tried once

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.time, "sleep", lambda _: None)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(httpx.Client, "send", request)
    hub._without_address.cache_clear()
    yield asked
    hub._without_address.cache_clear()


def test_nothing_is_asked_without_an_address(no_network: list[str]) -> None:
    recipe = Recipe(model_name_or_path="owner/name", data_path="x", output_dir="y")
    for call in (
        lambda: read_config("owner/name"),
        lambda: load_tokenizer(recipe),
        lambda: read_shape("owner/name"),
        lambda: sources._hub("owner/name", None, DataSettings(paths=("owner/name",))),
    ):
        with pytest.raises(ValueError, match=r"the hub was not reached: huggingface.co has no address here \(.*-2"):
            call()
    assert no_network == ["huggingface.co"] * 2  # a name server may fail once; then it is known


def test_no_address_is_looked_up_for_a_folder(no_network: list[str], tmp_path: Path) -> None:
    """Where there is no network, that may take a while."""
    folder = save_tiny_model(tmp_path / "model", "qwen2")
    read_config(str(folder))
    load_tokenizer(Recipe(model_name_or_path=str(folder), data_path="x", output_dir="y"))
    assert not no_network


def test_a_proxy_or_a_mirror_counts(no_network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub")
    assert "mirror.example has no address" in (hub.unreachable() or "")
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:1"})
    assert hub.unreachable() is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "getproxies", dict)
    assert hub.unreachable() is None


def test_a_name_without_an_organisation_may_be_cached(no_network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub once gave such ids."""
    with pytest.raises(ValueError, match="ids of the hub are ORGANISATION/NAME"):
        read_config("gpt2")
    assert not no_network
    monkeypatch.setenv("HF_HUB_CACHE", "cache")
    Path("cache/models--gpt2").mkdir(parents=True)
    with pytest.raises(ValueError, match="the hub was not reached"):
        read_config("gpt2")
