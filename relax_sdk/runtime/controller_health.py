"""Heartbeats of the roles: a thread of the driver pings them, and hands on what it learns.

The driver does it because a process that is given an actor's handle imports the actor's class, and with it torch; and
a thread, because the driver's main one waits in calls for minutes. Left out: what the state of a role is called
(`relax_sdk.runtime.controller_state`).
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

__all__ = ["HeartbeatThread"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_ANSWER_S = 0.2
_STOP_TIMEOUT_S = 5.0


@dataclasses.dataclass
class _Watched:
    """A role. Its ping waits in its queue like any call, so an outstanding one means that it is busy.

    Answering beside a running call would take a concurrency group, and that moves all of a role's calls off its main
    thread, although its thread count, CUDA device and signal handlers belong to that thread. A process that ends fails
    the waiting ping at once.
    """

    handle: Any
    ping: Any = None
    asked: float | None = None
    answered: float | None = None
    node: str | None = None
    pid: int | None = None
    problem: str | None = None
    dead: bool = False

    def ask(self) -> None:
        if self.ping is None and not self.dead:
            self.ping, self.asked = self.handle.ping.remote(), time.monotonic()

    def hear(self) -> None:
        """Take the answer to the ping, which has come."""
        try:
            self.node, self.pid = ray.get(self.ping, timeout=_STOP_TIMEOUT_S)
            self.answered, self.problem = time.monotonic(), None
        except (ActorUnavailableError, GetTimeoutError) as error:
            self.problem = _reason(error)
        except (RayActorError, RayTaskError) as error:
            self.dead, self.problem = True, _reason(error)
        self.ping = self.asked = None

    def report(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "asked_age_s": None if self.asked is None else now - self.asked,
            "answered_age_s": None if self.answered is None else now - self.answered,
            "node": self.node,
            "pid": self.pid,
            "problem": self.problem,
            "dead": self.dead,
        }


class HeartbeatThread:
    """Pings every watched role once a second.

    Args:
        send: receives, by name, what is known about each role; also while there is none, as the driver's own heartbeat.
    """

    def __init__(self, send: Callable[[dict[str, dict[str, Any]]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._roles: dict[str, _Watched] = {}
        self._wake, self._stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="controller-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def watch(self, handles: Mapping[str, Any]) -> None:
        """Ping these from now on; a name that is watched already gets the new handle."""
        with self._lock:
            self._roles |= {name: _Watched(handle) for name, handle in handles.items()}
        self._wake.set()

    def stop(self) -> None:
        """End, within a moment."""
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            try:
                self._send(self._poll())
            except (RayError, RuntimeError, ValueError) as error:
                if not self._stopped:
                    logger.warning("no more heartbeats: %s", _reason(error))
                return
            self._wake.wait(_INTERVAL_S)

    def _poll(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            roles = dict(self._roles)
        for role in roles.values():
            role.ask()
        waiting = {role.ping: role for role in roles.values() if role.ping is not None}
        if waiting:
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_ANSWER_S)
            for ping in done:
                waiting[ping].hear()
        return {name: role.report() for name, role in roles.items()}


def _reason(error: Exception) -> str:
    """Of Ray's long text about a dead actor the sentence that says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1].partition(". Worker")[0]
