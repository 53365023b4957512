"""What libraries say at every start and a user of our commands can do nothing about is not shown."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping

DEBUG_VARIABLE = "OOMB_DEBUG"
"""Environment variable that shows everything, as ``--debug`` does; for launches that pass no options on."""

LOGGED = {
    "DeepSpeed": (
        "Setting accelerator to CPU.",  # a run says on which device it is
        "**** You are using ZeRO with an untested optimizer",  # AdamW of torch, which our tests cover
    ),
    "liger_kernel.backends.registry": tuple(  # kernels for other hardware, or with a library that is not installed
        f"Backend impl 'liger_kernel.ops.backends.{name}" for name in ("_ascend", "_cutedsl", "_cutile")
    ),
    "transformers.tokenization_utils_base": (
        "Token indices sequence length is longer than",  # documents may be; the model's own range is checked
    ),
    "transformers.tokenization_utils_tokenizers": (
        "Ignoring clean_up_tokenization_spaces=True for BPE tokenizer",  # as it should, for the model's own setting
    ),
}
"""Beginnings of messages by the logger that they come from. All others are shown."""
WARNED = (
    r"Attempting to run cuBLAS, but there was no current CUDA context",  # autograd's threads; torch sets one itself
    r"Could not find a config file in .* - will assume that the vocabulary was not modified",  # nor is it
    r"Setting `save_embedding_layers` to `True`",  # as it should be
)
"""The same for Python's warnings, as patterns."""


def wants_everything(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for what ``--debug`` asks for."""
    return environ.get(DEBUG_VARIABLE, "").lower() not in ("", "0", "false", "no")


def hide_noise() -> None:
    """Hide these messages in this process, and libraries' bars of progress where nobody watches them move."""
    for name in LOGGED:
        logger = logging.getLogger(name)
        if _is_worth_saying not in logger.filters:
            logger.addFilter(_is_worth_saying)
    for pattern in WARNED:
        warnings.filterwarnings("ignore", message=pattern)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read by transformers too, when it is imported


def _is_worth_saying(record: logging.LogRecord) -> bool:
    try:
        return not record.getMessage().startswith(LOGGED[record.name])
    except (TypeError, ValueError):  # a bad format is the logger's to report
        return True
