"""Requests to SGLang field by field, and answers that lack or contradict anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from fake_sglang import ServedAdapter, enveloped, outputs_for, requests_for
from tiny_family import CHANNELS, STEPS, TOKENS

from relax_sdk.errors import RolloutError
from relax_sdk.protocols import RolloutRequest, RolloutResponse
from relax_sdk.rollout.sglang.messages import decode_tensors, rollout_body, rollout_response
from relax_sdk.rollout.sglang.server_side.recipe import Recipe
from relax_sdk.rollout.sglang.session import RECIPE_KEY

ALL = slice(None)


def body_of(request: RolloutRequest, candidates: slice = ALL) -> dict[str, Any]:
    """As the server gets it."""
    body = rollout_body(request, candidates, sampling_params={"max_sequence_length": 30})
    return dict(json.loads(json.dumps(body)))


def answer(
    request: RolloutRequest, outputs: list[dict[str, Any]], *, dtype: str = "fp32", adapter: Any = None
) -> RolloutResponse:
    return rollout_response(request, outputs, adapter=adapter or ServedAdapter(), dtype=dtype)


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "stock"), [("sde", "sde"), ("dance", "sde"), ("cps", "cps")])
def test_a_request_says_everything_that_sglang_would_otherwise_choose(kind: str, stock: str) -> None:
    (request,) = requests_for(sde_type=kind, eta=0.6)
    body = body_of(request)
    extra = body.pop("extra_sampling_params")
    assert body.pop("seed") == request.plan.engine_seed % 2**31
    assert body == {
        "prompt": "red",
        "negative_prompt": "",
        "generator_device": "cpu",
        "width": request.width,
        "height": request.height,
        "num_inference_steps": STEPS,
        "num_outputs_per_prompt": 3,
        "guidance_scale": 1.0,
        "true_cfg_scale": 1.0,
        "rollout": True,
        "rollout_sde_type": stock,
        "rollout_noise_level": 0.6,
        "rollout_log_prob_no_const": False,
        "rollout_debug_mode": False,
        "rollout_return_denoising_env": True,
        "rollout_return_dit_trajectory": True,
        "rollout_sde_step_indices": [1, 3],
        "suppress_logs": True,
    }
    assert extra["diffusers_kwargs"][RECIPE_KEY]["sde_type"] == kind
    assert (extra["quality"], extra["max_sequence_length"]) == ("exact", 30)


def test_the_recipe_comes_out_of_json_as_the_driver_planned_it() -> None:
    (request,) = requests_for(version=5)
    plan = request.plan
    recipe = Recipe.parse(body_of(request)["extra_sampling_params"]["diffusers_kwargs"][RECIPE_KEY])
    assert recipe == Recipe(
        initial_noise_seeds=plan.initial_noise_seeds,
        denoise_seeds={step: tuple(seeds[step] for seeds in plan.denoise_seeds) for step in (1, 3)},
        latent_shape=request.latent_shape,
        sde_type="sde",
        eta=request.eta,
        sigmas=request.sigmas,
        policy_version=5,
    )
    assert max(plan.initial_noise_seeds) > 2**53, "seeds that a float could not hold"


def test_some_candidates_of_a_group_carry_their_own_seeds() -> None:
    (request,) = requests_for(count=5)
    body = body_of(request, slice(2, 4))
    recipe = body["extra_sampling_params"]["diffusers_kwargs"][RECIPE_KEY]
    plan = request.plan
    assert body["num_outputs_per_prompt"] == 2
    assert recipe["initial_noise_seeds"] == list(plan.initial_noise_seeds[2:4])
    assert recipe["denoise_seeds"] == {
        str(step): [plan.denoise_seeds[2][step], plan.denoise_seeds[3][step]] for step in (1, 3)
    }


def test_an_evaluation_has_no_sde_step() -> None:
    (request,) = requests_for(steps=())
    body = body_of(request)
    assert body["rollout_sde_step_indices"] == []
    assert body["extra_sampling_params"]["diffusers_kwargs"][RECIPE_KEY]["denoise_seeds"] == {}


def test_without_driver_sigmas_the_recipe_has_none() -> None:
    request = requests_for()[0].model_copy(update={"sigmas": None})
    assert body_of(request)["extra_sampling_params"]["diffusers_kwargs"][RECIPE_KEY]["sigmas"] is None


def test_no_family_can_override_the_recipe_or_the_quality() -> None:
    (request,) = requests_for()
    body = rollout_body(request, ALL, sampling_params={"quality": "fast", "diffusers_kwargs": {}})
    assert body["extra_sampling_params"]["quality"] == "exact"
    assert RECIPE_KEY in body["extra_sampling_params"]["diffusers_kwargs"]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_whole_answer_becomes_the_record() -> None:
    (request,) = requests_for(version=2)
    outputs = outputs_for(request)
    response = answer(request, decode_tensors(enveloped(outputs)))
    assert torch.equal(response.trajectory_latents[1], outputs[1]["dit_trajectory"]["latents"])
    assert response.trajectory_latents.shape == (3, STEPS + 1, TOKENS, CHANNELS)
    assert response.sigmas.tolist() == pytest.approx(request.sigmas)
    assert torch.equal(response.timesteps, 1000 * response.sigmas[:-1])
    assert response.rollout_log_probs.tolist() == [[0, -1.0 - k, 0, -1.0 - k, 0, 0] for k in range(3)]
    # 0.25, 0.5 and 0.75 of 255, to the nearest even
    assert [int(image.unique()) for image in response.media["image"]] == [64, 128, 191]
    assert response.media["image"].shape == (3, 3, request.height, request.width)
    assert response.conditions["encoder_hidden_states"].shape == (3, 2)
    assert (response.policy_version, response.engine, response.truncated_prompts) == (2, "sglang", 0)
    assert (response.sde_indices, response.height, response.width) == ((1, 3), request.height, request.width)


def test_an_evaluation_and_a_cut_prompt() -> None:
    (request,) = requests_for(steps=(), prompts=("x" * 30,))
    response = answer(request, outputs_for(request))
    assert response.sde_indices == ()
    assert not bool(response.rollout_log_probs.any())
    assert response.truncated_prompts == 1


def test_bfloat16_start_noise_is_compared_to_its_rounding() -> None:
    (request,) = requests_for()
    rounded = outputs_for(request, torch.bfloat16)
    assert answer(request, rounded, dtype="bf16").trajectory_latents.dtype == torch.float32
    with pytest.raises(RolloutError, match="candidate 0 did not start from its own noise"):
        answer(request, rounded, dtype="fp32")


def test_pixels_outside_the_range_are_clipped() -> None:
    (request,) = requests_for(count=1)
    outputs = outputs_for(request)
    outputs[0]["generated_output"] = torch.linspace(-1, 2, 3 * 16).reshape(3, 1, 4, 4)
    image = answer(request, outputs).media["image"][0]
    assert (int(image.min()), int(image.max()), image.dtype) == (0, 255, torch.uint8)


def at(item: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *folders, leaf = path.split(".")
    for folder in folders:
        item = item[folder]
    return item, leaf


def replace(index: int, path: str, change: Callable[[Any], Any]) -> Callable[[list[dict[str, Any]]], None]:
    """Change one value of one output; None takes it out."""

    def apply(outputs: list[dict[str, Any]]) -> None:
        folder, leaf = at(outputs[index], path)
        folder[leaf] = change(folder[leaf])

    return apply


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(tensor.numel()).reshape(tensor.shape) == 0, torch.nan, tensor)


LATENTS, LOG_PROBS, IMAGE = "dit_trajectory.latents", "rollout_log_probs", "generated_output"
CONTRADICTIONS: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "too few outputs": (lambda outputs: outputs.pop(), "2 outputs for 3 candidates"),
    "too many outputs": (lambda outputs: outputs.append(outputs[0]), "4 outputs for 3 candidates"),
    "T latents in all": (
        lambda outputs: [replace(k, LATENTS, lambda x: x[:-1])(outputs) for k in range(3)],
        rf"output 0: {LATENTS} has shape \[6, 16, 4\], expected \[T\+1, N, C\] = \[7, 16, 4\]",
    ),
    "T latents in one": (replace(1, LATENTS, lambda x: x[1:]), rf"output 1: {LATENTS} has shape \[6, 16, 4\]"),
    "other tokens": (replace(2, LATENTS, lambda x: x[:, :8]), rf"output 2: {LATENTS} has shape \[7, 8, 4\]"),
    "a doubled terminal sigma": (
        lambda outputs: [
            replace(k, "dit_trajectory.sigmas", lambda x: torch.cat([x, x[-1:]]))(outputs) for k in range(3)
        ],
        r"dit_trajectory.sigmas has shape \[8\], expected \[T\+1\] = \[7\]",
    ),
    "too few timesteps": (
        replace(0, "dit_trajectory.timesteps", lambda x: x[:4]),
        r"dit_trajectory.timesteps has shape \[4\]",
    ),
    "another schedule for one": (
        replace(1, "dit_trajectory.sigmas", lambda x: x * torch.tensor([1, 0.9, 1, 1, 1, 1, 1])),
        "candidate 1 was sampled with other sigmas than candidate 0",
    ),
    "too few log-probabilities": (replace(2, LOG_PROBS, lambda x: x[:-1]), rf"output 2: {LOG_PROBS} has shape \[5\]"),
    "another size": (replace(0, IMAGE, lambda x: x[..., :-1]), rf"output 0: {IMAGE} has shape \[3, 1, 4, 3\]"),
    "swapped candidates": (
        lambda outputs: outputs.reverse(),
        "candidate 0 did not start from its own noise; .*candidate 2",
    ),
    "noise of another seed": (
        replace(1, LATENTS, lambda x: torch.cat([x[:1] + 0.01, x[1:]])),
        "candidate 1 did not start from its own noise",
    ),
    "NaN start noise": (replace(1, LATENTS, poisoned), rf"output 1: {LATENTS} holds NaN or infinite values"),
    "NaN log-probability": (replace(0, LOG_PROBS, poisoned), rf"output 0: {LOG_PROBS} holds NaN or infinite values"),
    "NaN pixels": (replace(2, IMAGE, poisoned), rf"output 2: {IMAGE} holds NaN or infinite values"),
    "other text": (
        replace(2, "denoising_env.pos_cond_kwargs", lambda _: {"encoder_hidden_states": [torch.zeros(3, 2)]}),
        "candidate 2 was sampled with other text conditions than candidate 0",
    ),
    "longer text": (
        replace(1, "denoising_env.pos_cond_kwargs", lambda _: {"encoder_hidden_states": [torch.ones(4, 2)]}),
        "candidate 1 was sampled with other text conditions than candidate 0",
    ),
    "no tensor": (replace(0, LOG_PROBS, lambda _: [0.0] * 6), rf"output 0: {LOG_PROBS} is a list, not a tensor"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_an_answer_that_contradicts_its_request_is_refused(case: str) -> None:
    change, text = CONTRADICTIONS[case]
    (request,) = requests_for()
    outputs = outputs_for(request)
    change(outputs)
    with pytest.raises(RolloutError, match=text) as caught:
        answer(request, outputs)
    assert caught.value.what.startswith("SGLang's answer for group 0 cannot be trained on: ")


def test_everything_that_is_missing_is_listed_at_once() -> None:
    (request,) = requests_for()
    outputs = outputs_for(request)
    del outputs[0]["dit_trajectory"]
    outputs[1]["rollout_log_probs"] = None
    outputs[2]["denoising_env"] = {"neg_cond_kwargs": {}}
    outputs.append({})
    with pytest.raises(RolloutError) as caught:
        answer(request, outputs)
    found = re.findall(r"output \d lacks [\w.]+|\d outputs for \d candidates", caught.value.what)
    assert found == [
        "4 outputs for 3 candidates",
        *(f"output 0 lacks dit_trajectory.{name}" for name in ("latents", "timesteps", "sigmas")),
        "output 1 lacks rollout_log_probs",
        "output 2 lacks denoising_env.pos_cond_kwargs",
        *(f"output 3 lacks {name}" for name in ("generated_output", "rollout_log_probs")),
        "output 3 lacks denoising_env.pos_cond_kwargs",
        *(f"output 3 lacks dit_trajectory.{name}" for name in ("latents", "timesteps", "sigmas")),
    ]


def test_several_contradictions_are_told_together() -> None:
    (request,) = requests_for()
    outputs = outputs_for(request)
    CONTRADICTIONS["other text"][0](outputs)
    CONTRADICTIONS["noise of another seed"][0](outputs)
    with pytest.raises(RolloutError, match=r"candidate 1 did not start .*; candidate 2 was sampled with other text"):
        answer(request, outputs)


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_tensors_come_out_of_nested_values_as_they_went_in(dtype: torch.dtype) -> None:
    value = {"a": [torch.arange(6).reshape(2, 3).to(dtype), None], "b": {"c": torch.ones(()).to(dtype), "d": "text"}}
    decoded = decode_tensors(enveloped(value))
    assert torch.equal(decoded["a"][0], value["a"][0])
    assert decoded["a"][0].dtype == dtype
    assert decoded["b"]["c"].shape == ()
    assert (decoded["a"][1], decoded["b"]["d"]) == (None, "text")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data": b"no safetensors"}, "cannot be read"),
        ({"data": "a text"}, "cannot be read"),
        ({"data": None}, "cannot be read"),
        ({"data": enveloped(torch.ones(2))["data"][:-1]}, "cannot be read"),
        ({"shape": [3]}, r"says shape \[3\], it has \[2\]"),
        ({"shape": None}, r"says shape None, it has \[2\]"),
    ],
)
def test_a_malformed_tensor_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(RolloutError, match=text):
        decode_tensors([{"latents": {**enveloped(torch.ones(2)), **change}}])


def test_an_envelope_without_data_or_with_another_key_is_refused() -> None:
    for envelope in ({"__tensor__": True}, {"__tensor__": True, "data": safetensors.torch.save({"x": torch.ones(1)})}):
        with pytest.raises(RolloutError, match="cannot be read"):
            decode_tensors(envelope)
