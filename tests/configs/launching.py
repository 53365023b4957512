"""Real launches on two CPU ranks, each with a watchdog, and the runs that they leave behind."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.ranks import ROOT, run_ranks
from tests.harness.tolerance import GRADIENT_RELATIVE, assert_same_values

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
"""What the command ``accelerate launch`` runs."""


def run(
    command: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None, *, timeout_s: float = 240
) -> str:
    """Run a command from the root of the repository, without GPUs, and return what it printed.

    The command and everything that it started are killed when it takes too long. It must compile nothing, and leave
    nothing in shared memory.
    """
    variables = variables or {}
    extensions = folder / "compiled"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_EXTENSIONS_DIR": str(extensions),
        **variables,
    }
    # A run's own settings, which a test before this one may have left.
    for name in [name for name in environment if name.startswith(("ACCELERATE_", "OOMB_")) and name not in variables]:
        del environment[name]
    before = _shared_memory()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        printed = f"did not finish within {timeout_s:g} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            printed += "\n" + process.communicate()[0]
    assert process.returncode == 0, printed[-8000:]
    assert not list(extensions.rglob("*.so")), f"something was compiled\n{printed[-8000:]}"
    assert _shared_memory() <= before, printed[-8000:]
    return printed


def _shared_memory() -> set[str]:
    """What DeepSpeed's shared-memory operator has left; nothing removes it."""
    return {path.name for path in Path("/dev/shm").glob("deepspeed*")}


def launch_forked(options: Sequence[str], arguments: Sequence[str], folder: Path) -> str:
    """``accelerate launch OPTIONS launch/finetune.py ARGUMENTS`` with `run_ranks` in the place of torchrun.

    Everything up to torchrun's call is Accelerate's own: its reading of files and flags, and the variables that it sets
    for the ranks. The script then runs as ``__main__`` in each rank, from the root of the repository.

    Returns:
        What rank 0 printed.
    """
    launched: dict[str, Any] = {}

    def torchrun(known: Any) -> None:
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        launched.update(ranks=int(known.nproc_per_node), environment=changed)
        launched.update(script=known.training_script, words=known.training_script_args)

    extensions = folder / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "OOMB_"))]:
            patch.delenv(name)
        patch.chdir(ROOT)
        patch.setattr("torch.distributed.run.run", torchrun)
        before = dict(os.environ)
        launch_command(launch_command_parser().parse_args([*options, "launch/finetune.py", *arguments]))
    environment = launched["environment"] | {"TORCH_EXTENSIONS_DIR": str(extensions)}
    job = {"folder": folder / "ranks", "ranks": launched["ranks"], "environment": environment}
    run_ranks(run_script, launched["script"], launched["words"], **job)
    printed = (folder / "ranks" / "rank0.log").read_text(encoding="utf-8")
    assert not list(extensions.rglob("*.so")), f"something was compiled\n{printed[-8000:]}"
    return printed


def run_script(rank: int, script: str, words: list[str]) -> None:
    """What `run_ranks` calls to run a script as ``__main__``."""
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, f"{script} ended with status {end.code}"


@dataclass(frozen=True)
class Trained:
    """What a run of ``oomb train`` left: its log, and the losses of the model with its adapter."""

    rows: list[dict[str, Any]]
    losses: Tensor
    """Of every token of a text."""

    @classmethod
    def at(cls, folder: Path, model_folder: str, text: str) -> Trained:
        """Read it; plain PEFT loads the adapter."""
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, folder).eval()
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            losses = _token_losses(model, ids)
            with model.disable_adapter():
                before = _token_losses(model, ids)
        assert before.mean() - losses.mean() > 0.1, "the adapter does nothing"
        return cls(rows, losses)

    def assert_same(self, wanted: Trained) -> None:
        """Counts, losses and gradient norms of every step, and the losses of the trained models.

        Not the weights one by one: AdamW divides each gradient by its own size, so that rounding in a gradient of
        nearly zero moves its weight as far as any other.
        """
        assert len(self.rows) == len(wanted.rows)
        for ours, theirs in zip(self.rows, wanted.rows, strict=True):
            for name in ("step", "tokens", "trained_tokens", "learning_rate"):
                assert ours[name] == theirs[name], name
            for name in ("loss", "grad_norm"):
                error = abs(ours[name] / theirs[name] - 1)
                assert error <= GRADIENT_RELATIVE, f"step {ours['step']}: {name} {ours[name]} for {theirs[name]}"
        assert_same_values(self.losses, wanted.losses, "token losses after training")


def _token_losses(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
