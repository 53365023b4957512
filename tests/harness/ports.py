"""Ports for processes of a test that connect with each other."""

from __future__ import annotations

import itertools
import socket


def free_port(start: int) -> int:
    """The first free one from ``start``, to be below the range from which outgoing connections take theirs."""
    for port in itertools.count(start):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
