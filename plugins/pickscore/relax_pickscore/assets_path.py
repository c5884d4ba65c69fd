"""Where the bundled tiny PickScore lies. Importing this loads no torch."""

from __future__ import annotations

from pathlib import Path

__all__ = ["tiny_model"]


def tiny_model() -> Path:
    """The folder of the bundled tiny model, in the published layout.

    It is the default of ``--reward-model-path`` only when the trained model is a preset's bundled one too.
    """
    return Path(__file__).parent / "assets" / "tiny"
