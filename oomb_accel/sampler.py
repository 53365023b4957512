"""Which documents each rank takes, and when: documents of like length side by side."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from torch.utils.data import Sampler

Step = list[list[list[int]]]
"""Documents of one optimizer step, as indices, by micro-step and rank. A rank without documents has an empty list."""

WINDOW_GROUPS = 16
"""Documents are sorted by length over so many groups. More groups waste less and mix the data less."""


class LengthBalancedSampler(Sampler[list[int]]):
    """Deals the documents of an epoch to ranks, so that no rank waits long for another one's document.

    Documents are shuffled, cut into *groups* of like length, and the groups are shuffled again; an optimizer step
    consists of whole groups. Within a step the longest documents come first, and ranks get one document after another,
    each going to the rank with the fewest tokens. Which documents make up a step depends on seed, epoch, documents per
    step and group only, not on how the step is cut into ranks and micro-steps: the same data order on any number of
    ranks. Every rank computes the whole plan; ranks need not talk.

    As a ``batch_sampler`` of a DataLoader it yields this rank's indices for one micro-step after another; the list is
    empty where the last step of an epoch has no document for this rank, and the collate function must then make the
    empty batch: one row of one padding token (``attention_mask`` 0, label -100). Do not let Accelerate prepare such a
    DataLoader: it would deal out what is dealt out already.

    Args:
        lengths: tokens of each document.
        num_ranks: of the whole run.
        rank: of this process.
        batch_size: documents per micro-step and rank.
        accumulation: micro-steps per optimizer step.
        seed: of the data order.
        group: documents that lie side by side in length; the documents of one micro-step over all ranks if left
            out. A run that goes on with another number of ranks passes that of its first part.

    Raises:
        ValueError: no documents, a rank that does not exist, or groups that do not fill a step.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        num_ranks: int = 1,
        rank: int = 0,
        batch_size: int = 1,
        accumulation: int = 1,
        seed: int = 0,
        group: int | None = None,
    ) -> None:
        self.lengths = list(lengths)
        self.num_ranks, self.rank = num_ranks, rank
        self.batch_size, self.accumulation = batch_size, accumulation
        self.seed = seed
        self.group = group or num_ranks * batch_size
        self.epoch = 0
        if not self.lengths:
            raise ValueError("There are no documents to sample from.\n  Got 0 lengths.\n  Pass at least one.")
        if not 0 <= rank < num_ranks:
            raise ValueError(
                f"There is no rank {rank}.\n  Got num_ranks={num_ranks}.\n  Set rank from 0 to {num_ranks - 1}."
            )
        if self.documents_per_step % self.group:
            raise ValueError(
                "A step must consist of whole groups.\n"
                f"  Got groups of {self.group} for {self.documents_per_step} documents per step.\n"
                f"  Set accumulation so that ranks x batch size x accumulation is a multiple of {self.group}."
            )

    @property
    def documents_per_step(self) -> int:
        """Documents of one optimizer step over all ranks."""
        return self.num_ranks * self.batch_size * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.lengths) / self.documents_per_step)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that iteration deals out."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Micro-steps of an epoch."""
        per_micro_step = self.num_ranks * self.batch_size
        full, rest = divmod(len(self.lengths), self.documents_per_step)
        return full * self.accumulation + math.ceil(rest / per_micro_step)

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps(self.epoch):
            for micro_step in step:
                yield micro_step[self.rank]

    def steps(self, epoch: int) -> list[Step]:
        """The plan of an epoch. Only its last step may have fewer documents, and then fewer micro-steps too."""
        order = self._order(epoch)
        size = self.documents_per_step
        return [self._deal(order[start : start + size]) for start in range(0, len(order), size)]

    def waiting(self, epoch: int) -> float:
        """Share of the ranks' time in an epoch that they spend waiting for a longer document, counted in tokens."""
        useful = total = 0
        for step in self.steps(epoch):
            useful += tokens_of(step, self.lengths)
            total += slots_of(step, self.lengths)
        return 1.0 - useful / total

    def _order(self, epoch: int) -> list[int]:
        """All documents, group after group; a group that is not full comes last."""
        shuffle = random.Random(f"{self.seed} {epoch}")
        order = list(range(len(self.lengths)))
        shuffle.shuffle(order)
        window, groups = WINDOW_GROUPS * self.group, []
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=lambda index: -self.lengths[index])
            groups += [near[first : first + self.group] for first in range(0, len(near), self.group)]
        rest = [groups.pop()] if len(groups[-1]) < self.group else []
        shuffle.shuffle(groups)
        return [index for group in [*groups, *rest] for index in group]

    def _deal(self, documents: list[int]) -> Step:
        """Cut the documents of one step into micro-steps and ranks."""
        documents = sorted(documents, key=lambda index: (-self.lengths[index], index))
        size, in_step = self.num_ranks * self.batch_size, [0] * self.num_ranks
        step: Step = []
        for start in range(0, len(documents), size):
            micro_step: list[list[int]] = [[] for _ in range(self.num_ranks)]
            in_micro_step = [0] * self.num_ranks
            for index in documents[start : start + size]:
                free = (rank for rank in range(self.num_ranks) if len(micro_step[rank]) < self.batch_size)
                rank = min(free, key=lambda rank: (in_micro_step[rank], in_step[rank], rank))
                micro_step[rank].append(index)
                in_micro_step[rank] += self.lengths[index]
                in_step[rank] += self.lengths[index]
            step.append(micro_step)
        return step


def tokens_of(step: Step, counts: Sequence[int]) -> int:
    """Sum of a count per document, such as its tokens or its targets, over a step and all ranks."""
    return sum(counts[index] for micro_step in step for documents in micro_step for index in documents)


def slots_of(step: Step, lengths: Sequence[int]) -> int:
    """Tokens that the ranks would get through in the time that the step takes, none of them waiting."""
    return sum(
        len(micro_step) * max(sum(lengths[index] for index in documents) for documents in micro_step)
        for micro_step in step
    )
