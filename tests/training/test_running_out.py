"""Memory that runs out in the middle of a step: numbers, a remedy, exit code 1, and everything before it intact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oomb_accel.cli import main
from oomb_accel.host import HostArena, HostMemoryError
from oomb_accel.pages import PagedKVCache
from oomb_accel.training import Recipe, loop, train

Write = Callable[[dict[str, Any]], Path]
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1 GiB is free. "
    "Process 1 has 138 GiB memory in use."
)


class Failing:
    """Raises in the n-th call of a method from when it is armed."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, error: Exception, call: int = 2
    ) -> None:
        self.armed = False
        self.raised = 0
        plain, left = getattr(owner, name), [call]

        def method(inner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.armed:
                left[0] -= 1
                if left[0] == 0:
                    self.raised += 1
                    raise error
            return plain(inner, *args, **kwargs)

        monkeypatch.setattr(owner, name, method)


def arm_in_step(monkeypatch: pytest.MonkeyPatch, failing: Failing, step: int) -> None:
    one_step = loop._one_step

    def run(run: Any, number: int, *rest: Any) -> None:
        failing.armed = number == step
        one_step(run, number, *rest)

    monkeypatch.setattr(loop, "_one_step", run)


FAILURES = {
    "forward": (PagedKVCache, "store", torch.OutOfMemoryError(OUT_OF_MEMORY), {}),
    "backward": (PagedKVCache, "add_gradients", torch.OutOfMemoryError(OUT_OF_MEMORY), {}),
    "library": (PagedKVCache, "add_gradients", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), {}),
    "host": (
        HostArena,
        "take",
        HostMemoryError(
            "Pages need more host memory than they may have.\n  Needed: 9 slabs, 9 GiB; the limit is 8 GiB, and 8 GiB "
            "are in use.\n  Set host_memory_gib=9 or more if the machine has it, or train on shorter documents."
        ),
        {"offload": True, "span_tokens": 16},
    ),
}


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("save_steps", [0, 1])
def test_the_last_step_is_kept(
    settings: dict[str, Any],
    write_recipe: Write,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    save_steps: int,
) -> None:
    owner, name, error, extra = FAILURES[where]
    oomb = {**settings["oomb"], **extra}
    whole = Path(settings["output_dir"]) / "whole"
    wanted = settings | {"output_dir": str(whole), "oomb": oomb, "save_steps": 2}
    train(Recipe.from_yaml(write_recipe(wanted)))
    losses = [row["loss"] for row in _rows(whole)]

    out = Path(settings["output_dir"]) / "stopped"
    path = write_recipe(settings | {"output_dir": str(out), "oomb": oomb, "save_steps": save_steps})
    with monkeypatch.context() as patch:
        failing = Failing(patch, owner, name, error, call=1 if where == "host" else 2)
        arm_in_step(patch, failing, 3)
        assert main(["train", str(path)]) == 1
        assert failing.raised == 1
    said = capsys.readouterr()
    assert "stopped after step 2 of 3" in said.out and f"the last save is {out / 'checkpoint-2'}" in said.out
    message = said.err[said.err.index("oomb train: ") :]
    assert "Traceback" not in message and len(message.strip().splitlines()) == 3
    sweep = "forward" if where in ("forward", "host") else "backward"
    assert f"in the {sweep} sweep of a step, chunk " in message and " of 6.\n" in message
    free = "GiB free" if where == "host" else "GiB are free"
    for words in (free, "page gradients", "Weights and optimizer state are"):
        assert words in message
    assert "page_grad_dtype='bfloat16'" in message
    _assert_same_state(out / "checkpoint-2", whole / "checkpoint-2")
    assert [row["loss"] for row in _rows(out)] == losses[:2]

    assert main(["train", str(path), "--resume_from_checkpoint", "latest"]) == 0
    assert [row["loss"] for row in _rows(out)] == losses
    _assert_same_weights(out, whole)
    steps = [json.loads(line)["step"] for line in (out / "memory.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps.count(3) == steps.count(2)  # the failed step's lines are gone


def test_the_first_step_leaves_nothing(
    settings: dict[str, Any], write_recipe: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = Failing(monkeypatch, PagedKVCache, "add_gradients", torch.OutOfMemoryError(OUT_OF_MEMORY))
    failing.armed = True
    assert main(["train", str(write_recipe(settings))]) == 1
    said = capsys.readouterr()
    assert "no step was finished" in said.out and "The machine ran out of memory" in said.err
    assert not Path(settings["output_dir"]).exists()


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _assert_same_weights(ours: Path, theirs: Path) -> None:
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _assert_same_state(ours: Path, theirs: Path) -> None:
    _assert_same_weights(ours, theirs)
    a, b = (torch.load(folder / "state" / "optimizer.bin", weights_only=True)["state"] for folder in (ours, theirs))
    assert a.keys() == b.keys() and len(a) > 0
    for number in a:
        assert all(torch.equal(a[number][name], b[number][name]) for name in ("exp_avg", "exp_avg_sq", "step"))
