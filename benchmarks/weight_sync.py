"""Weight sync and memory hand-over between a trainer's process and a real SGLang server on one GPU.

    python benchmarks/weight_sync.py --layers 60        # 40 GB, as the published model
    python benchmarks/weight_sync.py --layers 12 --syncs 50

In one run, at the same bytes: the streaming route, SGLang's own route, and a device copy of as many bytes, which is
the limit. Then device memory over many syncs; release and resume beside the pinned host-to-device rate; and an
adapter sync of 1,440 tensors (at 60 layers). ``ENGINE_ARGS`` in the environment holds further arguments of the server.
Writes ``benchmarks/results/weight_sync_<layers>.json``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import os
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from relax_qwen_image.adapter import QwenImageAdapter
from wide_model import build_folder, wide_transformer

from relax_sdk.errors import RelaxError
from relax_sdk.files import write_text_atomically
from relax_sdk.protocols import AdapterConfig, EngineSettings
from relax_sdk.rollout.sglang.engine import SGLangNativeGenerationEngine
from relax_sdk.rollout.sglang.session import STOCK_VARIABLE
from relax_sdk.weight_sync import StreamedSync, WireWeights
from relax_sdk.weights import inject_lora

RESULTS = Path(__file__).parent / "results"
ADAPTER_TARGETS = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")),
    "attn.to_add_out",
    *(f"{stream}_mlp.net.{part}" for stream in ("img", "txt") for part in ("0.proj", "2")),
)
ADAPTER_RANK = 28


class DirectLink:
    """An `EngineLink` of one rank that calls the engine in this process, in a thread as a remote call would run."""

    engine = "rollout engine 0"
    is_leader = True

    def __init__(self, engine: Any) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self._engine, self._pool = engine, ThreadPoolExecutor(max_workers=1)

    def submit(self, method: str, *args: Any) -> Callable[[], Any]:
        """See `EngineLink`."""
        return self._pool.submit(getattr(self._engine, method), *args).result

    def share(self, value: Any) -> list[Any]:
        """See `EngineLink`."""
        return [value]

    def agree(self, value: Any) -> list[Any]:
        """See `EngineLink`."""
        return [value]


def synchronized(work: Callable[[], Any]) -> float:
    """Seconds of ``work``, device included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def copy_rate() -> float:
    """Bytes per second that one device copy moves (each byte is read once and written once)."""
    source = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return source.numel() / statistics.median(synchronized(lambda: target.copy_(source)) for _ in range(5))


def pinned_rates() -> tuple[float, float]:
    """Bytes per second host to device and device to host, from pinned memory."""
    host = torch.empty(4 * 2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    device.copy_(host)
    up = statistics.median(synchronized(lambda: device.copy_(host, non_blocking=True)) for _ in range(3))
    down = statistics.median(synchronized(lambda: host.copy_(device, non_blocking=True)) for _ in range(3))
    return host.numel() / up, host.numel() / down


def stream(
    engine: Any, module: Any, version: int, *, bucket_mb: int, adapter: AdapterConfig | None = None
) -> tuple[float, dict[str, float], Any]:
    """One streaming sync; seconds, phases, manifest."""
    mode = "full" if adapter is None else "adapter"
    rank, alpha = (0, 0.0) if adapter is None else (adapter.rank, adapter.alpha)
    weights = WireWeights(
        module, mode=mode, dtype=torch.bfloat16, name_map=lambda name: name, lora_rank=rank, lora_alpha=alpha
    )
    sync = StreamedSync(bucket_size_mb=bucket_mb, device=torch.device("cuda", 0))
    report = sync.run(
        iter(weights),
        DirectLink(engine),
        manifest=weights.manifest,
        tensors=weights.tensors,
        dtype=weights.dtype,
        policy_version=version,
        adapter=adapter,
    )
    return report.seconds, dict(report.timings), report.manifest


def stock(
    engine: Any, tensors: Iterator[tuple[str, torch.Tensor]], *, bucket_mb: int, **body: Any
) -> tuple[float, int]:
    """SGLang's own route: flattened buckets in CUDA IPC payloads, one request each; seconds and requests."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    monkey_patch_torch_reductions()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    started, requests = time.perf_counter(), 0

    def send(part: list[tuple[str, torch.Tensor]]) -> None:
        bucket = FlattenedTensorBucket(named_tensors=part)
        value = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        payload = MultiprocessingSerializer.serialize({"transformer": value}, output_str=True)
        status, raw = engine._client._call(
            "POST",
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [payload],
                "payload_gpu_uuids": [uuid],
                "load_format": "flattened_bucket",
                "target_modules": ["transformer"],
            },
        )
        answer = json.loads(raw)
        if status != 200 or not answer["success"]:
            raise RuntimeError(f"the stock route failed: {answer}")

    part: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        part.append((name, tensor.detach()))
        size += tensor.numel() * tensor.element_size()
        if size >= bucket_mb * 2**20:
            send(part)
            requests, part, size = requests + 1, [], 0
    if part:
        send(part)
        requests += 1
    torch.cuda.synchronize()
    return time.perf_counter() - started, requests


def engine_for(folder: Path, mode: str, work: Path) -> SGLangNativeGenerationEngine:
    """A started engine."""
    engine = SGLangNativeGenerationEngine(
        adapter=QwenImageAdapter(),
        settings=EngineSettings(
            model_path=str(folder),
            device="cuda",
            dtype="bf16",
            sync_mode=mode,
            work_dir=work,
            timeout_s=300.0,
            extra_arguments=tuple(shlex.split(os.environ.get("ENGINE_ARGS", ""))),
        ),
    )
    started = time.perf_counter()
    engine.start()
    print(f"server for {mode} sync ready after {time.perf_counter() - started:.0f} s", flush=True)
    return engine


def used(engine: Any) -> float:
    """Used device memory in 10^9 bytes, all processes together, after this one gave its cache back."""
    gc.collect()
    torch.cuda.empty_cache()
    state = engine.state()
    return (state["total_bytes"] - state["free_bytes"]) / 1e9


def measure_full(folder: Path, layers: int, syncs: int, bucket_mb: int, work: Path) -> dict[str, Any]:
    """Full syncs: stream, stock, device copy, hand-over."""
    engine = engine_for(folder, "full", work / "full")
    module = wide_transformer(layers, "cuda", seed=1)
    try:
        version = 0
        seconds, phases, memory = [], [], []
        for version in range(1, syncs + 1):
            taken, timings, manifest = stream(engine, module, version, bucket_mb=bucket_mb)
            seconds.append(taken)
            phases.append(timings)
            memory.append(used(engine))
        out: dict[str, Any] = {"bytes": manifest.bytes, "tensors": manifest.tensors, "bucket_mb": bucket_mb}
        out |= {
            "stream_first_s": seconds[0],
            "stream_s": statistics.median(seconds[1:]),
            "stream_phases_s": {name: statistics.median(item[name] for item in phases[1:]) for name in phases[0]},
            "memory_gb_after_sync": [memory[1], memory[len(memory) // 2], memory[-1]],
        }
        taken, requests = stock(engine, module.named_parameters(), bucket_mb=2048)
        taken, requests = stock(engine, module.named_parameters(), bucket_mb=2048)
        out |= {"stock_s": taken, "stock_requests": requests, "stock_over_stream": taken / out["stream_s"]}
        out["device_copy_s"] = manifest.bytes / copy_rate()
        out |= handover(engine, module, functools.partial(stream, bucket_mb=bucket_mb), version + 1)
        return out
    finally:
        engine.shutdown()


def handover(engine: Any, module: Any, sync: Callable[..., Any], version: int) -> dict[str, Any]:
    """Release and resume around syncs; the first release makes the host copies."""
    before = used(engine)
    up, down = pinned_rates()
    rows = []
    for turn in range(3):
        released = synchronized(engine.release)
        idle = used(engine)
        weights = synchronized(lambda: engine.resume(weights_only=True))
        sync(engine, module, version + turn)
        rest = synchronized(engine.resume)
        rows.append({"release_s": released, "resume_weights_s": weights, "resume_rest_s": rest, "idle_gb": idle})
    return {"handover": rows, "used_gb": before, "host_to_device_gb_s": up / 1e9, "device_to_host_gb_s": down / 1e9}


def measure_adapter(folder: Path, layers: int, syncs: int, work: Path) -> dict[str, Any]:
    """Adapter syncs, and the hand-over with a base that is kept."""
    engine = engine_for(folder, "adapter", work / "adapter")
    module = wide_transformer(layers, "cuda", seed=1)
    inject_lora(module, rank=ADAPTER_RANK, alpha=float(2 * ADAPTER_RANK), target_modules=ADAPTER_TARGETS)
    adapter = AdapterConfig(rank=ADAPTER_RANK, alpha=float(2 * ADAPTER_RANK), target_modules=ADAPTER_TARGETS)
    try:
        seconds, phases, memory = [], [], []
        for version in range(1, syncs + 1):
            taken, timings, manifest = stream(engine, module, version, bucket_mb=512, adapter=adapter)
            seconds.append(taken)
            phases.append(timings)
            memory.append(used(engine))
        base = sum(p.numel() * p.element_size() for n, p in module.named_parameters() if "lora_" not in n)
        out: dict[str, Any] = {
            "bytes": manifest.bytes,
            "tensors": manifest.tensors,
            "stream_first_s": seconds[0],
            "stream_s": statistics.median(seconds[1:]),
            "stream_phases_s": {name: statistics.median(item[name] for item in phases[1:]) for name in phases[0]},
            "memory_gb_after_sync": [memory[1], memory[len(memory) // 2], memory[-1]],
            "base_bytes": base,
        }

        def sync(engine: Any, module: Any, version: int) -> None:
            stream(engine, module, version, bucket_mb=512, adapter=adapter)

        out |= handover(engine, module, sync, syncs + 1)
        resumed = min(row["resume_weights_s"] for row in out["handover"][1:])
        out["resume_share_of_pinned_rate"] = base / resumed / (out["host_to_device_gb_s"] * 1e9)
        return out
    finally:
        engine.shutdown()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--syncs", type=int, default=8)
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--modes", default="full,adapter")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    os.environ[STOCK_VARIABLE] = "1"
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "layers": arguments.layers,
    }
    work = Path(tempfile.mkdtemp(prefix="relax-benchmark-"))
    try:
        build_folder(work / "model", arguments.layers, sparse=True)
        for mode in arguments.modes.split(","):
            try:
                if mode == "full":
                    result[mode] = measure_full(
                        work / "model", arguments.layers, arguments.syncs, arguments.bucket_mb, work
                    )
                else:
                    result[mode] = measure_adapter(work / "model", arguments.layers, arguments.syncs, work)
            except RelaxError as error:
                result[mode] = {"failed": str(error)}
            gc.collect()
            torch.cuda.empty_cache()
            print(json.dumps({mode: result[mode]}, indent=1), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    output = arguments.output or RESULTS / f"weight_sync_{arguments.layers}.json"
    write_text_atomically(output, json.dumps(result, indent=2) + "\n")
    print(output)


if __name__ == "__main__":
    main()
