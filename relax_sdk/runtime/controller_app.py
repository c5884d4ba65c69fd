"""The HTTP side of a run's controller: `RunController`, a Ray Serve deployment.

Serve may restart it at any time; it holds nothing, checks who asks, and passes the question on to the run's
`relax_sdk.runtime.controller_state.StateActor`. It is sent to its process by value (see
`relax_sdk.runtime.controller`). Left out: starting and stopping it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from starlette.requests import Request
from starlette.responses import JSONResponse

from relax_sdk.control import RUN_HEADER

__all__ = ["RunController", "admit"]

ROUTES = {
    "/health": ("GET", "health"),
    "/status": ("GET", "status"),
    "/config": ("GET", "config"),
    "/stop": ("POST", "request_stop"),
}
"""Path -> method, and the `RunRecord` method that answers."""

_ANSWER_TIMEOUT_S = 5.0
_SERVE_CONTROLLER = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def admit(
    method: str, path: str, headers: Mapping[str, str], *, token_digest: str | None
) -> str | tuple[int, dict[str, Any], dict[str, str]]:
    """Decide about a request.

    Args:
        method, path: of the request, the path without the application's prefix.
        headers: with lower-case names.
        token_digest: sha256 of the token, in hex; None without one.

    Returns:
        The name of the answering `RunRecord` method, or the status, body and headers of a refusal.
    """
    valid = [f"{verb} {known}" for known, (verb, _) in ROUTES.items()]
    if token_digest is not None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(given.strip().encode()).hexdigest()
        # Both are evaluated, digests in constant time, so that the time tells nothing about the token.
        if not hmac.compare_digest(digest, token_digest) or scheme.lower() != "bearer":
            body = {"error": "this controller needs its token", "expected": "Authorization: Bearer TOKEN"}
            return 401, body, {"WWW-Authenticate": "Bearer"}
    elif "origin" in headers or not _names_loopback(headers.get("host", "")):
        # A web page in a browser on this machine can reach loopback ports; it sends Origin, or a host name of its own.
        return 403, {"error": "requests from web pages are refused", "expected": "a request to 127.0.0.1"}, {}
    if path not in ROUTES:
        return 404, {"error": f"unknown path {path!r}", "valid": valid}, {}
    verb, name = ROUTES[path]
    if method != verb:
        return 405, {"error": f"{path} does not take {method}", "valid": valid}, {"Allow": verb}
    return name


class RunController:
    """The run's HTTP API, to be deployed on Ray Serve.

    Args:
        run_id: sent with every answer.
        state: name and namespace of the `StateActor`.
        prefix: of the application's paths; empty when it has Serve to itself.
        token_digest: see `admit`.
        app: the application's own name.
        owns_serve: whether Serve was started for this run.
    """

    def __init__(
        self, *, run_id: str, state: tuple[str, str], prefix: str, token_digest: str | None, app: str, owns_serve: bool
    ) -> None:
        self._run_id, self._prefix, self._token_digest = run_id, prefix, token_digest
        self._app, self._owns_serve = app, owns_serve
        self._state = ray.get_actor(state[0], namespace=state[1])

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer one request."""
        path = request.url.path.removeprefix(self._prefix)
        decision = admit(request.method, path, request.headers, token_digest=self._token_digest)
        headers: dict[str, str] = {}
        if isinstance(decision, str):
            try:
                status, body = await asyncio.wait_for(self._ask(decision), _ANSWER_TIMEOUT_S)
            except (RayActorError, TimeoutError):
                status, body = 503, {"error": "the run has ended, or does not answer"}
        else:
            status, body, headers = decision
        return JSONResponse(
            body, status_code=status, headers={**headers, RUN_HEADER: self._run_id, "Cache-Control": "no-store"}
        )

    async def _ask(self, name: str) -> tuple[int, dict[str, Any]]:
        reply: tuple[int, dict[str, Any]] = await self._state.answer.remote(name)
        return reply

    async def check_health(self) -> None:
        """Called by Serve at intervals. When the driver was killed, nobody else takes this application away."""
        try:
            await asyncio.wait_for(self._ask("health"), _ANSWER_TIMEOUT_S)
        except ActorUnavailableError:
            return
        except RayActorError:
            await asyncio.to_thread(self._leave)
        except TimeoutError:
            return

    def _leave(self) -> None:
        from ray import serve  # in the replica it is loaded anyway

        others = set(serve.status().applications) - {self._app}
        if self._owns_serve and not others:
            ray.get_actor(**_SERVE_CONTROLLER).graceful_shutdown.remote(wait=False)
        else:
            serve.delete(self._app, _blocking=False)


def _names_loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback, with any port: a tunnel may have another one."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.lower() in _LOOPBACK_NAMES
