"""What a run's controller knows: an actor that the driver writes into, and that answers for it.

The driver writes without waiting, so that a driver that is busy for minutes delays no answer. The actor is the
driver's: it ends with it, whatever ends it. It is sent to its process by value (see `relax_sdk.runtime.controller`).
Left out: HTTP (`relax_sdk.runtime.controller_app`).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Reply", "RunRecord", "StateActor"]

Reply = tuple[int, dict[str, Any]]
"""HTTP status and JSON body."""

_BUSY_AFTER_S = 2.0
_SILENT_AFTER_S = 30.0
"""The driver's heartbeat comes every second."""


@dataclasses.dataclass
class Role:
    """What is known about one role; times on the record's clock, None for never."""

    asked: float | None = None
    answered: float | None = None
    node: str | None = None
    pid: int | None = None
    problem: str | None = None
    dead: bool = False

    def body(self, now: float) -> dict[str, Any]:
        """``state`` is starting (never answered), idle, busy (in a call), unavailable or dead."""
        if self.dead:
            state = "dead"
        elif self.problem is not None:
            state = "unavailable"
        elif self.answered is None:
            state = "starting"
        else:
            state = "busy" if self.asked is not None and now - self.asked > _BUSY_AFTER_S else "idle"
        return {
            "state": state,
            "heartbeat_age_s": None if self.answered is None else round(now - self.answered, 1),
            "node": self.node,
            "pid": self.pid,
            "problem": self.problem,
        }


class RunRecord:
    """Everything the controller knows, and its answers. No Ray, no waiting.

    Args:
        facts: what does not change: run_id, name, run_dir, num_rollout, started, node, pid.
        config: the recipe, answered as it is.
        clock: seconds that never go back.
    """

    def __init__(
        self, *, facts: Mapping[str, Any], config: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._facts, self._config, self._clock = dict(facts), _plain(config), clock
        self._run: dict[str, Any] = {
            "state": "starting",
            "rollout": None,
            "policy_version": None,
            "metrics": None,
            "metrics_rollout": None,
            "error": None,
        }
        self._updated = self._heard = clock()
        self.stop_requested = False
        self.roles: dict[str, Role] = {}

    def update(self, **fields: Any) -> None:
        """Take over what the driver published."""
        self._run |= {name: _plain(value) for name, value in fields.items()}
        if "metrics" in fields:
            self._run["metrics_rollout"] = self._run["rollout"]
        self._updated = self._clock()

    def heartbeat(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the driver's reports of its roles, which also show that the driver lives.

        Args:
            reports: name -> ``asked_age_s``, ``answered_age_s`` (seconds ago, or None) and the other fields of `Role`.
        """
        self._heard = now = self._clock()
        self.roles = {}
        for name, report in reports.items():
            fields = dict(report)
            for moment in ("asked", "answered"):
                age = fields.pop(f"{moment}_age_s")
                fields[moment] = None if age is None else now - age
            self.roles[name] = Role(**fields)

    def status(self) -> Reply:
        """Where the run is.

        ``metrics`` are the last record's, of rollout ``metrics_rollout``; a value that is no finite number is null.
        """
        facts = {name: self._facts[name] for name in ("run_id", "name", "run_dir", "num_rollout", "started")}
        return 200, {
            **facts,
            **self._run,
            "stop_requested": self.stop_requested,
            "updated_s_ago": round(self._clock() - self._updated, 1),
        }

    def health(self) -> Reply:
        """Every role by name, and the driver; 503 once the run has failed."""
        now = self._clock()
        roles = {name: role.body(now) for name, role in self.roles.items()}
        failed, silent = self._run["state"] == "failed", now - self._heard > _SILENT_AFTER_S
        ill = failed or silent or any(role["state"] in ("dead", "unavailable") for role in roles.values())
        return 503 if failed else 200, {
            "run_id": self._facts["run_id"],
            "state": self._run["state"],
            "healthy": not ill,
            "driver": {
                "state": "silent" if silent else "alive",
                "heartbeat_age_s": round(now - self._heard, 1),
                "node": self._facts["node"],
                "pid": self._facts["pid"],
                "problem": None,
            },
            "roles": roles,
        }

    def config(self) -> Reply:
        """The recipe."""
        return 200, self._config

    def request_stop(self) -> Reply:
        """Remember the wish, and say what follows from it. Asking again changes nothing."""
        state, rollout, total = self._run["state"], self._run["rollout"], self._facts["num_rollout"]
        if state in ("finished", "failed"):
            return 200, {"stopping": False, "already_requested": self.stop_requested, "message": f"the run has {state}"}
        if state == "stopping":
            message = "the run is stopping"
        elif state == "starting" or rollout is None:
            message = "the run stops before its first rollout"
        elif state == "evaluating":
            message = f"the run stops after the evaluation that is under way, at rollout {rollout} of {total}"
        else:
            message = f"the run stops after rollout {rollout} of {total}"
        already, self.stop_requested = self.stop_requested, True
        return 200, {"stopping": True, "already_requested": already, "message": message}


class StateActor:
    """A `RunRecord` in a process of its own; the arguments are the record's. Its methods never wait."""

    def __init__(self, *, facts: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._record = RunRecord(facts=facts, config=config)

    async def update(self, fields: Mapping[str, Any]) -> None:
        """See `RunRecord.update`."""
        self._record.update(**fields)

    async def heartbeat(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """See `RunRecord.heartbeat`."""
        self._record.heartbeat(reports)

    async def stop_requested(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._record.stop_requested

    async def answer(self, name: str) -> Reply:
        """The reply of a `RunRecord` method."""
        reply: Reply = getattr(self._record, name)()
        return reply


def _plain(value: Any) -> Any:
    """JSON as the standard has it: without NaN and infinities, which become null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
