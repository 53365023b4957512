"""DeepSpeed's shards, cut anew for another number of ranks, by DeepSpeed's own converter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from oomb_accel.training.launch import strategy

TAG = "pytorch_model"
"""Name that Accelerate gives to the model in a checkpoint of DeepSpeed."""
CONVERTER = "deepspeed.checkpoint.ds_to_universal"
_ANY_NUMBER = ("replicas", "ZeRO 0")
"""Nothing is cut here: every rank has everything."""
_ALIKE = ({"ZeRO 1", "ZeRO 2"},)
"""Stages whose shards can become each other's."""


def fits(accelerator: Accelerator, progress: dict[str, Any]) -> bool:
    """Whether a checkpoint can be read by this launch, as it is or cut anew.

    Args:
        progress: what the checkpoint says about the launch that wrote it.
    """
    ours, theirs = strategy(accelerator), progress["strategy"]
    return ours == theirs or any({ours, theirs} <= stages for stages in _ALIKE)


def needs_other_shards(accelerator: Accelerator, progress: dict[str, Any]) -> bool:
    """Whether the shards of a checkpoint that fits have to be cut anew."""
    ours, theirs = strategy(accelerator), progress["strategy"]
    same_ranks = accelerator.num_processes == progress["num_processes"]
    return fits(accelerator, progress) and not (ours == theirs and (same_ranks or ours in _ANY_NUMBER))


@contextmanager
def cut_anew(accelerator: Accelerator, state: Path) -> Iterator[Path]:
    """A folder with the shards of ``state`` in a form that any number of ranks can read; gone afterwards.

    Its place is beside the checkpoint, where all machines see it. Needs the checkpoint's size once more on the disk.

    Raises:
        RuntimeError: the converter failed.
    """
    folder = state.parent.parent / f".saving-shards-of-{state.parent.name}"
    problem = [""]
    if accelerator.is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        problem = [_convert(state / TAG, folder / TAG)]
    broadcast_object_list(problem)
    try:
        if problem[0]:
            raise RuntimeError(
                f"The shards in {str(state)!r} could not be cut for {accelerator.num_processes} processes.\n"
                f"  {problem[0]}\n  Go on with as many processes as before."
            )
        yield folder
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


def _convert(source: Path, target: Path) -> str:
    """Run the converter in a process of its own, without a GPU. Returns the end of what it said if it failed."""
    command = [sys.executable, "-m", CONVERTER, "--input_folder", str(source), "--output_folder", str(target)]
    # Accelerate does not write the entry that the converter looks for.
    command += ["--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"The converter of DeepSpeed said: {done.stderr.strip()[-500:]}"
