from __future__ import annotations

from pathlib import Path

import pytest

from relax_sdk.errors import ConfigError, PluginError, UnknownNameError
from relax_sdk.protocols import RewardBatch, RewardScores
from relax_sdk.registry import RewardSpec
from relax_sdk.rewards import build_scorer, building


@pytest.fixture(autouse=True)
def _nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_built", {})


class Scorer:
    components: tuple[str, ...] = ("x",)
    required_tracks: tuple[str, ...] = ("image",)

    def __init__(self, *, model_path: str, device: str) -> None:
        if model_path == "absent":
            raise ConfigError("no model at 'absent'")
        if model_path == "broken":
            raise FileNotFoundError("weights.bin")
        self.model_path = model_path
        self.device = device

    def score(self, batch: RewardBatch) -> RewardScores:
        raise NotImplementedError


class Tongueless:
    def __init__(self, *, model_path: str, device: str) -> None:
        pass


def build(reward: object = Scorer, model_path: str | None = "m", runtime: str = "colocate", device: str = "cuda"):  # type: ignore[no-untyped-def]
    return build_scorer(reward, model_path=model_path, runtime=runtime, device=device)  # type: ignore[arg-type]


def test_a_configuration_is_built_once() -> None:
    assert build() is build()
    assert build(model_path="m") is build(model_path=Path("m"))  # type: ignore[arg-type]
    assert len({id(build()), id(build(model_path="n")), id(build(device="cpu"))}) == 3
    assert build(runtime="cpu") is build(device="cpu")  # both are the CPU


def test_the_runtime_decides_the_device() -> None:
    assert build(runtime="colocate", device="cuda").device == "cuda"
    assert build(runtime="cpu", device="cuda").device == "cpu"
    with pytest.raises(UnknownNameError, match=r"(?s)unknown reward runtime 'colocated'.*did you mean 'colocate'"):
        build(runtime="colocated")


def test_failures_name_the_reward() -> None:
    with pytest.raises(ConfigError, match="no model at 'absent'"):
        build(model_path="absent")
    with pytest.raises(PluginError, match=r"(?s)'Scorer' could not be constructed: FileNotFoundError: weights\.bin"):
        build(model_path="broken")
    with pytest.raises(PluginError, match="Tongueless is not a RewardScorer"):
        build(Tongueless)
    assert building._built == {}  # what failed is tried anew


def test_a_scorer_without_a_model_is_given_none() -> None:
    assert build(model_path=None).model_path is None


def test_a_registered_reward_brings_its_class_and_its_model() -> None:
    import relax_pickscore.plugin
    from relax_pickscore.assets_path import tiny_model

    specs: list[RewardSpec] = []
    relax_pickscore.plugin.relax_register_rewards(specs.append)
    (spec,) = specs
    assert spec.default_model_path() == tiny_model()
    assert spec.load().components == spec.components == ("pickscore",)
    with pytest.raises(ConfigError, match="no PickScore model folder at '/nowhere'"):
        build(spec, model_path="/nowhere", device="cpu")
    if tiny_model().is_dir():
        assert build(spec, model_path=None, device="cpu") is build(spec, model_path=None, device="cpu")


def test_a_dotted_path_works_like_a_name() -> None:
    spec = RewardSpec.from_path("relax_pickscore.scorer.PickScoreScorer")
    with pytest.raises(ConfigError, match="PickScore needs its model"):
        build(spec, model_path=None)
    with pytest.raises(PluginError, match="has no attribute 'PickScoreScore'"):
        build(RewardSpec.from_path("relax_pickscore.scorer:PickScoreScore"))
