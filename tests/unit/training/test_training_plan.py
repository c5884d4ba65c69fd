"""Which cells go where: disjoint, equal, complete, in one order on all ranks."""

from __future__ import annotations

import collections
import itertools

import pytest

from relax_sdk.errors import TrainingError
from relax_sdk.training import MicroBatch, plan_updates

STEPS = 3


def cells(update: list[MicroBatch]) -> list[tuple[int, int, int]]:
    return [(micro.group, slot, column) for micro in update for slot in micro.slots for column in micro.columns]


def candidates_of(update: list[MicroBatch]) -> list[tuple[int, int]]:
    return [(micro.group, slot) for micro in update for slot in micro.slots]


def plan(
    groups: int, candidates: int, world: int, micro: int, updates: int, per_forward: int | None = None
) -> list[list[list[MicroBatch]]]:
    return [
        plan_updates(
            groups=groups,
            candidates=candidates,
            steps=STEPS,
            rank=rank,
            world=world,
            micro_batch_size=micro,
            steps_per_forward=per_forward,
            num_updates=updates,
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("world", "micro", "updates", "per_forward"),
    list(itertools.product([1, 2, 4, 8], [1, 2, 3, 8, 100], [1, 2, 4], [None, 1, 2, 3, 7])),
)
def test_properties(world: int, micro: int, updates: int, per_forward: int | None) -> None:
    groups, candidates = 4, 8
    ranks = plan(groups, candidates, world, micro, updates, per_forward)
    everyone: collections.Counter[tuple[int, int, int]] = collections.Counter()
    for rank, planned in enumerate(ranks):
        assert len(planned) == updates
        for update in planned:
            mine = cells(update)
            assert len(mine) == len(set(mine)) == STEPS * groups * candidates // (world * updates)
            assert all(slot % world == rank for _, slot, _ in mine)
            # A candidate's steps all belong to the update that it belongs to.
            assert len(mine) == STEPS * len(set(candidates_of(update)))
            assert max(len(micro_batch.columns) for micro_batch in update) == min(per_forward or STEPS, STEPS)
            assert all(len(micro_batch.slots) == len(update[0].slots) for micro_batch in update)
            share = candidates // world
            assert len(update[0].slots) == (micro if share % micro == 0 else share)
            everyone.update(mine)
        # One sequence of collectives: the same groups in the same order with the same sizes on every rank.
        assert [[(m.group, len(m.slots), m.columns) for m in update] for update in planned] == [
            [(m.group, len(m.slots), m.columns) for m in update] for update in ranks[0]
        ]
    assert everyone == collections.Counter(itertools.product(range(groups), range(candidates), range(STEPS)))


def test_a_group_that_the_ranks_cannot_share_is_replayed_whole_by_each() -> None:
    ranks = plan(groups=2, candidates=3, world=2, micro=1, updates=2)
    assert ranks[0] == ranks[1]
    assert [candidates_of(update) for update in ranks[0]] == [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]


def test_one_group_can_feed_several_updates() -> None:
    ((first, second),) = plan(groups=1, candidates=4, world=1, micro=2, updates=2)
    assert candidates_of(first) == [(0, 0), (0, 1)]
    assert candidates_of(second) == [(0, 2), (0, 3)]


def test_a_forward_takes_no_more_steps_than_asked() -> None:
    (((whole, rest),),) = plan(groups=1, candidates=2, world=1, micro=2, updates=1, per_forward=2)
    assert (whole.slots, whole.columns) == ((0, 1), (0, 1))
    assert (rest.slots, rest.columns) == ((0, 1), (2,))


@pytest.mark.parametrize(
    ("groups", "candidates", "micro", "updates"), [(3, 4, 4, 2), (1, 4, 4, 2), (5, 8, 1, 3), (1, 1, 1, 2)]
)
def test_unequal_updates_and_cut_micro_batches_are_refused(
    groups: int, candidates: int, micro: int, updates: int
) -> None:
    with pytest.raises(TrainingError, match="num-updates-per-batch"):
        plan(groups, candidates, 1, micro, updates)
