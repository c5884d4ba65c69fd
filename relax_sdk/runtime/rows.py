"""Training rows through TransferQueue: put once by the driver, read by every rank, removed once.

A row is numbers and a path. Keys are derived from the candidate, so a lost or repeated row is found by comparing
keys and never by waiting for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
from relax_sdk.runtime.bounded import bounded

__all__ = ["ROW_QUEUE_CPUS", "RowQueue"]

ROW_QUEUE_CPUS = 2
"""TransferQueue's two actors take one each."""
_START_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 30.0
_CONTROLLER = "TransferQueueController"
_STORAGE = "TransferQueueStorageUnit#0"
_T = TypeVar("_T")
_REWARD = "reward."
_TEXTS = ("sidecar", "sampling_fingerprint", "weight_manifest_hash")


class RowQueue:
    """One run's rows. The process that starts the queue also closes it; others attach.

    TransferQueue itself waits for ever where one of its actors cannot be placed or dies; nothing here does.

    Args:
        run_name: part of every partition's name.
        start: start the queue's actors (driver), or attach to them (ranks).
        timeout_s: for each operation later on.
        on: a Ray resource that only nodes with `ROW_QUEUE_CPUS` free have; without, the first node must.

    Raises:
        RunError: the cluster runs a queue already, or this one did not start.
    """

    def __init__(self, run_name: str, *, start: bool, timeout_s: float, on: str | None = None) -> None:
        self._run_name = run_name
        self._owner = start
        self._timeout_s = timeout_s
        self._actors: dict[str, Any] = {}
        storage = {"num_data_storage_units": 1} | ({"required_node_resource": on} if on else {})
        conf = OmegaConf.create({"backend": {"SimpleStorage": storage}}) if start else None
        if start and _queue_exists():
            raise RunError(
                "this Ray cluster already runs a TransferQueue, which serves one run at a time",
                where="RAY_ADDRESS",
                expected="a cluster without another run",
                next_step="wait for the other run to end, or unset RAY_ADDRESS to start a cluster of your own",
            )
        if not start and not _queue_exists():  # `init` would start another one
            raise RunError("TransferQueue's controller is gone", where="attaching to the row queue")
        try:
            self._bounded(
                "starting the row queue" if start else "attaching to the row queue",
                lambda: transfer_queue.init(conf),
                timeout_s=_START_TIMEOUT_S,
                expected=f"{ROW_QUEUE_CPUS} CPUs of {f'a node with {on}' if on else 'the cluster'} that nobody holds",
                give_up=_kill_queue if start else None,
            )
            self._actors = _living_actors()
        except BaseException:
            self.close()
            raise

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
        partition = self._partition(rollout_id)
        self._bounded("putting rows", lambda: transfer_queue.kv_batch_put(keys, partition, fields))

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
        listed = self._bounded("listing rows", lambda: transfer_queue.kv_list(partition))
        present = set(listed.get(partition, {}))
        lost, extra = sorted(set(expected) - present), sorted(present - set(expected))
        if lost or extra:
            raise RunError(
                f"rows of rollout {rollout_id}: {len(lost)} lost (first: {lost[:1]}), {len(extra)} too many "
                f"(first: {extra[:1]})",
                where="TransferQueue",
                expected=f"{groups} groups x {candidates} candidates",
            )
        data: Any = self._bounded("reading rows", lambda: transfer_queue.kv_batch_get(expected, partition))
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
        self._bounded("removing rows", lambda: transfer_queue.kv_clear(keys, self._partition(rollout_id)))

    def close(self) -> None:
        """Detach; the owner also stops the queue's actors. What stays behind ends with the run's processes."""
        if self._owner:
            self._owner = False
            self._actors = {}
            with contextlib.suppress(RunError):
                self._bounded("closing the row queue", transfer_queue.close, timeout_s=_CLOSE_TIMEOUT_S)

    def _bounded(self, what: str, call: Callable[[], _T], *, timeout_s: float | None = None, **further: Any) -> _T:
        return bounded(
            call,
            what=what,
            where="TransferQueue",
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            actors=self._actors,
            **further,
        )

    def _partition(self, rollout_id: int) -> str:
        return f"{self._run_name}/rollout_{rollout_id:07d}"


def _queue_exists() -> bool:
    try:
        ray.get_actor(_CONTROLLER, namespace="transfer_queue")
    except ValueError:
        return False
    return True


def _living_actors() -> dict[str, Any]:
    try:
        return {
            "TransferQueue's controller": ray.get_actor(_CONTROLLER, namespace="transfer_queue"),
            "TransferQueue's storage": ray.get_actor(_STORAGE),
        }
    except ValueError as error:
        raise RunError(f"the row queue ended as soon as it had started: {error}", where="TransferQueue") from error


def _kill_queue() -> None:
    """End the queue's actors, placed or not: whoever waits for them hears of it."""
    for name, namespace in ((_CONTROLLER, "transfer_queue"), (_STORAGE, None)):
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=namespace))


def _key(group: int, slot: int) -> str:
    return f"group_{group:08d}_sample_{slot:04d}"


def _one(values: list[Any], kind: str) -> Any:
    distinct = set(values)
    if len(distinct) != 1:
        raise RunError(f"rows of {len(distinct)} {kind} were put together: {sorted(distinct)[:3]}")
    return distinct.pop()
