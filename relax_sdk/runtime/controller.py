"""The driver's side of the controller: start it beside the loading models, publish to it, close it on every path.

Ray Serve is started with one proxy on the run's port, or joined when the cluster of ``RAY_ADDRESS`` already has it:
then the run is mounted below a prefix of its own, and only its application is removed at the end. What answers is in
`relax_sdk.runtime.controller_app`, over `relax_sdk.runtime.controller_state`. Left out: following the wish to stop,
which is the loop's.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_sdk.config import RunConfig, is_chosen
from relax_sdk.control import (
    TOKEN_VARIABLE,
    ControlAddress,
    RunState,
    ask,
    control_token,
    is_loopback,
    remove_address,
    write_address,
)
from relax_sdk.errors import ConfigError, RelaxError, RunError
from relax_sdk.runtime import controller_state
from relax_sdk.runtime.controller_health import HeartbeatThread
from relax_sdk.runtime.controller_serve import (
    WITHOUT,
    end_serve,
    listening_serve,
    reachable_host,
    reserved_port,
    start_serve,
    url_of,
)

__all__ = ["ControlPlane", "open_controller"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 300.0
"""Seconds on an idle machine, but beside other busy processes much longer, and no reason to lose a run."""
_ANSWER_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 15.0
_STATE_TIMEOUT_S = 10.0


class ControlPlane:
    """What the driver says to its controller. No call waits for anything but `stop_requested` and `wait_started`.

    Args:
        service: the controller; None with ``--no-control``, when every call does nothing.
    """

    def __init__(self, service: _Service | None) -> None:
        self._service = service

    def publish(
        self,
        *,
        state: RunState | None = None,
        rollout: int | None = None,
        policy_version: int | None = None,
        metrics: Mapping[str, float] | None = None,
        error: str | None = None,
    ) -> None:
        """Tell what changed; None leaves a value as it is.

        Args:
            state: what the run does now.
            rollout: the one under way, counted from 1.
            policy_version: of the weights that actor and engines hold.
            metrics: the last record.
            error: why the run failed.

        Raises:
            RelaxError: the controller did not start.
        """
        if self._service is None:
            return
        self._service.raise_if_failed()
        given = {
            "state": state,
            "rollout": rollout,
            "policy_version": policy_version,
            "metrics": None if metrics is None else dict(metrics),
            "error": error,
        }
        self._service.update({name: value for name, value in given.items() if value is not None})

    def roles(self, handles: Mapping[str, Any]) -> None:
        """Watch these roles' health from now on; a name that is watched already gets the new handle.

        Args:
            handles: name -> actor handle; each actor has a method ``ping`` that returns `relax_sdk.control.pulse()`.
        """
        if self._service is not None:
            self._service.heartbeats.watch(handles)

    def stop_requested(self) -> bool:
        """Whether somebody asked the run to stop; to be asked between rollouts."""
        return self._service is not None and self._service.stop_requested()

    def wait_started(self) -> str | None:
        """Wait until the controller answers over HTTP; its URL, or None with ``--no-control``.

        Raises:
            RelaxError: it did not start.
        """
        return None if self._service is None else self._service.wait_started()


@contextlib.contextmanager
def open_controller(
    config: RunConfig, *, run_dir: Path, environ: Mapping[str, str] | None = None
) -> Iterator[ControlPlane]:
    """Start the run's controller, in the background; close it and whatever of Serve was started for it.

    Ray must be running. ``control.json`` is in the run's folder as long as the controller answers.

    Args:
        config: the resolved configuration.
        run_dir: the run's folder.
        environ: environment variables; ``os.environ`` when None.

    Raises:
        ConfigError: the token is missing or malformed, or the port is in use.
        RelaxError: from the plane's calls, when the controller did not start.
    """
    if not config.control.control:
        yield ControlPlane(None)
        return
    token = control_token(
        token_file=config.control.control_token_file, environ=os.environ if environ is None else environ
    )
    if token is None and not is_loopback(config.control.control_host):
        raise _needs_token(f"--control-host {config.control.control_host}")
    service = _Service(config, run_dir=run_dir, token=token)
    try:
        service.start()
        yield ControlPlane(service)
    except BaseException as error:
        text = str(error) if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RayError, RuntimeError):  # Ray itself may be what failed
            service.update({"state": "failed", "error": text})
        raise
    else:
        service.update({"state": "finished"})
    finally:
        service.close()


class _Service:
    """The state actor, Serve, the application, and ``control.json``.

    Args:
        config: the resolved configuration.
        run_dir: the run's folder.
        token: which requests must carry, or None.
    """

    def __init__(self, config: RunConfig, *, run_dir: Path, token: str | None) -> None:
        self._config, self._run_dir, self._token = config, run_dir, token
        self._run_id = uuid.uuid4().hex[:12]
        # Part of a URL, and Serve reads braces in it as a pattern.
        self._app = f"relax-{re.sub('[^A-Za-z0-9_-]+', '-', run_dir.name)}-{self._run_id}"
        self._started = datetime.datetime.now().astimezone()
        self._url = ""
        self._owns_serve = self._deployed = False
        self._closing = threading.Event()
        self._done = threading.Event()
        self._failure: BaseException | None = None
        self._deadline = time.monotonic() + _START_TIMEOUT_S
        self._thread = threading.Thread(target=self._run, name="start-controller", daemon=True)
        self.state: Any = None
        self.heartbeats = HeartbeatThread(lambda reports: self.state.heartbeat.remote(reports))

    def start(self) -> None:
        """Create the state actor, and begin with the rest."""
        # By value: its process would otherwise import `relax_sdk.runtime`, and with it torch.
        ray.cloudpickle.register_pickle_by_value(controller_state)
        here = ray.get_runtime_context().get_node_id()
        self.state = (
            ray.remote(controller_state.StateActor)
            .options(
                num_cpus=0,
                name=self._app,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(facts=self._facts(), config=self._config.to_recipe())
        )
        self.heartbeats.start()
        self._thread.start()

    def update(self, fields: Mapping[str, Any]) -> None:
        """Send fields to the state actor, without waiting."""
        if self.state is not None:
            self.state.update.remote(dict(fields))

    def stop_requested(self) -> bool:
        """Ask the state actor; a lost one is reported and does not end the run."""
        try:
            return bool(ray.get(self.state.stop_requested.remote(), timeout=_STATE_TIMEOUT_S))
        except RayError as error:
            logger.warning("the controller's state is lost: %s", str(error).splitlines()[0])
            return False

    def raise_if_failed(self) -> None:
        """Raise what went wrong with the start, or that it takes too long."""
        if self._failure is not None:
            raise self._failure
        if not self._done.is_set() and time.monotonic() > self._deadline:
            raise RunError(
                f"the controller did not start within {_START_TIMEOUT_S:.0f} s",
                where="Ray Serve",
                next_step=WITHOUT,
            )

    def wait_started(self) -> str:
        """Wait for the URL."""
        self._done.wait(max(self._deadline - time.monotonic(), 0.0) + 0.1)
        self.raise_if_failed()
        return self._url

    def close(self) -> None:
        """Remove ``control.json``, the application, Serve if it was started here, and the state actor."""
        self._closing.set()
        self.heartbeats.stop()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        remove_address(self._run_dir, self._run_id)
        # In a thread, because a Ray that is gone answers these calls late or never.
        closing = threading.Thread(target=self._take_down, name="stop-controller", daemon=True)
        closing.start()
        closing.join(_STOP_TIMEOUT_S)
        if closing.is_alive():
            logger.warning("Ray Serve did not end within %.0f s", _STOP_TIMEOUT_S)

    def _facts(self) -> dict[str, Any]:
        return {
            "run_id": self._run_id,
            "name": self._run_dir.name,
            "run_dir": str(self._run_dir),
            "num_rollout": self._config.run.num_rollout,
            "started": self._started.isoformat(timespec="seconds"),
            "node": socket.gethostname(),
            "pid": os.getpid(),
        }

    def _run(self) -> None:
        try:
            self._start_serve()
        except RelaxError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - raised again where the driver meets it
            self._failure = RunError(
                f"the controller did not start: {type(error).__name__}: {str(error).strip()}",
                where="Ray Serve",
                next_step=WITHOUT,
            )
        finally:
            self._done.set()

    def _start_serve(self) -> None:
        # Here, because it takes a second, which the loading models hide.
        importlib.import_module("ray.serve")
        # It announces every step on stderr, and importing it sets its own level.
        quiet = self._config.run.log_level not in ("debug", "info")
        logging.getLogger("ray.serve").setLevel(logging.ERROR if quiet else logging.INFO)
        control = self._config.control
        found = listening_serve()
        if found is not None:
            host, port = found
            prefix = f"/{self._app}"
            self._check_joined(host, port)
            self._deploy(prefix)
        else:
            host, prefix = control.control_host, ""
            with reserved_port(host, control.control_port) as port:
                self._owns_serve = True
                start_serve(host, port)
            self._deploy(prefix)
        address = ControlAddress(
            run_id=self._run_id,
            url=url_of(reachable_host(host), port, prefix),
            host=host,
            port=port,
            pid=os.getpid(),
            machine=socket.gethostname(),
            started=self._started,
        )
        self._wait_for_answer(address)
        self._url = address.url
        if not self._closing.is_set():
            write_address(self._run_dir, address)

    def _check_joined(self, host: str, port: int) -> None:
        """The cluster's Serve listens where it listens: refuse what contradicts it, and demand a token."""
        control, listens = self._config.control, f"{host}:{port}"
        for path, wanted, found in (
            ("control.control_host", control.control_host, host),
            ("control.control_port", control.control_port or port, port),
        ):
            if is_chosen(self._config.provenance, path) and wanted != found:
                raise ConfigError(
                    f"this cluster's Ray Serve listens on {listens} already",
                    where=f"--{path.partition('.')[2].replace('_', '-')} {wanted}",
                    expected="the flag left out",
                )
        if self._token is None and not is_loopback(host):
            raise _needs_token(f"this cluster's Ray Serve, which listens on {listens}")

    def _deploy(self, prefix: str) -> None:
        from ray import serve

        from relax_sdk.runtime import controller_app

        ray.cloudpickle.register_pickle_by_value(controller_app)
        self._deployed = True
        here = ray.util.get_node_ip_address()
        deployment: Any = serve.deployment(controller_app.RunController)
        deployment = deployment.options(
            num_replicas=1,
            max_ongoing_requests=32,
            health_check_period_s=5.0,
            health_check_timeout_s=30.0,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=1.0,
            # On the driver's node, where Serve then has a proxy too, and loopback is the same.
            ray_actor_options={"num_cpus": 0, "resources": {f"node:{here}": 0.001}},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        application = deployment.bind(
            run_id=self._run_id,
            state=(self._app, ray.get_runtime_context().namespace),
            prefix=prefix,
            # Not the token: what Serve is given it keeps in the cluster's store.
            token_digest=None if self._token is None else hashlib.sha256(self._token.encode()).hexdigest(),
            app=self._app,
            owns_serve=self._owns_serve,
        )
        serve.run(application, name=self._app, route_prefix=prefix or "/")

    def _wait_for_answer(self, address: ControlAddress) -> None:
        deadline = time.monotonic() + _ANSWER_TIMEOUT_S
        while True:
            try:
                status = ask(address, "GET", "/status", token=self._token, timeout_s=5.0).status
            except ConnectionError as error:
                if time.monotonic() > deadline or self._closing.is_set():
                    raise RunError(
                        f"the controller does not answer: {error}", where=address.url, next_step=WITHOUT
                    ) from error
                time.sleep(0.1)
                continue
            if status != 200:
                raise RunError(f"the controller answers with HTTP {status}", where=address.url, next_step=WITHOUT)
            return

    def _take_down(self) -> None:
        try:
            if self._owns_serve or self._deployed:
                end_serve(self._app, owned=self._owns_serve)
            if self.state is not None:
                ray.kill(self.state)
        except (RayError, RuntimeError, ValueError, TimeoutError) as error:
            # Of a Ray that was started for this run nothing stays in any case; RunController looks after another one.
            logger.warning("the controller could not be stopped: %s", str(error).splitlines()[0])


def _needs_token(who: str) -> ConfigError:
    return ConfigError(
        "the controller is reachable from other machines and has no token",
        where=who,
        expected=f"{TOKEN_VARIABLE} or --control-token-file, or a loopback address",
        next_step=WITHOUT,
    )
