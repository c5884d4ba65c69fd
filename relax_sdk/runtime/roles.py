"""The roles' processes: where each is placed, what it is told, and how all of them are ended."""

from __future__ import annotations

import shlex
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_sdk.preflight import available_cores
from relax_sdk.protocols import EngineSettings
from relax_sdk.registry import Registry
from relax_sdk.runtime.actor_role import ActorRole, SyncPlan
from relax_sdk.runtime.engine_link import ENGINE_WAIT
from relax_sdk.runtime.rollout_role import RolloutRole
from relax_sdk.training import TrainerSettings

__all__ = ["Roles"]


class Roles:
    """Creates the roles in their places, and ends them.

    Rank j gets device j of the group from Ray. Engine e gets none of its own: it is told the devices of its ranks
    e * g .. e * g + g - 1, so that they share physical devices whatever order the group gives them in.
    """

    def __init__(self, config: RunConfig, registry: Registry, group: Any, *, use_gpu: bool) -> None:
        self._config, self._registry, self._group = config, registry, group
        self._use_gpu = use_gpu
        self._devices_per_node = config.backend.resource["actor"][1]
        self._threads = max(1, available_cores() // self._devices_per_node)
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

    def _remote(self, role: type, rank: int, *, gpus: int) -> Any:
        """A role beside ``rank``: in the bundle of its node."""
        bundle = rank // self._devices_per_node
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
