"""Whole runs at full width on CUDA: SGLang engines and the actor take turns on the same GPUs, LoRA and all weights.

    python benchmarks/wide_runs.py --devices 1
    python benchmarks/wide_runs.py --devices 2 --permute     # CUDA_VISIBLE_DEVICES reversed

Builds a Qwen-Image folder of random weights (12 layers of the published width), trains three rollouts at 384x384 with
adapter sync and with full sync, and checks what every run must show: exit code 0, policy versions 1, 2, 3, a first
update at ratio 1 exactly, no failed sync. ``ENGINE_ARGS`` in the environment holds further arguments of the server.
Writes ``benchmarks/results/wide_runs_<devices>.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import relax_pickscore
import torch
from wide_model import build_folder

from relax_sdk.files import write_text_atomically

RESULTS = Path(__file__).parent / "results"
SCORER = Path(relax_pickscore.__file__).parent / "assets" / "tiny"
MODES = {
    "adapter": (),
    "full": ("--fsdp-trainable-mode", "full", "--lora-rank", "0", "--lora-merge-mode"),
}
KEPT = (
    *("train/policy_version", "train/first_update_ratio_max_deviation", "train/weight_sync_failures"),
    *("train/logp_parity_mean", "train/logp_parity_max", "train/weight_sync_tensors", "train/weight_sync_gb"),
    *("train/grad_norm", "reward/pickscore_mean", "perf/rollout_time", "perf/reward_time", "perf/handover_time"),
    *("perf/train_time", "perf/sync_time", "perf/step_time", "perf/train_transitions_per_s", "perf/mfu"),
    *("perf/mem_idle_gb", "perf/mem_allocated_gb", "perf/mem_peak_gb"),
)


def train(folder: Path, mode: str, devices: int, run_dir: Path, *, rollouts: int, limit_s: float) -> dict[str, Any]:
    """One run; its figures, and whether it showed what it must."""
    prompts = run_dir.with_suffix(".txt")
    prompts.write_text("a red circle\ntwo blue squares\n")
    world = json.dumps({"actor": [1, devices], "rollout": [1, devices]})
    size = json.dumps({"height": 384, "width": 384})
    command = [
        *(sys.executable, "-m", "relax_sdk", "train", "--plugin", "qwen_image", "--preset", "tiny"),
        *("--model-path", str(folder), "--reward-model-path", str(SCORER), "--run-dir", str(run_dir)),
        *("--rollout-engine", "sglang", "--offload-train", "--offload-rollout", "--resource", world),
        *("--fsdp-param-dtype", "bf16", "--rollout-engine-dtype", "bf16", "--weight-sync-wire-dtype", "bf16"),
        *("--fsdp-activation-checkpointing", "--sampling-config", size, "--num-rollout", str(rollouts)),
        *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--micro-batch-size", "4"),
        *("--eval-prompt-data", "two", str(prompts), "--n-samples-per-eval-prompt", "1", "--eval-interval", "1000"),
        *(f"--rollout-engine-args={os.environ.get('ENGINE_ARGS', '')}",),
        *MODES[mode],
    ]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        code, text = done.returncode, done.stderr
    except subprocess.TimeoutExpired as error:
        code, text = -1, f"not done within {limit_s:.0f} s: {error.stderr!r}"
    metrics = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    rows = [{name: record[name] for name in KEPT if name in record} for record in records if "train/loss" in record]
    checks = {
        "exit code 0": code == 0,
        "versions": [row["train/policy_version"] for row in rows] == [float(step + 1) for step in range(rollouts)],
        "first update at ratio 1": all(row["train/first_update_ratio_max_deviation"] == 0.0 for row in rows),
        "no failed sync": all(row["train/weight_sync_failures"] == 0.0 for row in rows),
    }
    result = {"seconds": round(time.monotonic() - started, 1), "checks": checks, "rollouts": rows}
    return result if all(checks.values()) else result | {"stderr": text[-4000:]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count())
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rollouts", type=int, default=3)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--permute", action="store_true", help="reverse the order of the visible devices")
    parser.add_argument("--model", type=Path, help="a folder of wide_model.py; built when left out")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of one run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.permute:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in reversed(range(arguments.devices)))
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "devices": arguments.devices,
        "permuted": arguments.permute,
        "torch": torch.__version__,
        "layers": arguments.layers,
        "runs": {},
    }
    with tempfile.TemporaryDirectory(prefix="relax-wide-") as work:
        folder = arguments.model or Path(work) / "model"
        if arguments.model is None:
            build_folder(folder, arguments.layers, sparse=False)
        torch.cuda.empty_cache()
        for mode in arguments.modes:
            run = train(
                folder,
                mode,
                arguments.devices,
                Path(work) / mode,
                rollouts=arguments.rollouts,
                limit_s=arguments.limit,
            )
            result["runs"][mode] = run
            print(json.dumps({mode: run}, indent=1), flush=True)
    output = arguments.output or RESULTS / f"wide_runs_{arguments.devices}.json"
    write_text_atomically(output, json.dumps(result, indent=1) + "\n")
    print(output)


if __name__ == "__main__":
    main()
