"""Ray, the placement group, and the roles: started together, and stopped on every path.

A node is one bundle, and its ranks and engines share the bundle's devices. Without CUDA the same roles run on CPU
processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from relax_sdk.config import RunConfig
from relax_sdk.preflight import available_cores
from relax_sdk.registry import Registry
from relax_sdk.runtime.actor_group import ActorGroup
from relax_sdk.runtime.calls import engine_names, rank_names, wait_all
from relax_sdk.runtime.controller import ControlPlane, open_controller
from relax_sdk.runtime.fleet import RolloutFleet
from relax_sdk.runtime.observer import Observer
from relax_sdk.runtime.placement import place_roles, place_row_queue, uses_gpus
from relax_sdk.runtime.reaper import reaped_when_killed
from relax_sdk.runtime.roles import Roles
from relax_sdk.runtime.rows import RowQueue
from relax_sdk.runtime.shared_folders import require_shared_folders
from relax_sdk.runtime.waiting import Loading, sigterm_unwinds

__all__ = ["Cluster", "open_cluster"]

_START_TIMEOUT_S = 1800.0
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
def open_cluster(config: RunConfig, registry: Registry, *, observer: Observer) -> Iterator[Cluster]:
    """Start Ray (or join the cluster of ``RAY_ADDRESS``) and every role; stop them all on the way out.

    Args:
        config: the resolved configuration.
        registry: looks up model, engine, reward and weight sync.
        observer: told what is being waited for.

    Raises:
        ConfigError: the cluster has fewer devices or CPUs than ``--resource`` asks for.
        RunError: a role did not start.
    """
    observer.phase("starting Ray")
    with contextlib.ExitStack() as stack:
        owned = not os.environ.get("RAY_ADDRESS")
        if owned:
            stack.enter_context(reaped_when_killed())
        stack.callback(ray.shutdown)
        _start_ray(config, owned=owned)
        stack.enter_context(sigterm_unwinds())
        use_gpu = uses_gpus(config, owned=owned)
        observer.phase(f"placing roles on {'CUDA' if use_gpu else 'the CPU'}")
        group = place_roles(config, use_gpu=use_gpu)
        if not owned:  # a cluster of its own ends as a whole, also when parts of Ray have ended before
            stack.callback(remove_placement_group, group)
        queue_place = place_row_queue(config, group)
        control = stack.enter_context(open_controller(config, run_dir=config.run_dir))
        observer.phase("loading models")
        waiting = Loading(observer, engines=config.run_dir / "engines").tell
        roles = Roles(config, registry, group, use_gpu=use_gpu)
        # Killed before Ray goes down: a role that is stuck in a collective would otherwise delay it.
        stack.callback(roles.kill)
        stack.push(lambda kind, *_: roles.stop(timeout_s=20.0 if kind is None else 10.0))
        ranks = [roles.create_rank(rank) for rank in range(config.actor_world)]
        roles.devices = wait_all(
            [rank.visible_devices.remote() for rank in ranks],
            what="start",
            names=rank_names(len(ranks)),
            timeout_s=_START_TIMEOUT_S,
            waiting=waiting,
        )
        require_shared_folders(_written_folders(config), ranks)
        engines = [roles.create_engine(index) for index in range(config.actor_world // roles.ranks_per_engine)]
        control.roles(dict(zip(rank_names(len(ranks)), ranks, strict=True)))
        control.roles(dict(zip(engine_names(len(engines)), engines, strict=True)))
        started = [engine.start.remote() for engine in engines]
        host, port = wait_all(
            [ranks[0].open_store.remote()],
            what="start",
            names=["actor rank 0"],
            timeout_s=_START_TIMEOUT_S,
            waiting=waiting,
        )[0]
        started += [rank.start.remote(host, port) for rank in ranks]
        timeout_s = float(config.backend.collective_timeout_s)
        rows = RowQueue(config.run_dir.name, start=True, timeout_s=timeout_s, on=queue_place)
        stack.callback(rows.close)
        started += [rank.attach_rows.remote() for rank in ranks]
        names = engine_names(len(engines)) + rank_names(len(ranks)) * 2
        results = wait_all(started, what="start", names=names, timeout_s=_START_TIMEOUT_S, waiting=waiting)
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
        actor = ActorGroup(ranks, timeout_s=_whole_call(config))
        yield Cluster(fleet=fleet, actor=actor, rows=rows, control=control)


def _written_folders(config: RunConfig) -> dict[str, Path]:
    """Where the driver writes what ranks read, by flag."""
    folders = {"--run-dir": config.run_dir}
    if not config.artifact_root.is_relative_to(config.run_dir):
        folders["--artifact-root"] = config.artifact_root
    return folders


def _whole_call(config: RunConfig) -> float:
    return float(_CALL_FACTOR * config.backend.collective_timeout_s)


def _start_ray(config: RunConfig, *, owned: bool) -> None:
    """Start a cluster, or join the one of ``RAY_ADDRESS``."""
    # It says once per process how its own authentication works, which a user of this command need not know.
    logging.getLogger("ray").setLevel(logging.ERROR)
    options: dict[str, Any] = {
        "log_to_driver": config.run.log_level in ("debug", "info"),
        "logging_level": logging.ERROR,
        "configure_logging": False,
        "namespace": f"relax-{config.run_dir.name}",
    }
    if not owned:
        ray.init(address=os.environ["RAY_ADDRESS"], **options)
        return
    # Roles hold fractions of a CPU; the rest lets TransferQueue's actors be scheduled beside them.
    cpus = max(available_cores(), 2 * config.actor_world + 2)
    # Ray gives its workers a low priority by default; beside any other busy process the roles, which meet at thread
    # barriers all the time, would then run ten times slower.
    options["_system_config"] = {"worker_niceness": 0}
    # Without an address Ray would join any cluster that it finds on this machine.
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **options)
