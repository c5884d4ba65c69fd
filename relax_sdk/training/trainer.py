"""One rank of the actor: holds the sharded policy and takes the clipped policy steps of a rollout.

Order of an `update`: all anchors are frozen before the first optimizer step; then each disjoint update accumulates
its micro-batches, clips the gradient, and steps. A non-finite loss or gradient is refused before the optimizer sees
it. Between updates a rank can give its device memory away (`Trainer.offload`). This module leaves out Ray, rows and
files (`relax_sdk.runtime`) and the wire (`relax_sdk.weight_sync`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from relax_sdk.config import FlowGrpoSection, FsdpSection, LoraSection, OptimizerSection
from relax_sdk.errors import TrainingError
from relax_sdk.objectives import grpo_clip_loss
from relax_sdk.protocols import GenerativeModelAdapter, Trajectory
from relax_sdk.training.flops import FlopsModel, measure_matrix_rate
from relax_sdk.training.offload import StorageOffload
from relax_sdk.training.optimizer import build_optimizer, lr_at_step
from relax_sdk.training.plan import MicroBatch, plan_updates
from relax_sdk.training.replay import replay_cells, replay_geometry
from relax_sdk.training.sharding import TORCH_DTYPES, hold_gathered, prepare_module, trainable_parameters
from relax_sdk.training.statistics import UpdateStatistics

__all__ = ["TrainGroup", "Trainer", "TrainerSettings", "UpdateReport"]


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """What a rank needs to know; sections of the run's configuration plus the model."""

    model_path: str
    model_revision: str | None
    fsdp: FsdpSection
    lora: LoraSection
    optimizer: OptimizerSection
    flow_grpo: FlowGrpoSection
    micro_batch_size: int
    seed: int
    replay_steps_per_forward: int | None = None


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """A prompt group to train on: its trajectory and its K advantages (float64 [K])."""

    trajectory: Trajectory
    advantages: Tensor


@dataclasses.dataclass(frozen=True)
class UpdateReport:
    """What an update tells: ``train/...`` and ``perf/...`` metrics, the same on every rank, and debug lines."""

    metrics: dict[str, float]
    lines: tuple[str, ...] = ()


class Trainer:
    """One FSDP2 rank. The process group must be initialised before.

    Args:
        adapter: the model family.
        settings: see `TrainerSettings`.
        device: this rank's device.
    """

    def __init__(self, adapter: GenerativeModelAdapter, settings: TrainerSettings, *, device: torch.device) -> None:
        self._adapter = adapter
        self._settings = settings
        self._device = device
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.optimizer_steps = 0
        self.policy_version = 0
        self.target_modules = tuple(settings.lora.target_modules or adapter.lora_target_modules)
        self._module = self._load()
        self._optimizer = build_optimizer(trainable_parameters(self._module), settings.optimizer)
        self._peak_lr: float = self._optimizer.defaults["lr"]
        self._offload = StorageOffload(self._module, self._optimizer, device=device)
        self._flops = FlopsModel(self._module)
        self._matrix_rate: float | None = None

    @property
    def module(self) -> nn.Module:
        """The sharded policy.

        Raises:
            TrainingError: its weights are offloaded.
        """
        self._offload.require_resident("the policy's module")
        return self._module

    @property
    def is_offloaded(self) -> bool:
        """Whether the rank has given its device memory away."""
        return self._offload.is_offloaded

    def offload(self) -> int:
        """Free this rank's weights and optimizer state on the device; see `StorageOffload.offload`."""
        return self._offload.offload()

    def wake(self) -> int:
        """Undo `offload`, bit for bit; see `StorageOffload.wake`."""
        return self._offload.wake()

    def _load(self) -> nn.Module:
        """In waves: a rank's whole copy leaves the host, sharded to its device, before the next wave loads."""
        mesh = init_device_mesh(self._device.type, (self._world,))
        wave = self._settings.fsdp.load_wave_size or self._world
        turn, turns = self._rank // wave, -(-self._world // wave)
        for _ in range(turn):
            dist.barrier()
        module = self._load_and_shard(mesh)
        for _ in range(turns - turn):
            dist.barrier()
        return module

    def _load_and_shard(self, mesh: DeviceMesh) -> nn.Module:
        settings = self._settings
        fsdp = settings.fsdp
        # Full training updates the loaded tensors themselves: they must not pass through a narrower dtype first.
        full = fsdp.trainable_mode == "full"
        dtype = TORCH_DTYPES[(fsdp.master_dtype if full else None) or fsdp.param_dtype]
        module = prepare_module(
            self._adapter.load_train_model(settings.model_path, revision=settings.model_revision, dtype=dtype),
            fsdp=fsdp,
            lora=settings.lora,
            target_modules=self.target_modules,
            block_module_names=self._adapter.block_module_names,
            mesh=mesh,
            seed=settings.seed,
        )
        return module if fsdp.cpu_offload else module.to(self._device)

    def update(self, groups: Sequence[TrainGroup]) -> UpdateReport:
        """Train on one rollout.

        Args:
            groups: all groups of the rollout, the same on every rank, in group order.

        Returns:
            See `UpdateReport`.

        Raises:
            TrainingError: the weights are offloaded, ranks disagree about the plan, a value is not finite, or groups
                differ in size.
        """
        self._offload.require_resident("update()")
        _check_advantages(groups)
        updates = self._plan(groups)
        self._check_aligned(updates)
        rate = self._measured_matrix_rate()
        start = time.perf_counter()
        # Before the anchors: their forwards may leave parameters gathered, which would be counted on every rank.
        before = self._fingerprint() if self._settings.fsdp.debug_fingerprint else 0.0
        anchors = [[self._anchor(groups, micro) for micro in update] for update in updates]
        statistics = UpdateStatistics(self._device)
        statistics.add_parity(self._parity(groups, updates, anchors))
        for index, (update, frozen) in enumerate(zip(updates, anchors, strict=True)):
            self._one_update(index, groups, update, frozen, statistics)
        metrics = statistics.reduce()
        # The reduction has waited for the device.
        metrics |= self._throughput(groups, updates, time.perf_counter() - start, rate)
        metrics["train/lr"] = self._optimizer.param_groups[0]["lr"]
        metrics["train/optimizer_steps"] = float(self.optimizer_steps)
        metrics["train/num_microbatches"] = float(sum(len(update) for update in updates))
        lines = self._fingerprint_lines(before, metrics) if self._settings.fsdp.debug_fingerprint else ()
        return UpdateReport(metrics=metrics, lines=lines)

    def _plan(self, groups: Sequence[TrainGroup]) -> list[list[MicroBatch]]:
        sizes = {len(group.advantages) for group in groups}
        if len(sizes) != 1:
            raise TrainingError(f"groups of different sizes {sorted(sizes)} cannot share equal updates")
        steps = {len(group.trajectory.sde_indices) for group in groups}
        if len(steps) != 1 or 0 in steps:
            raise TrainingError(
                f"groups have {sorted(steps)} trained steps", expected="the same number in every group, at least 1"
            )
        return plan_updates(
            groups=len(groups),
            candidates=sizes.pop(),
            steps=steps.pop(),
            rank=self._rank,
            world=self._world,
            micro_batch_size=self._settings.micro_batch_size,
            steps_per_forward=self._settings.replay_steps_per_forward,
            num_updates=self._settings.flow_grpo.num_updates_per_batch,
        )

    def _one_update(
        self,
        index: int,
        groups: Sequence[TrainGroup],
        update: list[MicroBatch],
        frozen: list[Tensor],
        statistics: UpdateStatistics,
    ) -> None:
        grpo, optimizer = self._settings.flow_grpo, self._optimizer
        cells = sum(anchor.numel() for anchor in frozen)
        optimizer.zero_grad(set_to_none=True)
        for position, (micro, anchor) in enumerate(zip(update, frozen, strict=True)):
            hold_gathered(self._module, self._settings.fsdp, last=position == len(update) - 1)
            group = groups[micro.group]
            with self._flops.counting(replay_geometry(group.trajectory, micro.slots, micro.columns)):
                log_prob = self._replay(group, micro)
            advantages = group.advantages[list(micro.slots)].to(self._device, torch.float32)
            loss, clip = grpo_clip_loss(
                log_prob, anchor, advantages, eps_clip=grpo.eps_clip, eps_clip_high=grpo.eps_clip_high
            )
            if not bool(loss.isfinite()):
                raise TrainingError(
                    f"loss is {loss.item()}: the optimizer step was refused",
                    where=f"group {group.trajectory.group_index}, candidates {list(micro.slots)}, update {index}",
                )
            # Every micro-batch adds its cells' share of one mean, so their number does not change the gradient.
            torch.autograd.backward(loss / cells)
            statistics.add_micro_batch(index, clip)
        if self._degenerate(groups, update):
            # AdamW moves weights by momentum and decay even on a zero gradient; no signal means no step.
            statistics.skips += len(update)
            return
        norm = self._clip_gradient()
        if not math.isfinite(norm):
            raise TrainingError(f"gradient norm is {norm}: the optimizer step was refused", where=f"update {index}")
        statistics.add_grad_norm(norm)
        config = self._settings.optimizer
        rate = lr_at_step(
            self.optimizer_steps,
            lr=self._peak_lr,
            warmup=config.lr_warmup_iters,
            shape=self._settings.fsdp.lr_scheduler,
            decay=config.lr_decay_iters,
            min_lr=config.min_lr,
        )
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1

    @torch.no_grad()
    def _anchor(self, groups: Sequence[TrainGroup], micro: MicroBatch) -> Tensor:
        return self._replay(groups[micro.group], micro)

    def _replay(self, group: TrainGroup, micro: MicroBatch) -> Tensor:
        return replay_cells(
            self._adapter, self._module, group.trajectory, micro.slots, micro.columns, device=self._device
        )

    def _parity(
        self, groups: Sequence[TrainGroup], updates: list[list[MicroBatch]], anchors: list[list[Tensor]]
    ) -> Tensor:
        """|replayed anchor - the engine's own log-prob| of every local cell, flat."""
        gaps = [
            (anchor.cpu() - _engine_log_probs(groups[micro.group], micro)).abs().flatten()
            for update, frozen in zip(updates, anchors, strict=True)
            for micro, anchor in zip(update, frozen, strict=True)
        ]
        return torch.cat(gaps)

    def _degenerate(self, groups: Sequence[TrainGroup], update: list[MicroBatch]) -> bool:
        """Whether every advantage of the update is 0 on every rank; groups are known to all, so no collective."""
        return all(not bool(groups[micro.group].advantages.any()) for micro in update)

    def _measured_matrix_rate(self) -> float | None:
        """FLOP/s of matrix products in the compute dtype, measured once, when engines have left the device alone."""
        if self._matrix_rate is None and self._device.type == "cuda":
            self._matrix_rate = measure_matrix_rate(self._device, TORCH_DTYPES[self._settings.fsdp.param_dtype])
            torch.cuda.empty_cache()
        return self._matrix_rate

    def _throughput(
        self, groups: Sequence[TrainGroup], updates: list[list[MicroBatch]], seconds: float, rate: float | None
    ) -> dict[str, float]:
        """``perf/...``: mean FLOP/s of a device over the slowest rank's time; work that every rank repeats is one."""
        counts = [
            self._flops[replay_geometry(groups[micro.group].trajectory, micro.slots, micro.columns)]
            for update in updates
            for micro in update
        ]
        model = sum(2 * count.forward + count.backward for count in counts)
        repeated = len(groups[0].advantages) % self._world != 0
        mine = [model, sum(count.recompute for count in counts), rate or 0.0]
        total = torch.tensor(mine, dtype=torch.float64, device=self._device) / self._world
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        share = (total[:2] / slowest / (self._world if repeated else 1)).tolist()
        metrics = {"perf/train_tflops": share[0] / 1e12, "perf/train_recompute_tflops": share[1] / 1e12}
        if rate is not None:
            metrics["perf/mfu"] = share[0] / float(total[2])
        return metrics

    def _clip_gradient(self) -> float:
        norm = nn.utils.clip_grad_norm_(trainable_parameters(self._module), self._settings.optimizer.clip_grad)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _check_aligned(self, updates: list[list[MicroBatch]]) -> None:
        """All ranks must run the same number of micro-batches, or the collectives would hang."""
        count = sum(len(update) for update in updates)
        bounds = torch.tensor([count, -count], device=self._device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        most, fewest = int(bounds[0]), -int(bounds[1])
        if most != fewest:
            raise TrainingError(
                f"ranks disagree about the number of micro-batches: {fewest} to {most}, rank {self._rank} has {count}"
            )

    def _fingerprint(self) -> float:
        """Sum of |w| over all trainable weights of all ranks, float64."""
        local = [
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach().double().abs().sum()
            for parameter in trainable_parameters(self._module)
        ]
        total = torch.stack(local).sum().to(self._device)
        dist.all_reduce(total)
        return float(total)

    def _fingerprint_lines(self, before: float, metrics: dict[str, float]) -> tuple[str, ...]:
        after = self._fingerprint()
        return (
            f"[fingerprint] sum |w| {before:.9e} -> {after:.9e} ({'moved' if before != after else 'NOT moved'})",
            f"[logp parity] mean |replay - engine| {metrics['train/logp_parity_mean']:.3e}, "
            f"max {metrics['train/logp_parity_max']:.3e}; "
            f"first update max |rho - 1| {metrics['train/first_update_ratio_max_deviation']:.17g}",
        )


def _engine_log_probs(group: TrainGroup, micro: MicroBatch) -> Tensor:
    """What the engine recorded for the cells of a micro-batch, [B, S]."""
    return group.trajectory.rollout_log_probs[list(micro.slots)][:, list(micro.columns)]


def _check_advantages(groups: Sequence[TrainGroup]) -> None:
    """Refuse a non-finite advantage before any step; every rank holds all groups, so all of them raise together."""
    for group in groups:
        bad = (~group.advantages.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise TrainingError(
                f"advantage is {group.advantages[bad[0]].item()}",
                where=f"group {group.trajectory.group_index}, candidate {bad[0]}",
            )
