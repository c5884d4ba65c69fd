"""What the runtime tells whoever watches it. It prints nothing itself."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Observer", "SilentObserver"]


class Observer(Protocol):
    """Receives progress; implemented by the command line."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """A phase began or advanced, e.g. ``"rollout 3"`` with 2 of 8 groups; total 0 means unknown."""
        ...

    def line(self, text: str) -> None:
        """A lasting line: one per rollout and evaluation, and where things are."""
        ...


class SilentObserver:
    """Ignores everything."""

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Ignored."""

    def line(self, text: str) -> None:
        """Ignored."""
