"""Rules about roles on devices, the process environment and the run folder."""

from __future__ import annotations

from collections.abc import Iterator

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
    if size > 1 and config.rollout.rollout_engine == "local":
        yield f"{situation.given('rollout.rollout_num_gpus_per_engine')}: the engine 'local' uses one device"
    if config.backend.colocate and world != devices:
        yield (
            f"{situation.given('backend.resource')}: under --colocate the actor's {world} devices must be the "
            f"rollout's {devices}"
        )


def allocator_allows_ipc(situation: Situation) -> Iterator[str]:
    """Expandable segments cannot be shared with another process."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = situation.environ.get(name, "")
        if "expandable_segments:true" in value.replace(" ", "").lower():
            yield f"{name} is {value!r}: weights are shared between processes, which expandable_segments prevents"


def run_folder_is_new(situation: Situation) -> Iterator[str]:
    """A second run in the same folder would mix two sets of metrics."""
    folder = situation.config.run_dir
    if folder.exists() and not folder.is_dir():
        yield f"{situation.given('run.run_dir')}: this is a file; give a new folder"
    elif folder.is_dir() and any(folder.iterdir()):
        yield f"{situation.given('run.run_dir')}: the folder is not empty; give a new one, or leave --run-dir out"


RULES: tuple[Rule, ...] = (
    training_is_synchronous_and_colocated,
    engines_tile_the_ranks,
    allocator_allows_ipc,
    run_folder_is_new,
)
