"""Training rows through TransferQueue: put once by the driver, read by every rank, removed once.

A row is numbers and a path. Keys are derived from the candidate, so a lost or repeated row is found by comparing
keys and never by waiting for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch

# A row is a few numbers; the library's default of 8 threads only makes it warn on smaller machines. Read at import.
os.environ.setdefault("TQ_NUM_THREADS", "1")
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from relax_sdk.errors import RunError
from relax_sdk.protocols import TrainRow

__all__ = ["RowQueue"]

_REWARD = "reward."
_TEXTS = ("sidecar", "sampling_fingerprint", "weight_manifest_hash")


class RowQueue:
    """One run's rows. The process that starts the queue also closes it; others attach.

    Args:
        run_name: part of every partition's name.
        start: start the queue's actors (driver), or attach to them (ranks).
    """

    def __init__(self, run_name: str, *, start: bool) -> None:
        self._run_name = run_name
        self._owner = start
        conf = OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}) if start else None
        if start and _queue_exists():
            raise RunError(
                "this Ray cluster already runs a TransferQueue, which serves one run at a time",
                where="RAY_ADDRESS",
                expected="a cluster without another run",
                next_step="wait for the other run to end, or unset RAY_ADDRESS to start a cluster of your own",
            )
        transfer_queue.init(conf)

    def put(self, rows: Sequence[TrainRow]) -> None:
        """Store the rows of one rollout.

        Raises:
            RunError: two rows stand for one candidate, rows mix rollouts, or their reward components differ.
        """
        rollout_id = _one([row.rollout_id for row in rows], "rollouts")
        components = _one([tuple(sorted(row.rewards)) for row in rows], "sets of reward components")
        keys = [_key(row.group_index, row.slot) for row in rows]
        if len(set(keys)) != len(keys):
            raise RunError(f"{len(keys) - len(set(keys))} rows of rollout {rollout_id} stand for the same candidate")
        fields = TensorDict(
            {
                "group_index": torch.tensor([row.group_index for row in rows]),
                "slot": torch.tensor([row.slot for row in rows]),
                "policy_version": torch.tensor([row.policy_version for row in rows]),
                "advantage": torch.tensor([row.advantage for row in rows], dtype=torch.float64),
            }
            | {name: NonTensorStack(*[getattr(row, name) for row in rows]) for name in _TEXTS}
            | {
                f"{_REWARD}{name}": torch.tensor([row.rewards[name] for row in rows], dtype=torch.float64)
                for name in components
            },
            batch_size=[len(rows)],
        )
        transfer_queue.kv_batch_put(keys=keys, partition_id=self._partition(rollout_id), fields=fields)

    def take(self, rollout_id: int, *, groups: int, candidates: int) -> list[TrainRow]:
        """Read all rows of a rollout, in (group, slot) order.

        Args:
            rollout_id: the round.
            groups, candidates: how many there must be.

        Raises:
            RunError: a row is missing or there is one too many; the first of them is named.
        """
        partition = self._partition(rollout_id)
        expected = [_key(group, slot) for group in range(groups) for slot in range(candidates)]
        present = set(transfer_queue.kv_list(partition).get(partition, {}))
        lost, extra = sorted(set(expected) - present), sorted(present - set(expected))
        if lost or extra:
            raise RunError(
                f"rows of rollout {rollout_id}: {len(lost)} lost (first: {lost[:1]}), {len(extra)} too many "
                f"(first: {extra[:1]})",
                where="TransferQueue",
                expected=f"{groups} groups x {candidates} candidates",
            )
        data: Any = transfer_queue.kv_batch_get(keys=expected, partition_id=partition)
        columns = {name: data[name].tolist() for name in data.keys()}  # noqa: SIM118 - a TensorDict is no mapping
        return [
            TrainRow(
                rollout_id=rollout_id,
                group_index=columns["group_index"][index],
                slot=columns["slot"][index],
                advantage=columns["advantage"][index],
                rewards={
                    name.removeprefix(_REWARD): column[index]
                    for name, column in columns.items()
                    if name.startswith(_REWARD)
                },
                **{name: columns[name][index] for name in _TEXTS},
                policy_version=columns["policy_version"][index],
            )
            for index in range(len(expected))
        ]

    def clear(self, rollout_id: int, *, groups: int, candidates: int) -> None:
        """Remove a rollout's rows once every rank has trained on them."""
        keys = [_key(group, slot) for group in range(groups) for slot in range(candidates)]
        transfer_queue.kv_clear(keys=keys, partition_id=self._partition(rollout_id))

    def close(self) -> None:
        """Detach; the owner also stops the queue's actors."""
        if self._owner:
            transfer_queue.close()

    def _partition(self, rollout_id: int) -> str:
        return f"{self._run_name}/rollout_{rollout_id:07d}"


def _queue_exists() -> bool:
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return False
    return True


def _key(group: int, slot: int) -> str:
    return f"group_{group:08d}_sample_{slot:04d}"


def _one(values: list[Any], kind: str) -> Any:
    distinct = set(values)
    if len(distinct) != 1:
        raise RunError(f"rows of {len(distinct)} {kind} were put together: {sorted(distinct)[:3]}")
    return distinct.pop()
