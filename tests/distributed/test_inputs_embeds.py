"""Input embeddings instead of ids under ZeRO 3, on ranks with different numbers of chunks: the same weights."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import oomb_accel
from tests.distributed.ranks import needs_deepspeed, run_ranks
from tests.distributed.training import Job, batch_of, steps_of, whole_weights
from tests.harness.parity import config
from tests.harness.tolerance import assert_same_gradients

pytestmark = needs_deepspeed


def _train(rank: int, job: Job, embeds: bool) -> dict[str, Tensor]:
    dist.init_process_group("gloo")
    model = job.build()
    table = model.get_input_embeddings().weight.detach().clone()  # type: ignore[operator]
    engine, *_ = oomb_accel.deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5),
        config=job.deepspeed_config(),
        oomb=config(self_test=False),
    )
    for step in job.steps:
        batch = dict(batch_of(step[0][rank]).batch)
        if embeds:
            batch["inputs_embeds"] = table[batch.pop("input_ids")]
        engine.backward(engine(**batch, num_targets=100).loss)
        engine.step()
    return whole_weights(model)


def test_embeddings_equal_ids(tmp_path: Path) -> None:
    job = Job(steps=steps_of(((100, 37), (12,)), ((5,), (49, 3))), stage=3, lora={})
    by_ids, by_embeds = (run_ranks(_train, job, embeds, folder=tmp_path)[0] for embeds in (False, True))
    assert_same_gradients(by_embeds, by_ids)
    before = whole_weights(job.build())
    assert all(not torch.equal(by_ids[name], before[name]) for name in before)
