"""The model hub: whether it can be reached. Its client finds out by itself, but tries for half a minute per file."""

from __future__ import annotations

import os
import socket
import time
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

_HUB = "https://huggingface.co"


def unreachable() -> str | None:
    """Why asking the hub would only take time: its host has no address. None where it has, and where its client knows
    by itself (``HF_HUB_OFFLINE``) or asks a proxy."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    url = urlsplit(os.environ.get("HF_ENDPOINT", _HUB))
    proxies = getproxies()
    if not url.hostname or url.scheme in proxies or "all" in proxies:
        return None
    return _without_address(url.hostname)


def cached_folder(repository: str) -> Path:
    """Where the hub's client keeps a model on this machine, whether it is there or not."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache_folder = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    return cache_folder / f"models--{repository.replace('/', '--')}"


@cache
def _without_address(host: str) -> str | None:
    for pause_s in (1.0, None):  # a name server may fail once
        try:
            socket.getaddrinfo(host, 443)
            return None
        except OSError as error:
            reason = f"{host} has no address here ({error})"
        if pause_s is not None:
            time.sleep(pause_s)
    return reason
