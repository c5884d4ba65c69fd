"""A real SGLang server under our engine, on a CPU, with the bundled tiny model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import relax_qwen_image
import torch
from relax_qwen_image.adapter import QwenImageAdapter
from relax_qwen_image.loading import load_transformer

from relax_sdk.protocols import AdapterConfig, EngineSettings, PromptRecord, RolloutRequest, SamplingConfig, SyncReport
from relax_sdk.rollout import plan_groups
from relax_sdk.weight_sync import StreamedSync, WireWeights
from relax_sdk.weights import inject_lora

MODEL = Path(relax_qwen_image.__file__).parent / "assets" / "tiny"
ADAPTER = QwenImageAdapter()
RANK, ALPHA = 4, 8.0
PROMPTS = ("a red circle on a white background", "two blue squares", "a green star")


def settings(mode: Literal["full", "adapter"], work_dir: Path, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "model_path": str(MODEL),
        "device": "cpu",
        "dtype": "fp32",
        "sync_mode": mode,
        "work_dir": work_dir,
        "timeout_s": 120.0,
        "threads": 2,
    }
    return EngineSettings(**values | changes)


@functools.cache
def _scheduler() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MODEL / "scheduler" / "scheduler_config.json").read_text())
    return loaded


def requests(
    samples: int,
    *,
    version: int = 0,
    sde_type: str = "sde",
    steps: Sequence[int] = (1, 3, 5),
    prompts: Sequence[str] = PROMPTS[:1],
    rollout_id: int | None = 0,
) -> list[RolloutRequest]:
    """Groups of ``samples`` candidates at 64x64 and 12 steps; without steps, an evaluation."""
    sampling = SamplingConfig(
        height=64, width=64, num_inference_steps=12, sde_indices=tuple(steps), sde_type=sde_type, eta=0.7
    )
    plans = plan_groups(
        [PromptRecord(prompt=prompt, prompt_id=f"p{index}") for index, prompt in enumerate(prompts)],
        rollout_id=rollout_id,
        samples_per_prompt=samples,
        sampling=sampling,
        generation_seed=1,
        policy_version=version,
        sde_indices=tuple(steps),
    )
    return [ADAPTER.build_rollout_request(plan, sampling, scheduler_config=_scheduler()) for plan in plans]


def policy(mode: str) -> torch.nn.Module:
    """The trainer's module in float32, with LoRA in adapter mode."""
    module: torch.nn.Module = load_transformer(str(MODEL), revision=None, dtype=torch.float32)
    if mode == "adapter":
        inject_lora(module, rank=RANK, alpha=ALPHA, target_modules=ADAPTER.lora_target_modules)
    return module


@torch.no_grad()
def change(module: torch.nn.Module, seed: int, *, width: float = 0.01) -> None:
    """Move what is trained by noise of a seed."""
    generator = torch.Generator().manual_seed(seed)
    trained = dict(module.named_parameters())
    if any("lora_" in name for name in trained):
        trained = {name: parameter for name, parameter in trained.items() if "lora_" in name}
    for parameter in trained.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * width)


class Link:
    """An `EngineLink` of one rank to an engine in this process."""

    engine = "rollout engine 0"
    is_leader = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def submit(self, method: str, *args: Any) -> Callable[[], Any]:
        return functools.partial(getattr(self._engine, method), *args)

    def share(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, value: Any) -> list[Any]:
        return [value]


def sync(engine: Any, module: torch.nn.Module, version: int, *, mode: str) -> SyncReport:
    """One weight sync as the actor makes it, in small buckets."""
    weights = WireWeights(
        module,
        mode=mode,
        dtype=torch.float32,
        name_map=ADAPTER.weight_name_map(),
        lora_rank=RANK,
        lora_alpha=ALPHA,
    )
    adapter = AdapterConfig(rank=RANK, alpha=ALPHA, target_modules=ADAPTER.lora_target_modules)
    return StreamedSync(bucket_size_mb=1, device=torch.device("cpu")).run(
        iter(weights),
        Link(engine),
        manifest=weights.manifest,
        tensors=weights.tensors,
        dtype=weights.dtype,
        policy_version=version,
        adapter=adapter if mode == "adapter" else None,
    )
