"""Where the bundled tiny PickScore lies. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tiny_model"]


def tiny_model() -> Path:
    """The folder of the bundled tiny model, in the published layout; the default of ``--reward-model-path``."""
    return Path(__file__).parent / "assets" / "tiny"
