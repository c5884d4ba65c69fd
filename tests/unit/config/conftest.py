"""A registry made up of plain objects: resolving needs no more than their shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from relax_sdk.errors import UnknownNameError


@dataclasses.dataclass
class FakeModel:
    name: str = "toy"
    default_preset: str | None = "tiny"
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def load_preset(self, name: str) -> Mapping[str, Any]:
        if name not in self.presets:
            raise UnknownNameError("preset", name, self.presets)
        return self.presets[name]


@dataclasses.dataclass
class FakeReward:
    components: tuple[str, ...] = ("taste",)
    bundled: Path | None = Path("/models/taste")

    def default_model_path(self) -> Path | None:
        return self.bundled


class FakeRegistry:
    def __init__(self) -> None:
        tiny = {
            "model": {"model_path": "/models/toy"},
            "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 8, "global_batch_size": 32},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
            "sampling": {"sampling_config": {"eta": 0.9, "height": 64}},
            "reward": {"scorer_path": "taste", "model_path": "/models/preset", "required_components": ["taste"]},
        }
        self.toy = FakeModel(presets={"tiny": tiny, "big": {"optimizer.lr": 5e-5}})
        self.rewards = {"taste": FakeReward(), "smell": FakeReward(("smell", "fume"), None)}

    def plugin_model(self, name: str) -> FakeModel:
        return self.model(name)

    def model(self, name: str) -> FakeModel:
        if name != "toy":
            raise UnknownNameError("plug-in", name, ["toy"])
        return self.toy

    def reward(self, name: str) -> FakeReward:
        return self.rewards[name]


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()
