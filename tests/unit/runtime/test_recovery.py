"""Turns and recovery against a fake actor and fake engines that write down what is asked of them, and die on demand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from relax_sdk.errors import RolloutError, RunError, WeightSyncError
from relax_sdk.runtime.recovery import Recovery
from relax_sdk.runtime.turns import Turns


class World:
    """Actor and engines in one: who is on the device, which version the engines hold, and the order of it all."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.deaths: list[tuple[str, int]] = []
        """``(call, engine)``: at that call the engine dies; taken one by one, in order."""
        self.dead: set[int] = set()
        self.version = 0
        self.actor_in = True
        self.both_whole = False

    workers = ("e0", "e1")

    def _note(self, call: str, error: type[RunError] = RolloutError) -> None:
        self.calls.append(call)
        if self.deaths and self.deaths[0][0] == call:
            self.dead.add(self.deaths.pop(0)[1])
        if self.dead and call != "restart":
            raise error(f"{call}: engines {sorted(self.dead)} do not answer")

    # the actor
    def offload(self) -> None:
        self.calls.append("offload")
        self.actor_in = False

    def wake(self) -> None:
        self.calls.append("wake")
        self.actor_in = True

    def device_bytes(self) -> int:
        return 7

    def sync(self, workers: Any, policy_version: int) -> str:
        assert self.actor_in
        self._note("sync", WeightSyncError)
        self.version = policy_version
        return f"report {policy_version}"

    # the engines
    def release(self) -> None:
        self._note("release")

    def resume(self, *, weights_only: bool) -> None:
        self.both_whole |= self.actor_in and not weights_only
        self._note("resume weights" if weights_only else "resume")

    def dead_engines(self) -> dict[int, str]:
        return dict.fromkeys(sorted(self.dead), "its server ended with signal 9")

    def restart(self, indices: Iterable[int]) -> None:
        self.both_whole |= self.actor_in
        self.dead -= set(indices)
        self.version = 0
        self._note("restart")
        if self.dead:
            raise RolloutError("a server did not start")

    def wave(self) -> str:
        self._note("wave")
        return f"pictures of {self.version}"


def recovery(world: Any, *, offload: bool = True, enabled: bool = True) -> tuple[Recovery, list[str]]:
    lines: list[str] = []
    turns = Turns(world, world, offload_train=offload, offload_rollout=offload)
    return Recovery(actor=world, fleet=world, turns=turns, enabled=enabled, line=lines.append), lines


def step(made: Recovery, world: World, version: int) -> str:
    """Sample, train, sync, as a step does it."""
    pictures = made.sample(world.wave, policy_version=version)
    made.train()
    made.sync(version + 1)
    return pictures


def test_the_turns_of_two_quiet_steps() -> None:
    world = World()
    made, lines = recovery(world)
    assert [step(made, world, 0), step(made, world, 1)] == ["pictures of 0", "pictures of 1"]
    assert world.calls == [
        *("offload", "wave", "release", "wake", "resume weights", "sync"),
        *("offload", "resume", "wave", "release", "wake", "resume weights", "sync"),
    ]
    assert (lines, made.restarts, made.sync_failures, world.both_whole) == ([], 0, 0, False)
    assert made.memory_metrics() == {"perf/mem_idle_gb": 7e-9}


def test_without_the_flags_everything_stays() -> None:
    world = World()
    made, _ = recovery(world, offload=False)
    step(made, world, 0)
    step(made, world, 1)
    assert world.calls == ["wave", "sync", "wave", "sync"]
    assert made.memory_metrics() == {}


@pytest.mark.parametrize("call", ["wave", "resume", "release", "resume weights", "sync"])
@pytest.mark.parametrize("offload", [True, False], ids=["offload", "resident"])
def test_wherever_an_engine_dies_the_next_wave_has_the_actors_weights(call: str, offload: bool) -> None:
    world = World()
    made, lines = recovery(world, offload=offload)
    step(made, world, 0)
    world.deaths = [(call, 1)]
    step(made, world, 1)
    assert world.version == 2
    assert made.sample(world.wave, policy_version=2) == "pictures of 2"
    happened = not world.deaths
    assert happened or not offload
    assert made.restarts == (1 if happened else 0)
    assert lines == (
        ["rollout engine 1 is gone (its server ended with signal 9); starting it again"] if happened else []
    )
    # Whole pipelines load only while the actor is off the device, where it can be.
    assert not (offload and world.both_whole)


def test_a_second_death_while_the_first_is_mended() -> None:
    world = World()
    made, _ = recovery(world)
    step(made, world, 0)
    world.deaths = [("wave", 0), ("sync", 1)]
    assert step(made, world, 1) == "pictures of 1"
    assert (made.restarts, made.sync_failures, world.version) == (2, 1, 2)


def test_a_third_death_ends_the_run_with_its_own_error() -> None:
    world = World()
    made, _ = recovery(world)
    world.deaths = [("wave", 0), ("wave", 0), ("wave", 1)]
    with pytest.raises(RolloutError, match=r"wave: engines \[1\]"):
        made.sample(world.wave, policy_version=0)
    assert made.restarts == 2


def test_a_restart_that_fails_is_tried_again_and_then_told_with_its_cause() -> None:
    world = World()
    made, _ = recovery(world)

    def restart(indices: Iterable[int]) -> None:
        raise RolloutError("no such model")

    world.restart = restart  # type: ignore[method-assign]
    world.deaths = [("wave", 0)]
    with pytest.raises(RunError, match=r"rollout engines \[0\] could not be started again: no such model") as caught:
        made.sample(world.wave, policy_version=0)
    assert "wave: engines [0]" in str(caught.value.where) or "could not be started again" in str(caught.value.where)


def test_a_failure_without_a_death_is_not_repeated() -> None:
    world = World()
    made, _ = recovery(world)

    def work() -> None:
        world.calls.append("work")
        raise RolloutError("a bad answer")

    with pytest.raises(RolloutError, match="a bad answer"):
        made.sample(work, policy_version=0)
    assert world.calls.count("work") == 1


def test_without_the_switch_a_death_ends_the_run() -> None:
    world = World()
    made, _ = recovery(world, enabled=False)
    world.deaths = [("wave", 0)]
    with pytest.raises(RolloutError, match="wave"):
        made.sample(world.wave, policy_version=0)
    assert "restart" not in world.calls
