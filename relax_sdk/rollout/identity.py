"""Who a candidate is, and every random number that follows from it.

A candidate is known by its ``sample_id``. Together with the round's seed it fixes x_T and the noise of every step,
so the same candidate comes out whatever its batch mates, its engine or its position in a wave.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from relax_sdk.protocols import GroupPlan, PromptRecord, SamplingConfig

__all__ = ["EVALUATION_ROUND", "candidate_seed", "plan_groups", "sample_ids"]

EVALUATION_ROUND = "evaluation"
"""Stands for the rollout id in the seeds of held-out evaluation, so that its noise is the same in every pass."""


def candidate_seed(generation_seed: int, round_key: int | str, sample_id: str, purpose: str) -> int:
    """63 bits of sha256 over the four parts, separated so that no two tuples spell the same text.

    Args:
        generation_seed: ``--generation-seed``.
        round_key: the rollout id, or `EVALUATION_ROUND`. It is part of the seed so that a prompt which comes again
            in a later epoch explores with fresh noise.
        sample_id: the candidate.
        purpose: ``"x_T"``, or ``"step:<i>"``.

    Returns:
        An integer in 0 .. 2^63 - 1.
    """
    text = "\x1f".join((str(generation_seed), str(round_key), sample_id, purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def sample_ids(prompt: PromptRecord, group_index: int, count: int, *, mode: str, repeat: int = 0) -> tuple[str, ...]:
    """The candidates' stable ids.

    Args:
        prompt: the group's prompt.
        group_index: the group's position in the round.
        count: candidates K.
        mode: ``metadata``: ``prompt:<prompt_id>:sample:<slot>``; ``positional`` and ``group_index``:
            ``prompt:<group_index>:sample:<slot>``.
        repeat: how often this prompt came earlier in the same round (a prompt set smaller than the batch); a
            repeated prompt's ids carry it, so that its groups do not hold the same candidates twice.
    """
    key = prompt.prompt_id if mode == "metadata" else str(group_index)
    again = f":repeat:{repeat}" if repeat and mode == "metadata" else ""
    return tuple(f"prompt:{key}:sample:{slot}{again}" for slot in range(count))


def plan_groups(
    prompts: Sequence[PromptRecord],
    *,
    rollout_id: int | None,
    samples_per_prompt: int,
    sampling: SamplingConfig,
    generation_seed: int,
    policy_version: int,
    sde_indices: tuple[int, ...],
) -> list[GroupPlan]:
    """Fix everything about a round before any model runs.

    Args:
        prompts: one per group.
        rollout_id: the round, or None for held-out evaluation.
        samples_per_prompt: candidates K of each group.
        sampling: steps and id mode.
        generation_seed: base of every seed.
        policy_version: the weights that the round is meant for.
        sde_indices: the SDE steps of the round, resolved once by the caller; empty for an ODE evaluation.
    """
    round_key: int | str = EVALUATION_ROUND if rollout_id is None else rollout_id
    seen: dict[str, int] = {}
    plans = []
    for index, prompt in enumerate(prompts):
        repeat = seen.get(prompt.prompt_id, 0)
        seen[prompt.prompt_id] = repeat + 1
        ids = sample_ids(prompt, index, samples_per_prompt, mode=sampling.sample_id_mode, repeat=repeat)
        plans.append(
            GroupPlan(
                rollout_id=rollout_id,
                group_index=index,
                prompt=prompt.prompt,
                sample_ids=ids,
                initial_noise_seeds=tuple(candidate_seed(generation_seed, round_key, name, "x_T") for name in ids),
                denoise_seeds=tuple(
                    tuple(
                        candidate_seed(generation_seed, round_key, name, f"step:{step}")
                        for step in range(sampling.num_inference_steps)
                    )
                    for name in ids
                ),
                # Without the driver's x_T recipe an engine numbers its candidates from here.
                engine_seed=generation_seed + (0 if sampling.driver_xt else index * samples_per_prompt),
                sde_indices=sde_indices,
                policy_version=policy_version,
            )
        )
    return plans
