"""The Ray role that trains: one FSDP2 rank of the actor."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from relax_sdk.control import pulse
from relax_sdk.errors import TrainingError
from relax_sdk.protocols import AdapterConfig, SyncReport, TrainRow
from relax_sdk.registry import ModelSpec, WeightSyncSpec
from relax_sdk.rollout import read_sidecar
from relax_sdk.runtime.engine_link import ControlGroups, RayEngineLink
from relax_sdk.runtime.rows import RowQueue
from relax_sdk.training import TORCH_DTYPES, Trainer, TrainerSettings, TrainGroup, UpdateReport
from relax_sdk.weight_sync import WireWeights

__all__ = ["ActorRole", "SyncPlan"]


@dataclasses.dataclass(frozen=True)
class SyncPlan:
    """How this run's weights travel.

    Args:
        spec: the weight sync.
        mode: ``"full"`` or ``"adapter"``.
        wire_dtype: ``"bf16"`` or ``"fp32"``.
        bucket_size_mb: size of a bucket.
        ranks_per_engine: how many ranks one engine serves, ``--rollout-num-gpus-per-engine``.
    """

    spec: WeightSyncSpec
    mode: str
    wire_dtype: str
    bucket_size_mb: int
    ranks_per_engine: int


class ActorRole:
    """Runs inside a Ray actor, one per rank.

    Args:
        rank, world: position in the actor group.
        model: the model family.
        settings: the trainer's.
        sync: how weights travel.
        run_name: the run's rows in TransferQueue.
        timeout_s: of every collective.
        device: ``"cuda"`` or ``"cpu"``.
        threads: CPU threads of this process.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        model: ModelSpec,
        settings: TrainerSettings,
        sync: SyncPlan,
        run_name: str,
        timeout_s: float,
        device: str,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        self._rank, self._world = rank, world
        self._settings, self._sync = settings, sync
        self._run_name, self._timeout_s = run_name, timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None
        self._model = model
        # Ray shows a rank its own device only, so it is number 0.
        self._device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self._adapter: Any = None
        self._groups: ControlGroups | None = None
        self._trainer: Trainer | None = None
        self._rows: RowQueue | None = None

    def open_store(self) -> tuple[str, int]:
        """Open the store where the ranks find each other, on this rank's node; asked of rank 0 only.

        Returns:
            Its host and the port that it listens on, which is free because the system chose it.
        """
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, self._world, is_master=True, timeout=self._timeout, wait_for_workers=False)
        return host, self._store.port

    def start(self, host: str, port: int) -> None:
        """Join the process group and load the model; errors of either arrive whole, as a constructor's would not."""
        if self._store is None:
            self._store = TCPStore(host, port, self._world, is_master=False, timeout=self._timeout)
        self._adapter = self._model.load()()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            # gloo beside NCCL: with CPU offload the gradient norm is reduced over host tensors.
            "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._world,
            timeout=self._timeout,
        )
        self._groups = ControlGroups.create(
            rank=self._rank,
            world=self._world,
            ranks_per_engine=self._sync.ranks_per_engine,
            timeout_s=self._timeout_s,
        )
        self._trainer = Trainer(self._adapter, self._settings, device=self._device)

    def attach_rows(self) -> None:
        """Attach to the run's TransferQueue."""
        self._rows = RowQueue(self._run_name, start=False, timeout_s=self._timeout_s)

    def update(self, rollout_id: int, groups: int, candidates: int) -> UpdateReport:
        """Take the rollout's rows, read its sidecars, train; see `Trainer.update`."""
        trainer, rows = self._ready()
        taken = rows.take(rollout_id, groups=groups, candidates=candidates)
        report = trainer.update(
            [
                self._group(taken[start : start + candidates], trainer.policy_version)
                for start in range(0, len(taken), candidates)
            ]
        )
        report = dataclasses.replace(report, metrics=report.metrics | self._memory())
        if self._device.type == "cuda":
            # What training needed at its peak is the engines' now: a weight sync has both on the device.
            torch.cuda.empty_cache()
        return report

    def offload(self) -> None:
        """Give the device memory of weights and optimizer away; see `Trainer.offload`."""
        trainer, _ = self._ready()
        trainer.offload()

    def wake(self) -> None:
        """Take it again; see `Trainer.wake`."""
        trainer, _ = self._ready()
        trainer.wake()

    def device_bytes(self) -> int | None:
        """Used memory of this rank's device, whoever uses it; None on a CPU."""
        if self._device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def visible_devices(self) -> tuple[str, str]:
        """Node id, and what Ray set ``CUDA_VISIBLE_DEVICES`` to for this rank (empty on a CPU)."""
        on_gpu = self._device.type == "cuda"
        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"] if on_gpu else ""

    def reads(self, path: str, *, wait_s: float) -> str:
        """The text of a file, which a shared file system may show a little later; empty when it does not."""
        deadline = time.monotonic() + wait_s
        while not Path(path).is_file():
            if time.monotonic() > deadline:
                return ""
            time.sleep(0.2)
        return Path(path).read_text(encoding="utf-8")

    def ping(self) -> tuple[str, int]:
        """Machine and process; it waits its turn behind a running call."""
        return pulse()

    def _memory(self) -> dict[str, float]:
        """``perf/mem_*`` of the worst rank, in 10^9 bytes; nothing on a CPU."""
        if self._device.type != "cuda":
            return {}
        bytes_ = [
            torch.cuda.memory_allocated(self._device),
            torch.cuda.memory_reserved(self._device),
            torch.cuda.max_memory_allocated(self._device),
        ]
        worst = torch.tensor(bytes_, dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        torch.cuda.reset_peak_memory_stats(self._device)
        names = ("perf/mem_allocated_gb", "perf/mem_reserved_gb", "perf/mem_peak_gb")
        return dict(zip(names, (worst / 1e9).tolist(), strict=True))

    def sync(self, engines: Sequence[Any], policy_version: int) -> SyncReport:
        """Send the weights to this rank's engine, in one transaction with the other ranks and engines.

        Raises:
            WeightSyncError: on every rank, when anything failed on any; the policy version stays.
        """
        trainer, _ = self._ready()
        assert self._groups is not None
        lora, plan = self._settings.lora, self._sync
        weights = WireWeights(
            trainer.module,
            mode=plan.mode,
            dtype=TORCH_DTYPES[plan.wire_dtype],
            name_map=self._adapter.weight_name_map(),
            lora_rank=lora.rank,
            lora_alpha=lora.scale_numerator,
        )
        adapter = None
        if plan.mode == "adapter":
            adapter = AdapterConfig(
                rank=lora.rank, alpha=lora.scale_numerator, target_modules=tuple(trainer.target_modules)
            )
        link = RayEngineLink(
            engines,
            groups=self._groups,
            rank=self._rank,
            world=self._world,
            ranks_per_engine=plan.ranks_per_engine,
            timeout_s=self._timeout_s,
        )
        sync_class: Any = plan.spec.load()
        report: SyncReport = sync_class(bucket_size_mb=plan.bucket_size_mb, device=self._device).run(
            iter(weights),
            link,
            manifest=weights.manifest,
            tensors=weights.tensors,
            dtype=weights.dtype,
            policy_version=policy_version,
            adapter=adapter,
        )
        trainer.policy_version = policy_version
        return report

    def _group(self, rows: Sequence[TrainRow], policy_version: int) -> TrainGroup:
        """Read a group's sidecar and pair it with its rows' advantages."""
        trajectory = read_sidecar(Path(rows[0].sidecar))
        where = f"sidecar {rows[0].sidecar}"
        if {row.sidecar for row in rows} != {rows[0].sidecar} or trajectory.group_index != rows[0].group_index:
            raise TrainingError("rows of one group point at different sidecars", where=where)
        if trajectory.rollout_id != rows[0].rollout_id:
            raise TrainingError(
                f"sidecar of rollout {trajectory.rollout_id}, rows of {rows[0].rollout_id}", where=where
            )
        if trajectory.sample_indices.tolist() != [row.slot for row in rows]:
            raise TrainingError("sidecar and rows disagree about the candidates", where=where)
        if len({(row.sampling_fingerprint, row.weight_manifest_hash) for row in rows}) != 1:
            raise TrainingError("rows of one group were sampled with different settings or weights", where=where)
        versions = {trajectory.policy_version, policy_version, *(row.policy_version for row in rows)}
        if len(versions) != 1:
            raise TrainingError(
                f"rollout of policy version {trajectory.policy_version}, actor at {policy_version}", where=where
            )
        return TrainGroup(
            trajectory=trajectory, advantages=torch.tensor([row.advantage for row in rows], dtype=torch.float64)
        )

    def _ready(self) -> tuple[Trainer, RowQueue]:
        if self._trainer is None or self._rows is None:
            raise TrainingError("the rank was used before start and attach_rows")
        return self._trainer, self._rows
