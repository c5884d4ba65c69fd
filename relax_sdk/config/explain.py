"""Every value with its unit and its source, as rows for ``relax-sdk config explain``."""

from __future__ import annotations

import dataclasses
from typing import Any

from relax_sdk.config.options import SAMPLING_PATH, options
from relax_sdk.config.schema import RunConfig
from relax_sdk.protocols import SamplingConfig

__all__ = ["ExplainRow", "explain"]


@dataclasses.dataclass(frozen=True)
class ExplainRow:
    """One value: its section, the key in a file, the flag, the value as plain JSON, unit, source and meaning."""

    section: str
    path: str
    flag: str
    value: Any
    unit: str
    source: str
    description: str


def explain(config: RunConfig) -> list[ExplainRow]:
    """Rows in the order of the schema; the sampling configuration has one row per key."""
    values = config.to_values()
    rows = []
    for option in options():
        value = values[option.section][option.field]
        if option.path != SAMPLING_PATH:
            source = config.provenance.get(option.path, "default")
            rows.append(
                ExplainRow(
                    option.section_title, option.path, option.flag, value, option.unit, source, option.description
                )
            )
            continue
        for key, field in SamplingConfig.model_fields.items():
            path = f"{SAMPLING_PATH}.{key}"
            source = config.provenance.get(path, "default")
            rows.append(
                ExplainRow(
                    option.section_title,
                    path,
                    f"{option.flag} {key}",
                    value[key],
                    _SAMPLING_UNITS.get(key, ""),
                    source,
                    field.description or "",
                )
            )
    return rows


_SAMPLING_UNITS = {
    "height": "pixels",
    "width": "pixels",
    "num_inference_steps": "steps",
    "guidance_scale": "scale",
    "eta": "noise level",
    "sigma_max": "sigma",
    "sde_type": "transition",
    "driver_sigmas": "switch",
    "driver_xt": "switch",
    "init_noise_latent_shape": "shape",
    "sample_id_mode": "mode",
    "sde_resample_per_rollout": "switch",
    "sde_pool": "steps",
    "sde_indices": "steps",
    "num_sde_steps": "steps",
    "sde_timestep_fraction": "fraction of T",
}
