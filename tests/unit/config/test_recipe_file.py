"""The recipe of one run as the ``--config`` of the next."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from relax_sdk.config import RunConfig, is_chosen, resolve
from relax_sdk.config.sources import origin
from relax_sdk.errors import ConfigError

FIRST = datetime.datetime(2030, 1, 2, 3, 4, 5)
SECOND = datetime.datetime(2031, 1, 2, 3, 4, 5)


@pytest.fixture
def toy(registry):
    """Its preset leaves the scorer's model to be derived, as a bundled pair does."""
    del registry.toy.presets["tiny"]["reward"]["model_path"]
    return registry


def written(config: RunConfig, folder: Path) -> Path:
    file = folder / "recipe.json"
    file.write_text(json.dumps(config.to_recipe(), indent=2) + "\n")
    return file


def first(registry: Any, **flags: Any) -> RunConfig:
    given = {"run.plugin": "toy", "optimizer.adam_eps": "1e-15", "rollout.eval_prompt_data": ("held", "a b.txt")}
    return resolve(registry=registry, environ={}, flags={**given, **flags}, now=FIRST)


def test_it_gives_the_same_values_and_a_folder_of_its_own(toy, tmp_path):
    config = first(toy, **{"artifact.root": "/elsewhere", "run.run_dir": "mine", "lora.rank": "4"})
    again = resolve(registry=toy, environ={}, config_file=written(config, tmp_path), now=SECOND)
    assert again.run_dir == Path.cwd() / "runs" / "toy-20310102-030405"
    assert again.artifact_root == again.run_dir / "artifacts"
    before, after = config.to_values(), again.to_values()
    for values in (before, after):
        del values["run"]["run_dir"], values["artifact"]["root"]
    assert after == before
    assert after["optimizer"]["adam_eps"] == 1e-15


def test_sources_tell_the_line_and_where_the_recipe_had_it_from(toy, tmp_path):
    config = first(toy)
    (tmp_path / "runs (old)").mkdir()
    file = written(config, tmp_path / "runs (old)")
    again = resolve(registry=toy, environ={}, config_file=file)
    lines = file.read_text().splitlines()
    for path in ("optimizer.adam_eps", "sampling.sampling_config.eta", "reward.model_path", "rollout.micro_batch_size"):
        source = again.provenance[path]
        line = int(source.removeprefix(f"recipe {file}:").partition(" ")[0])
        assert lines[line - 1].strip().startswith(f'"{path.rpartition(".")[2]}":')
        assert origin(source) == config.provenance[path]
    (tmp_path / "second").mkdir()
    third = resolve(registry=toy, environ={}, config_file=written(again, tmp_path / "second"))
    assert third.provenance["optimizer.lr"].endswith("(preset toy:tiny)")
    assert third.provenance["optimizer.lr"].count("recipe.json") == 1
    assert origin("flag --lr") == "flag --lr"


def test_a_recipe_does_not_turn_a_preset_or_a_default_into_a_choice(toy, tmp_path):
    config = first(toy)
    again = resolve(registry=toy, environ={}, config_file=written(config, tmp_path))
    for path, chosen in (("optimizer.lr", False), ("backend.resource", False), ("optimizer.adam_eps", True)):
        assert is_chosen(config.provenance, path) is chosen
        assert is_chosen(again.provenance, path) is chosen


def test_flags_win_and_what_follows_from_them_is_derived_anew(toy, tmp_path):
    file = written(first(toy, **{"lora.rank": "4"}), tmp_path)

    def with_flags(**flags: Any) -> RunConfig:
        return resolve(registry=toy, environ={}, config_file=file, flags=flags)

    assert with_flags(**{"optimizer.lr": "2"}).optimizer.lr == 2
    assert with_flags(**{"rollout.rollout_batch_size": "5"}).global_batch_size == 40
    assert with_flags(**{"rollout.n_samples_per_prompt": "1"}).std_mode == "none"
    assert with_flags(**{"lora.adapter_mode": True}).sync_mode == "adapter"
    assert with_flags(**{"lora.rank": "8"}).lora.alpha == 8
    reward = with_flags(**{"reward.scorer_path": "smell"}).reward
    assert (reward.required_components, reward.component_weights) == (["smell", "fume"], {"smell": 1, "fume": 1})
    assert reward.model_path is None
    assert with_flags().reward.model_path == "/models/taste"
    assert with_flags(**{"model.model_path": "/models/mine"}).reward.model_path is None, "it judges the toy model only"


def test_what_the_user_chose_stays(toy, tmp_path):
    file = written(first(toy, **{"lora.rank": "4", "lora.alpha": "16"}), tmp_path)
    config = resolve(registry=toy, environ={}, config_file=file, flags={"lora.rank": "8"})
    assert config.lora.alpha == 16


def test_mistakes_in_it_are_named_with_their_line(toy, tmp_path):
    file = written(first(toy), tmp_path)
    text = file.read_text().replace('"adam_eps"', '"adam_epps"')
    file.write_text(text)
    line = next(number for number, item in enumerate(text.splitlines(), start=1) if '"adam_epps"' in item)
    with pytest.raises(ConfigError) as caught:
        resolve(registry=toy, environ={}, config_file=file)
    assert f"{file}:{line}" in str(caught.value)
    assert caught.value.nearest == "adam_eps"
    file.write_text(json.dumps({"config": {"optimizer": {"lr": "fast"}}, "provenance": {}}))
    with pytest.raises(ConfigError, match=r"recipe\.json:1\b"):
        resolve(registry=toy, environ={}, config_file=file)
