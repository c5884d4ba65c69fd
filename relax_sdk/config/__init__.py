"""One schema of sections; loading, precedence and provenance; the flags generated from it; the recipe beside a run.

Precedence, low to high: schema defaults, the plug-in's preset, the YAML file, ``RELAX_*`` variables, flags. Left out:
rules that relate several values (``relax_sdk.preflight``). Importing this loads neither torch nor numpy.
"""

from relax_sdk.config.explain import ExplainRow, explain
from relax_sdk.config.options import Option, options
from relax_sdk.config.resolve import resolve
from relax_sdk.config.schema import RunConfig
from relax_sdk.config.sections import (
    ArtifactSection,
    BackendSection,
    FlowGrpoSection,
    FsdpSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    RewardSection,
    RolloutSection,
    RunSection,
    SamplingSection,
    WeightSyncSection,
)
from relax_sdk.config.sources import is_chosen

__all__ = [
    "ArtifactSection",
    "BackendSection",
    "ExplainRow",
    "FlowGrpoSection",
    "FsdpSection",
    "LoraSection",
    "ModelSection",
    "OptimizerSection",
    "Option",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "SamplingSection",
    "WeightSyncSection",
    "explain",
    "is_chosen",
    "options",
    "resolve",
]
