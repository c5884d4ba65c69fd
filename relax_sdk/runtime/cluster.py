"""Ray, the placement group, and the roles: started together, and stopped on every path.

Rank j and engine j share bundle j, and with it one device. Without CUDA the same roles run on CPU processes. Left
out: several nodes' storage checks, offload, restart of a role.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_sdk.config import RunConfig, is_chosen
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.preflight import available_cores
from relax_sdk.protocols import SyncReport
from relax_sdk.registry import Registry
from relax_sdk.runtime.actor_role import ActorRole, SyncPlan
from relax_sdk.runtime.calls import engine_names, rank_names, wait_all
from relax_sdk.runtime.fleet import RolloutFleet
from relax_sdk.runtime.rollout_role import RolloutRole
from relax_sdk.runtime.rows import RowQueue
from relax_sdk.training import TrainerSettings, UpdateReport

__all__ = ["ActorGroup", "Cluster", "open_cluster"]

_START_TIMEOUT_S = 1800.0
_PLACEMENT_TIMEOUT_S = 120.0
_CALL_FACTOR = 12
"""A whole wave, scoring or update may take this many times the longest wait inside it, --collective-timeout-s."""


class ActorGroup:
    """The ranks of the actor, called together.

    Args:
        ranks: actor handles, rank 0 first.
        timeout_s: of an update or a sync.
    """

    def __init__(self, ranks: Sequence[Any], *, timeout_s: float) -> None:
        self.ranks = tuple(ranks)
        self._timeout_s = timeout_s

    def update(self, rollout_id: int, *, groups: int, candidates: int) -> UpdateReport:
        """Train on a rollout's rows; the report of rank 0, whose metrics all ranks share."""
        calls = [rank.update.remote(rollout_id, groups, candidates) for rank in self.ranks]
        report: UpdateReport = self._wait(calls, "update")[0]
        return report

    def sync(self, engines: Sequence[Any], policy_version: int) -> SyncReport:
        """Send the weights to the engines; see `ActorRole.sync`."""
        calls = [rank.sync.remote(list(engines), policy_version) for rank in self.ranks]
        report: SyncReport = self._wait(calls, "weight sync")[0]
        return report

    def _wait(self, calls: Sequence[Any], what: str) -> list[Any]:
        return wait_all(calls, what=what, names=rank_names(len(self.ranks)), timeout_s=self._timeout_s)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The running roles.

    Attributes:
        fleet: engines and scorer.
        actor: the training ranks.
        rows: the driver's end of TransferQueue.
    """

    fleet: RolloutFleet
    actor: ActorGroup
    rows: RowQueue


@contextlib.contextmanager
def open_cluster(config: RunConfig, registry: Registry, *, on_phase: Callable[[str], None]) -> Iterator[Cluster]:
    """Start Ray (or join the cluster of ``RAY_ADDRESS``) and every role; stop them all on the way out.

    Args:
        config: the resolved configuration.
        registry: looks up model, engine, reward and weight sync.
        on_phase: told what is being waited for.

    Raises:
        ConfigError: the machine has fewer devices than ``--resource`` asks for.
        RunError: a role did not start.
    """
    on_phase("starting Ray")
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        owned = _start_ray(config)
        use_gpu = _use_gpu(config, owned=owned)
        on_phase(f"placing roles on {'CUDA' if use_gpu else 'the CPU'}")
        group = _place(config, use_gpu=use_gpu)
        stack.callback(remove_placement_group, group)
        on_phase("loading models")
        engines, ranks = _create_roles(config, registry, group, use_gpu=use_gpu)
        # Killed before Ray goes down: a role that is stuck in a collective would otherwise delay it.
        stack.callback(_kill, [*engines, *ranks])
        stack.push(lambda kind, *_: _stop(engines, timeout_s=20.0 if kind is None else 3.0))
        started = [engine.start.remote() for engine in engines]
        address = wait_all(
            [ranks[0].master_address.remote()],
            what="start",
            names=["actor rank 0"],
            timeout_s=_START_TIMEOUT_S,
        )[0]
        started += [rank.start.remote(address) for rank in ranks]
        rows = RowQueue(config.run_dir.name, start=True)
        stack.callback(rows.close)
        started += [rank.attach_rows.remote() for rank in ranks]
        names = engine_names(len(engines)) + rank_names(len(ranks)) * 2
        results = wait_all(started, what="start", names=names, timeout_s=_START_TIMEOUT_S)
        components, tracks = results[0]
        fleet = RolloutFleet(
            engines,
            components=components,
            required_tracks=tracks,
            timeout_s=_whole_call(config),
            score_rows=config.reward.batch_size,
        )
        yield Cluster(
            fleet=fleet,
            actor=ActorGroup(ranks, timeout_s=_whole_call(config)),
            rows=rows,
        )


def _whole_call(config: RunConfig) -> float:
    return float(_CALL_FACTOR * config.backend.collective_timeout_s)


def _start_ray(config: RunConfig) -> bool:
    """Join or start a cluster; returns whether it was started here."""
    # It says once per process how its own authentication works, which a user of this command need not know.
    logging.getLogger("ray").setLevel(logging.ERROR)
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {
        "log_to_driver": config.run.log_level in ("debug", "info"),
        "logging_level": logging.ERROR,
        "configure_logging": False,
        "namespace": f"relax-{config.run_dir.name}",
    }
    if address:
        ray.init(address=address, **options)
        return False
    # Roles hold fractions of a CPU; the rest lets TransferQueue's actors be scheduled beside them.
    cpus = max(available_cores(), 2 * config.actor_world + 2)
    # Ray gives its workers a low priority by default; beside any other busy process the roles, which meet at thread
    # barriers all the time, would then run ten times slower.
    options["_system_config"] = {"worker_niceness": 0}
    ray.init(num_cpus=cpus, include_dashboard=False, **options)
    return True


def _use_gpu(config: RunConfig, *, owned: bool) -> bool:
    """CUDA when there is any: then every rank needs a device of its own."""
    available = int(ray.cluster_resources().get("GPU", 0))
    if available == 0:
        return False
    if owned and torch.cuda.device_count() == 0:
        return False
    if available < config.actor_world and not is_chosen(config.provenance, "backend.resource"):
        # The user did not ask for these devices: a preset that fits a CPU runs there.
        return False
    if available < config.actor_world:
        raise ConfigError(
            f"{config.actor_world} devices asked for, {available} found",
            where="--resource",
            expected=f'at most {available}, e.g. {{"actor": [1, {available}], "rollout": [1, {available}]}}',
        )
    return True


def _place(config: RunConfig, *, use_gpu: bool) -> Any:
    bundle = {"CPU": 1.0, "GPU": 1.0} if use_gpu else {"CPU": 1.0}
    group = placement_group([dict(bundle) for _ in range(config.actor_world)], strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=_PLACEMENT_TIMEOUT_S)
    if not ready:
        remove_placement_group(group)
        raise RunError(
            f"Ray could not place {config.actor_world} bundles of {bundle} within {_PLACEMENT_TIMEOUT_S:.0f} s",
            where="--resource",
            expected=f"free resources; the cluster has {ray.available_resources()}",
        )
    return group


def _create_roles(config: RunConfig, registry: Registry, group: Any, *, use_gpu: bool) -> tuple[list[Any], list[Any]]:
    world = config.actor_world
    threads = max(1, available_cores() // world)
    device = "cuda" if use_gpu else "cpu"

    def remote(role: type, bundle: int) -> Any:
        # Half a bundle each: engine and rank of one bundle share its device in turns.
        return ray.remote(role).options(
            num_cpus=0.5,
            num_gpus=0.5 if use_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            # Ray would pin OpenMP to one thread; the roles take turns, so each may use its share of the cores.
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}},
        )

    model = registry.model(str(config.model.model_adapter_path))
    reward = registry.reward(str(config.reward.scorer_path))
    engines = [
        remote(RolloutRole, index).remote(
            engine=registry.engine(config.rollout.rollout_engine),
            model=model,
            reward=reward,
            model_path=config.model.model_path,
            model_revision=config.model.model_revision,
            reward_model_path=config.reward.model_path,
            reward_runtime=config.reward.runtime,
            engine_dtype=config.rollout.rollout_engine_dtype,
            device=device,
            threads=threads,
        )
        for index in range(config.rollout_devices // config.rollout.rollout_num_gpus_per_engine)
    ]
    ranks = [
        remote(ActorRole, rank).remote(
            rank=rank,
            world=world,
            model=model,
            settings=_trainer_settings(config),
            sync=_sync_plan(config, registry),
            run_name=config.run_dir.name,
            timeout_s=float(config.backend.collective_timeout_s),
            device=device,
            threads=threads,
        )
        for rank in range(world)
    ]
    return engines, ranks


def _trainer_settings(config: RunConfig) -> TrainerSettings:
    return TrainerSettings(
        model_path=str(config.model.model_path),
        model_revision=config.model.model_revision,
        fsdp=config.fsdp,
        lora=config.lora,
        optimizer=config.optimizer,
        flow_grpo=config.flow_grpo,
        micro_batch_size=config.rollout.micro_batch_size,
        seed=config.sampling.generation_seed,
    )


def _sync_plan(config: RunConfig, registry: Registry) -> SyncPlan:
    return SyncPlan(
        spec=registry.weight_sync("stream"),
        mode=config.sync_mode,
        wire_dtype=config.weight_sync.wire_dtype,
        bucket_size_mb=config.weight_sync.bucket_size_mb,
    )


def _stop(engines: Sequence[Any], *, timeout_s: float) -> None:
    """Let every engine stop what it started; one that does not answer in time is killed with its role."""
    ray.wait([engine.shutdown.remote() for engine in engines], num_returns=len(engines), timeout=timeout_s)


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
