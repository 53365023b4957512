"""Dealing documents to ranks: everything once, like lengths side by side, the same steps on any number of ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from oomb_accel.sampler import LengthBalancedSampler, Step, slots_of, tokens_of
from oomb_accel.training.data import Document, collate

_draw = random.Random(0)
UNLIKE = [2 ** _draw.randint(3, 12) + number for number in range(200)]
"""Lengths from 8 to over 4000 tokens."""


def documents_of(step: Step) -> list[int]:
    return sorted(index for micro_step in step for documents in micro_step for index in documents)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    batch_size=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    epoch=st.integers(0, 2),
)
def test_every_document_once(
    lengths: list[int], num_ranks: int, batch_size: int, accumulation: int, epoch: int
) -> None:
    sampler = LengthBalancedSampler(lengths, num_ranks=num_ranks, batch_size=batch_size, accumulation=accumulation)
    steps = sampler.steps(epoch)
    assert sorted(index for step in steps for index in documents_of(step)) == list(range(len(lengths)))
    assert len(steps) == sampler.steps_per_epoch
    assert sum(len(step) for step in steps) == len(sampler)
    for number, step in enumerate(steps):
        assert all(len(micro_step) == num_ranks for micro_step in step)
        assert all(len(documents) <= batch_size for micro_step in step for documents in micro_step)
        assert all(any(micro_step) for micro_step in step)  # no micro-step in which all ranks are idle
        if number < len(steps) - 1:
            assert len(documents_of(step)) == sampler.documents_per_step


def test_ranks_wait_little_for_unlike_documents() -> None:
    balanced = LengthBalancedSampler(UNLIKE, num_ranks=8)
    assert balanced.waiting(0) < 0.15
    # What dealing in shuffled order would cost.
    order = random.Random(1).sample(range(len(UNLIKE)), len(UNLIKE))
    shuffled = [[[[index] for index in order[start : start + 8]]] for start in range(0, len(order), 8)]
    slots = sum(slots_of(step, UNLIKE) for step in shuffled)
    assert 1 - sum(UNLIKE) / slots > 0.5
    assert LengthBalancedSampler(UNLIKE).waiting(0) == 0.0


def test_what_waiting_counts() -> None:
    step: Step = [[[0], [1]], [[2], []]]
    lengths = [10, 6, 4]
    assert tokens_of(step, lengths) == 20
    assert slots_of(step, lengths) == 2 * 10 + 2 * 4
    sampler = LengthBalancedSampler(lengths, num_ranks=2, accumulation=2)
    assert sampler.waiting(0) == pytest.approx(1 - 20 / 28)


def test_the_longest_come_first_and_ranks_take_turns() -> None:
    (step,) = LengthBalancedSampler([40, 10, 30, 20], num_ranks=2, accumulation=2).steps(0)
    assert step == [[[0], [2]], [[1], [3]]]  # the rank with 40 gets 10, the one with 30 gets 20


@pytest.mark.parametrize(("num_ranks", "batch_size", "accumulation"), [(1, 2, 4), (1, 8, 1), (4, 2, 1), (2, 1, 4)])
def test_steps_do_not_depend_on_the_number_of_ranks(num_ranks: int, batch_size: int, accumulation: int) -> None:
    wanted = LengthBalancedSampler(UNLIKE, num_ranks=8, seed=3).steps(1)
    sampler = LengthBalancedSampler(
        UNLIKE, num_ranks=num_ranks, batch_size=batch_size, accumulation=accumulation, seed=3, group=8
    )
    assert [documents_of(step) for step in sampler.steps(1)] == [documents_of(step) for step in wanted]


def test_seed_and_epoch_make_the_order() -> None:
    def plan(seed: int, epoch: int) -> list[Step]:
        return LengthBalancedSampler(UNLIKE, num_ranks=2, seed=seed).steps(epoch)

    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(2, 0)
    assert plan(1, 0) != plan(1, 1)


def test_as_batch_sampler_of_a_data_loader() -> None:
    """Three documents for two ranks: the second rank's second batch is the empty one."""
    documents = [Document("d", torch.arange(n), torch.arange(n)) for n in (9, 5, 7)]
    loaders: list[Any] = []
    for rank in range(2):
        sampler = LengthBalancedSampler([9, 5, 7], num_ranks=2, rank=rank, seed=0)
        sampler.set_epoch(0)
        loader: Any = DataLoader(
            documents,  # type: ignore[arg-type]  # a list is a map-style dataset
            batch_sampler=sampler,
            collate_fn=lambda found: collate(found, pad_token_id=0),
        )
        loaders.append(loader)
    first, second = (list(loader) for loader in loaders)
    assert len(first) == len(second) == 2
    masks = [int(batch["attention_mask"].sum()) for batch in (*first, *second)]
    assert sorted(masks) == [0, 5, 7, 9]
    empty = next(batch for batch in second if not batch["attention_mask"].any())
    assert empty["input_ids"].shape == (1, 1) and empty["labels"].tolist() == [[-100]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": []}, "no documents"),
        ({"rank": 2}, "no rank 2"),
        ({"group": 3}, "groups of 3 for 2"),
    ],
    ids=str,
)
def test_bad_input(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LengthBalancedSampler(**{"lengths": [1, 2], "num_ranks": 2, **changes})
