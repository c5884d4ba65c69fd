"""Run every rule and raise one error with all violations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.errors import PluginError, PreflightError
from relax_sdk.preflight import batch, control, model, placement, reward, sampling, training
from relax_sdk.preflight.situation import Rule, Situation
from relax_sdk.registry import ModelSpec, Registry

__all__ = ["RULES", "WARNINGS", "check"]

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *placement.RULES,
    *batch.RULES,
    *sampling.RULES,
    *training.RULES,
    *reward.RULES,
    *control.RULES,
)
WARNINGS: tuple[Rule, ...] = (*model.WARNINGS, *batch.WARNINGS, *sampling.WARNINGS, *training.WARNINGS)


def check(config: RunConfig, registry: Registry, *, environ: Mapping[str, str] | None = None) -> list[str]:
    """Check a resolved configuration.

    Args:
        config: made by `relax_sdk.config.resolve`.
        registry: the plug-ins; the named ones are loaded, and the adapter constructed.
        environ: environment variables; ``os.environ`` when None.

    Returns:
        Warnings, which block nothing.

    Raises:
        PreflightError: every violation, in the order of the rules.
        UnknownNameError: an adapter, scorer or engine that nothing registers.
        PluginError: the plug-in that registers one of them is broken, or its adapter misbehaved.
    """
    spec = None if config.model.model_adapter_path is None else registry.model(config.model.model_adapter_path)
    scorer = None if config.reward.scorer_path is None else registry.reward(config.reward.scorer_path)
    engine = registry.engine(config.rollout.rollout_engine)
    situation = Situation(
        config=config,
        registry=registry,
        environ=os.environ if environ is None else environ,
        model=spec,
        adapter=None if spec is None else _construct(spec),
        reward=scorer,
        engine=engine,
    )
    violations = [text for rule in RULES for text in rule(situation)]
    if violations:
        raise PreflightError(violations)
    return [text for rule in WARNINGS for text in rule(situation)]


def _construct(spec: ModelSpec) -> Any:
    adapter = spec.load()
    try:
        return adapter()
    except Exception as error:
        raise PluginError(
            f"{spec.import_string!r} cannot be constructed: {type(error).__name__}: {error}",
            where=spec.where,
            expected="a class that is constructed without arguments",
        ) from error
