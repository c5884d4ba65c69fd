"""One rank of the actor: holds the sharded policy and takes the clipped policy steps of a rollout.

Order of an `update`: all anchors are frozen before the first optimizer step; then each disjoint update accumulates
its micro-batches, clips the gradient, and steps. A non-finite loss or gradient is refused before the optimizer sees
it. This module leaves out Ray, rows and files (`relax_sdk.runtime`) and the wire (`relax_sdk.weight_sync`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from relax_sdk.config import FlowGrpoSection, FsdpSection, LoraSection, OptimizerSection
from relax_sdk.errors import TrainingError
from relax_sdk.objectives import grpo_clip_loss
from relax_sdk.protocols import GenerativeModelAdapter, Trajectory
from relax_sdk.training.optimizer import build_optimizer, lr_at_step
from relax_sdk.training.plan import MicroBatch, plan_updates
from relax_sdk.training.replay import replay_cells
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


@dataclasses.dataclass(frozen=True)
class TrainGroup:
    """A prompt group to train on: its trajectory and its K advantages (float64 [K])."""

    trajectory: Trajectory
    advantages: Tensor


@dataclasses.dataclass(frozen=True)
class UpdateReport:
    """What an update tells: ``train/...`` metrics, the same on every rank, and the lines of the debug fingerprint."""

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
        self.module = self._load()
        self._optimizer = build_optimizer(trainable_parameters(self.module), settings.optimizer)
        self._peak_lr: float = self._optimizer.defaults["lr"]

    def _load(self) -> nn.Module:
        settings = self._settings
        fsdp = settings.fsdp
        # Full training updates the loaded tensors themselves: they must not pass through a narrower dtype first.
        full = fsdp.trainable_mode == "full"
        dtype = TORCH_DTYPES[(fsdp.master_dtype if full else None) or fsdp.param_dtype]
        wave = settings.fsdp.load_wave_size or self._world
        bundle: Any = None
        for first in range(0, self._world, wave):
            if first <= self._rank < first + wave:
                bundle = self._adapter.load_train_model(
                    settings.model_path, revision=settings.model_revision, dtype=dtype
                )
            dist.barrier()
        module = prepare_module(
            bundle,
            fsdp=settings.fsdp,
            lora=settings.lora,
            target_modules=self.target_modules,
            block_module_names=self._adapter.block_module_names,
            mesh=init_device_mesh(self._device.type, (self._world,)),
            seed=settings.seed,
        )
        return module if settings.fsdp.cpu_offload else module.to(self._device)

    def update(self, groups: Sequence[TrainGroup]) -> UpdateReport:
        """Train on one rollout.

        Args:
            groups: all groups of the rollout, the same on every rank, in group order.

        Returns:
            See `UpdateReport`.

        Raises:
            TrainingError: ranks disagree about the plan, a value is not finite, or groups differ in size.
        """
        grpo = self._settings.flow_grpo
        _check_advantages(groups)
        sizes = {len(group.advantages) for group in groups}
        if len(sizes) != 1:
            raise TrainingError(f"groups of different sizes {sorted(sizes)} cannot share equal updates")
        updates = plan_updates(
            groups=len(groups),
            candidates=sizes.pop(),
            rank=self._rank,
            world=self._world,
            micro_batch_size=self._settings.micro_batch_size,
            num_updates=grpo.num_updates_per_batch,
        )
        self._check_aligned(updates)
        # Before the anchors: their forwards may leave parameters gathered, which would be counted on every rank.
        before = self._fingerprint() if self._settings.fsdp.debug_fingerprint else 0.0
        anchors = [[self._anchor(groups, micro) for micro in update] for update in updates]
        statistics = UpdateStatistics(self._device)
        statistics.add_parity(self._parity(groups, updates, anchors))
        for index, (update, frozen) in enumerate(zip(updates, anchors, strict=True)):
            self._one_update(index, groups, update, frozen, statistics)
        metrics = statistics.reduce()
        metrics["train/lr"] = self._optimizer.param_groups[0]["lr"]
        metrics["train/optimizer_steps"] = float(self.optimizer_steps)
        metrics["train/num_microbatches"] = float(sum(len(update) for update in updates))
        lines = self._fingerprint_lines(before, metrics) if self._settings.fsdp.debug_fingerprint else ()
        return UpdateReport(metrics=metrics, lines=lines)

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
            hold_gathered(self.module, self._settings.fsdp, last=position == len(update) - 1)
            group = groups[micro.group]
            log_prob = replay_cells(self._adapter, self.module, group.trajectory, micro.slots, device=self._device)
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
            statistics.add_micro_batch(index, loss.detach(), clip)
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
        return replay_cells(
            self._adapter, self.module, groups[micro.group].trajectory, micro.slots, device=self._device
        )

    def _parity(
        self, groups: Sequence[TrainGroup], updates: list[list[MicroBatch]], anchors: list[list[Tensor]]
    ) -> Tensor:
        """|replayed anchor - the engine's own log-prob| of every local cell, flat."""
        gaps = [
            (anchor.cpu() - groups[micro.group].trajectory.rollout_log_probs[list(micro.slots)]).abs().flatten()
            for update, frozen in zip(updates, anchors, strict=True)
            for micro, anchor in zip(update, frozen, strict=True)
        ]
        return torch.cat(gaps)

    def _degenerate(self, groups: Sequence[TrainGroup], update: list[MicroBatch]) -> bool:
        """Whether every advantage of the update is 0 on every rank; groups are known to all, so no collective."""
        return all(not bool(groups[micro.group].advantages.any()) for micro in update)

    def _clip_gradient(self) -> float:
        norm = nn.utils.clip_grad_norm_(trainable_parameters(self.module), self._settings.optimizer.clip_grad)
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
            for parameter in trainable_parameters(self.module)
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


def _check_advantages(groups: Sequence[TrainGroup]) -> None:
    """Refuse a non-finite advantage before any step; every rank holds all groups, so all of them raise together."""
    for group in groups:
        bad = (~group.advantages.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise TrainingError(
                f"advantage is {group.advantages[bad[0]].item()}",
                where=f"group {group.trajectory.group_index}, candidate {bad[0]}",
            )
