"""Who a candidate is, and that nothing else decides its noise."""

from __future__ import annotations

import hashlib

import pytest

from relax_sdk.errors import RecordError
from relax_sdk.protocols import GroupPlan, PromptRecord, SamplingConfig
from relax_sdk.rollout import EVALUATION_ROUND, candidate_seed, plan_groups, sample_ids

FIRST = PromptRecord(prompt="a red circle", prompt_id="pickapic_7")
SECOND = PromptRecord(prompt="a red circle", prompt_id="pickapic_8")


def plan(prompts: list[PromptRecord], *, rollout_id: int | None = 3, **changes: object) -> list[GroupPlan]:
    sampling = SamplingConfig(num_inference_steps=4, **changes.pop("sampling", {}))  # type: ignore[arg-type]
    options = {"samples_per_prompt": 3, "generation_seed": 42, "policy_version": 5, "sde_indices": (1, 2), **changes}
    return plan_groups(prompts, rollout_id=rollout_id, sampling=sampling, **options)  # type: ignore[arg-type]


def test_golden_seeds() -> None:
    """These never change: a run could otherwise not be repeated with a later version. (sha256sum | cut -c1-16) >> 1."""
    assert candidate_seed(42, 0, "prompt:0:sample:0", "x_T") == 8196548770615930598
    assert candidate_seed(1234, 17, "prompt:pickapic_7:sample:3", "step:5") == 6871347415518440868
    assert candidate_seed(42, EVALUATION_ROUND, "prompt:0:sample:0", "x_T") == 883535411339623952


def test_a_seed_is_the_first_63_bits_of_a_digest() -> None:
    digest = hashlib.sha256(b"42\x1f3\x1fprompt:0:sample:1\x1fstep:2").hexdigest()
    assert candidate_seed(42, 3, "prompt:0:sample:1", "step:2") == int(digest[:16], 16) // 2


def test_a_seed_depends_on_each_of_its_parts() -> None:
    base = candidate_seed(42, 3, "prompt:0:sample:0", "x_T")
    others = [
        candidate_seed(43, 3, "prompt:0:sample:0", "x_T"),
        candidate_seed(42, 4, "prompt:0:sample:0", "x_T"),
        candidate_seed(42, 3, "prompt:0:sample:1", "x_T"),
        candidate_seed(42, 3, "prompt:0:sample:0", "step:0"),
        candidate_seed(42, EVALUATION_ROUND, "prompt:0:sample:0", "x_T"),
        # Digits that move over a border are not the same text.
        candidate_seed(4, 23, "prompt:0:sample:0", "x_T"),
    ]
    assert len({base, *others}) == 7
    assert all(0 <= seed < 2**63 for seed in (base, *others))


@pytest.mark.parametrize(("mode", "key"), [("metadata", "pickapic_7"), ("positional", "2"), ("group_index", "2")])
def test_ids_of_each_mode(mode: str, key: str) -> None:
    assert sample_ids(FIRST, 2, 3, mode=mode) == tuple(f"prompt:{key}:sample:{slot}" for slot in range(3))


def test_a_plan_states_every_seed() -> None:
    (group,) = plan([FIRST])
    assert group.sample_ids == tuple(f"prompt:pickapic_7:sample:{slot}" for slot in range(3))
    for slot, name in enumerate(group.sample_ids):
        assert group.initial_noise_seeds[slot] == candidate_seed(42, 3, name, "x_T")
        assert group.denoise_seeds[slot] == tuple(candidate_seed(42, 3, name, f"step:{step}") for step in range(4))
    assert (group.rollout_id, group.group_index, group.prompt) == (3, 0, "a red circle")
    assert (group.policy_version, group.sde_indices) == (5, (1, 2))


def test_all_seeds_of_a_round_and_of_the_next_differ() -> None:
    groups = [*plan([FIRST, SECOND]), *plan([FIRST, SECOND], rollout_id=4), *plan([FIRST, SECOND], rollout_id=None)]
    seeds = [seed for group in groups for rows in (group.initial_noise_seeds, *group.denoise_seeds) for seed in rows]
    assert len(seeds) == 6 * 3 * 5
    assert len(set(seeds)) == len(seeds)


def test_metadata_ids_do_not_depend_on_the_position_in_the_batch() -> None:
    early, late = plan([FIRST, SECOND])[0], plan([SECOND, FIRST])[1]
    assert early.initial_noise_seeds == late.initial_noise_seeds
    assert early.denoise_seeds == late.denoise_seeds
    moved = plan([SECOND, FIRST], sampling={"sample_id_mode": "positional"})[1]
    assert moved.initial_noise_seeds != early.initial_noise_seeds


def test_a_candidate_does_not_depend_on_the_group_size() -> None:
    small, large = plan([FIRST], samples_per_prompt=2)[0], plan([FIRST], samples_per_prompt=5)[0]
    assert small.initial_noise_seeds == large.initial_noise_seeds[:2]
    assert small.denoise_seeds == large.denoise_seeds[:2]


@pytest.mark.parametrize("mode", ["metadata", "positional", "group_index"])
def test_a_prompt_that_comes_twice_in_a_round_draws_anew(mode: str) -> None:
    groups = plan([FIRST, SECOND, FIRST, FIRST], sampling={"sample_id_mode": mode})
    ids = [name for group in groups for name in group.sample_ids]
    seeds = [seed for group in groups for seed in group.initial_noise_seeds]
    assert len(set(ids)) == len(set(seeds)) == 12
    assert groups[0].sample_ids == plan([FIRST], sampling={"sample_id_mode": mode})[0].sample_ids


def test_evaluation_has_the_same_noise_in_every_pass() -> None:
    """Whatever the policy version; training never uses those seeds."""
    first = plan([FIRST, SECOND], rollout_id=None, policy_version=0, sde_indices=())
    later = plan([FIRST, SECOND], rollout_id=None, policy_version=9, sde_indices=())
    assert [group.initial_noise_seeds for group in first] == [group.initial_noise_seeds for group in later]
    assert later[0].sde_indices == ()


def test_engine_seed_follows_the_guide() -> None:
    """Unchanged with the driver's x_T; else generation_seed + group_index * group_size, to which a slot is added."""
    assert [group.engine_seed for group in plan([FIRST, SECOND])] == [42, 42]
    assert [group.engine_seed for group in plan([FIRST, SECOND], sampling={"driver_xt": False})] == [42, 45]


def test_an_incomplete_plan_is_refused() -> None:
    (group,) = plan([FIRST])
    with pytest.raises(RecordError, match="one entry per candidate"):
        GroupPlan(**{**group.model_dump(), "initial_noise_seeds": (1, 2)})
    with pytest.raises(RecordError, match="differ within a group"):
        GroupPlan(**{**group.model_dump(), "sample_ids": ("a", "a", "b")})
