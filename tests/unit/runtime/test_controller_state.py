"""What the controller answers, without Ray: state, health by role, and the texts of a stop."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from relax_sdk.control import RUN_STATES
from relax_sdk.runtime.controller_health import _reason
from relax_sdk.runtime.controller_state import RunRecord

FACTS = {
    "run_id": "abc",
    "name": "shapes",
    "run_dir": "runs/shapes",
    "num_rollout": 75,
    "started": "2026-01-01T00:00:00+00:00",
    "node": "here",
    "pid": 7,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def record(clock: Clock) -> RunRecord:
    return RunRecord(facts=FACTS, config={"config": {"optimizer": {"lr": 1e-3}}}, clock=clock)


def body(reply: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """As it goes over the wire: standard JSON, without NaN."""
    decoded: dict[str, Any] = json.loads(json.dumps(reply[1], allow_nan=False))
    return decoded


def test_before_anything_was_published(record: RunRecord) -> None:
    assert body(record.status()) == {
        "run_id": "abc", "name": "shapes", "run_dir": "runs/shapes", "num_rollout": 75,
        "started": "2026-01-01T00:00:00+00:00", "state": "starting", "rollout": None, "policy_version": None,
        "metrics": None, "metrics_rollout": None, "error": None, "stop_requested": False, "updated_s_ago": 0.0,
    }  # fmt: skip
    assert body(record.config()) == {"config": {"optimizer": {"lr": 1e-3}}}


def test_what_is_not_published_again_stays(record: RunRecord, clock: Clock) -> None:
    record.update(state="training", rollout=2, policy_version=1)
    record.update(metrics={"reward/a_mean": 0.5, "train/loss": math.nan, "train/x": math.inf})
    record.update(state="rolling out", rollout=3)
    clock.now += 4.26
    status = body(record.status())
    assert (status["state"], status["rollout"], status["policy_version"]) == ("rolling out", 3, 1)
    assert status["metrics"] == {"reward/a_mean": 0.5, "train/loss": None, "train/x": None}
    assert status["metrics_rollout"] == 2, "the rollout that they were measured in"
    assert status["updated_s_ago"] == 4.3


def report(*, asked: float | None = None, answered: float | None = None, **others: Any) -> dict[str, Any]:
    return {"asked_age_s": asked, "answered_age_s": answered, "node": "n", "pid": 1, "problem": None, "dead": False} | (
        others
    )


def test_roles_by_what_their_pings_did(record: RunRecord, clock: Clock) -> None:
    reports = {
        "never answered": report(asked=50),
        "idle": report(answered=0.5),
        "just asked": report(answered=3, asked=1),
        "in a call": report(answered=61, asked=60),
    }
    record.heartbeat(reports)
    status, health = record.health()
    assert {name: role["state"] for name, role in health["roles"].items()} == {
        "never answered": "starting", "idle": "idle", "just asked": "idle", "in a call": "busy",
    }  # fmt: skip
    assert [role["heartbeat_age_s"] for role in health["roles"].values()] == [None, 0.5, 3, 61]
    assert (status, health["healthy"]) == (200, True), "a long call is no illness"
    record.heartbeat(reports | {"lost": report(answered=9, dead=True, problem="killed")})
    status, health = record.health()
    assert (status, health["healthy"]) == (200, False), "the run itself is still there to tell"
    assert (health["roles"]["lost"]["state"], len(health["roles"])) == ("dead", 5)
    record.heartbeat({"away": report(answered=1, problem="no connection")})
    health = body(record.health())
    assert ({name: role["state"] for name, role in health["roles"].items()}, health["healthy"]) == (
        {"away": "unavailable"},
        False,
    )


def test_ages_grow_while_the_driver_is_silent(record: RunRecord, clock: Clock) -> None:
    record.heartbeat({"role": report(answered=1.0)})
    clock.now += 29
    health = body(record.health())
    assert (health["driver"]["state"], health["driver"]["heartbeat_age_s"], health["healthy"]) == ("alive", 29, True)
    assert health["roles"]["role"]["heartbeat_age_s"] == 30
    clock.now += 2
    health = body(record.health())
    assert (health["driver"]["state"], health["healthy"]) == ("silent", False)


def test_a_failed_run_is_not_healthy(record: RunRecord) -> None:
    record.update(state="failed", error="it broke")
    status, health = record.health()
    assert (status, health["healthy"]) == (503, False)
    assert body(record.status())["error"] == "it broke"


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ({}, "the run stops before its first rollout"),
        ({"state": "evaluating"}, "the run stops before its first rollout"),
        ({"state": "rolling out", "rollout": 3}, "the run stops after rollout 3 of 75"),
        ({"state": "syncing", "rollout": 75}, "the run stops after rollout 75 of 75"),
        ({"state": "evaluating", "rollout": 3}, "the run stops after the evaluation that is under way"),
        ({"state": "stopping", "rollout": 3}, "the run is stopping"),
    ],
)
def test_stop_says_what_follows_and_can_be_repeated(record: RunRecord, published: dict[str, Any], message: str) -> None:
    record.update(**published)
    first, second = body(record.request_stop()), body(record.request_stop())
    assert first["message"].startswith(message)
    assert (first["already_requested"], second["already_requested"]) == (False, True)
    assert first["stopping"]
    assert second["message"] == first["message"]
    assert record.stop_requested
    assert body(record.status())["stop_requested"]


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_there_is_nothing_to_stop_any_more(record: RunRecord, state: str) -> None:
    record.update(state=state)
    assert not body(record.request_stop())["stopping"]
    assert not record.stop_requested


def test_the_states_are_those_of_the_interface() -> None:
    assert RUN_STATES == (
        "starting", "rolling out", "scoring", "training", "syncing", "evaluating", "stopping", "finished", "failed",
    )  # fmt: skip


def test_the_reason_of_a_death_is_one_sentence() -> None:
    text = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: R\n\tpid: 1\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit ...\n"
    )
    assert _reason(RuntimeError(text)) == "The actor is dead because its worker process has died"
