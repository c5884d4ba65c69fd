"""How a rollout's candidates become micro-batches and disjoint updates, identically on every rank.

Every rank walks the groups in the same order, so the FSDP collectives of all ranks form one sequence. Within a
group rank r takes the candidates ``[r::world]`` when the world size divides K, else every rank replays the whole
group (correct, but redundant).
"""

from __future__ import annotations

import dataclasses

from relax_sdk.errors import TrainingError

__all__ = ["MicroBatch", "plan_updates"]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Cells of one group, candidates x trained steps, that go through the transformer together.

    Attributes:
        group: position of the group in the rollout.
        slots: positions of the candidates within the group.
        columns: positions of the steps among the trained steps.
    """

    group: int
    slots: tuple[int, ...]
    columns: tuple[int, ...]


def plan_updates(
    *,
    groups: int,
    candidates: int,
    steps: int,
    rank: int,
    world: int,
    micro_batch_size: int,
    steps_per_forward: int | None,
    num_updates: int,
) -> list[list[MicroBatch]]:
    """Split a rank's share into ``num_updates`` disjoint updates of equal sample counts.

    A share is cut into chunks of ``micro_batch_size`` only when that divides it: uneven chunks would change the
    weight of each mean, and the chunk sizes of the ranks. Trained steps are cut without that condition, since the last
    chunk is the shorter one on every rank; all steps of a candidate belong to one update.

    Args:
        groups: prompt groups P of the rollout.
        candidates: candidates K of each group.
        steps: trained steps S of each candidate.
        rank: this rank.
        world: ranks in all.
        micro_batch_size: candidates in one forward when that divides the share of a group; else the whole share.
        steps_per_forward: trained steps of a candidate in one forward, at most; None for all.
        num_updates: ``--num-updates-per-batch``.

    Returns:
        For each update its micro-batches, in order.

    Raises:
        TrainingError: the updates cannot be equal, or a micro-batch would lie across two of them.
    """
    share = tuple(range(rank, candidates, world)) if candidates % world == 0 else tuple(range(candidates))
    size = micro_batch_size if len(share) % micro_batch_size == 0 else len(share)
    chunks = [(group, share[start : start + size]) for group in range(groups) for start in range(0, len(share), size)]
    if len(chunks) % num_updates:
        raise TrainingError(
            f"{groups} groups x {len(share)} candidates per rank in micro-batches of {size} make {len(chunks)} "
            f"micro-batches, which {num_updates} equal updates cannot share without cutting one",
            where="--num-updates-per-batch",
            expected=f"a divisor of {len(chunks)}",
        )
    width = steps_per_forward or steps
    columns = [tuple(range(start, min(start + width, steps))) for start in range(0, steps, width)]
    per_update = len(chunks) // num_updates
    return [
        [MicroBatch(group, slots, part) for group, slots in chunks[start : start + per_update] for part in columns]
        for start in range(0, len(chunks), per_update)
    ]
