"""The plug-in that the entry point ``relax_sdk.plugins`` names. Registers import strings only; loads no torch."""

from __future__ import annotations

from collections.abc import Callable

from relax_sdk import RewardSpec, hookimpl

__all__ = ["relax_register_rewards"]


@hookimpl
def relax_register_rewards(register: Callable[[RewardSpec], None]) -> None:
    """Declare the ``pickscore`` reward."""
    register(
        RewardSpec(
            name="pickscore",
            scorer="relax_pickscore.scorer:PickScoreScorer",
            components=("pickscore",),
            description="PickScore v1 (CLIP-H tuned on human choices): how well an image answers its prompt.",
            model_path="relax_pickscore.assets_path:tiny_model",
        )
    )
