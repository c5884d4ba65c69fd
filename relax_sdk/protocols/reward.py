"""What a reward implements: `RewardScorer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from relax_sdk.protocols.records import RewardBatch, RewardScores

__all__ = ["OffloadableScorer", "RewardScorer"]


@runtime_checkable
class RewardScorer(Protocol):
    """Scores decoded media. Constructed as ``Scorer(model_path=..., device=...)``.

    ``model_path`` is ``--reward-model-path`` or the plug-in's bundled model, None when there is neither; ``device`` is
    ``"cpu"`` or ``"cuda"``.

    Attributes:
        components: names of the components that `score` returns.
        required_tracks: media tracks that it reads, e.g. ``("image",)``.
    """

    components: tuple[str, ...]
    required_tracks: tuple[str, ...]

    def score(self, batch: RewardBatch) -> RewardScores:
        """Score every row of the batch.

        Returns:
            For each component one float per row, in row order. Non-finite values and wrong counts are refused by
            the caller, for the whole group.

        Raises:
            RewardError: the media cannot be scored.
        """
        ...


@runtime_checkable
class OffloadableScorer(RewardScorer, Protocol):
    """A scorer that can leave its device while the actor trains there. Optional: another one simply stays.

    Both methods are called with ``--offload-rollout``, each possibly twice in a row, which changes nothing.
    """

    def release(self) -> None:
        """Give the device memory back. Scores are asked for only after `resume`."""
        ...

    def resume(self) -> None:
        """Take the device memory again; scores are what they were."""
        ...
