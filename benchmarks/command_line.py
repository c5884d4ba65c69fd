"""CPU time of the commands that a person types most, above that of a bare interpreter.

    python benchmarks/command_line.py

writes ``benchmarks/results/command_line.json``.
"""

from __future__ import annotations

import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from relax_sdk.files import write_text_atomically

RESULTS = Path(__file__).parent / "results"
RUNS = 7


def cpu_seconds(*arguments: str) -> float:
    """User and system time of one process, by the operating system's accounting."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


def main() -> None:
    """Measure in turns, take medians, write."""
    commands = {
        "bare interpreter": ("-c", "pass"),
        "relax-sdk --help": ("-m", "relax_sdk", "--help"),
        "relax-sdk plugins list": ("-m", "relax_sdk", "plugins", "list"),
        "relax-sdk train --help": ("-m", "relax_sdk", "train", "--help"),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, arguments in commands.items():
            times[name].append(cpu_seconds(*arguments))
    medians = {name: statistics.median(values) for name, values in times.items()}
    bare = medians["bare interpreter"]
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "cpu_s_above_a_bare_interpreter": {n: round(v - bare, 3) for n, v in medians.items() if v is not bare},
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_text_atomically(RESULTS / "command_line.json", json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
