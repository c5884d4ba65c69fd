"""Records refuse what does not fit, name the field, and say what was expected and what came."""

from __future__ import annotations

import pickle
from typing import Annotated, Any

import pytest
import torch

from relax_sdk.errors import RecordError
from relax_sdk.protocols import (
    FullWeightManifest,
    GroupPlan,
    Record,
    ReplayBatch,
    RewardBatch,
    RolloutRequest,
    RolloutResponse,
    Tensor,
    TensorSpec,
    Trajectory,
)

K, T, S, N, C = 2, 4, 2, 6, 3


def response(**changes: Any) -> RolloutResponse:
    fields: dict[str, Any] = {
        "trajectory_latents": torch.zeros(K, T + 1, N, C),
        "sigmas": torch.linspace(1, 0, T + 1),
        "timesteps": torch.linspace(1000, 100, T),
        "rollout_log_probs": torch.zeros(K, T),
        "sde_indices": (1, 2),
        "conditions": {"embeds": torch.zeros(5, 7, dtype=torch.bfloat16)},
        "media": {"image": torch.zeros(K, 3, 8, 8, dtype=torch.uint8)},
        "height": 8,
        "width": 8,
        "policy_version": 0,
        "engine": "local",
    }
    return RolloutResponse(**{**fields, **changes})


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "sigmas": torch.linspace(1, 0, T + 1),
        "timesteps": torch.linspace(1000, 100, T),
        "sde_indices": torch.tensor([1, 2]),
        "sample_indices": torch.arange(K),
        "rollout_log_probs": torch.zeros(K, S),
        "latents": torch.zeros(K, S, N, C),
        "next_latents": torch.zeros(K, S, N, C),
        "conditions": {},
        "height": 8,
        "width": 8,
        "policy_version": 0,
        "group_index": 0,
        "rollout_id": 0,
        "sde_type": "sde",
        "eta": 0.7,
        "sigma_clamp": 0.9,
        "seed_hash": "x",
    }
    return Trajectory(**{**fields, **changes})


def plan(**changes: Any) -> GroupPlan:
    fields: dict[str, Any] = {
        "rollout_id": 0,
        "group_index": 0,
        "prompt": "a",
        "sample_ids": ("p:0", "p:1"),
        "initial_noise_seeds": (1, 2),
        "denoise_seeds": ((1,), (2,)),
        "engine_seed": 0,
        "sde_indices": (1,),
        "policy_version": 0,
    }
    return GroupPlan(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"trajectory_latents": torch.zeros(K, T, N, C)}, ["sigmas", "T+1", "came 5"]),
        ({"trajectory_latents": torch.zeros(K, T + 1, N)}, ["trajectory_latents", "[K T+1 N C]", "[2, 5, 6]"]),
        ({"trajectory_latents": torch.zeros(K, T + 1, N, C).bfloat16()}, ["expected dtype float32", "came bfloat16"]),
        ({"rollout_log_probs": torch.full((K, T), float("nan"))}, ["rollout_log_probs", "8 of 8 NaN or infinite"]),
        ({"rollout_log_probs": torch.zeros(K + 1, T)}, ["K = 2", "came 3", "trajectory_latents"]),
        ({"media": {"image": torch.zeros(K, 3, 8, 8)}}, ["media['image']", "uint8", "float32"]),
        ({"media": {"image": torch.zeros(K, 4, 8, 8, dtype=torch.uint8)}}, ["media['image']", "[K 3 H W]"]),
        ({"conditions": {"embeds": torch.tensor([float("inf")])}}, ["conditions['embeds']", "1 of 1"]),
        ({"sigmas": [1.0, 0.0]}, ["sigmas", "expected a tensor", "came list"]),
        ({"colour": "red"}, ["colour", "unknown field"]),
        ({"height": "tall"}, ["height", "'tall'"]),
    ],
)
def test_a_response_that_does_not_fit(changes, parts):
    with pytest.raises(RecordError) as caught:
        response(**changes)
    for part in parts:
        assert part in str(caught.value)


def test_every_problem_is_named_at_once():
    with pytest.raises(RecordError) as caught:
        response(rollout_log_probs=torch.zeros(1, T), timesteps=torch.zeros(T + 3))
    assert "rollout_log_probs" in str(caught.value)
    assert "timesteps" in str(caught.value)
    with pytest.raises(RecordError) as caught:
        GroupPlan(prompt=3)
    assert "sample_ids: missing" in str(caught.value)
    assert "engine_seed: missing" in str(caught.value)


def test_what_fits_is_frozen_and_travels():
    record = trajectory()
    assert torch.equal(pickle.loads(pickle.dumps(record)).latents, record.latents)
    with pytest.raises(ValueError, match="frozen"):
        record.height = 9


@pytest.mark.parametrize("steps", [[2, 1], [1, 1], [-1, 2], [1, 4]])
def test_trained_steps_increase_and_exist(steps):
    with pytest.raises(RecordError, match=r"increasing steps in 0\.\.3"):
        trajectory(sde_indices=torch.tensor(steps))


def test_group_plans():
    assert plan().sample_ids == ("p:0", "p:1")
    with pytest.raises(RecordError, match="one entry per candidate"):
        plan(initial_noise_seeds=(1,))
    with pytest.raises(RecordError, match="must differ within a group"):
        plan(sample_ids=("same", "same"))


@pytest.mark.parametrize(
    ("sigmas", "expected"),
    [
        ((1.0, 0.5, 0.0), None),
        ((1.0, 0.0), "T\\+1 = 3 values, came 2"),
        ((1.0, 0.0, 0.0), "not strictly decreasing at step 1"),
        ((1.0, 0.5, 0.1), "the last value must be 0"),
    ],
)
def test_schedules_of_requests(sigmas, expected):
    fields: dict[str, Any] = {"plan": plan(), "height": 8, "width": 8, "num_inference_steps": 2, "eta": 0.7}
    fields |= {"sde_type": "sde", "latent_shape": (3,), "sigmas": sigmas}
    if expected is None:
        assert RolloutRequest(**fields).sigmas == sigmas
        return
    with pytest.raises(RecordError, match=expected):
        RolloutRequest(**fields)


def test_rows_are_paired():
    with pytest.raises(RecordError, match=r"expected B = 2 mappings, came 1"):
        ReplayBatch(latents=torch.zeros(2, N, C), sigmas=torch.ones(2), conditions=({},), height=8, width=8)
    image = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(RecordError, match=r"expected B = 1 rows, came 2"):
        RewardBatch(prompts=("a",), tracks={"image": image})
    with pytest.raises(RecordError, match=r"expected B = 2 entries, came 1"):
        RewardBatch(prompts=("a", "b"), tracks={"image": image}, metadata=({},))


def test_a_manifest_depends_on_names_shapes_and_order_only():
    entries = [("a", (2, 3), 24), ("b", (4,), 16)]
    manifest = FullWeightManifest.describe("full", entries)
    assert (manifest.tensors, manifest.bytes) == (2, 40)
    assert manifest == FullWeightManifest.describe("full", iter(entries))
    for other in ([entries[1], entries[0]], [("a", (3, 2), 24), entries[1]], [("c", (2, 3), 24), entries[1]]):
        assert FullWeightManifest.describe("full", other).ordered_name_shape_hash != manifest.ordered_name_shape_hash
    with pytest.raises(RecordError):
        FullWeightManifest.describe("full", [])


class Shaped(Record):
    first: Annotated[Tensor, TensorSpec("... N C")]
    second: Annotated[Tensor | None, TensorSpec("N+2", "int64|int32")] = None


def test_axes():
    Shaped(first=torch.zeros(N, C))
    Shaped(first=torch.zeros(5, 4, N, C), second=torch.zeros(N + 2, dtype=torch.int32))
    with pytest.raises(RecordError, match=r"expected shape \[\.\.\. N C\]"):
        Shaped(first=torch.zeros(N))
    with pytest.raises(RecordError, match=rf"expected N\+2 = {N + 2}"):
        Shaped(first=torch.zeros(N, C), second=torch.zeros(N, dtype=torch.int64))
    with pytest.raises(RecordError, match=r"int64\|int32"):
        Shaped(first=torch.zeros(N, C), second=torch.zeros(N + 2))
