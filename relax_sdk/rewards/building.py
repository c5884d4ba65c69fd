"""Constructs reward scorers, each configuration once per process.

A scorer may hold gigabytes of weights; training and evaluation of one process share the object.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from relax_sdk.errors import PluginError, RelaxError, UnknownNameError
from relax_sdk.protocols import RewardScorer
from relax_sdk.registry import RewardSpec

__all__ = ["REWARD_RUNTIMES", "build_scorer"]

logger = logging.getLogger(__name__)

REWARD_RUNTIMES = ("cpu", "colocate")
"""``cpu``: in the rollout's process, on the CPU. ``colocate``: there too, on the rollout's device."""

_built: dict[tuple[RewardSpec | type, str | None, str], RewardScorer] = {}


def build_scorer(
    reward: RewardSpec | type[RewardScorer],
    *,
    model_path: str | Path | None,
    runtime: str,
    device: str,
) -> RewardScorer:
    """The scorer of this configuration, constructed on the first call and shared by later ones.

    Args:
        reward: a registered spec (``RewardSpec.from_path`` makes one from an import path), or the class itself.
        model_path: ``--reward-model-path``; None takes the model that the plug-in bundles.
        runtime: ``--reward-runtime``, one of `REWARD_RUNTIMES`.
        device: the rollout's device, ``"cpu"`` or ``"cuda"``; the ``cpu`` runtime does not use it.

    Raises:
        UnknownNameError: another runtime.
        ConfigError: the scorer refuses the path (also a missing one) or the device.
        PluginError: the class cannot be imported, does not fit the protocol, or fails while it is constructed.
    """
    if runtime not in REWARD_RUNTIMES:
        raise UnknownNameError("reward runtime", runtime, REWARD_RUNTIMES, where="--reward-runtime")
    bundled = reward.default_model_path() if isinstance(reward, RewardSpec) and model_path is None else None
    # A scorer may need no model at all: None is passed on, and one that needs a model says so itself.
    path = model_path if model_path is not None else bundled
    name = _name(reward)
    device = "cpu" if runtime == "cpu" else device
    key = (reward, None if path is None else str(path), device)
    if key not in _built:
        logger.info("loading reward %s from %s on %s", name, path, device)
        _built[key] = _construct(reward, name=name, model_path=None if path is None else str(path), device=device)
    return _built[key]


def _name(reward: RewardSpec | type) -> str:
    return reward.name if isinstance(reward, RewardSpec) else reward.__qualname__


def _construct(reward: RewardSpec | type, *, name: str, model_path: str | None, device: str) -> RewardScorer:
    where = reward.where if isinstance(reward, RewardSpec) else f"{reward.__module__}:{reward.__qualname__}"
    scorer_class: Any = reward.load() if isinstance(reward, RewardSpec) else reward
    try:
        scorer = scorer_class(model_path=model_path, device=device)
    except RelaxError:
        raise
    except Exception as error:
        raise PluginError(
            f"reward {name!r} could not be constructed: {type(error).__name__}: {error}",
            where=where,
            expected=f"Scorer(model_path={model_path!r}, device={device!r}) to succeed",
        ) from error
    if not isinstance(scorer, RewardScorer):
        raise PluginError(
            f"{type(scorer).__name__} is not a RewardScorer",
            where=where,
            expected="attributes components and required_tracks, and a method score(batch)",
        )
    return scorer
