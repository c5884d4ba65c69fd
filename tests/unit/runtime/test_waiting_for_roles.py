"""A long wait says who is waited for, and ends with an error in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from relax_sdk.errors import RunError
from relax_sdk.runtime import calls, waiting
from relax_sdk.runtime.calls import wait_all
from relax_sdk.runtime.waiting import Loading


class Told:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.lines: list[str] = []

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        self.phases.append(name)

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A clock that only Ray's waits advance, and calls that finish at the second they are named after."""
    now = {"s": 100.0}

    def wait(refs: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        first = min(refs, key=lambda ref: float(ref))
        if 100.0 + float(first) <= now["s"] + timeout:
            now["s"] = max(now["s"], 100.0 + float(first))
            return [first], [ref for ref in refs if ref != first]
        now["s"] += timeout
        return [], refs

    monkeypatch.setattr(calls.ray, "wait", wait)
    monkeypatch.setattr(calls.ray, "get", lambda ref, timeout: f"result {ref}")
    monkeypatch.setattr(time, "monotonic", lambda: now["s"])
    return now


def test_who_has_not_answered_is_told_every_second(clock: dict[str, float]) -> None:
    told: list[tuple[list[str], float]] = []
    results = wait_all(
        ["3.5", "1.5", "2.0"],
        what="start",
        names=["a", "b", "a"],
        timeout_s=60,
        waiting=lambda names: told.append((names, clock["s"] - 100)),
    )
    assert results == ["result 3.5", "result 1.5", "result 2.0"]
    assert told == [(["a", "b"], 1.0), (["a"], 3.0)]


@pytest.mark.parametrize("told", [True, False])
def test_a_call_that_never_answers_is_given_up_in_time(clock: dict[str, float], told: bool) -> None:
    listener: Any = (lambda *_: None) if told else None
    with pytest.raises(RunError, match="start did not finish within 7 s") as caught:
        wait_all(["1", "900"], what="start", names=["a", "b"], timeout_s=7, waiting=listener)
    assert clock["s"] == 107.0
    assert "waiting for b" in str(caught.value)


def test_a_phase_names_them_and_a_line_comes_after_half_a_minute_one_and_two(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = {"s": 0.0}
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now["s"])
    told = Told()
    loading = Loading(told, engines=tmp_path)
    for second in range(130):
        now["s"] = float(second)
        if second == 100:
            (tmp_path / "0").mkdir()
            (tmp_path / "0" / "server.log").touch()
        loading.tell(["rollout engine 0", "actor rank 0"])
    assert set(told.phases) == {"loading models: rollout engine 0, actor rank 0"}
    assert told.lines == [
        "still loading after 30 s: rollout engine 0, actor rank 0",
        "still loading after 60 s: rollout engine 0, actor rank 0",
        f"still loading after 120 s: rollout engine 0, actor rank 0; logs of servers: {tmp_path}",
    ]
