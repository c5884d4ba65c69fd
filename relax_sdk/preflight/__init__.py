"""Rules that relate values, files and plug-ins, all checked before any process starts; and the environment doctor.

Left out: whether a single value fits its field (`relax_sdk.config`), and whether the prompt files parse
(`relax_sdk.data`, which the command line calls). Loads no torch.
"""

from relax_sdk.preflight.check import check
from relax_sdk.preflight.doctor import Finding, available_cores, doctor

__all__ = ["Finding", "available_cores", "check", "doctor"]
