"""Rules about the scorer, its model and its components."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_sdk.errors import nearest_name
from relax_sdk.preflight.situation import METRIC_WORD, Rule, Situation

__all__ = ["RESERVED_COMPONENTS", "RULES"]

RESERVED_COMPONENTS = ("advantage", "group_std")
"""``reward/<component>_mean`` of these would be a metric of the core."""


def scorer_is_chosen(situation: Situation) -> Iterator[str]:
    """A scorer, and its model's folder when one is named."""
    if situation.reward is None:
        names = [spec.name for record in situation.registry.plugins() for spec in record.rewards]
        installed = f"installed: {', '.join(names)}" if names else "none is installed"
        yield f"no reward is chosen: give --reward NAME, or package.module:Class ({installed})"
    path = situation.config.reward.model_path
    if path is None and situation.reward is not None and situation.reward.model_path is not None:
        yield (
            f"no model for the scorer {situation.reward.name!r}: give --reward-model-path (the bundled one, which is "
            f"used by default only with a preset's own model, is {str(situation.reward.default_model_path())!r})"
        )
    if path is not None and not Path(path).exists():
        yield f"{situation.given('reward.model_path')}: no such folder"


def components_have_weights(situation: Situation) -> Iterator[str]:
    """Every required component has a weight, and the scorer returns every component that is named."""
    reward = situation.config.reward
    if reward.component_weights == {}:
        yield f"{situation.given('reward.component_weights')}: expected a weight, e.g. '{{\"pickscore\": 1.0}}'"
        return
    # Both unset: a scorer given by its class's path tells its components when it is loaded; they count 1 each.
    required, weights = reward.required_components or [], reward.component_weights or {}
    for name in required:
        if name not in weights:
            yield f"{situation.given('reward.component_weights')}: the required component {name!r} has no weight"
    if weights and all(weight == 0 for weight in weights.values()):
        yield f"{situation.given('reward.component_weights')}: all weights are 0, so every advantage would be 0"
    known = situation.reward.components if situation.reward is not None else ()
    paths = dict.fromkeys(required, "reward.required_components") | dict.fromkeys(weights, "reward.component_weights")
    for name, path in paths.items():
        if known and name not in known:
            nearest = nearest_name(name, known)
            hint = f"; did you mean {nearest!r}?" if nearest else ""
            yield f"{situation.given(path)}: the scorer returns {', '.join(known)}, not {name!r}{hint}"


def components_can_name_metrics(situation: Situation) -> Iterator[str]:
    """A component's name is part of metric names, ``reward/<component>_mean``."""
    reward = situation.config.reward
    declared = situation.reward.components if situation.reward is not None else ()
    for name in dict.fromkeys((*declared, *(reward.required_components or ()), *(reward.component_weights or ()))):
        given = f"the reward {reward.scorer_path!r} has the component {name!r}"
        if METRIC_WORD.fullmatch(name) is None:
            yield f"{given}: expected letters, digits, '_', '.' and '-', because metrics carry it"
        elif name in RESERVED_COMPONENTS:
            yield f"{given}: reward/{name}_mean is a metric of the core; rename it in the scorer"


RULES: tuple[Rule, ...] = (scorer_is_chosen, components_have_weights, components_can_name_metrics)
