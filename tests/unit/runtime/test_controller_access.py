"""Who may ask the controller, what it takes, and where it may listen."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from relax_sdk.config import RunConfig, resolve
from relax_sdk.control import (
    CONTROL_FILE,
    ControlAddress,
    control_token,
    is_loopback,
    read_address,
    remove_address,
    run_process_is_gone,
    write_address,
)
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.preflight.control import controller_is_protected
from relax_sdk.preflight.situation import Situation
from relax_sdk.registry import Registry
from relax_sdk.runtime.controller import open_controller
from relax_sdk.runtime.controller_app import admit
from relax_sdk.runtime.controller_serve import reserved_port, url_of

TOKEN = "correct-horse-battery"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
LOCAL = {"host": "127.0.0.1:8123"}


def ask(method: str, path: str, headers: dict[str, str], digest: str | None = None) -> Any:
    return admit(method, path, headers, token_digest=digest)


def test_the_four_endpoints() -> None:
    routes = {("GET", "/health"): "health", ("GET", "/status"): "status", ("GET", "/config"): "config"}
    for (method, path), name in (routes | {("POST", "/stop"): "request_stop"}).items():
        assert ask(method, path, LOCAL) == name


def test_everything_else_is_refused_with_the_valid_ones() -> None:
    valid = ["GET /health", "GET /status", "GET /config", "POST /stop"]
    for path in ("/", "/x", "/status/", "/status/x", "//status", "/Status", ""):
        status, body, _ = ask("GET", path, LOCAL)
        assert (status, body["valid"]) == (404, valid)
        assert repr(path) in body["error"]
    for method, path, allowed in (("GET", "/stop", "POST"), ("POST", "/status", "GET"), ("DELETE", "/config", "GET")):
        status, body, headers = ask(method, path, LOCAL)
        assert (status, body["valid"], headers) == (405, valid, {"Allow": allowed})


@pytest.mark.parametrize("given", ["Bearer " + TOKEN, "bearer  " + TOKEN])
def test_the_right_token(given: str) -> None:
    assert ask("GET", "/status", {"authorization": given, "host": "elsewhere"}, DIGEST) == "status"


@pytest.mark.parametrize(
    "given",
    [None, "", TOKEN, "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {DIGEST}", "Bearer é"],
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/status"), ("POST", "/stop"), ("GET", "/no/such/path")])
def test_without_it_nothing_is_told(given: str | None, method: str, path: str) -> None:
    headers = LOCAL if given is None else LOCAL | {"authorization": given}
    status, body, extra = ask(method, path, headers, DIGEST)
    assert (status, extra) == (401, {"WWW-Authenticate": "Bearer"})
    assert "valid" not in body


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:1", "LOCALHOST", "[::1]:80", "127.0.0.1"])
def test_names_of_loopback(host: str) -> None:
    assert ask("POST", "/stop", {"host": host}) == "request_stop"


@pytest.mark.parametrize(
    "headers",
    [{}, {"host": "evil.example:8123"}, {"host": "127.0.0.1.evil.example"}, LOCAL | {"origin": "http://evil.example"}],
)
def test_a_web_page_cannot_stop_a_run(headers: dict[str, str]) -> None:
    assert ask("POST", "/stop", headers)[0] == 403


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "no-such-name.invalid"))


def test_token_from_file_or_variable(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert control_token(token_file=None, environ={}) is None
    assert control_token(token_file=None, environ={"RELAX_CONTROL_TOKEN": "another-token-of-enough"}) is not None
    assert control_token(token_file=file, environ={"RELAX_CONTROL_TOKEN": "another-token-of-enough"}) == TOKEN
    with pytest.raises(ConfigError, match="cannot read the token"):
        control_token(token_file=tmp_path / "none", environ={})


@pytest.mark.parametrize("token", ["", "short", "has a space in the middle", "ünïcödé-but-long-enough"])
def test_what_is_no_token_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        control_token(token_file=None, environ={"RELAX_CONTROL_TOKEN": token})
    assert not token or token not in str(caught.value)


def configured(**values: Any) -> RunConfig:
    return resolve({f"control.{name}": value for name, value in values.items()}, registry=Registry([]), environ={})


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_beyond_loopback_a_token_is_required(host: str, tmp_path: Path) -> None:
    """In preflight, and again before anything is started."""
    config = configured(control_host=host)
    with pytest.raises(ConfigError, match="has no token"), open_controller(config, run_dir=tmp_path, environ={}):
        pass
    assert len(violations(config, {})) == 1
    assert "RELAX_CONTROL_TOKEN" in violations(config, {})[0]
    assert violations(config, {"RELAX_CONTROL_TOKEN": TOKEN}) == []
    assert len(violations(config, {"RELAX_CONTROL_TOKEN": "short"})) == 1
    assert violations(configured(control_host=host, control=False), {}) == []
    assert violations(configured(), {}) == []


def violations(config: RunConfig, environ: dict[str, str]) -> list[str]:
    registry = Registry.discover()
    situation = Situation(
        config=config, registry=registry, environ=environ, model=None, adapter=None, reward=None,
        engine=registry.engine("local"),
    )  # fmt: skip
    return list(controller_is_protected(situation))


def test_without_a_controller_every_call_does_nothing(tmp_path: Path) -> None:
    with open_controller(configured(control=False), run_dir=tmp_path) as plane:
        plane.publish(state="training", rollout=1, metrics={"a": 1.0})
        plane.roles({"x": object()})
        assert plane.wait_started() is None
        assert not plane.stop_requested()
    assert list(tmp_path.iterdir()) == []


def test_the_token_is_in_no_recipe() -> None:
    config = configured(control_token_file="secret.txt")
    assert config.to_values()["control"] == {
        "control": True, "control_host": "127.0.0.1", "control_port": 0, "control_token_file": "secret.txt",
    }  # fmt: skip


def address(**changes: Any) -> ControlAddress:
    values = {
        "run_id": "abc", "url": "http://127.0.0.1:1", "host": "127.0.0.1", "port": 1, "pid": os.getpid(),
        "machine": socket.gethostname(), "started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return ControlAddress(**(values | changes))


def test_control_file(tmp_path: Path) -> None:
    assert read_address(tmp_path) is None
    write_address(tmp_path, address())
    assert read_address(tmp_path) == address()
    remove_address(tmp_path, "another run")
    assert read_address(tmp_path) == address()
    remove_address(tmp_path, "abc")
    assert list(tmp_path.iterdir()) == []
    for text in ("", "[]", "{}", '{"run_id": 1}'):
        (tmp_path / CONTROL_FILE).write_text(text)
        with pytest.raises(RunError, match=r"cannot use control\.json"):
            read_address(tmp_path)


def test_a_process_elsewhere_is_never_called_gone() -> None:
    free = 2**22 + 1  # above the largest process id
    assert not run_process_is_gone(address())
    assert run_process_is_gone(address(pid=free))
    assert not run_process_is_gone(address(pid=free, machine="another"))


def test_urls() -> None:
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url_of("::1", 80, "/run") == "http://[::1]:80/run"


def listening_as_serve_does(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


def test_a_reserved_port_is_kept_for_serve() -> None:
    """Another run, which would look for it as we do, cannot take it; a socket that shares ports, like Serve's, can."""
    with reserved_port("127.0.0.1", 0) as port:
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"), reserved_port("127.0.0.1", port):
            pass
        with listening_as_serve_does(port) as listening:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                accepted, _ = listening.accept()
                accepted.close()
            with pytest.raises(ConfigError), reserved_port("127.0.0.1", port):
                pass
    with reserved_port("127.0.0.1", port) as again:
        assert again == port


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on '192\.0\.2\.77'"), reserved_port("192.0.2.77", 0):
        pass
