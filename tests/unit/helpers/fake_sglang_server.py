"""A server with SGLang's endpoints and none of its work, which fails in the way that it is told to.

As a program it takes the place of ``sglang serve``: it opens ``--port`` and writes the reports of its workers.
``FAKE_SGLANG`` holds its orders as JSON: how to answer a path, what to report, how to die. In a test's own process
`answering` runs the same handler in a thread. Imports neither torch nor the project, so that it starts at once.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ORDERS = "FAKE_SGLANG"
"""Keys: ``answers`` {path: answer}, ``hooks`` [per worker a list, or null for no report], ``exit`` (code), ``signal``
(number), ``quiet`` (end without a word), ``children`` (how many that ignore SIGTERM), ``lifeline`` (watch it)."""


def answer(body: bytes | str = b"", status: int = 200, *, then: str = "") -> dict[str, Any]:
    """How to answer a path. ``then``: ``hang``, ``die``, ``close`` (no answer) or ``cut`` (half of it)."""
    raw = body.encode() if isinstance(body, str) else body
    return {"status": status, "body": base64.b64encode(raw).decode(), "then": then}


class _Handler(http.server.BaseHTTPRequestHandler):
    answers: Mapping[str, Any]
    seen: list[tuple[str, Any]]

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        self.seen.append((self.path, json.loads(raw) if raw else None))
        order = self.answers.get(self.path, answer("no such path", 404))
        if order["then"] == "hang":
            time.sleep(600)
        if order["then"] == "die":
            print("fatal: out of luck", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if order["then"] == "close":
            return
        body = base64.b64decode(order["body"])
        self.send_response(order["status"])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if order["then"] == "cut" else body)

    def log_message(self, *_: Any) -> None:
        pass


def _server(port: int, answers: Mapping[str, Any]) -> http.server.ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"answers": answers, "seen": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    return server


@contextlib.contextmanager
def answering(answers: Mapping[str, Any]) -> Iterator[tuple[int, list[tuple[str, Any]]]]:
    """Serve in a thread; yields the port and the (path, decoded body) of every request."""
    server = _server(0, answers)
    # Hanging answers must not keep the test waiting.
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_port, server.RequestHandlerClass.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _stubborn_child() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('child', flush=True)\n"
        "time.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    print(f"child {child.pid}", flush=True)


def main() -> None:
    """Follow the orders."""
    orders = json.loads(os.environ.get(ORDERS, "{}"))
    folder = Path(os.environ["RELAX_SGLANG_SESSION"])
    if orders.get("quiet"):
        sys.exit(1)
    for number in range(30):
        print(f"loading part {number}", flush=True)
    if orders.get("lifeline"):
        from relax_sdk.rollout.sglang.server_side.plugin import _watch_lifeline

        _watch_lifeline()
    for _ in range(orders.get("children", 0)):
        _stubborn_child()
    if "exit" in orders:
        print("error: no such model", flush=True)
        sys.exit(orders["exit"])
    if "signal" in orders:
        os.kill(os.getpid(), orders["signal"])
    for rank, hooks in enumerate(orders.get("hooks", [])):
        if hooks is not None:
            report = {
                "pid": os.getpid(),
                "hooks": hooks,
                "argv": sys.argv[1:],
                "owner": os.environ["RELAX_SGLANG_OWNER"],
            }
            (folder / f"worker-{rank}.json").write_text(json.dumps(report))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = _server(port, {"/health": answer("ok"), **orders.get("answers", {})})
    print("ready", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
