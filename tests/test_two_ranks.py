"""Plain data parallelism on two real processes: unequal numbers of chunks, one reduction, the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import oomb_accel
from tests.distributed.ranks import run_ranks
from tests.harness.batches import Document, documents_of, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config, reference
from tests.harness.tolerance import assert_same_gradients, assert_same_total

LENGTHS = ((100, 37), (12,))  # rank 0 runs nine chunks, rank 1 an ordinary step


def _train(rank: int, lora: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients."""
    dist.init_process_group("gloo")
    model = with_lora(tiny_model()) if lora else tiny_model()
    parallel = nn.parallel.DistributedDataParallel(oomb_accel.enable(model, config()))
    layout = padded(_documents()[rank])
    total = torch.tensor(oomb_accel.count_targets(layout.batch))
    dist.all_reduce(total)
    loss = parallel(**layout.batch, num_targets=int(total)).loss
    (loss * len(LENGTHS)).backward()  # DDP averages over ranks
    dist.all_reduce(loss := loss.detach().clone())
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _documents() -> list[list[Document]]:
    documents = documents_of(*LENGTHS[0], *LENGTHS[1])
    return [documents[: len(LENGTHS[0])], documents[len(LENGTHS[0]) :]]


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_ddp_equals_one_process_on_the_union(tmp_path: Path, lora: bool) -> None:
    wanted = reference(with_lora(tiny_model()) if lora else tiny_model(), [d for part in _documents() for d in part])
    for loss, gradients in run_ranks(_train, lora, folder=tmp_path):
        assert_same_total(loss, wanted.loss)
        assert_same_gradients(gradients, wanted.gradients)
