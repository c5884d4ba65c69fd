"""Rules about roles on devices, the process environment and the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from relax_sdk.preflight.situation import Rule, Situation

__all__ = ["RULES"]


def training_is_synchronous_and_colocated(situation: Situation) -> Iterator[str]:
    """Only synchronous colocated training exists."""
    backend = situation.config.backend
    if not backend.colocate:
        yield f"{situation.given('backend.colocate')}: give --colocate; actor and engines take turns on the devices"
    for path, on in (("backend.fully_async", backend.fully_async), ("backend.hybrid", backend.hybrid)):
        if on:
            yield f"{situation.given(path)}: only synchronous training exists; leave it out"


def several_nodes_have_a_cluster(situation: Situation) -> Iterator[str]:
    """A run starts Ray on its own node only; roles on several need a cluster that is there already."""
    resource = situation.config.backend.resource
    nodes = {count for count, _ in resource.values()}
    if len(nodes) > 1:
        yield f"{situation.given('backend.resource')}: actor and rollout share devices, so they have the same nodes"
    elif nodes != {1} and not situation.environ.get("RAY_ADDRESS"):
        yield (
            f"{situation.given('backend.resource')}: several nodes need a Ray cluster over them; run `ray start` on "
            "each, then set RAY_ADDRESS"
        )


def engines_tile_the_ranks(situation: Situation) -> Iterator[str]:
    """Under colocation the engines' devices are exactly the actor's ranks."""
    config = situation.config
    size, world, devices = config.rollout.rollout_num_gpus_per_engine, config.actor_world, config.rollout_devices
    if size < 1:
        yield f"{situation.given('rollout.rollout_num_gpus_per_engine')}: expected at least 1"
    elif world % size:
        yield (
            f"{situation.given('rollout.rollout_num_gpus_per_engine')}: the actor's {world} ranks are not divisible "
            "by it"
        )
    elif (per_node := config.backend.resource["actor"][1]) % size:
        yield (
            f"{situation.given('rollout.rollout_num_gpus_per_engine')}: an engine lives on one node, and a node's "
            f"{per_node} devices are not divisible by it"
        )
    most = situation.engine.max_devices
    if most is not None and size > most:
        yield (
            f"{situation.given('rollout.rollout_num_gpus_per_engine')}: the engine {situation.engine.name!r} uses at "
            f"most {most}"
        )
    if config.backend.colocate and world != devices:
        yield (
            f"{situation.given('backend.resource')}: under --colocate the actor's {world} devices must be the "
            f"rollout's {devices}"
        )


def offload_has_something_to_move(situation: Situation) -> Iterator[str]:
    """FSDP2's own offload leaves nothing on the device that ours could move."""
    config = situation.config
    if config.backend.offload_train and config.fsdp.cpu_offload:
        yield (
            f"{situation.given('backend.offload_train')}: --fsdp-cpu-offload keeps parameters and AdamW state on the "
            "host all the time, so there is nothing to offload; leave one of them out"
        )


def allocator_allows_ipc(situation: Situation) -> Iterator[str]:
    """Expandable segments cannot be shared with another process."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = situation.environ.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            yield f"{name} is {value!r}: weights are shared between processes, which expandable_segments prevents"


def run_folder_is_new(situation: Situation) -> Iterator[str]:
    """A second run in the same folder would mix two sets of metrics."""
    folder, given = situation.config.run_dir, situation.given("run.run_dir")
    try:
        occupied = folder.is_dir() and any(folder.iterdir())
    except OSError as error:
        yield f"{given}: it cannot be read ({error.strerror}); give another folder"
        return
    if occupied:
        yield f"{given}: the folder is not empty; give a new one, or leave --run-dir out"
    else:
        yield from _not_writable(folder, given)


def artifacts_can_be_written(situation: Situation) -> Iterator[str]:
    """Sidecars may go elsewhere than into the run's folder."""
    config = situation.config
    if not config.artifact_root.is_relative_to(config.run_dir):
        yield from _not_writable(config.artifact_root, situation.given("artifact.root"))


def _not_writable(folder: Path, given: str) -> Iterator[str]:
    """The folder, or the innermost existing one above it, must take new files."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        is_folder = existing.is_dir()
    except OSError as error:
        yield f"{given}: it cannot be read ({error.strerror}); give another folder"
        return
    if not is_folder:
        yield f"{given}: {str(existing)!r} is a file; give another folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{given}: no permission to write in {str(existing)!r}; give another folder"


RULES: tuple[Rule, ...] = (
    training_is_synchronous_and_colocated,
    several_nodes_have_a_cluster,
    engines_tile_the_ranks,
    offload_has_something_to_move,
    allocator_allows_ipc,
    run_folder_is_new,
    artifacts_can_be_written,
)
