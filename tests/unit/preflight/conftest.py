"""A configuration that breaks no rule, on made-up plug-ins; each test breaks what it is about."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_sdk import ModelSpec, RewardSpec, hookimpl
from relax_sdk.config import RunConfig, resolve
from relax_sdk.preflight import check
from relax_sdk.registry import Registry
from relax_sdk.registry.loading import PluginEntry


class ToyAdapter:
    family = "toy"
    supported_tasks = ("t2i",)
    lora_target_modules: tuple[str, ...] = ("to_q",)
    block_module_names = ("blocks",)

    def load_train_model(self, model_path, *, revision, dtype): ...

    def validate_sampling(self, sampling):
        return [] if sampling.height % 16 == 0 else [f"height {sampling.height}: the nearest valid one is 64"]

    def build_rollout_request(self, plan, sampling, *, scheduler_config): ...

    def validate_rollout_response(self, request, response): ...

    def pack_trajectory(self, request, response): ...

    def replay_transition(self, model, batch): ...

    def artifact_tracks(self):
        return ("image",)

    def weight_name_map(self):
        return str

    def load_embedded_model(self, model_path, *, revision, device, dtype): ...

    def pack_initial_noise(self, noise): ...


class ToyPlugin:
    @hookimpl
    def relax_register_models(self, register):
        register(ModelSpec(name="toy", adapter="toy_preflight_plugin:ToyAdapter"))

    @hookimpl
    def relax_register_rewards(self, register):
        register(RewardSpec(name="taste", scorer="a:B", components=("sweet", "sour")))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("toy_preflight_plugin")
    module.ToyAdapter = type("ToyAdapter", (ToyAdapter,), {})  # a fresh class, which a test may change
    module.plugin = ToyPlugin()
    monkeypatch.setitem(sys.modules, "toy_preflight_plugin", module)
    return module


@pytest.fixture
def registry(toy: types.ModuleType) -> Registry:
    return Registry([PluginEntry("toy", "toy_preflight_plugin:plugin", "toy-dist", "1.0")])


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    return {
        "run.plugin": "toy",
        "run.run_dir": tmp_path / "run",
        "backend.colocate": True,
        "model.model_path": str(folder),
        "rollout.prompt_data": tmp_path / "prompts.txt",
        "rollout.rollout_batch_size": 4,
        "rollout.n_samples_per_prompt": 8,
        "sampling.sampling_config": {"sde_indices": [1, 3, 5]},
        "optimizer.lr": 3e-4,
        "flow_grpo.eps_clip": 1e-4,
        "flow_grpo.num_updates_per_batch": 2,
        "reward.scorer_path": "taste",
    }


@pytest.fixture
def make(registry: Registry, good: dict[str, Any]) -> Callable[..., RunConfig]:
    def build(changes: dict[str, Any] | None = None) -> RunConfig:
        merged = {**good, **(changes or {})}
        return resolve({key: value for key, value in merged.items() if value is not ...}, registry=registry, environ={})

    return build


@pytest.fixture
def run(registry: Registry, make: Callable[..., RunConfig]) -> Callable[..., list[str]]:
    def call(changes: dict[str, Any] | None = None, **environ: str) -> list[str]:
        return check(make(changes), registry, environ=environ)

    return call
