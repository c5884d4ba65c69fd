"""``relax-sdk status`` and ``stop`` against a made-up controller: what they print, and say when none answers."""

from __future__ import annotations

import datetime
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_sdk.control import RUN_HEADER, ControlAddress, write_address

TOKEN = "correct-horse-battery"
STATUS: dict[str, Any] = {
    "run_id": "abc", "name": "shapes", "run_dir": "runs/shapes", "num_rollout": 75, "state": "training", "rollout": 3,
    "policy_version": 2, "metrics_rollout": 2, "error": None, "stop_requested": False, "updated_s_ago": 1.0,
    "metrics": {"reward/pickscore_mean": 0.6845, "train/policy_version": 2.0, "train/loss": None,
                "eval/few_prompts/pickscore_mean": 0.7},
}  # fmt: skip
HEALTH: dict[str, Any] = {
    "run_id": "abc", "state": "training", "healthy": False,
    "driver": {"state": "alive", "heartbeat_age_s": 0.4, "node": "here", "pid": 7, "problem": None},
    "roles": {
        "actor rank 0": {"state": "busy", "heartbeat_age_s": 12.3, "node": "here", "pid": 8, "problem": None},
        "rollout engine 0": {"state": "dead", "heartbeat_age_s": None, "node": None, "pid": None, "problem": "killed"},
    },
}  # fmt: skip


class Controller:
    """A server on a free port that answers like a controller, from a table that a test may change."""

    def __init__(self) -> None:
        self.run_id, self.token = "abc", ""
        self.replies: dict[tuple[str, str], tuple[int, Any]] = {
            ("GET", "/status"): (200, dict(STATUS)),
            ("GET", "/health"): (200, dict(HEALTH)),
            ("POST", "/stop"): (
                200,
                {"stopping": True, "already_requested": False, "message": "the run stops after rollout 3 of 75"},
            ),
        }
        self.seen: list[str] = []
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                controller.seen.append(f"{self.command} {self.path}")
                status, body = controller.replies[self.command, self.path]
                if controller.token and self.headers.get("Authorization") != f"Bearer {controller.token}":
                    status, body = 401, {"error": "this controller needs its token"}
                self.send_response(status)
                self.send_header(RUN_HEADER, controller.run_id)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                """Silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def folder(self, path: Path, **changes: Any) -> Path:
        """A run's folder whose ``control.json`` points here."""
        port = self.server.server_address[1]
        values = {
            "run_id": "abc", "url": f"http://127.0.0.1:{port}", "host": "127.0.0.1", "port": port, "pid": os.getpid(),
            "machine": socket.gethostname(), "started": datetime.datetime.now().astimezone(),
        }  # fmt: skip
        write_address(path, ControlAddress(**(values | changes)))
        return path


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Relax = Callable[..., Any]


def test_status_of_a_folder(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    ended = relax("status", str(controller.folder(tmp_path / "elsewhere")))
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].startswith("run       ")
    assert lines[1] == "state     training, rollout 3 of 75"
    assert lines[2] == "policy    version 2"
    assert "(0 s ago)" in lines[3] or "(1 s ago)" in lines[3]
    assert lines[4].startswith("last      rollout  2/75  pickscore 0.6845")
    assert lines[5].startswith("          eval few_prompts after 2 rollouts  pickscore 0.7000")
    rows = {line.split("  ")[0]: line.split() for line in lines if line.startswith(("driver", "actor", "rollout"))}
    assert rows["driver"][1:] == ["alive", "0", "s", "ago", "here", "7"]
    assert rows["actor rank 0"][3:] == ["busy", "12", "s", "ago", "here", "8"]
    assert rows["rollout engine 0"][3:] == ["dead", "-", "-", "-", "killed"]


def test_a_run_that_has_just_begun(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    nothing = dict.fromkeys(("rollout", "policy_version", "metrics", "metrics_rollout"))
    controller.replies["GET", "/status"] = (200, STATUS | nothing | {"state": "starting", "stop_requested": True})
    controller.replies["GET", "/health"] = (200, HEALTH | {"roles": {}})
    lines = relax("status", str(controller.folder(tmp_path / "run"))).out.splitlines()
    assert lines[1] == "state     starting, 75 rollouts to do, stop requested"
    assert [line.split(" ")[0] for line in lines] == [
        "run",
        "state",
        "started",
        "",
        "role",
        lines[-2].split(" ")[0],
        "driver",
    ]


def test_status_as_json(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    found = relax("status", "--json", str(controller.folder(tmp_path / "run"))).json
    assert (found["status"], found["health"]) == (STATUS, HEALTH)


def test_a_failed_run_that_still_answers(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    controller.replies["GET", "/status"] = (200, STATUS | {"state": "failed", "error": "it broke\n  where: here"})
    controller.replies["GET", "/health"] = (503, HEALTH | {"state": "failed"})
    ended = relax("status", str(controller.folder(tmp_path / "run")))
    assert ended.code == 1
    assert "error     it broke\n            where: here" in ended.out
    assert "it broke" in ended.err


def test_the_newest_run_that_answers_is_meant(
    relax: Relax, controller: Controller, tmp_path: Path, free_port: int
) -> None:
    now = datetime.datetime.now().astimezone()
    hour = datetime.timedelta(hours=1)
    runs = tmp_path / "runs"
    controller.folder(runs / "oldest", started=now - 3 * hour)
    controller.folder(runs / "older", started=now - 2 * hour)
    controller.folder(runs / "killed", started=now - hour, pid=2**22 + 1)
    controller.folder(runs / "hung", url=f"http://127.0.0.1:{free_port}")
    (runs / "broken").mkdir()
    (runs / "broken" / "control.json").write_text("{")
    (runs / "over").mkdir()
    ended = relax("status")
    assert ended.code == 0
    assert ended.out.startswith("run       runs/older ")
    assert "note: runs/killed: stale control.json: its run (process 4194305," in ended.err
    assert "note: runs/hung: no answer from" in ended.err
    assert "note: runs/broken: cannot use control.json" in ended.err
    assert "runs/over" not in ended.err


def test_no_run_answers(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    ended = relax("status")
    assert (ended.code, ended.out) == (1, "")
    assert "no run answers" in ended.err
    controller.folder(tmp_path / "runs" / "killed", pid=2**22 + 1)
    ended = relax("stop")
    assert (ended.code, ended.out) == (1, "")
    assert "stale control.json" in ended.err
    assert controller.seen == [], "nothing is sent to whoever has the port now"


def test_messages_about_a_folder(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    ended = relax("status", "nowhere")
    assert (ended.code, "no folder 'nowhere'" in ended.err) == (2, True)
    (tmp_path / "run").mkdir()
    ended = relax("status", "run")
    assert (ended.code, "is not the folder of a run" in ended.err) == (2, True)
    (tmp_path / "run" / "recipe.json").write_text("{}")
    ended = relax("status", "run")
    assert (ended.code, "no run is under way here" in ended.err) == (1, True)
    controller.folder(tmp_path / "run", pid=2**22 + 1)
    ended = relax("status", "run")
    assert ended.code == 1
    assert "rm run/control.json" in ended.err


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"[1]"])
def test_another_program_has_the_port(relax: Relax, controller: Controller, tmp_path: Path, body: bytes) -> None:
    folder = str(controller.folder(tmp_path / "run"))
    controller.replies["GET", "/health"] = (200, body)
    assert "JSON" in relax("status", folder).err
    controller.run_id = "another run"
    ended = relax("status", folder)
    assert (ended.code, "another program answers there" in ended.err) == (1, True)


def test_redirects_are_not_followed(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    controller.replies["GET", "/health"] = (302, {"error": "moved"})
    ended = relax("status", str(controller.folder(tmp_path / "run")))
    assert (ended.code, controller.seen) == (1, ["GET /health"])


def test_no_answer(relax: Relax, controller: Controller, tmp_path: Path, free_port: int) -> None:
    folder = controller.folder(tmp_path / "run", url=f"http://127.0.0.1:{free_port}")
    ended = relax("status", str(folder))
    assert ended.code == 1
    assert "Connection refused" in ended.err
    assert f"look for process {os.getpid()}" in ended.err


def test_a_proxy_of_the_environment_is_not_asked(
    relax: Relax, controller: Controller, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port}")
    assert relax("status", str(controller.folder(tmp_path / "run"))).code == 0


def test_token(relax: Relax, controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller.token = TOKEN
    folder = str(controller.folder(tmp_path / "runs" / "run"))
    ended = relax("status", folder)
    assert (ended.code, "the run needs its token" in ended.err) == (2, True)
    monkeypatch.setenv("RELAX_CONTROL_TOKEN", "a-token-of-another-run")
    for arguments in (["status"], ["stop", folder]):
        ended = relax(*arguments)
        assert (ended.code, "the run refuses the token" in ended.err) == (2, True)
        assert "a-token-of" not in ended.err
    (tmp_path / "token").write_text(TOKEN)
    assert relax("status", "--control-token-file", "token", folder).code == 0
    monkeypatch.setenv("RELAX_CONTROL_TOKEN", TOKEN)
    assert relax("status").code == 0


def test_stop(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    controller.folder(tmp_path / "runs" / "run")
    ended = relax("stop")
    assert (ended.code, ended.out, ended.err) == (0, "runs/run: the run stops after rollout 3 of 75\n", "")
    controller.replies["POST", "/stop"] = (200, {"already_requested": True, "message": "the run stops soon"})
    assert relax("stop", "runs/run").out == "runs/run: the run stops soon (already asked for)\n"
    assert relax("stop", "--json").json["message"] == "the run stops soon"


def test_a_controller_whose_run_is_lost(relax: Relax, controller: Controller, tmp_path: Path) -> None:
    controller.replies["GET", "/health"] = (503, {"error": "the run has ended, or does not answer"})
    ended = relax("status", str(controller.folder(tmp_path / "run")))
    assert (ended.code, "the run has ended, or does not answer" in ended.err) == (1, True)
