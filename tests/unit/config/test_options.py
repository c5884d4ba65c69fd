"""Flags come from the schema; names and defaults that users rely on are stated here a second time, by hand."""

from __future__ import annotations

import pytest

from relax_sdk.config import options
from relax_sdk.config.explain import _SAMPLING_UNITS
from relax_sdk.protocols import SamplingConfig

DEFAULTS = {
    "--train-backend": "fsdp",
    "--generation-task": "t2i",
    "--model-path": None,
    "--model-revision": None,
    "--model-adapter-path": None,
    "--rollout-num-gpus-per-engine": 1,
    "--artifact-root": None,
    "--artifact-retention-rollouts": 2,
    "--generation-seed": 1234,
    "--fsdp-trainable-mode": "full",
    "--fsdp-trainable-attr": "transformer",
    "--fsdp-param-dtype": "bf16",
    "--fsdp-reduce-dtype": "fp32",
    "--fsdp-master-dtype": None,
    "--fsdp-activation-checkpointing": False,
    "--fsdp-cpu-offload": False,
    "--fsdp-load-wave-size": 0,
    "--fsdp-lr-scheduler": "constant",
    "--fsdp-debug-fingerprint": False,
    "--num-updates-per-batch": 1,
    "--eps-clip": 0.2,
    "--eps-clip-high": None,
    "--rollout-batch-size": None,
    "--n-samples-per-prompt": None,
    "--global-batch-size": None,
    "--micro-batch-size": 1,
    "--replay-steps-per-forward": None,
    "--clip-grad": 1.0,
    "--disable-grpo-std-normalization": False,
    "--generative-advantage-std-mode": None,
    "--reward-runtime": "cpu",
    "--reward-scorer-path": None,
    "--reward-model-path": None,
    "--reward-required-components": None,
    "--reward-component-weights": None,
    "--weight-sync-mode": None,
    "--weight-sync-wire-dtype": "bf16",
    "--weight-sync-bucket-size-mb": 512,
    "--eval-interval": None,
    "--eval-prompt-data": None,
    "--n-samples-per-eval-prompt": 1,
    "--rollout-seed": 42,
    "--lora-rank": 0,
    "--lora-alpha": None,
    "--lora-dropout": 0.0,
    "--lora-target-modules": None,
    "--lora-adapter-mode": False,
    "--colocate": False,
    "--fully-async": False,
    "--hybrid": False,
    "--offload-train": False,
    "--offload-rollout": False,
    "--kl-coef": 0.0,
    "--use-kl-loss": False,
    "--lr": None,
    "--weight-decay": 0.0,
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.999,
    "--adam-eps": 1e-8,
    "--lr-warmup-iters": 0,
    "--lr-decay-iters": None,
    "--min-lr": 0.0,
}


@pytest.mark.parametrize(("flag", "default"), DEFAULTS.items())
def test_flags_and_defaults(flag, default):
    (option,) = [option for option in options() if option.flag == flag]
    assert option.default == default


def test_flags_that_switch_off_and_aliases():
    off = {option.off for option in options()}
    aliases = {alias for option in options() for alias in option.aliases}
    assert {"--no-fsdp-reshard-after-forward", "--lora-merge-mode"} <= off
    assert {"--rollout-engine-class-path", "--reward"} <= aliases


def test_every_field_is_described_and_has_a_unit():
    for option in options():
        assert option.description.endswith("."), option.path
        assert option.unit, option.path
    assert set(_SAMPLING_UNITS) == set(SamplingConfig.model_fields)


def test_no_flag_or_variable_is_used_twice():
    flags = [flag for option in options() for flag in (option.flag, option.off, *option.aliases) if flag]
    assert len(set(flags)) == len(flags)
    assert len({option.env for option in options()}) == len(options())


def test_kinds():
    kinds = {option.flag: option.kind for option in options()}
    assert kinds["--lr"] == "float"
    assert kinds["--num-rollout"] == "int"
    assert kinds["--prompt-data"] == "path"
    assert kinds["--eval-prompt-data"] == "pair"
    assert kinds["--resource"] == "json"
    assert kinds["--lora-target-modules"] == "json"
    assert kinds["--use-tensorboard"] == "switch"
    assert kinds["--fsdp-master-dtype"] == "choice"
