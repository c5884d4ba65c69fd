"""Ray, the placement group, and the roles: started together, and stopped on every path.

Rank j and engine j share bundle j, and with it one device. Without CUDA the same roles run on CPU processes. Left
out: several nodes' storage checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_sdk.config import RunConfig, is_chosen
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.preflight import available_cores
from relax_sdk.protocols import EngineSettings
from relax_sdk.registry import Registry
from relax_sdk.runtime.actor_group import ActorGroup
from relax_sdk.runtime.actor_role import ActorRole, SyncPlan
from relax_sdk.runtime.calls import engine_names, rank_names, wait_all
from relax_sdk.runtime.controller import ControlPlane, open_controller
from relax_sdk.runtime.engine_link import ENGINE_WAIT
from relax_sdk.runtime.fleet import RolloutFleet
from relax_sdk.runtime.rollout_role import RolloutRole
from relax_sdk.runtime.rows import RowQueue
from relax_sdk.training import TrainerSettings

__all__ = ["Cluster", "open_cluster"]

_START_TIMEOUT_S = 1800.0
_PLACEMENT_TIMEOUT_S = 120.0
_CALL_FACTOR = 12
"""A whole wave, scoring or update may take this many times the longest wait inside it, --collective-timeout-s."""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The running roles.

    Attributes:
        fleet: engines and scorer.
        actor: the training ranks.
        rows: the driver's end of TransferQueue.
        control: the run's controller.
    """

    fleet: RolloutFleet
    actor: ActorGroup
    rows: RowQueue
    control: ControlPlane


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
        stack.enter_context(_sigterm_unwinds())
        control = stack.enter_context(open_controller(config, run_dir=config.run_dir))
        use_gpu = _use_gpu(config, owned=owned)
        on_phase(f"placing roles on {'CUDA' if use_gpu else 'the CPU'}")
        group = _place(config, use_gpu=use_gpu)
        stack.callback(remove_placement_group, group)
        on_phase("loading models")
        roles = _Roles(config, registry, group, use_gpu=use_gpu)
        # Killed before Ray goes down: a role that is stuck in a collective would otherwise delay it.
        stack.callback(roles.kill)
        stack.push(lambda kind, *_: roles.stop(timeout_s=20.0 if kind is None else 10.0))
        ranks = [roles.create_rank(rank) for rank in range(config.actor_world)]
        roles.devices = wait_all(
            [rank.visible_devices.remote() for rank in ranks],
            what="start",
            names=rank_names(len(ranks)),
            timeout_s=_START_TIMEOUT_S,
        )
        engines = [roles.create_engine(index) for index in range(config.actor_world // roles.ranks_per_engine)]
        control.roles(dict(zip(rank_names(len(ranks)), ranks, strict=True)))
        control.roles(dict(zip(engine_names(len(engines)), engines, strict=True)))
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
        control.wait_started()
        components, tracks = results[0]

        def replace(index: int) -> Any:
            engine = roles.create_engine(index)
            control.roles({engine_names(len(engines))[index]: engine})
            return engine

        fleet = RolloutFleet(
            engines,
            components=components,
            required_tracks=tracks,
            timeout_s=_whole_call(config),
            start_timeout_s=_START_TIMEOUT_S,
            score_rows=config.reward.batch_size,
            replace=replace,
        )
        yield Cluster(
            fleet=fleet,
            actor=ActorGroup(ranks, timeout_s=_whole_call(config)),
            rows=rows,
            control=control,
        )


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """A request to terminate ends the run like Ctrl-C, with every role stopped; Ray's own handler would only crash.

    Raises:
        SystemExit: 128 + 15, from wherever the main thread is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def terminate(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


class _Roles:
    """Creates the roles in their places, and ends them.

    Rank j gets device j of the group from Ray. Engine e gets none of its own: it is told the devices of its ranks
    e * g .. e * g + g - 1, so that they share physical devices whatever order the group gives them in.
    """

    def __init__(self, config: RunConfig, registry: Registry, group: Any, *, use_gpu: bool) -> None:
        self._config, self._registry, self._group = config, registry, group
        self._use_gpu = use_gpu
        self._threads = max(1, available_cores() // config.actor_world)
        self._model = registry.model(str(config.model.model_adapter_path))
        self._ranks: list[Any] = []
        self._engines: dict[int, Any] = {}
        self.ranks_per_engine = config.rollout.rollout_num_gpus_per_engine
        self.devices: list[tuple[str, str]] = []

    def create_rank(self, rank: int) -> Any:
        """Create one rank of the actor."""
        config = self._config
        handle = self._remote(ActorRole, rank, gpus=1).remote(
            rank=rank,
            world=config.actor_world,
            model=self._model,
            settings=_trainer_settings(config),
            sync=_sync_plan(config, self._registry),
            run_name=config.run_dir.name,
            timeout_s=float(config.backend.collective_timeout_s),
            device=self._device,
            threads=self._threads,
        )
        self._ranks.append(handle)
        return handle

    def create_engine(self, index: int) -> Any:
        """Create a rollout role, unstarted; the one that had this index before is forgotten.

        Raises:
            ConfigError: its ranks are on several nodes.
        """
        config, size = self._config, self.ranks_per_engine
        places = self.devices[index * size : (index + 1) * size]
        if len({node for node, _ in places}) != 1:
            raise ConfigError(
                f"the ranks of rollout engine {index} are on {len({node for node, _ in places})} nodes",
                where="--rollout-num-gpus-per-engine",
                expected="an engine's devices on one node: a divisor of the devices of each node",
            )
        handle = self._remote(RolloutRole, index * size, gpus=0).remote(
            engine=self._registry.engine(config.rollout.rollout_engine),
            model=self._model,
            reward=self._registry.reward(str(config.reward.scorer_path)),
            settings=EngineSettings(
                model_path=str(config.model.model_path),
                revision=config.model.model_revision,
                device=self._device,
                devices=size,
                dtype=config.rollout.rollout_engine_dtype,
                sync_mode=config.sync_mode,
                work_dir=config.run_dir / "engines" / str(index),
                timeout_s=ENGINE_WAIT * config.backend.collective_timeout_s,
                extra_arguments=tuple(shlex.split(config.rollout.rollout_engine_args or "")),
                candidates_per_request=config.rollout.rollout_candidates_per_request,
                threads=self._threads,
            ),
            reward_model_path=config.reward.model_path,
            reward_runtime=config.reward.runtime,
            visible_devices=",".join(device for _, device in places) if self._use_gpu else None,
        )
        self._engines[index] = handle
        return handle

    def stop(self, *, timeout_s: float) -> None:
        """Let every engine stop what it started; one that does not answer in time is killed with its role."""
        calls = [engine.shutdown.remote() for engine in self._engines.values()]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=timeout_s)

    def kill(self) -> None:
        """End every role's process."""
        for role in (*self._engines.values(), *self._ranks):
            ray.kill(role)

    @property
    def _device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self._use_gpu else "cpu"

    def _remote(self, role: type, bundle: int, *, gpus: int) -> Any:
        return ray.remote(role).options(
            num_cpus=0.5,
            num_gpus=gpus if self._use_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            # Ray would pin OpenMP to one thread; the roles take turns, so each may use its share of the cores.
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(self._threads), "TOKENIZERS_PARALLELISM": "false"}},
        )


def _trainer_settings(config: RunConfig) -> TrainerSettings:
    return TrainerSettings(
        model_path=str(config.model.model_path),
        model_revision=config.model.model_revision,
        fsdp=config.fsdp,
        lora=config.lora,
        optimizer=config.optimizer,
        flow_grpo=config.flow_grpo,
        micro_batch_size=config.rollout.micro_batch_size,
        replay_steps_per_forward=config.rollout.replay_steps_per_forward,
        seed=config.sampling.generation_seed,
    )


def _sync_plan(config: RunConfig, registry: Registry) -> SyncPlan:
    return SyncPlan(
        spec=registry.weight_sync("stream"),
        mode=config.sync_mode,
        wire_dtype=config.weight_sync.wire_dtype,
        bucket_size_mb=config.weight_sync.bucket_size_mb,
        ranks_per_engine=config.rollout.rollout_num_gpus_per_engine,
    )
