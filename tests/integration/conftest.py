"""Whole runs of the installed command on a CPU: real Ray, real TransferQueue, real FSDP2, the bundled tiny models."""

from run_fixtures import mark, plain, train, two_ranks

__all__ = ["mark", "plain", "train", "two_ranks"]
