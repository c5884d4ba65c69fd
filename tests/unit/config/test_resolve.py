"""Layers, provenance and derived values."""

from __future__ import annotations

import datetime
import json
import pickle
from pathlib import Path

import pytest

from relax_sdk.config import RunConfig, explain, options, resolve
from relax_sdk.errors import ConfigError, UnknownNameError

NOW = datetime.datetime(2030, 1, 2, 3, 4, 5)


def test_precedence_from_default_to_flag(registry, tmp_path):
    file = tmp_path / "run.yaml"
    path = "optimizer.lr"

    def lr(**layers):
        config = resolve(registry=registry, environ=layers.pop("environ", {}), **layers)
        return config.optimizer.lr, config.provenance[path]

    assert lr() == (None, "default")
    assert lr(flags={"run.plugin": "toy"}) == (1e-3, "preset toy:tiny")
    file.write_text("run:\n  plugin: toy\noptimizer:\n  # a comment\n  lr: 2e-3\n")
    assert lr(config_file=file) == (2e-3, f"file {file}:5")
    assert lr(config_file=file, environ={"RELAX_LR": "3e-3"}) == (3e-3, "env RELAX_LR")
    given = {"config_file": file, "environ": {"RELAX_LR": "3e-3"}, "flags": {path: "4e-3"}}
    assert lr(**given) == (4e-3, "flag --lr")
    assert lr(values={path: 5e-3}, **given) == (5e-3, "call optimizer.lr")


def test_the_sampling_configuration_merges_key_by_key(registry, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("sampling:\n  sampling_config:\n    width: 128\n    eta: 0.8\n")
    config = resolve(
        registry=registry,
        config_file=file,
        environ={"RELAX_SAMPLING_CONFIG": '{"num_sde_steps": 3, "sample_id_mode": "metadata"}'}
        | {"RELAX_NATIVE_GENERATION_SAMPLE_ID_MODE": "positional"},
        flags={"run.plugin": "toy", "sampling.sampling_config": '{"eta": 0.5}'},
    )
    sampling, prefix = config.sampling.sampling_config, "sampling.sampling_config."
    assert (sampling.height, sampling.width, sampling.eta, sampling.num_sde_steps) == (64, 128, 0.5, 3)
    assert sampling.sample_id_mode == "positional"
    assert config.provenance[prefix + "height"] == "preset toy:tiny"
    assert config.provenance[prefix + "width"] == f"file {file}:3"
    assert config.provenance[prefix + "eta"] == "flag --sampling-config"
    assert config.provenance[prefix + "sde_type"] == "default"


def test_the_default_preset_yields_to_a_model_of_ones_own(registry):
    config = resolve(registry=registry, environ={}, flags={"run.plugin": "toy", "model.model_path": "mine"})
    assert config.run.preset is None
    assert config.optimizer.lr is None
    config = resolve(registry=registry, environ={"RELAX_MODEL_PATH": "mine"}, flags={"run.plugin": "toy"})
    assert config.run.preset is None
    flags = {"run.plugin": "toy", "run.preset": "big", "model.model_path": "mine"}
    config = resolve(registry=registry, environ={}, flags=flags)
    assert (config.run.preset, config.optimizer.lr) == ("big", 5e-5)
    assert config.model.model_path == str(Path.cwd() / "mine")


def test_presets_that_cannot_be_used(registry):
    with pytest.raises(ConfigError, match="--plugin"):
        resolve(registry=registry, environ={}, flags={"run.preset": "tiny"})
    with pytest.raises(UnknownNameError) as caught:
        resolve(registry=registry, environ={}, flags={"run.plugin": "toy", "run.preset": "tiyn"})
    assert caught.value.nearest == "tiny"
    registry.toy.presets = {"tiny": {"optimizer": {"lrr": 1}}}
    with pytest.raises(ConfigError, match="preset toy:tiny"):
        resolve(registry=registry, environ={}, flags={"run.plugin": "toy"})
    registry.toy.presets = {"tiny": {"run": {"plugin": "other"}}}
    with pytest.raises(ConfigError, match="only the user"):
        resolve(registry=registry, environ={}, flags={"run.plugin": "toy"})


def test_what_is_derived(registry):
    flags = {"run.plugin": "toy", "rollout.rollout_batch_size": "6", "lora.rank": "16"}
    config = resolve(registry=registry, environ={}, flags=flags, now=NOW)
    assert config.global_batch_size == 48, "the preset's 32 belonged to its own number of prompts"
    assert config.run_dir == Path.cwd() / "runs" / "toy-20300102-030405"
    assert config.artifact_root == config.run_dir / "artifacts"
    assert (config.sync_mode, config.std_mode, config.lora.alpha) == ("full", "group", 16.0)
    assert config.model.model_adapter_path == "toy"
    assert config.reward.component_weights == {"taste": 1.0}
    assert config.provenance["rollout.global_batch_size"].startswith("derived: --rollout-batch-size")
    assert resolve(registry=registry, environ={}, flags={"lora.adapter_mode": True}).sync_mode == "adapter"


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ({"rollout.n_samples_per_prompt": "8"}, "group"),
        ({"flow_grpo.disable_grpo_std_normalization": True}, "none"),
        ({"rollout.n_samples_per_prompt": "1"}, "none"),
        ({"rollout.n_samples_per_prompt": "1", "flow_grpo.generative_advantage_std_mode": "group"}, "none"),
        ({"flow_grpo.generative_advantage_std_mode": "batch"}, "batch"),
    ],
)
def test_std_mode(registry, flags, mode):
    assert resolve(registry=registry, environ={}, flags=flags).std_mode == mode


def test_another_scorer_takes_its_own_components_and_no_foreign_model(registry):
    config = resolve(registry=registry, environ={}, flags={"run.plugin": "toy", "reward.scorer_path": "smell"})
    assert config.reward.required_components == ["smell", "fume"]
    assert config.reward.component_weights == {"smell": 1.0, "fume": 1.0}
    assert config.reward.model_path is None


def test_components_of_a_scorer_that_does_not_tell_them(registry):
    registry.rewards["a.b:C"] = type(registry.rewards["taste"])(components=(), bundled=None)

    def reward(**flags):
        given = {"reward.scorer_path": "a.b:C"} | {f"reward.{name}": text for name, text in flags.items()}
        section = resolve(registry=registry, environ={}, flags=given).reward
        return section.required_components, section.component_weights

    assert reward() == (None, None)
    assert reward(component_weights='{"x": 2, "y": 1}') == (["x", "y"], {"x": 2, "y": 1})
    assert reward(required_components='["x"]') == (["x"], {"x": 1})
    assert reward(required_components='["x"]', component_weights='{"x": 2, "y": 1}') == (["x"], {"x": 2, "y": 1})
    assert reward(scorer_path="smell", component_weights='{"fume": 3}') == (["fume"], {"fume": 3})


def test_a_bundled_scorer_is_no_default_for_a_model_of_ones_own(registry):
    registry.toy.presets = {"tiny": {"model.model_path": "/models/toy", "reward.scorer_path": "taste"}}
    config = resolve(registry=registry, environ={}, flags={"run.plugin": "toy"})
    assert config.reward.model_path == "/models/taste"
    config = resolve(
        registry=registry, environ={}, flags={"reward.scorer_path": "taste", "model.model_path": "/models/mine"}
    )
    assert config.reward.model_path is None


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"optimizer.lr": "fast"}, ["--lr", "'fast'", "flag --lr"]),
        ({"optimizer.lr": "nan"}, ["--lr", "finite"]),
        ({"fsdp.trainable_mode": "both"}, ["'full' or 'lora'", "'both'"]),
        ({"run.num_rollout": "1.5"}, ["--num-rollout", "'1.5'"]),
        ({"backend.resource": "{"}, ["not valid JSON", "flag --resource"]),
        ({"backend.resource": '{"actor": [1, 2]}'}, ["'actor' and 'rollout'"]),
        ({"backend.resource": '{"actor": [0, 2], "rollout": [1, 2]}'}, ["at least 1"]),
        ({"sampling.sampling_config": '{"etaa": 1}'}, ["'etaa'", "did you mean 'eta'"]),
        ({"sampling.sampling_config": '{"eta": 0}'}, ["eta", "greater than 0", "flag --sampling-config"]),
        ({"sampling.sampling_config": "[1]"}, ["a mapping of sampling keys"]),
        ({"optimizer.lr": "x", "run.num_rollout": "y"}, ["2 values do not fit", "--lr", "--num-rollout"]),
    ],
)
def test_a_value_that_does_not_fit_says_where_it_was_given(registry, flags, parts):
    with pytest.raises(ConfigError) as caught:
        resolve(registry=registry, environ={}, flags=flags)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optimizer:\n  lrr: 1\n", [":2", "'lrr'", "did you mean 'lr'"]),
        ("optimiser:\n  lr: 1\n", [":1", "did you mean 'optimizer'"]),
        ("lr: 1\n", [":1", "optimizer.lr"]),
        ("run:\n  lr: 1\n", [":2", "did you mean 'optimizer.lr'"]),
        ("optimizer:\n  lr: 1\n  lr: 2\n", ["twice", ":2", ":3"]),
        ("optimizer.lr: 1\noptimizer:\n  lr: 2\n", ["twice"]),
        ("optimizer: 3\n", [":1", "a mapping"]),
        ("- a\n", ["a mapping of sections"]),
        ("run:\n  plugin: [a\n", ["not valid YAML"]),
        ("sampling:\n  sampling_config:\n    hight: 1\n", [":3", "did you mean 'height'"]),
        ("optimizer:\n  lr: yes\n", ["--lr", "no true or false", ":2"]),
    ],
)
def test_a_file_that_does_not_fit_says_the_line(registry, tmp_path, text, parts):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve(registry=registry, environ={}, config_file=file)
    for part in parts:
        assert part in str(caught.value)


def test_files_that_cannot_be_read(registry, tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, expected in (("missing.yaml", "No such file"), (".", "directory"), ("binary.yaml", "UTF-8")):
        with pytest.raises(ConfigError, match=expected):
            resolve(registry=registry, environ={}, config_file=tmp_path / name)
    (tmp_path / "empty.yaml").write_text("# nothing\nrun:\n")
    assert resolve(registry=registry, environ={}, config_file=tmp_path / "empty.yaml").run.num_rollout == 100


def test_an_unknown_variable_is_an_error_and_control_variables_are_not(registry):
    with pytest.raises(ConfigError) as caught:
        resolve(registry=registry, environ={"RELAX_NUM_ROLLOUTS": "3"})
    assert caught.value.nearest == "RELAX_NUM_ROLLOUT"
    environ = {
        "RELAX_DISABLE_PLUGINS": "1",
        "HOME": "/x",
        "RELAX_COLOCATE": "1",
        "RELAX_EVAL_PROMPT_DATA": "held a b.txt",
    }
    config = resolve(registry=registry, environ=environ)
    assert config.backend.colocate is True
    assert config.rollout.eval_prompt_data == ("held", Path.cwd() / "a b.txt")


def test_a_switch_can_be_turned_off_again(registry):
    config = resolve(registry=registry, environ={"RELAX_COLOCATE": "true"}, flags={"backend.colocate": False})
    assert config.backend.colocate is False
    assert config.provenance["backend.colocate"] == "flag --no-colocate"


def test_the_recipe_is_json_and_gives_the_same_configuration_again(registry, tmp_path):
    config = resolve(registry=registry, environ={}, flags={"run.plugin": "toy"}, now=NOW)
    recipe = json.loads(json.dumps(config.to_recipe()))
    assert set(recipe) == {"config", "provenance", "packages", "git_revision"}
    assert recipe["packages"]["python"]
    assert recipe["provenance"]["optimizer.lr"] == "preset toy:tiny"
    file = tmp_path / "again.yaml"
    file.write_text(json.dumps(recipe["config"]))
    again = resolve(registry=registry, environ={}, config_file=file)
    assert again.to_values() == config.to_values()


def test_it_is_frozen_picklable_and_complete(registry):
    config = resolve(registry=registry, environ={}, flags={"run.plugin": "toy"})
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ValueError, match="frozen"):
        config.optimizer.lr = 1.0
    assert len(explain(config)) == len(options()) - 1 + len(type(config.sampling.sampling_config).model_fields)
    assert set(config.provenance) == {row.path for row in explain(config)}


def test_unresolved_values_say_so():
    with pytest.raises(ConfigError, match=r"relax_sdk\.config\.resolve"):
        _ = RunConfig().run_dir
