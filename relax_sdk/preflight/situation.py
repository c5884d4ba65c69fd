"""What the rules look at: the configuration, the plug-ins it names, and the environment."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_sdk.config import RunConfig, options
from relax_sdk.errors import PluginError
from relax_sdk.protocols import SamplingConfig
from relax_sdk.registry import EngineSpec, ModelSpec, Registry, RewardSpec

__all__ = ["METRIC_WORD", "Rule", "Situation", "call_adapter"]

METRIC_WORD = re.compile(r"[A-Za-z0-9_.-]+")
"""What a user's or a plug-in's part of a metric name may be made of."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """Input of every rule.

    Attributes:
        config: the resolved configuration.
        registry: the plug-ins.
        environ: environment variables.
        model: spec of the chosen model family; None when none was chosen, which is a violation of its own.
        adapter: an instance of its adapter; None together with ``model``.
        reward: spec of the chosen scorer; None when none was chosen.
        engine: spec of the chosen engine.
    """

    config: RunConfig
    registry: Registry
    environ: Mapping[str, str]
    model: ModelSpec | None
    adapter: Any
    reward: RewardSpec | None
    engine: EngineSpec

    @property
    def sampling(self) -> SamplingConfig:
        """The sampling configuration."""
        return self.config.sampling.sampling_config

    def given(self, path: str) -> str:
        """``--lr = 0.0 (flag --lr)``: a value and where it came from, to begin a violation with."""
        section, _, field = path.partition(".")
        value = getattr(getattr(self.config, section), field)
        flag = next(option.flag for option in options() if option.path == path)
        shown = str(value) if isinstance(value, Path) else value
        return f"{flag} is {shown!r} ({self.config.provenance.get(path, 'default')})"

    def given_sampling(self, key: str) -> str:
        """The same for a key of ``--sampling-config``."""
        source = self.config.provenance.get(f"sampling.sampling_config.{key}", "default")
        return f"--sampling-config {key} is {getattr(self.sampling, key)!r} ({source})"


Rule = Callable[[Situation], Iterator[str]]
"""Yields one text per violation, or per warning."""


def call_adapter(situation: Situation, method: str, *arguments: Any) -> list[str]:
    """Ask the adapter for its own violations.

    Raises:
        PluginError: the method raised, or returned something other than a list of texts.
    """
    name = f"{type(situation.adapter).__name__}.{method}"
    where = situation.model.where if situation.model is not None else name
    try:
        texts = getattr(situation.adapter, method)(*arguments)
    except Exception as error:
        raise PluginError(f"{name} raised {type(error).__name__}: {error}", where=where) from error
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise PluginError(f"{name} returned {texts!r}", where=where, expected="a list of str")
    return texts
