"""Plain data parallelism on two real processes: unequal numbers of chunks, one reduction, the same weights."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import oomb_accel
from tests.harness.batches import Document, documents_of, padded
from tests.harness.models import tiny_model, with_lora
from tests.harness.parity import config, reference
from tests.harness.tolerance import assert_same_gradients, assert_same_total

LENGTHS = ((100, 37), (12,))  # rank 0 runs nine chunks, rank 1 an ordinary step


def _train_one_rank(rank: int, port: int, folder: str, lora: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=len(LENGTHS))
    model = with_lora(tiny_model()) if lora else tiny_model()
    parallel = nn.parallel.DistributedDataParallel(oomb_accel.enable(model, config()))
    layout = padded(_documents()[rank])
    total = torch.tensor(oomb_accel.count_targets(layout.batch))
    dist.all_reduce(total)
    loss = parallel(**layout.batch, num_targets=int(total)).loss
    (loss * len(LENGTHS)).backward()  # DDP averages over ranks
    dist.all_reduce(loss := loss.detach().clone())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.save({"loss": loss, "gradients": gradients}, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    # Not by returning: gloo's destructor waits, with the GIL, for a thread that may be waiting for the GIL.
    os._exit(0)


def _documents() -> list[list[Document]]:
    documents = documents_of(*LENGTHS[0], *LENGTHS[1])
    return [documents[: len(LENGTHS[0])], documents[len(LENGTHS[0]) :]]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_ddp_equals_one_process_on_the_union(tmp_path: Path, lora: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_train_one_rank, (port, str(tmp_path), lora), nprocs=len(LENGTHS))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(len(LENGTHS))]
    wanted = reference(with_lora(tiny_model()) if lora else tiny_model(), [d for part in _documents() for d in part])
    for got in ranks:
        assert_same_total(got["loss"], wanted.loss)
        assert_same_gradients(got["gradients"], wanted.gradients)
