"""Which candidates go where: disjoint, equal, complete, in one order on all ranks."""

from __future__ import annotations

import collections
import itertools

import pytest

from relax_sdk.errors import TrainingError
from relax_sdk.training import MicroBatch, plan_updates

Cell = tuple[int, int]


def cells(update: list[MicroBatch]) -> list[Cell]:
    return [(micro.group, slot) for micro in update for slot in micro.slots]


def plan(groups: int, candidates: int, world: int, micro: int, updates: int) -> list[list[list[MicroBatch]]]:
    return [
        plan_updates(
            groups=groups, candidates=candidates, rank=rank, world=world, micro_batch_size=micro, num_updates=updates
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("world", "micro", "updates"), list(itertools.product([1, 2, 4, 8], [1, 2, 3, 8, 100], [1, 2, 4]))
)
def test_properties(world: int, micro: int, updates: int) -> None:
    groups, candidates = 4, 8
    ranks = plan(groups, candidates, world, micro, updates)
    everyone: collections.Counter[Cell] = collections.Counter()
    for rank, planned in enumerate(ranks):
        assert len(planned) == updates
        for update in planned:
            mine = cells(update)
            assert len(mine) == len(set(mine)) == groups * candidates // (world * updates)
            assert all(slot % world == rank for _, slot in mine)
            assert all(len(micro_batch.slots) == len(update[0].slots) for micro_batch in update)
            share = candidates // world
            assert len(update[0].slots) == (micro if share % micro == 0 else share)
            everyone.update(mine)
        # One sequence of collectives: the same groups in the same order with the same sizes on every rank.
        assert [[(m.group, len(m.slots)) for m in update] for update in planned] == [
            [(m.group, len(m.slots)) for m in update] for update in ranks[0]
        ]
    assert everyone == collections.Counter(itertools.product(range(groups), range(candidates)))


def test_a_group_that_the_ranks_cannot_share_is_replayed_whole_by_each() -> None:
    ranks = plan(groups=2, candidates=3, world=2, micro=1, updates=2)
    assert ranks[0] == ranks[1]
    assert [cells(update) for update in ranks[0]] == [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]


def test_one_group_can_feed_several_updates() -> None:
    ((first, second),) = plan(groups=1, candidates=4, world=1, micro=2, updates=2)
    assert cells(first) == [(0, 0), (0, 1)]
    assert cells(second) == [(0, 2), (0, 3)]


@pytest.mark.parametrize(
    ("groups", "candidates", "micro", "updates"), [(3, 4, 4, 2), (1, 4, 4, 2), (5, 8, 1, 3), (1, 1, 1, 2)]
)
def test_unequal_updates_and_cut_micro_batches_are_refused(
    groups: int, candidates: int, micro: int, updates: int
) -> None:
    with pytest.raises(TrainingError, match="num-updates-per-batch"):
        plan(groups, candidates, 1, micro, updates)
