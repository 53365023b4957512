"""What libraries say at every start is hidden; anything else that they say is not."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator

import pytest

from oomb_accel import cli
from oomb_accel.cli import quiet
from oomb_accel.sources import gather


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the loggers print, with the state of logging and of warnings as it was afterwards."""
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")  # gone again afterwards
    text = io.StringIO()
    handler, loggers = logging.StreamHandler(text), [logging.getLogger(name) for name in quiet.LOGGED]
    before = [list(logger.filters) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.filters.clear()
    with warnings.catch_warnings():
        yield text
    for logger, filters in zip(loggers, before, strict=True):
        logger.removeHandler(handler)
        logger.filters[:] = filters


def say() -> None:
    log = logging.getLogger("DeepSpeed")
    log.warning("**** You are using ZeRO with an untested optimizer, proceed with caution *****")
    log.warning("Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.")
    log.warning("Loss scale is %d: gradients overflow", 1)
    liger, failed = logging.getLogger("liger_kernel.backends.registry"), "Backend impl '%s' for op 'rope' could not"
    liger.warning(failed, "liger_kernel.ops.backends._ascend.rope")
    liger.warning(failed, "liger_kernel.ops.backends._triton.rope")


def test_only_noise_is_hidden(heard: io.StringIO) -> None:
    say()
    assert len(heard.getvalue().splitlines()) == 5
    heard.truncate(0)
    quiet.hide_noise()
    quiet.hide_noise()
    say()
    assert heard.getvalue().strip("\0").splitlines() == [
        "Loss scale is 1: gradients overflow",
        "Backend impl 'liger_kernel.ops.backends._triton.rope' for op 'rope' could not",
    ]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", append=True)
        for text in ("Setting `save_embedding_layers` to `True` as embedding layers found", "Something new"):
            warnings.warn(text, stacklevel=1)
    assert [str(item.message) for item in told] == ["Something new"]


@pytest.mark.parametrize(
    ("words", "variable", "hidden"),
    [
        (["env"], None, True),
        (["env"], "0", True),
        (["env", "--debug"], None, False),
        (["env"], "1", False),
        (["run", "x.py"], None, False),
    ],
)
def test_who_hears_everything(
    words: list[str], variable: str | None, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(cli, "hide_noise", lambda: calls.append(None))
    monkeypatch.setattr(cli, "run_guarded", lambda *_, **__: 0)
    if variable is not None:
        monkeypatch.setenv(quiet.DEBUG_VARIABLE, variable)
    cli.main(words)
    assert bool(calls) is hidden
    assert gather() == ()  # the variable is no setting
