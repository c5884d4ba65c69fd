"""How the controller of a run is found and spoken to: ``control.json``, the token, and one HTTP request.

Shared by the runtime, which listens, and by the command line, which asks. Left out: the controller itself
(`relax_sdk.runtime.controller`). Loads neither torch nor Ray.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import AwareDatetime, Field

from relax_sdk.errors import ConfigError, RecordError, RunError
from relax_sdk.files import write_text_atomically
from relax_sdk.protocols import Record

__all__ = [
    "CONTROL_FILE",
    "RUN_HEADER",
    "RUN_STATES",
    "TOKEN_VARIABLE",
    "Answer",
    "ControlAddress",
    "RunState",
    "ask",
    "control_token",
    "is_loopback",
    "pulse",
    "read_address",
    "remove_address",
    "run_process_is_gone",
    "write_address",
]

RunState = Literal[
    "starting", "rolling out", "scoring", "training", "syncing", "evaluating", "stopping", "finished", "failed"
]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)

CONTROL_FILE = "control.json"
"""In the run's folder, while its controller answers."""

TOKEN_VARIABLE = "RELAX_CONTROL_TOKEN"
RUN_HEADER = "Relax-Run-Id"
"""Every answer carries it: a file left behind may name a port that another program has by now."""

_TOKEN = re.compile(r"[!-~]{16,512}")
_MAX_ANSWER_BYTES = 16_000_000


class ControlAddress(Record):
    """The content of ``control.json``."""

    run_id: str = Field(description="Made up anew for every run.")
    url: str = Field(description="What the paths of the endpoints are appended to.")
    host: str
    port: int
    pid: int = Field(gt=0, description="Of the process that runs `relax-sdk train`.")
    machine: str = Field(description="Host name of the machine it runs on.")
    started: AwareDatetime


class Answer(NamedTuple):
    """An HTTP answer: its status and its JSON body."""

    status: int
    body: dict[str, Any]


def write_address(run_dir: Path, address: ControlAddress) -> None:
    """Write ``control.json``, whole or not at all.

    Raises:
        ArtifactError: see `write_text_atomically`.
    """
    write_text_atomically(run_dir / CONTROL_FILE, address.model_dump_json(indent=2) + "\n")


def read_address(run_dir: Path) -> ControlAddress | None:
    """The content of ``control.json``; None when there is no such file.

    Raises:
        RunError: it cannot be read, or holds something else.
    """
    path = run_dir / CONTROL_FILE
    try:
        return ControlAddress(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecordError) as error:
        raise RunError(
            f"cannot use {CONTROL_FILE}: {str(error).splitlines()[0]}",
            where=str(path),
            expected="the file that relax-sdk train writes while it runs",
        ) from error


def remove_address(run_dir: Path, run_id: str) -> None:
    """Remove ``control.json`` when it is this run's; there may be none."""
    try:
        address = read_address(run_dir)
    except RunError:
        return  # somebody else wrote it
    if address is not None and address.run_id == run_id:
        (run_dir / CONTROL_FILE).unlink(missing_ok=True)


def run_process_is_gone(address: ControlAddress) -> bool:
    """Whether the run's process certainly ended: it was on this machine, and no process has its number."""
    if address.machine != socket.gethostname():
        return False
    try:
        os.kill(address.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def control_token(*, token_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The token that requests carry: from the file, else from ``RELAX_CONTROL_TOKEN``, else None.

    Raises:
        ConfigError: the file cannot be read, or what was given is no token. The token is not shown.
    """
    if token_file is not None:
        where = f"--control-token-file {token_file}"
        try:
            token = token_file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"cannot read the token: {reason}", where=where) from error
    elif TOKEN_VARIABLE in environ:
        token, where = environ[TOKEN_VARIABLE].strip(), TOKEN_VARIABLE
    else:
        return None
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"the token of {len(token)} characters is refused",
            where=where,
            expected="16 to 512 printable ASCII characters without spaces",
            next_step='python -c "import secrets; print(secrets.token_urlsafe())"',
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a socket bound to ``host``; a name must resolve to such addresses alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass  # a name
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(item[4][0])).is_loopback for item in found)


def pulse() -> tuple[str, int]:
    """What a role answers to a ping: the host name of its machine, and its process id."""
    return socket.gethostname(), os.getpid()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to wherever it points."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def ask(
    address: ControlAddress, method: Literal["GET", "POST"], path: str, *, token: str | None, timeout_s: float
) -> Answer:
    """One request to a run's controller.

    Args:
        address: where it listens.
        method: of the request, which has no body.
        path: of the endpoint, e.g. ``"/status"``.
        token: sent as ``Authorization: Bearer``.
        timeout_s: of connecting, and of each read.

    Raises:
        ConnectionError: nothing answers there, not in time, or another program does.
    """
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    request = urllib.request.Request(address.url + path, method=method, headers=headers)
    # Never through the proxy of http_proxy: it would look for 127.0.0.1 on its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with _open(opener, request, timeout_s) as response:
            run_id, text = response.headers.get(RUN_HEADER), response.read(_MAX_ANSWER_BYTES)
            status: int = response.status
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ConnectionError(str(reason) or type(reason).__name__) from error
    if run_id != address.run_id:
        raise ConnectionError("another program answers there")
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConnectionError("the answer is not JSON") from error
    if not isinstance(body, dict):
        raise ConnectionError("the answer is not a JSON object")
    return Answer(status, body)


def _open(opener: urllib.request.OpenerDirector, request: urllib.request.Request, timeout_s: float) -> Any:
    """Open, with a status of 400 and above as an ordinary response."""
    try:
        return opener.open(request, timeout=timeout_s)
    except urllib.error.HTTPError as error:
        return error
