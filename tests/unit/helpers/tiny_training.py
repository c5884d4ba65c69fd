"""Rollouts, a trainer and a plain reference of its update for the tiny family; also what a spawned rank runs."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_family import SCHEDULER, TinyAdapter, TinyTransformer, reference_log_prob, reference_moments
from tiny_sync import embedded_engine
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relax_sdk.config import FlowGrpoSection, FsdpSection, LoraSection, OptimizerSection
from relax_sdk.errors import TrainingError
from relax_sdk.protocols import PromptRecord, SamplingConfig
from relax_sdk.rollout import plan_groups
from relax_sdk.training import Trainer, TrainerSettings, TrainGroup, trainer
from relax_sdk.weight_sync import strip_transport_wrappers
from relax_sdk.weights import inject_lora

LR, EPS, CLIP = 0.02, 1e-4, 2e-3


def tiny_groups(
    count: int = 4, candidates: int = 4, *, steps: tuple[int, ...] = (1, 3), seed: int = 0
) -> list[TrainGroup]:
    """Groups sampled by the embedded engine, with made-up advantages."""
    adapter, sampling = TinyAdapter(), SamplingConfig(num_inference_steps=6)
    engine = embedded_engine(adapter)
    plans = plan_groups(
        [PromptRecord(prompt=f"prompt {n}", prompt_id=str(n)) for n in range(count)],
        rollout_id=0,
        samples_per_prompt=candidates,
        sampling=sampling,
        generation_seed=seed,
        policy_version=0,
        sde_indices=steps,
    )
    asked = [adapter.build_rollout_request(plan, sampling, scheduler_config=SCHEDULER) for plan in plans]
    generator = torch.Generator().manual_seed(seed)
    return [
        TrainGroup(
            trajectory=_plain(adapter.pack_trajectory(request, response)),
            advantages=torch.randn(candidates, generator=generator, dtype=torch.float64),
        )
        for request, response in zip(asked, engine.generate(asked), strict=True)
    ]


def _plain(trajectory: Any) -> Any:
    """Ordinary tensors: an engine's are made in inference mode, which a sidecar's round trip ends."""
    values = {name: value.clone() if isinstance(value, Tensor) else value for name, value in dict(trajectory).items()}
    return type(trajectory)(**{**values, "conditions": {k: v.clone() for k, v in trajectory.conditions.items()}})


def settings(
    *,
    mode: str = "full",
    micro: int = 2,
    steps: int | None = None,
    updates: int = 1,
    fsdp: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **grpo: Any,
) -> TrainerSettings:
    lora = LoraSection(rank=2, alpha=4.0) if mode == "lora" else LoraSection()
    return TrainerSettings(
        model_path="",
        model_revision=None,
        fsdp=FsdpSection(**{"trainable_mode": mode, "param_dtype": "fp32", "master_dtype": "fp32", **(fsdp or {})}),
        lora=lora,
        # A large eps keeps AdamW smooth: with a tiny one, rounding in a gradient near 0 flips a whole step.
        optimizer=OptimizerSection(**{"lr": LR, "adam_eps": EPS, "clip_grad": 1e6, **(optimizer or {})}),
        flow_grpo=FlowGrpoSection(**{"eps_clip": CLIP, "num_updates_per_batch": updates, **grpo}),
        micro_batch_size=micro,
        seed=3,
        replay_steps_per_forward=steps,
    )


def make_trainer(adapter: TinyAdapter | None = None, **changes: Any) -> Trainer:
    return Trainer(adapter or TinyAdapter(), settings(**changes), device=torch.device("cpu"))


def repeatable(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on time."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {strip_transport_wrappers(name): whole(tensor) for name, tensor in module.named_parameters()}


@contextmanager
def captured_gradients(module: nn.Module) -> Iterator[list[dict[str, Tensor]]]:
    """Full gradients by name, as each optimizer step sees them."""
    seen: list[dict[str, Tensor]] = []

    def note(*_: object) -> None:
        seen.append(
            {
                strip_transport_wrappers(name): whole(tensor.grad)
                for name, tensor in module.named_parameters()
                if tensor.grad is not None
            }
        )

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


@dataclasses.dataclass
class Reference:
    """One rollout's updates without sharding, micro-batches or float32."""

    gradients: list[dict[str, Tensor]]
    losses: list[float]
    ratios: list[Tensor]
    weights: dict[str, Tensor]


def reference_update(
    groups: Sequence[TrainGroup], *, updates: int = 1, mode: str = "full", clip: float = CLIP, high: float | None = None
) -> Reference:
    """The whole objective as one expression, float64, plain autograd; group order is split into equal updates."""
    model = TinyTransformer().double()
    if mode == "lora":
        inject_lora(model, rank=2, alpha=4.0, target_modules=("to_q", "to_out"), seed=3)
        for name, parameter in model.named_parameters():
            # The trainer's A is drawn in float32.
            parameter.data = parameter.data.double()
            assert parameter.requires_grad == ("lora_" in name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=0.0)
    per_update = len(groups) // updates
    with torch.no_grad():
        anchors = [reference_cells(model, group) for group in groups]
    result = Reference([], [], [], {})
    for update in range(updates):
        losses, ratios = [], []
        for index in range(update * per_update, (update + 1) * per_update):
            rho = torch.exp(reference_cells(model, groups[index]) - anchors[index])
            advantage = groups[index].advantages[:, None]
            bounded = rho.clamp(1 - clip, 1 + (clip if high is None else high))
            losses.append(torch.maximum(-advantage * rho, -advantage * bounded).flatten())
            ratios.append(rho.detach().flatten())
        loss = torch.cat(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        result.gradients.append(
            {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}
        )
        result.losses.append(loss.item())
        result.ratios.append(torch.cat(ratios))
        optimizer.step()
    result.weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return result


def reference_cells(model: nn.Module, group: TrainGroup) -> Tensor:
    """Log-probabilities [K, S] of a group, float64, one step at a time."""
    stored = group.trajectory
    text = stored.conditions["encoder_hidden_states"].double().mean()
    columns = []
    for column, step in enumerate(stored.sde_indices.tolist()):
        here, after = float(stored.sigmas[step]), float(stored.sigmas[step + 1])
        x = stored.latents[:, column].double()
        rows = x.shape[0]
        v = model(x, torch.full((rows,), here, dtype=torch.float64), text.expand(rows))
        mean, tau = reference_moments(
            x, v, here, after, eta=stored.eta, sde_type=stored.sde_type, clamp=stored.sigma_clamp
        )
        columns.append(reference_log_prob(stored.next_latents[:, column], mean, tau))
    return torch.stack(columns, 1)


# --- what the ranks of a two-process test run -------------------------------------------------------------------------


def _join(rank: int, folder: str, world: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=20))


def four_rank_entry(rank: int, folder: str) -> None:
    """One update with all weights and one with LoRA, to ``<folder>/rank<rank>.pt``."""
    _join(rank, folder, 4)
    results = {mode: rank_update(mode, candidates=4) for mode in ("full", "lora")}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def two_rank_entry(rank: int, folder: str) -> None:
    """Run every scenario on this rank and write what came of it to ``<folder>/rank<rank>.pt``."""
    from offload_ranks import offload_scenarios

    _join(rank, folder, 2)
    results = {
        "full": rank_update("full", candidates=4),
        "lora": rank_update("lora", candidates=4),
        "redundant": rank_update("full", candidates=3),
        "uncentred": rank_update("full", candidates=4, shift=2.0),
        **offload_scenarios(),
        "misaligned": misaligned_error(rank),
        # Last: ranks that part ways here have no common collective afterwards.
        "poisoned": poisoned_candidate_of_the_other_rank(),
    }
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def shifted(groups: list[TrainGroup], shift: float) -> list[TrainGroup]:
    """The groups with a constant added to every advantage."""
    return [dataclasses.replace(group, advantages=group.advantages + shift) for group in groups]


def rank_update(mode: str, *, candidates: int, shift: float = 0.0) -> dict[str, Any]:
    adapter = TinyAdapter()
    made = make_trainer(adapter, mode=mode, micro=1, updates=2)
    with captured_gradients(made.module) as gradients:
        metrics = repeatable(made.update(shifted(tiny_groups(4, candidates), shift)).metrics)
    replayed = sum(latents.shape[0] for grad, latents in adapter.forwards if grad)
    return {"metrics": metrics, "weights": weights(made.module), "gradients": gradients, "replayed": replayed}


def poisoned_candidate_of_the_other_rank() -> str:
    """A NaN advantage of candidate 1 of group 3, which rank 1 replays: what each rank says about it."""
    made = make_trainer(mode="full", micro=1, updates=2)
    groups = tiny_groups(4, 4)
    groups[3].advantages[1] = float("nan")
    try:
        made.update(groups)
    except (TrainingError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def misaligned_error(rank: int) -> str:
    """Rank 1 believes in fewer micro-batches than rank 0."""
    made = make_trainer(mode="full", micro=1)
    true_plan = trainer.plan_updates

    def wrong_plan(**arguments: Any) -> Any:
        plan = true_plan(**arguments)
        return [plan[0][:-1]] if rank == 1 else plan

    trainer.plan_updates = wrong_plan
    try:
        made.update(tiny_groups(2, 4))
    except TrainingError as error:
        return str(error)
    finally:
        trainer.plan_updates = true_plan
    return "trained"
