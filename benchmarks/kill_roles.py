"""kill -9 of one process of a run at a random moment, many times: how it ends, how fast, and what is left.

    python benchmarks/kill_roles.py --times 20 --seed 1
    python benchmarks/kill_roles.py --times 4 --engine sglang

Each time a small demonstration run is started, a role is drawn (a rank of the actor, a rollout engine's role, the row
queue's controller or its storage, the driver; with SGLang its server too), and killed at a moment drawn uniformly
between the start of the roles and a few rollouts later. A run has to end within 60 s of the kill, with one error (the
driver cannot tell one), and without a process left. Writes ``benchmarks/results/kill_roles.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from runs import Running, processes_named, processes_of

from relax_sdk.files import write_text_atomically

RESULT = Path(__file__).parent / "results" / "kill_roles.json"
ROLES = {
    "actor rank": "ray::ActorRole",
    "rollout engine": "ray::RolloutRole",
    "row queue": "ray::TransferQueueController",
    "row storage": "ray::SimpleStorageUnit",
    "driver": "relax_sdk",
}
SERVER = {"SGLang server": "sgl_diffusion::scheduler"}
LIMIT_S = 60.0


def once(role: str, title: str, delay_s: float, engine: str) -> dict[str, Any]:
    """Start a run, kill a process of it, and watch the end."""
    mark = uuid.uuid4().hex
    row: dict[str, Any] = {"role": role, "delay_s": round(delay_s, 2)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--num-rollout", "1000", "--rollout-engine", engine)
        with Running(Path(folder) / "run", mark, *arguments) as running:
            started = time.monotonic()
            while not processes_named(mark, "ray::ActorRole") and time.monotonic() < started + 120:
                time.sleep(0.1)
            time.sleep(delay_s)
            if role == "driver":
                target = running.process.pid
            else:
                found = processes_named(mark, title)
                if not found:  # not there yet at this moment, e.g. a server that still loads
                    return row | {"skipped": "the process did not exist yet"}
                target = random.choice(found)
            lines = running.text().splitlines()
            row["moment"] = lines[-1].strip()[:60] if lines else ""
            os.kill(target, signal.SIGKILL)
            killed = time.monotonic()
            while (running.process.poll() is None or processes_of(mark)) and time.monotonic() < killed + LIMIT_S:
                time.sleep(0.1)
            row["seconds"] = round(time.monotonic() - killed, 1)
            row["exit_code"] = running.process.poll()
            text = running.text()
            row["errors"] = text.count("error:")
            row["traceback"] = "Traceback" in text
            row["error"] = next((line for line in text.splitlines() if "error:" in line), "")[:160]
        left = processes_of(mark)
        row["left"] = len(left)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    clean = row["left"] == 0 and row["seconds"] < LIMIT_S and not row["traceback"]
    row["ok"] = clean and (role == "driver" or (row["errors"] == 1 and row["exit_code"] == 1))
    return row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("local", "sglang"), default="local")
    parser.add_argument("--longest", type=float, default=25.0, help="seconds after the roles appear")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    roles = ROLES | (SERVER if arguments.engine == "sglang" else {})
    draw = random.Random(arguments.seed)
    rows = []
    while sum("ok" in row for row in rows) < arguments.times:
        role = draw.choice(sorted(roles))
        row = once(role, roles[role], draw.uniform(0.0, arguments.longest), arguments.engine)
        rows.append(row)
        print(json.dumps(row), flush=True)
    judged = [row for row in rows if "ok" in row]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "engine": arguments.engine,
        "kills": len(judged),
        "clean": sum(row["ok"] for row in judged),
        "slowest_s": max((row["seconds"] for row in judged), default=0.0),
        "rows": rows,
    }
    write_text_atomically(arguments.output, json.dumps(result, indent=1) + "\n")
    print(f"{result['clean']} of {result['kills']} clean, slowest end {result['slowest_s']} s; {arguments.output}")


if __name__ == "__main__":
    main()
