"""The controller on a real Ray and a real Ray Serve, asked over HTTP, and what is left when it is gone."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from runs import HERE, MARK, processes_of

from relax_sdk.cli import main
from relax_sdk.config import RunConfig, resolve
from relax_sdk.control import CONTROL_FILE, Answer, ask, pulse, read_address
from relax_sdk.errors import ConfigError
from relax_sdk.registry import Registry
from relax_sdk.runtime.controller import ControlPlane, open_controller

TOKEN = "correct-horse-battery"

# Ray and Serve leave sockets and sub-processes to the garbage collector, and use deprecated names.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Worker:
    """Stands for a role."""

    def ping(self) -> tuple[str, int]:
        return pulse()

    def work(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Ray whose processes carry a mark in their environment."""

    mark: str
    address: str
    session: Path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        started = ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="relax-test",
        )
        info = started.address_info
        yield Cluster(mark, str(info["gcs_address"]), Path(str(info["session_dir"])))
        ray.shutdown()


def configured(**values: Any) -> RunConfig:
    return resolve(
        {"run.num_rollout": 7} | {f"control.{name}": value for name, value in values.items()},
        registry=Registry([]),
        environ={},
    )


def processes(mark: str, *titles: str) -> list[str]:
    """The titles, of processes of this Ray, that begin with one of these."""
    found = []
    for pid in processes_of(mark):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue  # it ended while we looked
        found += [title] if title.startswith(titles) else []
    return found


CONTROLLER_PROCESSES = ("ray::Serve", "ray::Proxy", "ray::StateActor")


def eventually(check: Callable[[], Any], *, within_s: float = 15.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.1)
    return found


def get(run_dir: Path, path: str, method: Any = "GET", token: str | None = None) -> Answer:
    address = read_address(run_dir)
    assert address is not None
    return ask(address, method, path, token=token, timeout_s=10)


def role_of(run_dir: Path, name: str) -> dict[str, Any]:
    """What /health says about a role; empty before its first ping."""
    role: dict[str, Any] = get(run_dir, "/health").body["roles"].get(name, {})
    return role


@pytest.fixture(scope="class")
def run(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ControlPlane]]:
    run_dir = tmp_path_factory.mktemp("runs") / "a run {1}"
    run_dir.mkdir()
    with open_controller(configured(), run_dir=run_dir, environ={}) as plane:
        plane.publish(state="starting")
        plane.wait_started()
        yield run_dir, plane


Running = tuple[Path, ControlPlane]


class TestOneRun:
    """Serve started for a run, in the order of a run's life."""

    def test_status_follows_what_the_driver_publishes(self, run: Running) -> None:
        run_dir, plane = run
        plane.publish(
            state="rolling out", rollout=2, policy_version=1, metrics={"reward/a_mean": 0.25, "x": float("nan")}
        )
        status = eventually(lambda: (answer := get(run_dir, "/status")).body["rollout"] == 2 and answer)
        assert status.status == 200
        expected = {"state": "rolling out", "rollout": 2, "num_rollout": 7, "policy_version": 1, "name": "a run {1}"}
        assert status.body | expected == status.body
        assert status.body["metrics"] == {"reward/a_mean": 0.25, "x": None}
        recipe = get(run_dir, "/config").body
        assert recipe["config"]["run"]["num_rollout"] == 7
        assert recipe["packages"]["ray"] == ray.__version__

    def test_unknown_paths_and_methods(self, run: Running) -> None:
        run_dir, _ = run
        for path in ("/", "/nothing", "/status/x"):
            answer = get(run_dir, path)
            assert (answer.status, "GET /status" in answer.body["valid"]) == (404, True)
        assert get(run_dir, "/status", "POST").status == 405
        assert get(run_dir, "/stop").status == 405

    def test_a_busy_driver_delays_no_answer(self, run: Running) -> None:
        run_dir, plane = run
        worker: Any = ray.remote(Worker).options(num_cpus=0).remote()
        plane.roles({"actor rank 0": worker})
        plane.publish(state="training")
        eventually(lambda: role_of(run_dir, "actor rank 0").get("state") == "idle")
        seen: list[tuple[float, Answer, Answer]] = []

        def watch() -> None:
            for _ in range(8):
                begun = time.monotonic()
                answers = get(run_dir, "/status"), get(run_dir, "/health")
                seen.append((time.monotonic() - begun, *answers))
                time.sleep(0.5)

        watcher = threading.Thread(target=watch)
        watcher.start()
        ray.get(worker.work.remote(5.0), timeout=60)
        watcher.join()
        assert len(seen) == 8
        assert max(seconds for seconds, _, _ in seen) < 2.0
        assert all(status.body["state"] == "training" for _, status, _ in seen)
        last = seen[-1][2].body["roles"]["actor rank 0"]
        assert (last["state"], last["pid"] > 0, last["node"]) == ("busy", True, socket.gethostname())
        assert last["heartbeat_age_s"] > 2
        eventually(lambda: role_of(run_dir, "actor rank 0").get("state") == "idle")

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
    def test_a_killed_role_is_seen_at_once(self, run: Running, busy: bool) -> None:
        run_dir, plane = run
        worker: Any = ray.remote(Worker).options(num_cpus=0).remote()
        plane.roles({"rollout engine 0": worker})
        pid = eventually(lambda: role_of(run_dir, "rollout engine 0").get("pid"))
        call = worker.work.remote(600.0 if busy else 0.0)
        if busy:
            eventually(lambda: role_of(run_dir, "rollout engine 0")["state"] == "busy")
        os.kill(pid, signal.SIGKILL)
        health = eventually(lambda: not (answer := get(run_dir, "/health")).body["healthy"] and answer, within_s=5.0)
        assert health.status == 200
        dead = health.body["roles"]["rollout engine 0"]
        assert (dead["state"], "died" in dead["problem"]) == ("dead", True)
        plane.roles({"rollout engine 0": ray.remote(Worker).options(num_cpus=0).remote()})
        eventually(lambda: get(run_dir, "/health").body["healthy"])
        del call

    def test_stop_twice(self, run: Running) -> None:
        run_dir, plane = run
        plane.publish(state="training", rollout=3)
        assert not plane.stop_requested()
        eventually(lambda: get(run_dir, "/status").body["rollout"] == 3)
        first, second = (get(run_dir, "/stop", "POST") for _ in range(2))
        assert first.body == {
            "stopping": True,
            "already_requested": False,
            "message": "the run stops after rollout 3 of 7",
        }
        assert second.body == first.body | {"already_requested": True}
        assert plane.stop_requested()
        assert get(run_dir, "/status").body["stop_requested"]

    def test_a_web_page_is_refused(self, run: Running) -> None:
        address = read_address(run[0])
        assert address is not None
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            request = urllib.request.Request(address.url + "/stop", method="POST", headers=headers)
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10)
            assert caught.value.code == 403
            caught.value.close()

    def test_the_command_line(
        self, run: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_dir, _ = run
        (run_dir.parent / "runs").symlink_to(run_dir.parent)
        monkeypatch.chdir(run_dir.parent)
        for arguments, expected in ((["status"], "of 7"), (["stop", str(run_dir)], "(already asked for)")):
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            assert (ended.value.code, expected in capsys.readouterr().out) == (0, True)

    def test_no_process_of_it_holds_torch(self, run: Running, cluster: Cluster) -> None:
        """They are small because they do not import the runtime."""
        found = 0
        for pid in processes_of(cluster.mark):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            if title.startswith(CONTROLLER_PROCESSES):
                found += 1
                assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), title
        assert found == 4

    def test_a_second_run_in_the_cluster_shares_serve(
        self, run: Running, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        run_dir, second_dir = run[0], tmp_path / "second"
        address = read_address(run_dir)
        assert address is not None

        def second_run() -> None:
            with open_controller(configured(), run_dir=second_dir, environ={}) as second:
                assert str(second.wait_started()).startswith(address.url + "/relax-second-")
                assert get(second_dir, "/status").body["name"] == "second"
                assert get(second_dir, "/nothing").status == 404
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            second_run()
        assert not (second_dir / CONTROL_FILE).exists()
        assert get(run_dir, "/status").status == 200, "the first one still answers"
        assert capfd.readouterr() == ("", "")


def test_token_beyond_loopback_and_nothing_left(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    eventually(lambda: not processes(cluster.mark, *CONTROLLER_PROCESSES))
    run_dir = tmp_path / "run"
    config = configured(control_host="0.0.0.0")
    with open_controller(config, run_dir=run_dir, environ={"RELAX_CONTROL_TOKEN": TOKEN}) as plane:
        plane.wait_started()
        address = read_address(run_dir)
        assert address is not None
        assert address.host == "0.0.0.0"
        assert "//0.0.0.0" not in address.url, "an address that one can connect to"
        for token, status in ((None, 401), (TOKEN + "x", 401), (TOKEN, 200)):
            assert get(run_dir, "/status", token=token).status == status
        assert get(run_dir, "/stop", "POST").status == 401
        assert not plane.stop_requested()
        assert TOKEN not in json.dumps(get(run_dir, "/config", token=TOKEN).body)
    eventually(lambda: not processes(cluster.mark, *CONTROLLER_PROCESSES), within_s=5.0)
    assert list(run_dir.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((address.url.partition("//")[2].partition(":")[0], address.port), timeout=5)
    assert capfd.readouterr() == ("", "")
    logs = [path for path in (cluster.session / "logs").rglob("*") if path.is_file()]
    assert logs
    assert [path for path in logs if TOKEN.encode() in path.read_bytes()] == []


def test_the_serve_of_the_cluster_stays(cluster: Cluster, tmp_path: Path) -> None:
    from ray import serve

    class Greeting:
        async def __call__(self, request: Any) -> str:
            return "hello"

    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(serve.deployment(Greeting).options(ray_actor_options={"num_cpus": 0}).bind(), name="theirs")
        with (
            pytest.raises(ConfigError, match=f"listens on 127.0.0.1:{port} already"),
            open_controller(configured(control_port=port + 1), run_dir=tmp_path / "other", environ={}) as plane,
        ):
            plane.wait_started()
        run_dir = tmp_path / "run"
        with open_controller(configured(), run_dir=run_dir, environ={}) as plane:
            url = plane.wait_started()
            assert url is not None
            assert url.startswith(f"http://127.0.0.1:{port}/relax-run-")
            assert get(run_dir, "/status").body["state"] == "starting"
            assert get(run_dir, "/nothing").status == 404
        assert not (run_dir / CONTROL_FILE).exists()
        assert set(serve.status().applications) == {"theirs"}
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://127.0.0.1:{port}/", timeout=10
        ) as response:
            assert response.read() == b"hello"
    finally:
        serve.shutdown()


DRIVER = """
import logging, os, sys, time
from pathlib import Path
import ray
from relax_sdk.config import RunConfig
from relax_sdk.runtime.controller import open_controller
ray.init(address=sys.argv[1], namespace="relax-killed", log_to_driver=False, logging_level=logging.ERROR)
with open_controller(RunConfig(), run_dir=Path(sys.argv[2]), environ={}) as plane:
    plane.wait_started()
    time.sleep(600)
"""


def test_a_killed_driver_leaves_nothing_in_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    """In a cluster that lives on; its own ends with it."""
    eventually(lambda: not processes(cluster.mark, *CONTROLLER_PROCESSES))
    run_dir = tmp_path / "run"
    with (tmp_path / "output").open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, cluster.address, str(run_dir)], stdout=output, stderr=output
        )
    try:
        eventually(lambda: driver.poll() is None and (run_dir / CONTROL_FILE).exists(), within_s=120.0)
    finally:
        driver.kill()
        driver.wait()
    assert (tmp_path / "output").read_text() == ""
    eventually(lambda: not processes(cluster.mark, *CONTROLLER_PROCESSES), within_s=30.0)
    assert (run_dir / CONTROL_FILE).exists(), "which relax-sdk status calls stale"


def test_a_port_that_is_taken(cluster: Cluster, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def a_run(step: Callable[[ControlPlane], object]) -> None:
            with open_controller(configured(control_port=port), run_dir=tmp_path, environ={}) as plane:
                step(plane)

        def publish_in_time(plane: ControlPlane) -> None:
            eventually(lambda: plane.publish(state="training"))

        for step in (ControlPlane.wait_started, publish_in_time):
            with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
                a_run(step)
    eventually(lambda: not processes(cluster.mark, *CONTROLLER_PROCESSES))
    assert list(tmp_path.iterdir()) == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
