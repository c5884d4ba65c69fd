"""Presets of `qwen_image`: the bundled demonstration, and two recipes for eight GPUs. Imports no torch.

A preset returns one mapping per configuration section, exactly like a YAML file; whatever it leaves out keeps the
schema's default. `lora` and `full` name no files: model, prompts, evaluation prompts and reward model are the user's.
`tiny` samples in the embedded engine, the others with SGLang.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

__all__ = ["full", "lora", "tiny"]

Preset = dict[str, dict[str, Any]]


def tiny() -> Preset:
    """The bundled models of 64x64 coloured shapes, trained with LoRA in float32 on any machine within minutes."""
    prompts = _bundled("relax_qwen_image", "prompts")
    return {
        "run": {"num_rollout": 75, "rollout_seed": 42},
        "backend": {"train_backend": "fsdp", "colocate": True, "resource": {"actor": (1, 2), "rollout": (1, 2)}},
        "model": {"generation_task": "t2i", "model_path": _bundled("relax_qwen_image", "tiny")},
        "rollout": {
            "prompt_data": f"{prompts}/train.jsonl",
            "rollout_batch_size": 16,
            "n_samples_per_prompt": 8,
            "global_batch_size": 128,
            "micro_batch_size": 4,
            "eval_prompt_data": ("shapes", f"{prompts}/eval.jsonl"),
            "eval_interval": 25,
            "n_samples_per_eval_prompt": 4,
            "rollout_engine_dtype": "fp32",
        },
        "sampling": {
            "sampling_config": {
                "height": 64,
                "width": 64,
                "num_inference_steps": 12,
                "guidance_scale": 1.0,
                "eta": 1.0,
                "sde_type": "sde",
                "sde_indices": [1, 3, 5],
                "sde_resample_per_rollout": True,
                "num_sde_steps": 3,
                "sde_pool": [1, 2, 3, 4, 5],
                "driver_xt": True,
                "sample_id_mode": "metadata",
            },
            "generation_seed": 42,
        },
        "fsdp": {
            "trainable_mode": "lora",
            "trainable_attr": "transformer",
            "param_dtype": "fp32",
            "reduce_dtype": "fp32",
            "master_dtype": "fp32",
            "reshard_after_forward": False,
        },
        "lora": {"rank": 16, "alpha": 32, "dropout": 0.0, "adapter_mode": True},
        "flow_grpo": {
            "advantage_estimator": "grpo",
            "eps_clip": 1e-4,
            "generative_advantage_std_mode": "group",
            "num_updates_per_batch": 2,
        },
        "optimizer": {"lr": 1e-3, "lr_warmup_iters": 0, "adam_eps": 1e-8, "weight_decay": 0.0},
        # Without a model path: the scorer's bundled one, which judges nothing but these shapes, is the default only
        # while the trained model is the one above.
        "reward": _pickscore(runtime="cpu"),
        "weight_sync": {"wire_dtype": "fp32"},
    }


def lora() -> Preset:
    """Qwen-Image with LoRA of rank 64 and adapter sync on eight GPUs: the values of a published 100-rollout run."""
    return {
        "run": {"num_rollout": 100, "rollout_seed": 42},
        "backend": _eight_gpus(),
        "model": {"generation_task": "t2i"},
        "rollout": {
            "rollout_engine": "sglang",
            "rollout_num_gpus_per_engine": 1,
            "rollout_batch_size": 32,
            "n_samples_per_prompt": 8,
            "global_batch_size": 256,
            "micro_batch_size": 1,
            "eval_interval": 10,
            "n_samples_per_eval_prompt": 2,
            "rollout_engine_dtype": "bf16",
        },
        "sampling": {"sampling_config": _sampling_384(sde_indices=[3, 4, 5]), "generation_seed": 42},
        "lora": {"rank": 64, "alpha": 128, "dropout": 0.0, "adapter_mode": True},
        "fsdp": {"trainable_mode": "lora", **_fsdp_bf16(), "master_dtype": "fp32"},
        "flow_grpo": {
            "advantage_estimator": "grpo",
            "eps_clip": 1e-4,
            "generative_advantage_std_mode": "group",
            "num_updates_per_batch": 2,
        },
        # About ten times the rate of full training: an adapter starts at B = 0 and has far fewer degrees of freedom.
        "optimizer": {"lr": 3e-4, "lr_warmup_iters": 0, "adam_eps": 1e-8, "weight_decay": 0.0},
        "reward": _pickscore(runtime="colocate"),
        "weight_sync": {"wire_dtype": "bf16", "bucket_size_mb": 2048},
    }


def full() -> Preset:
    """All of Qwen-Image's transformer on eight GPUs: the reference values; prefer `lora` unless all must move."""
    recipe = lora()
    del recipe["lora"]
    # Gradients and AdamW moments of the base fill the memory that more candidates would need.
    recipe["rollout"] |= {"rollout_batch_size": 8, "global_batch_size": 64, "micro_batch_size": 2}
    recipe["sampling"]["sampling_config"] = _sampling_384(sde_indices=[1, 3, 5])
    recipe["fsdp"] = {"trainable_mode": "full", **_fsdp_bf16()}
    # A mean-reduced log-prob leaves gradients of about 1e-8 an element, which an epsilon of 1e-8 would drown.
    recipe["optimizer"] |= {"lr": 3e-5, "lr_warmup_iters": 20, "adam_eps": 1e-15}
    return recipe


def _eight_gpus() -> dict[str, Any]:
    """Actor and engines take turns, and whoever is not working leaves the devices to the other."""
    return {
        "train_backend": "fsdp",
        "colocate": True,
        "offload_train": True,
        "offload_rollout": True,
        "resource": {"actor": (1, 8), "rollout": (1, 8)},
    }


def _fsdp_bf16() -> dict[str, Any]:
    return {
        "trainable_attr": "transformer",
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "activation_checkpointing": True,
        "load_wave_size": 2,
    }


def _sampling_384(*, sde_indices: list[int]) -> dict[str, Any]:
    """12 steps at 384x384, 3 of them trained; ``sde_indices`` apply when the per-rollout draw is switched off."""
    return {
        "height": 384,
        "width": 384,
        "num_inference_steps": 12,
        "guidance_scale": 1.0,
        "eta": 0.7,
        "sde_type": "sde",
        "sde_indices": sde_indices,
        "sde_resample_per_rollout": True,
        "num_sde_steps": 3,
        "sde_pool": [1, 2, 3, 4, 5],
        "driver_xt": True,
        "sample_id_mode": "metadata",
    }


def _pickscore(*, runtime: str) -> dict[str, Any]:
    return {
        "runtime": runtime,
        "scorer_path": "pickscore",
        "required_components": ["pickscore"],
        "component_weights": {"pickscore": 1.0},
    }


def _bundled(package: str, name: str) -> str:
    """Path of a bundled asset. Packages are installed as folders, so a resource is a plain path."""
    return str(resources.files(package) / "assets" / name)
