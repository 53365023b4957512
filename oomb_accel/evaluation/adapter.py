"""A saved adapter put on its model, with every reason why it does not belong there; for evaluation and for merging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from transformers import PreTrainedModel

from oomb_accel.integrations.saving import check_adapter, read_config
from oomb_accel.reading import Unreadable, file_text, in_a_line, yaml_value
from oomb_accel.training.folder import RECIPE


def rope_of_run(folder: Path) -> dict[str, Any] | None:
    """The ``rope_parameters`` that an adapter was trained with, where its run has left them beside it: PEFT does not
    store them, and without them the adapter meets other positions than in training."""
    for place in (folder, folder.parent):
        path = place / RECIPE
        if path.is_file():
            try:
                recipe = yaml_value(file_text(path))
            except Unreadable as error:
                raise ValueError(
                    f"{path} cannot be read, so nobody knows how RoPE was scaled.\n  {error}\n"
                    "  Repair it, or remove it if the recipe had no rope_parameters."
                ) from None
            values = recipe.get("rope_parameters") if isinstance(recipe, dict) else None
            return values if isinstance(values, dict) else None
    return None


def put_on(model: PreTrainedModel, folder: Path) -> PeftModel:
    """The model with a saved adapter on it, in evaluation mode.

    Raises:
        ValueError: the adapter is not complete, is no adapter of this model, or is of a kind that transformers' forward
            with chunks does not know.
    """
    read_config(folder)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"The adapter in {str(folder)!r} cannot be read.\n  {type(error).__name__}: {in_a_line(error)}\n"
            "  Save it again with this version of PEFT."
        ) from error
    base = config.base_model_name_or_path
    if config.is_prompt_learning:
        raise ValueError(
            f"The adapter in {str(folder)!r} is of a kind that is not supported.\n"
            f"  It is {config.peft_type}, which adds tokens to the text.\n  Use LoRA or another adapter of weights."
        )
    config.base_model_name_or_path = model.name_or_path
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(
            f"The adapter in {str(folder)!r} belongs to another model.\n  {str(error).splitlines()[0]}\n"
            f"  Give the model that it was trained on{f': its config names {base!r}' if base else ''}."
        ) from error
    assert isinstance(adapted, PeftModel)
    check_adapter(folder, adapted)
    set_peft_model_state_dict(adapted, load_peft_weights(str(folder), device="cpu"))
    return adapted.eval()
