"""A model and a finished run that all cases share, and a folder for each."""

import shutil
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from oomb_accel.training import train
from tests.robustness.bad_inputs import Place
from tests.training.conftest import fresh_accelerate, model_folder, tokenizer
from tests.training.ranks_train import recipe_of

__all__ = ["fresh_accelerate", "model_folder", "tokenizer"]


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run with checkpoints 1 to 3; its data lies beside it."""
    folder = tmp_path_factory.mktemp("run")
    place = Place(folder, model_folder, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        train(recipe_of(place.settings(max_steps=4, save_steps=1)))
        shutil.rmtree(place.folder / "out" / "checkpoint-4")  # its last step is left to be done again
        AcceleratorState._reset_state(reset_partial_state=True)
    return folder


@pytest.fixture
def place(tmp_path: Path, model_folder: Path, finished_run: Path) -> Place:
    return Place(tmp_path, model_folder, finished_run)
