"""``oomb verify --page-dtype float8``, ``--page-grad-dtype bfloat16``, ``--base-dtype float8``: what storage in fewer
bits costs.

Both sides are a training step by the recurrence on the user's model and text, with the same chunks and attention; only
how pages, their gradients and frozen weights are stored differs.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oomb_accel.cli.verify_inputs import trained
from oomb_accel.cli.verify_tables import gradient_rows, gradient_table, loss_table, plain
from oomb_accel.config import OombConfig
from oomb_accel.integrations.sparsity_cost import gradient_costs, loss_costs, training_step
from oomb_accel.progress import ProgressLine

OPTIONS: dict[str, tuple[str, ...]] = {
    "page_dtype": ("model", "float8"),
    "page_grad_dtype": ("float32", "bfloat16"),
    "base_dtype": ("model", "float8"),
}
"""What can be asked for, the exact one first."""


def exact(config: OombConfig) -> OombConfig:
    """The same settings with everything stored as it is computed."""
    first: dict[str, Any] = {name: values[0] for name, values in OPTIONS.items()}
    return replace(config, **first)


def run(
    options: argparse.Namespace,
    config: OombConfig,
    model: PreTrainedModel,
    documents: list[Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """Measure and print. Returns the report for JSON."""
    measured = trained(model, options, getattr(torch, options.dtype), device, random_adapters=False)
    sides = []
    for name, settings in (("exact", exact(config)), ("stored", config)):
        print(f"oomb verify: training step, {name}", file=sys.stderr, flush=True)
        sides.append(training_step(measured, settings, documents, on_progress=ProgressLine()))
    before, stored = sides
    losses = loss_costs(before.token_losses, stored.token_losses, config.known_chunk_tokens)
    gradients = gradient_costs(before.gradients, stored.gradients)
    asked = {name: getattr(config, name) for name in OPTIONS}
    print(
        f"\nStorage: {', '.join(f'{name}={value}' for name, value in asked.items())}, in {options.dtype}\n"
        f"{loss_table(losses, ('exact', 'stored'))}\n\n{gradient_table(gradients)}\n"
        "cosine, rel. error: the gradient of the layer's parameters against that with everything stored as computed."
    )
    rows = [plain(asdict(cost) | {"difference": cost.difference}) for cost in losses]
    named = [{{"dense": "exact", "sparse": "stored"}.get(key, key): row[key] for key in row} for row in rows]
    return {**asked, "dtype": options.dtype, "loss": named, **gradient_rows(gradients)}
