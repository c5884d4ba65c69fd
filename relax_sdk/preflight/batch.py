"""Rules about prompts, groups and how a rollout batch splits into updates and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from relax_sdk.config import RunConfig, is_chosen
from relax_sdk.preflight.situation import METRIC_WORD, Rule, Situation

__all__ = ["RULES", "WARNINGS", "candidates_of_a_group_per_rank"]


def candidates_of_a_group_per_rank(config: RunConfig) -> int:
    """K / ranks when that is whole; otherwise every rank replays the whole group, K."""
    return config.group_size // config.actor_world if config.group_size % config.actor_world == 0 else config.group_size


def _has_geometry(config: RunConfig) -> bool:
    return config.rollout.rollout_batch_size is not None and config.rollout.n_samples_per_prompt is not None


def batch_is_given(situation: Situation) -> Iterator[str]:
    """Prompts, batch size and group size have no default."""
    rollout = situation.config.rollout
    if rollout.prompt_data is None:
        yield "no prompts: give --prompt-data PATH"
    if rollout.rollout_batch_size is None:
        yield "give --rollout-batch-size: prompts of one rollout"
    if rollout.n_samples_per_prompt is None:
        yield "give --n-samples-per-prompt: images of one prompt, which are compared with each other"
    # A preset may offer an interval for prompts that only the user has.
    chosen = is_chosen(situation.config.provenance, "rollout.eval_interval")
    if rollout.eval_interval is not None and rollout.eval_prompt_data is None and chosen:
        yield f"{situation.given('rollout.eval_interval')}: give --eval-prompt-data NAME PATH too"


def evaluation_set_has_a_name(situation: Situation) -> Iterator[str]:
    """The name is part of metric names, ``eval/<set>/...``."""
    held_out = situation.config.rollout.eval_prompt_data
    if held_out is not None and METRIC_WORD.fullmatch(held_out[0]) is None:
        source = situation.config.provenance.get("rollout.eval_prompt_data", "default")
        yield (
            f"--eval-prompt-data names the set {held_out[0]!r} ({source}): expected letters, digits, '_', '.' and '-', "
            "because metrics carry it"
        )


def batch_is_the_product(situation: Situation) -> Iterator[str]:
    """``global_batch_size`` is prompts x group size."""
    config = situation.config
    if not _has_geometry(config):
        return
    prompts, group = config.rollout.rollout_batch_size or 0, config.group_size
    if config.global_batch_size != prompts * group:
        yield (
            f"{situation.given('rollout.global_batch_size')}: expected --rollout-batch-size x --n-samples-per-prompt "
            f"= {prompts} x {group} = {prompts * group}; leave it out to have it computed"
        )


def updates_split_evenly(situation: Situation) -> Iterator[str]:
    """Disjoint updates of equal size on every rank, none of which cuts a micro-batch."""
    config = situation.config
    if not _has_geometry(config):
        return
    updates = config.flow_grpo.num_updates_per_batch
    share = candidates_of_a_group_per_rank(config)
    local = (config.rollout.rollout_batch_size or 0) * share
    if local % updates:
        yield (
            f"{situation.given('flow_grpo.num_updates_per_batch')}: it does not divide the {local} images that each "
            "rank replays"
        )
        return
    chunk = _micro_batch(config, share)
    if (local // updates) % chunk:
        yield (
            f"{situation.given('flow_grpo.num_updates_per_batch')}: an update has {local // updates} images a rank, "
            f"which cuts a micro-batch of {chunk}; choose a number of updates that divides --rollout-batch-size, or "
            "another --micro-batch-size"
        )


def _micro_batch(config: RunConfig, share: int) -> int:
    """Rows of one forward: a group's local share is split only evenly, else kept whole."""
    size = config.rollout.micro_batch_size
    return size if share % size == 0 else share


def group_is_one(situation: Situation) -> Iterator[str]:
    """Groups of one have nothing to compare with."""
    if situation.config.rollout.n_samples_per_prompt == 1:
        yield (
            f"{situation.given('rollout.n_samples_per_prompt')}: a group of one has no spread, so every advantage is 0 "
            "and nothing is learned; the std mode is none"
        )


def micro_batch_is_not_used(situation: Situation) -> Iterator[str]:
    """A size that does not divide a rank's share is ignored, because uneven parts would change the mean."""
    config = situation.config
    if _has_geometry(config) and (share := candidates_of_a_group_per_rank(config)) % config.rollout.micro_batch_size:
        yield (
            f"{situation.given('rollout.micro_batch_size')}: it does not divide the {share} images of a group on a "
            f"rank, so forwards have {share} images"
        )


def ranks_repeat_work(situation: Situation) -> Iterator[str]:
    """Groups that cannot be shared out are replayed in full by everyone."""
    config = situation.config
    if _has_geometry(config) and config.group_size % config.actor_world:
        yield (
            f"{situation.given('rollout.n_samples_per_prompt')}: not divisible by the actor's {config.actor_world} "
            "ranks, so every rank replays every image; correct, but no faster than one rank"
        )


RULES: tuple[Rule, ...] = (batch_is_given, evaluation_set_has_a_name, batch_is_the_product, updates_split_evenly)
WARNINGS: tuple[Rule, ...] = (group_is_one, micro_batch_is_not_used, ranks_repeat_work)
