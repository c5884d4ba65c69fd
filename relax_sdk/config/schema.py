"""`RunConfig`: the sections together, where each value came from, and typed access to what resolving fills in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from relax_sdk.config.recipe import environment_of_run
from relax_sdk.config.sections import (
    ArtifactSection,
    BackendSection,
    ControlSection,
    FlowGrpoSection,
    FsdpSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    RewardSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    Section,
    WeightSyncSection,
)
from relax_sdk.errors import ConfigError

__all__ = ["RunConfig", "section_types"]

_T = TypeVar("_T")


class RunConfig(BaseModel):
    """The configuration of one run: frozen, picklable, one attribute per section.

    Build it with `relax_sdk.config.resolve`, which merges the layers, makes paths absolute, fills in every derived
    value and records ``provenance`` (``"optimizer.lr"`` -> ``"flag --lr"``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    run: RunSection = Field(default_factory=RunSection)
    backend: BackendSection = Field(default_factory=BackendSection)
    model: ModelSection = Field(default_factory=ModelSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    artifact: ArtifactSection = Field(default_factory=ArtifactSection)
    sampling: SamplingSection = Field(default_factory=SamplingSection)
    fsdp: FsdpSection = Field(default_factory=FsdpSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    flow_grpo: FlowGrpoSection = Field(default_factory=FlowGrpoSection)
    lora: LoraSection = Field(default_factory=LoraSection)
    reward: RewardSection = Field(default_factory=RewardSection)
    weight_sync: WeightSyncSection = Field(default_factory=WeightSyncSection)
    control: ControlSection = Field(default_factory=ControlSection)
    provenance: dict[str, str] = Field(default_factory=dict, exclude=True, repr=False)

    @property
    def run_dir(self) -> Path:
        """``run.run_dir``, resolved. Raises ConfigError on a configuration that was not resolved."""
        return _resolved(self.run.run_dir, "run.run_dir")

    @property
    def artifact_root(self) -> Path:
        """``artifact.root``, resolved."""
        return _resolved(self.artifact.root, "artifact.root")

    @property
    def group_size(self) -> int:
        """Candidates of one prompt."""
        return _resolved(self.rollout.n_samples_per_prompt, "rollout.n_samples_per_prompt")

    @property
    def global_batch_size(self) -> int:
        """Candidates of one rollout, resolved."""
        return _resolved(self.rollout.global_batch_size, "rollout.global_batch_size")

    @property
    def std_mode(self) -> Literal["group", "batch", "none"]:
        """``flow_grpo.generative_advantage_std_mode``, resolved."""
        return _resolved(self.flow_grpo.generative_advantage_std_mode, "flow_grpo.generative_advantage_std_mode")

    @property
    def sync_mode(self) -> Literal["full", "adapter"]:
        """``weight_sync.mode``, resolved."""
        return _resolved(self.weight_sync.mode, "weight_sync.mode")

    @property
    def actor_world(self) -> int:
        """Training ranks: nodes x devices of the actor."""
        nodes, devices = self.backend.resource["actor"]
        return nodes * devices

    @property
    def rollout_devices(self) -> int:
        """Devices of all engines together."""
        nodes, devices = self.backend.resource["rollout"]
        return nodes * devices

    def to_recipe(self) -> dict[str, Any]:
        """The recipe that is written beside a run, ready for ``json.dumps``.

        Returns:
            ``config`` (values by section), ``provenance`` (where each came from), ``packages`` (installed versions)
            and ``git_revision`` (of the source tree, with ``+changes`` when it has any; None outside one).
        """
        return {"config": self.to_values(), "provenance": dict(self.provenance), **environment_of_run()}

    def to_values(self) -> dict[str, dict[str, Any]]:
        """Every value by section, as plain JSON; a YAML file of it gives the same configuration."""
        return {name: getattr(self, name).model_dump(mode="json") for name in section_types()}


def section_types() -> dict[str, type[Section]]:
    """Section name -> its class, in the order of the schema."""
    found = {}
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            found[name] = field.annotation
    return found


def _resolved(value: _T | None, path: str) -> _T:
    if value is None:
        raise ConfigError(
            f"{path} is not set", expected="a configuration made by relax_sdk.config.resolve, with this value given"
        )
    return value
