"""Presets resolve against the real schema through the real registry, and say what the published recipes say."""

from __future__ import annotations

import json

import pytest
from relax_qwen_image import plugin, presets
from relax_qwen_image.adapter import QwenImageAdapter

from relax_sdk.config import resolve
from relax_sdk.errors import PreflightError
from relax_sdk.preflight import check
from relax_sdk.registry import ModelSpec, Registry
from relax_sdk.registry.loading import PluginEntry


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry(
        [
            PluginEntry(name, target=f"relax_{name}.plugin", distribution=f"relax-{name}", version="0.1.0")
            for name in ("qwen_image", "pickscore")
        ]
    )


def _resolved(registry: Registry, preset: str):
    return resolve({"run.plugin": "qwen_image", "run.preset": preset}, registry=registry, environ={})


def test_plugin_registers_one_model():
    specs: list[ModelSpec] = []
    plugin.relax_register_models(specs.append)
    (spec,) = specs
    assert (spec.name, spec.tasks, spec.default_preset) == ("qwen_image", ("t2i",), "tiny")
    assert spec.load() is QwenImageAdapter
    assert {name: spec.load_preset(name) for name in spec.presets} == {
        "tiny": presets.tiny(),
        "lora": presets.lora(),
        "full": presets.full(),
    }


@pytest.mark.parametrize("name", ["tiny", "lora", "full"])
def test_preset_is_consistent_in_itself(registry, name):
    config = _resolved(registry, name)
    rollout, sampling = config.rollout, config.sampling.sampling_config
    assert rollout.global_batch_size == rollout.rollout_batch_size * rollout.n_samples_per_prompt
    assert (rollout.n_samples_per_prompt * rollout.rollout_batch_size) % config.flow_grpo.num_updates_per_batch == 0
    assert QwenImageAdapter().validate_sampling(sampling) == []
    assert 0 not in sampling.trainable_steps()
    assert sampling.num_inference_steps - 1 not in sampling.trainable_steps()
    assert config.weight_sync.wire_dtype == config.fsdp.param_dtype
    assert (config.fsdp.trainable_mode == "lora") == (config.lora.rank > 0)


@pytest.mark.parametrize("name", ["tiny", "lora", "full"])
def test_the_recipe_of_a_preset_is_a_configuration_file(registry, name, tmp_path):
    config = _resolved(registry, name)
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(config.to_recipe(), indent=2))
    again = resolve({"run.run_dir": config.run_dir}, registry=registry, config_file=file, environ={})
    assert again.to_values() == config.to_values()


def test_tiny_is_bundled_and_in_float32(registry):
    config = _resolved(registry, "tiny")
    assert config.model.model_path.endswith("relax_qwen_image/assets/tiny")
    assert config.rollout.prompt_data.name == "train.jsonl"
    assert config.rollout.eval_prompt_data[1].name == "eval.jsonl"
    assert config.reward.model_path.endswith("relax_pickscore/assets/tiny")
    assert {config.fsdp.param_dtype, config.fsdp.master_dtype, config.rollout.rollout_engine_dtype} == {"fp32"}
    # It runs wherever the project is installed, so it may need no further package.
    assert (config.rollout.rollout_engine, config.backend.offload_rollout) == ("local", False)


def test_the_bundled_pickscore_is_for_the_bundled_model_alone(registry, tmp_path):
    """It would judge the pictures of any other model by what it knows: shapes."""
    values = {"run.plugin": "qwen_image", "run.preset": "tiny", "model.model_path": str(tmp_path)}
    config = resolve(values, registry=registry, environ={})
    assert config.reward.model_path is None
    with pytest.raises(PreflightError) as caught:
        check(config, registry, environ={})
    assert any("give --reward-model-path" in text for text in caught.value.violations)
    assert check(_resolved(registry, "tiny"), registry, environ={}) == []


@pytest.mark.parametrize("name", ["lora", "full"])
def test_the_eight_gpu_presets_break_no_rule(registry, name, tmp_path):
    """With the user's files in place, nothing but a missing SGLang can be in the way."""
    tiny = _resolved(registry, "tiny")
    files = {
        "model.model_path": tiny.model.model_path,
        "reward.model_path": tiny.reward.model_path,
        "rollout.prompt_data": tiny.rollout.prompt_data,
        "run.run_dir": tmp_path / "new",
    }
    values = {"run.plugin": "qwen_image", "run.preset": name, **files}
    config = resolve(values, registry=registry, environ={})
    violations: tuple[str, ...] = ()
    try:
        check(config, registry, environ={})
    except PreflightError as error:
        violations = tuple(error.violations)
    assert [text for text in violations if not text.startswith("--rollout-engine is 'sglang'")] == []
    assert registry.engine(config.rollout.rollout_engine).missing_from(QwenImageAdapter()) == []


def test_lora_is_the_published_recipe(registry):
    config = _resolved(registry, "lora")
    rollout, sampling = config.rollout, config.sampling.sampling_config
    assert config.backend.resource == {"actor": (1, 8), "rollout": (1, 8)}
    assert (config.backend.colocate, config.backend.offload_train, config.backend.offload_rollout) == (True,) * 3
    assert not config.backend.use_fault_tolerance
    assert (rollout.rollout_engine, rollout.rollout_num_gpus_per_engine) == ("sglang", 1)
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.global_batch_size) == (32, 8, 256)
    assert (rollout.micro_batch_size, rollout.eval_interval, rollout.n_samples_per_eval_prompt) == (1, 10, 2)
    assert (sampling.height, sampling.width, sampling.num_inference_steps, sampling.eta) == (384, 384, 12, 0.7)
    assert (sampling.sde_indices, sampling.sde_pool, sampling.num_sde_steps) == ((3, 4, 5), (1, 2, 3, 4, 5), 3)
    assert sampling.sde_resample_per_rollout
    assert (config.run.rollout_seed, config.sampling.generation_seed) == (42, 42)
    assert (config.lora.rank, config.lora.alpha, config.lora.dropout, config.lora.adapter_mode) == (64, 128, 0, True)
    assert (config.fsdp.param_dtype, config.fsdp.reduce_dtype, config.fsdp.master_dtype) == ("bf16", "fp32", "fp32")
    assert (config.fsdp.activation_checkpointing, config.fsdp.load_wave_size) == (True, 2)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.lr_warmup_iters, optimizer.adam_eps, optimizer.weight_decay) == (3e-4, 0, 1e-8, 0)
    assert (config.flow_grpo.eps_clip, config.flow_grpo.num_updates_per_batch) == (1e-4, 2)
    assert config.flow_grpo.generative_advantage_std_mode == "group"
    assert (config.reward.runtime, config.reward.required_components) == ("colocate", ["pickscore"])
    assert (config.weight_sync.mode, config.weight_sync.bucket_size_mb) == ("adapter", 2048)


def test_full_differs_from_lora_where_the_reference_says_so(registry):
    config = _resolved(registry, "full")
    rollout, optimizer = config.rollout, config.optimizer
    assert (rollout.rollout_engine, config.backend.offload_train, config.backend.offload_rollout) == (
        "sglang",
        True,
        True,
    )
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, rollout.global_batch_size) == (8, 8, 64)
    assert rollout.micro_batch_size == 2
    assert config.sampling.sampling_config.sde_indices == (1, 3, 5)
    assert (optimizer.lr, optimizer.lr_warmup_iters, optimizer.adam_eps) == (3e-5, 20, 1e-15)
    assert (config.fsdp.trainable_mode, config.fsdp.master_dtype, config.lora.rank) == ("full", None, 0)
    assert (config.weight_sync.mode, config.weight_sync.bucket_size_mb) == ("full", 2048)
    # Building one preset must not have changed another.
    assert presets.lora()["optimizer"]["lr"] == 3e-4
