"""Sizes, guidance, requests, responses and trajectories."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from relax_qwen_image.geometry import nearest_side

from relax_sdk import ConfigError, RecordError, RolloutError
from relax_sdk.protocols import (
    EmbeddedModelAdapter,
    GenerativeModelAdapter,
    RolloutRequest,
    RolloutResponse,
    SamplingConfig,
)


def _change(sampling: SamplingConfig, **changes) -> SamplingConfig:
    return SamplingConfig(**(sampling.model_dump() | changes))


@pytest.fixture
def request_for(adapter, plan, sampling, scheduler_config) -> RolloutRequest:
    return adapter.build_rollout_request(plan, sampling, scheduler_config=scheduler_config)


def _fields(request: RolloutRequest) -> dict:
    steps, candidates = request.num_inference_steps, len(request.plan.sample_ids)
    tokens = request.height * request.width // 256
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.zeros(candidates, steps)
    log_probs[:, list(request.plan.sde_indices)] = -1.25
    sigmas = torch.tensor(request.sigmas)
    return {
        "trajectory_latents": torch.randn(candidates, steps + 1, tokens, 64, generator=generator),
        "sigmas": sigmas,
        "timesteps": sigmas[:-1] * 1000,
        "rollout_log_probs": log_probs,
        "sde_indices": request.plan.sde_indices,
        "conditions": {"encoder_hidden_states": torch.randn(9, 32), "encoder_hidden_states_mask": torch.ones(9)},
        "media": {"image": torch.zeros(candidates, 3, request.height, request.width, dtype=torch.uint8)},
        "height": request.height,
        "width": request.width,
        "policy_version": request.plan.policy_version,
        "engine": "local",
    }


def test_adapter_implements_both_protocols(adapter):
    assert isinstance(adapter, GenerativeModelAdapter)
    assert isinstance(adapter, EmbeddedModelAdapter)


@pytest.mark.parametrize(
    ("pixels", "nearest"), [(1, 16), (16, 16), (23, 16), (24, 16), (25, 32), (100, 96), (105, 112), (1023, 1024)]
)
def test_nearest_side(pixels, nearest):
    assert nearest_side(pixels) == nearest


def test_size_off_the_grid_names_the_nearest(adapter, sampling):
    assert adapter.validate_sampling(_change(sampling, height=100, width=64)) == [
        "height = 100 is not a multiple of 16; the nearest valid height is 96"
    ]
    assert len(adapter.validate_sampling(_change(sampling, height=100, width=65))) == 2


def test_request_for_a_size_off_the_grid_is_refused(adapter, plan, sampling, scheduler_config):
    with pytest.raises(ConfigError, match=r"height = 100 .* nearest valid height is 96"):
        adapter.build_rollout_request(plan, _change(sampling, height=100), scheduler_config=scheduler_config)


def test_guidance_is_refused(adapter, plan, sampling, scheduler_config):
    guided = _change(sampling, guidance_scale=2.0)
    assert any("guidance_scale = 2.0 must be 1.0" in text for text in adapter.validate_sampling(guided))
    with pytest.raises(ConfigError, match=r"guidance_scale = 2\.0 must be 1\.0"):
        adapter.build_rollout_request(plan, guided, scheduler_config=scheduler_config)


def test_request_has_the_pipelines_schedule(request_for, pipeline):
    import numpy
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

    config = pipeline.scheduler.config
    mu = calculate_shift(8, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
    pipeline.scheduler.set_timesteps(sigmas=numpy.linspace(1.0, 0.25, 4), mu=mu)
    torch.testing.assert_close(torch.tensor(request_for.sigmas), pipeline.scheduler.sigmas, atol=2e-7, rtol=0)
    assert request_for.latent_shape == (16, 4, 8)
    assert (request_for.height, request_for.width, request_for.guidance_scale) == (32, 64, 1.0)


def test_without_driver_sigmas_the_engine_computes_them(adapter, plan, sampling):
    request = adapter.build_rollout_request(plan, _change(sampling, driver_sigmas=False), scheduler_config={})
    assert request.sigmas is None


@pytest.mark.parametrize("shape", [(16, 4, 8), (1, 16, 4, 8), (16, 1, 4, 8)])
def test_noise_shape_override_is_honoured(adapter, plan, sampling, scheduler_config, shape):
    override = _change(sampling, init_noise_latent_shape=shape)
    request = adapter.build_rollout_request(plan, override, scheduler_config=scheduler_config)
    assert request.latent_shape == shape
    assert adapter.pack_initial_noise(torch.zeros(2, *shape)).shape == (2, 8, 64)


@pytest.mark.parametrize("shape", [(16, 8, 4), (4, 4, 4, 8), (8, 64), (16, 4, 8, 1), (32, 4, 8)])
def test_noise_shape_that_does_not_fit_is_refused(adapter, sampling, shape):
    (problem,) = adapter.validate_sampling(_change(sampling, init_noise_latent_shape=shape))
    assert f"{list(shape)} does not fit 32x64" in problem
    assert "[16, 4, 8]" in problem


def test_response_that_answers_is_accepted(adapter, request_for):
    adapter.validate_rollout_response(request_for, RolloutResponse(**_fields(request_for)))


def test_response_of_fewer_steps_names_the_missing_latent(adapter, request_for):
    fields = _fields(request_for)
    # Consistent in itself, one step short of the request: four latents where T + 1 = 5 were asked for.
    fields["trajectory_latents"] = fields["trajectory_latents"][:, :-1]
    fields["sigmas"] = torch.tensor([*request_for.sigmas[:3], 0.0])
    fields["timesteps"] = fields["timesteps"][:-1]
    fields["rollout_log_probs"] = fields["rollout_log_probs"][:, :-1]
    with pytest.raises(RolloutError) as caught:
        adapter.validate_rollout_response(request_for, RolloutResponse(**fields))
    assert "trajectory_latents: expected x_0 to x_4, T+1 = 5 latents, came 4: x_4 is missing" in str(caught.value)
    assert "sigmas: expected shape [5], came [4]" in str(caught.value)
    assert "engine 'local'" in str(caught.value)


def test_t_latents_instead_of_t_plus_one_are_refused(adapter, request_for):
    fields = _fields(request_for)
    fields["trajectory_latents"] = fields["trajectory_latents"][:, :-1]
    # The record refuses it when it is built through its constructor, the adapter when it was not.
    with pytest.raises(RecordError, match=r"sigmas: expected T\+1 = 4"):
        RolloutResponse(**fields)
    with pytest.raises(RolloutError, match=r"trajectory_latents: expected x_0 to x_4.*x_4 is missing"):
        adapter.validate_rollout_response(request_for, RolloutResponse.model_construct(**fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_version": 4}, "policy_version: expected 5, came 4"),
        ({"height": 64, "width": 32}, "height: expected 32, came 64; width: expected 64, came 32"),
        ({"sde_indices": (1, 2)}, "sde_indices: expected [1, 3], came [1, 2]"),
        ({"media": {}}, "media['image'] is missing"),
        ({"conditions": {"prompt_embeds": torch.zeros(3, 4)}}, "conditions['encoder_hidden_states'] is missing"),
        ({"conditions": {"encoder_hidden_states": torch.zeros(1, 3, 4)}}, "expected [L, D], came [1, 3, 4]"),
        ({"rollout_log_probs": torch.zeros(2, 4)}, "all 0 at SDE step 1"),
        ({"rollout_log_probs": torch.ones(2, 4)}, "not 0 at step 0, which is not an SDE step"),
        ({"trajectory_latents": torch.zeros(2, 5, 16, 64)}, "expected shape [2, 5, 8, 64], came [2, 5, 16, 64]"),
    ],
)
def test_each_difference_is_named(adapter, request_for, changes, message):
    response = RolloutResponse(**(_fields(request_for) | changes))
    with pytest.raises(RolloutError) as caught:
        adapter.validate_rollout_response(request_for, response)
    assert message in str(caught.value)


def test_schedule_off_by_one_names_the_step(adapter, request_for):
    fields = _fields(request_for)
    sigmas = list(request_for.sigmas)
    sigmas[1:4] = [sigmas[2], sigmas[3], sigmas[3] / 2]
    fields |= {"sigmas": torch.tensor(sigmas), "timesteps": torch.tensor(sigmas[:-1]) * 1000}
    with pytest.raises(RolloutError, match=r"sigma at step 1: .*off by one"):
        adapter.validate_rollout_response(request_for, RolloutResponse(**fields))


def test_timesteps_shifted_twice_name_the_step(adapter, request_for):
    fields = _fields(request_for)
    fields["timesteps"] = torch.tensor([1000.0, 700.0, 400.0, 20.0])
    with pytest.raises(RolloutError, match=r"timesteps: expected .* \(1000 sigma\) at step 1, came 700\.0"):
        adapter.validate_rollout_response(request_for, RolloutResponse(**fields))


def test_everything_that_is_missing_is_listed(adapter, request_for):
    bare = RolloutResponse.model_construct(conditions={}, media={}, engine="other")
    with pytest.raises(RolloutError) as caught:
        adapter.validate_rollout_response(request_for, bare)
    for name in ("trajectory_latents", "sigmas", "timesteps", "rollout_log_probs", "sde_indices", "height", "width"):
        assert f"{name} is missing" in str(caught.value)


def test_trajectory_keeps_the_trained_steps(adapter, request_for):
    fields = _fields(request_for)
    trajectory = adapter.pack_trajectory(request_for, RolloutResponse(**fields))
    latents = fields["trajectory_latents"]
    assert trajectory.sde_indices.tolist() == [1, 3]
    assert torch.equal(trajectory.latents[:, 0], latents[:, 1])
    assert torch.equal(trajectory.next_latents[:, 0], latents[:, 2])
    assert torch.equal(trajectory.latents[:, 1], latents[:, 3])
    assert torch.equal(trajectory.next_latents[:, 1], latents[:, 4])
    assert trajectory.rollout_log_probs.tolist() == [[-1.25, -1.25]] * 2
    assert trajectory.sigma_clamp == request_for.sigmas[1]
    assert trajectory.sample_indices.tolist() == [0, 1]
    assert set(trajectory.conditions) == {"encoder_hidden_states"}
    assert (trajectory.rollout_id, trajectory.group_index, trajectory.policy_version) == (7, 3, 5)
    seeds = [99, [11, 12], [[1, 2, 3, 4], [5, 6, 7, 8]]]
    assert trajectory.seed_hash == hashlib.sha256(json.dumps(seeds).encode()).hexdigest()


def test_nothing_to_train_is_refused_but_evaluation_may_be_deterministic(adapter, sampling, scheduler_config, plan):
    for rollout_id in (7, None):
        quiet = type(plan)(**(plan.model_dump() | {"sde_indices": (), "rollout_id": rollout_id}))
        request = adapter.build_rollout_request(quiet, sampling, scheduler_config=scheduler_config)
        response = RolloutResponse(**_fields(request))
        adapter.validate_rollout_response(request, response)
        if rollout_id is None:
            assert adapter.pack_trajectory(request, response).latents.shape == (2, 0, 8, 64)
        else:
            with pytest.raises(RolloutError, match="group 3 of rollout 7 has no SDE step"):
                adapter.pack_trajectory(request, response)


def test_names_and_tracks(adapter, pipeline):
    names = adapter.weight_name_map()
    assert [names(name) for name, _ in pipeline.transformer.named_parameters()] == [
        name for name, _ in pipeline.transformer.named_parameters()
    ]
    assert adapter.artifact_tracks() == ("image",)
    assert adapter.supported_tasks == ("t2i",)
