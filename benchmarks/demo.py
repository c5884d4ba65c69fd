"""Time the bundled demonstration as its user sees it, and record what it gained.

    python benchmarks/demo.py

starts ``relax-sdk train --plugin qwen_image`` in this environment, notes when its first rollout line and its end
come, and writes ``benchmarks/results/demo.json`` with the hardware, the date and the held-out result, and the two
pictures that the README shows.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from relax_sdk.files import write_text_atomically
from relax_sdk.metrics import read_metrics

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "images"
TIMEOUT_S = 1800


def processor() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def run(run_dir: Path) -> dict[str, float]:
    """Seconds from the start of the command to its first rollout line, and to its end."""
    started = time.monotonic()
    times: dict[str, float] = {}
    command = [sys.executable, "-m", "relax_sdk", "train", "--plugin", "qwen_image", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", flush=True)
            if line.startswith("rollout") and "first_rollout_line_s" not in times:
                times["first_rollout_line_s"] = round(time.monotonic() - started, 1)
        if process.wait(timeout=TIMEOUT_S) != 0:
            raise SystemExit(f"the demonstration failed with exit code {process.returncode}")
    times["whole_run_s"] = round(time.monotonic() - started, 1)
    return times


def main() -> None:
    """Run, measure, write."""
    for target in (RESULTS, PICTURES):
        target.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    try:
        figures = run(folder / "run")
        records = read_metrics(folder / "run" / "metrics.jsonl")
        for name in ("samples.png", "curve.png"):
            shutil.copy(folder / "run" / name, PICTURES / name)
    finally:
        shutil.rmtree(folder)
    steps = [record for record in records if "train/loss" in record]
    evaluations = [record for record in records if "eval/shapes/pickscore_mean" in record]
    last = evaluations[-1]
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        **figures,
        "rollouts": len(steps),
        "median_step_s": round(sorted(step["perf/step_time"] for step in steps)[len(steps) // 2], 2),
        "eval_before": round(evaluations[0]["eval/shapes/pickscore_mean"], 4),
        "eval_after": round(last["eval/shapes/pickscore_mean"], 4),
        "eval_change": round(last["eval/shapes/pickscore_delta_mean"], 4),
        "eval_change_standard_error_over_prompts": round(last["eval/shapes/pickscore_delta_se"], 4),
        "eval_change_t": round(last["eval/shapes/pickscore_delta_t"], 1),
        "max_first_update_ratio_deviation": max(step["train/first_update_ratio_max_deviation"] for step in steps),
        "max_logp_parity": max(step["train/logp_parity_max"] for step in steps),
    }
    write_text_atomically(RESULTS / "demo.json", json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
