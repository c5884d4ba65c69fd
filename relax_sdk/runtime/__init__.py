"""The runtime: Ray roles, the training step, the loop. Start here: `relax_sdk.runtime.step`."""

from relax_sdk.runtime.loop import TrainResult, train
from relax_sdk.runtime.observer import Observer, SilentObserver

__all__ = ["Observer", "SilentObserver", "TrainResult", "train"]
