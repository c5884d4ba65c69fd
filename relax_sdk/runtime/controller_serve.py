"""Ray Serve for one application: start it, or use the cluster's; remove what was added, and nothing else.

Left out: what the application does (`relax_sdk.runtime.controller_app`).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import ray

from relax_sdk.errors import ConfigError, RunError

__all__ = ["WITHOUT", "end_serve", "listening_serve", "reachable_host", "reserved_port", "start_serve", "url_of"]

WITHOUT = "--no-control  (trains without a controller)"
"""What to type when the controller is in the way."""

_SERVE_CONTROLLER = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}
"""Ray has no public call that says where a cluster's Serve listens, nor one that ends it without a retried task."""

_PROXY_SHARES_PORTS = os.environ.get("SERVE_SOCKET_REUSE_PORT_ENABLED", "1") == "1" and hasattr(socket, "SO_REUSEPORT")
"""As Serve itself decides it."""

_REQUEST_TIMEOUT_S = 10
_CALL_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 20.0


def listening_serve() -> tuple[str, int] | None:
    """Host and port of the Serve that this cluster runs; None when it runs none.

    Raises:
        RunError: it runs one that answers no HTTP.
    """
    try:
        controller = ray.get_actor(**_SERVE_CONTROLLER)
    except ValueError:
        return None
    options: Any = ray.get(controller.get_http_config.remote(), timeout=_CALL_TIMEOUT_S)
    if options.host is None:
        raise RunError("this cluster's Ray Serve has HTTP switched off", where="RAY_ADDRESS", next_step=WITHOUT)
    return str(options.host), int(options.port)


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """A port that no other process can take while the block runs; Serve, which shares ports, can.

    Serve's proxy listens with SO_REUSEPORT, so that two runs on one port would take each other's requests without an
    error. A socket that is bound and does not listen keeps others out and receives nothing.

    Args:
        host: address to bind to.
        port: the port, or 0 for a free one.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    with contextlib.ExitStack() as stack:
        try:
            holder = stack.enter_context(_bound_socket(host, port))
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        found: int = holder.getsockname()[1]
        if not _PROXY_SHARES_PORTS:
            holder.close()
        yield found


def _bound_socket(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if port:
        # Without SO_REUSEPORT a port that somebody listens on is refused. With SO_REUSEADDR, as servers have it, one
        # whose last connections are in TIME_WAIT is not.
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    holder = socket.socket(family, kind)
    try:
        if _PROXY_SHARES_PORTS:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except OSError:
        holder.close()
        raise
    return holder


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} of {host} is in use", where="--control-port", expected="a free port, or 0 to have one found"
        )
    return ConfigError(
        f"cannot listen on {host!r}: {error.strerror or error}",
        where="--control-host",
        expected="an address of this machine, and a port that this user may take",
    )


def start_serve(host: str, port: int) -> None:
    """Start Serve with one HTTP proxy on every node that has a replica, and no gRPC."""
    from ray import serve

    serve.start(
        proxy_location="EveryNode",
        http_options={"host": host, "port": port, "request_timeout_s": _REQUEST_TIMEOUT_S},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )


def end_serve(application: str, *, owned: bool) -> None:
    """Remove an application, and the whole of Serve when it was started for it and serves nothing else.

    Returns when they are gone.

    Raises:
        TimeoutError: they are not gone in time.
    """
    from ray import serve

    try:
        controller = ray.get_actor(**_SERVE_CONTROLLER)
    except ValueError:
        return
    if not owned or set(serve.status().applications) - {application}:
        serve.delete(application)
        return
    # serve.shutdown() would wait inside a call that Ray retries without end, and says so on the driver's stdout.
    ray.get(controller.graceful_shutdown.remote(wait=False), timeout=_CALL_TIMEOUT_S)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            ray.get_actor(**_SERVE_CONTROLLER)
        except ValueError:
            return
        time.sleep(0.05)
    raise TimeoutError(f"Ray Serve did not end within {_END_TIMEOUT_S:.0f} s")


def reachable_host(host: str) -> str:
    """The address to connect to when a server is bound to ``host``: this node's own for a wildcard."""
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    return str(ray.util.get_node_ip_address()) if wildcard else host


def url_of(host: str, port: int, prefix: str = "") -> str:
    """``http://127.0.0.1:8000/prefix``, with an IPv6 address in brackets."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}{prefix}"
