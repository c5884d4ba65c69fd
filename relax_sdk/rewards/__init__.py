"""Rewards: build a scorer once, call it for every rollout, refuse what is not a complete set of finite scores.

Left out on purpose: turning scores into advantages (`relax_sdk.objectives`) and scoring on another machine.
"""

from relax_sdk.rewards.building import REWARD_RUNTIMES, build_scorer
from relax_sdk.rewards.manager import RewardManager, RewardResult

__all__ = ["REWARD_RUNTIMES", "RewardManager", "RewardResult", "build_scorer"]
