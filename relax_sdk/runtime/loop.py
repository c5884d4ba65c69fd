"""The run: open the cluster, evaluate, step, evaluate, and leave a folder that tells what happened."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TypeVar

from relax_sdk.config import RunConfig
from relax_sdk.data import PromptSampler, load_prompts
from relax_sdk.errors import ConfigError
from relax_sdk.files import write_text_atomically
from relax_sdk.metrics import MetricsLogger, open_run_metrics, plot_curve
from relax_sdk.registry import Registry
from relax_sdk.rewards import RewardManager
from relax_sdk.rollout import RolloutDriver
from relax_sdk.runtime.cluster import Cluster, open_cluster
from relax_sdk.runtime.evaluation import Evaluation, Evaluator
from relax_sdk.runtime.observer import Observer, SilentObserver
from relax_sdk.runtime.recovery import Recovery
from relax_sdk.runtime.samples import draw_samples
from relax_sdk.runtime.step import StepContext, run_step
from relax_sdk.runtime.turns import Turns

__all__ = ["TrainResult", "train"]

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves.

    Attributes:
        run_dir: the run's folder.
        rollouts: how many were trained.
        policy_version: of the final weights.
        evaluations: every held-out pass, the baseline first; empty without ``--eval-prompt-data``.
    """

    run_dir: Path
    rollouts: int
    policy_version: int
    evaluations: tuple[Evaluation, ...]


def train(config: RunConfig, *, registry: Registry, observer: Observer | None = None) -> TrainResult:
    """Run the whole training.

    Args:
        config: resolved and checked by preflight.
        registry: looks up the plug-ins.
        observer: told about progress.

    Raises:
        RelaxError: whatever went wrong; by then every role has been stopped.
        KeyboardInterrupt: likewise.
    """
    watcher = observer or SilentObserver()
    prompts = load_prompts(_required(config.rollout.prompt_data, "--prompt-data"), task=config.model.generation_task)
    held_out = config.rollout.eval_prompt_data
    held_out_prompts = load_prompts(held_out[1], task=config.model.generation_task) if held_out else ()
    scheduler_config = _scheduler_config(config)
    run_dir = _new_run_dir(config)
    write_text_atomically(run_dir / "recipe.json", json.dumps(config.to_recipe(), indent=2, ensure_ascii=False) + "\n")
    watcher.line(f"run folder: {run_dir}")
    with (
        open_run_metrics(
            run_dir,
            num_rollout=config.run.num_rollout,
            use_tensorboard=config.run.use_tensorboard,
            write_line=watcher.line,
        ) as metrics,
        open_cluster(config, registry, observer=watcher) as cluster,
    ):
        sampler = PromptSampler(
            prompts,
            batch_size=_required(config.rollout.rollout_batch_size, "--rollout-batch-size"),
            seed=config.run.rollout_seed,
        )
        context = _context(config, registry, cluster, sampler, watcher, scheduler_config)
        evaluator = None
        if held_out:
            evaluator = Evaluator(
                name=held_out[0],
                prompts=held_out_prompts,
                samples_per_prompt=config.rollout.n_samples_per_eval_prompt,
                driver=context.driver,
                rewards=context.rewards,
                recovery=context.recovery,
            )
        rollouts, evaluations = _rounds(context, evaluator, metrics, watcher)
    _pictures(run_dir, evaluator, rollouts, evaluations, watcher)
    return TrainResult(
        run_dir=run_dir,
        rollouts=rollouts,
        policy_version=rollouts,
        evaluations=tuple(evaluations),
    )


def _rounds(
    context: StepContext, evaluator: Evaluator | None, metrics: MetricsLogger, watcher: Observer
) -> tuple[int, list[Evaluation]]:
    """Every rollout, with an evaluation before the first, at each interval, and after the last.

    A wish to stop ends it after the rollout under way, without a further evaluation.

    Returns:
        How many rollouts were trained, and the evaluations.
    """
    config, control = context.config, context.cluster.control
    total, interval = config.run.num_rollout, config.rollout.eval_interval
    evaluations: list[Evaluation] = []

    def evaluate(step: int) -> None:
        if evaluator is None:
            return
        control.publish(state="evaluating")
        evaluation = evaluator.run(step, step, phase=watcher.phase)
        evaluations.append(evaluation)
        metrics.log(step, evaluation.metrics)

    evaluate(0)
    manifest_hash = ""
    for rollout_id in range(total):
        # The policy version counts the committed syncs, one per rollout.
        record, report = run_step(context, rollout_id, rollout_id, manifest_hash)
        manifest_hash = report.manifest.ordered_name_shape_hash
        step = rollout_id + 1
        metrics.log(step, record)
        control.publish(policy_version=step, metrics=record)
        if step < total and control.stop_requested():
            control.publish(state="stopping")
            watcher.line(f"stopped as asked, after {step} of {total} rollouts")
            return step, evaluations
        if step == total or (interval is not None and step % interval == 0):
            evaluate(step)
    return total, evaluations


def _context(
    config: RunConfig,
    registry: Registry,
    cluster: Cluster,
    prompts: PromptSampler,
    watcher: Observer,
    scheduler_config: dict[str, object],
) -> StepContext:
    reward = registry.reward(str(config.reward.scorer_path))
    driver = RolloutDriver(
        adapter=registry.model(str(config.model.model_adapter_path)).load()(),
        sampling=config.sampling.sampling_config,
        scheduler_config=scheduler_config,
        fleet=cluster.fleet,
        artifact_root=config.artifact_root,
        task=config.model.generation_task,
        generation_seed=config.sampling.generation_seed,
        wave_size=config.rollout.rollout_wave_size,
        retention=config.artifact.retention_rollouts,
    )
    rewards = RewardManager(
        cluster.fleet,
        required_components=tuple(config.reward.required_components or cluster.fleet.components),
        component_weights=config.reward.component_weights or dict.fromkeys(cluster.fleet.components, 1.0),
        name=reward.name,
        where=reward.import_string,
    )
    turns = Turns(
        cluster.actor,
        cluster.fleet,
        offload_train=config.backend.offload_train,
        offload_rollout=config.backend.offload_rollout,
    )
    recovery = Recovery(
        actor=cluster.actor,
        fleet=cluster.fleet,
        turns=turns,
        enabled=config.backend.use_fault_tolerance,
        line=watcher.line,
    )
    return StepContext(
        recovery=recovery,
        config=config,
        prompts=prompts,
        driver=driver,
        rewards=rewards,
        cluster=cluster,
        phase=watcher.phase,
        line=watcher.line,
    )


def _pictures(
    run_dir: Path,
    evaluator: Evaluator | None,
    rollouts: int,
    evaluations: list[Evaluation],
    watcher: Observer,
) -> None:
    """``curve.png``, and ``samples.png`` when there are held-out images from before and after."""
    plot_curve(run_dir / "metrics.jsonl", run_dir / "curve.png")
    watcher.line(f"curve: {run_dir / 'curve.png'}")
    if evaluator is None or len(evaluations) < 2 or not evaluations[0].images:
        return
    draw_samples(
        run_dir / "samples.png",
        prompts=[prompt.prompt for prompt in evaluator.prompts],
        before=evaluations[0].images,
        after=evaluations[-1].images,
        title=f"Held-out prompts before and after {rollouts} rollouts (same noise, ODE sampler)",
    )
    watcher.line(f"samples before and after: {run_dir / 'samples.png'}")


def _scheduler_config(config: RunConfig) -> dict[str, object]:
    path = Path(_required(config.model.model_path, "--model-path")) / "scheduler" / "scheduler_config.json"
    try:
        loaded: dict[str, object] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the noise schedule: {error}", where=str(path)) from error
    return loaded


def _new_run_dir(config: RunConfig) -> Path:
    """Create the run's folder. Folders that hold another run's files are refused: nothing is mixed or pruned."""
    run_dir, artifacts = config.run_dir, config.artifact_root / config.model.generation_task
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        used = next((path for path in (run_dir, artifacts) if path.is_dir() and any(path.iterdir())), None)
    except OSError as error:
        raise ConfigError(f"cannot use the run folder: {error.strerror}", where=str(run_dir)) from error
    if used is not None:
        raise ConfigError(
            f"{str(used)!r} is not empty", where="--run-dir, --artifact-root", expected="a new or an empty folder"
        )
    return run_dir


def _required(value: _T | None, flag: str) -> _T:
    if value is None:
        raise ConfigError("a value is missing", where=flag, next_step="relax-sdk preflight")
    return value
