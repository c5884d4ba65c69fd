"""Which prompts a rollout gets: a pure function of the seed and the rollout's number, so resuming needs no state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from relax_sdk.errors import ConfigError, DataError
from relax_sdk.protocols import PromptRecord

__all__ = ["PromptSampler"]


class PromptSampler:
    """Batches of prompts, shuffled anew every epoch.

    Batches run on over the end of an epoch: every prompt is drawn exactly once per epoch, whatever the batch size. A
    batch holds no prompt twice as long as there are at least two batches of prompts; a batch larger than the data
    wraps around. The order depends on nothing but the seed, the epoch and the number of prompts, on every platform
    and Python release (it sorts sha256 digests).

    Args:
        prompts: all prompts, in file order.
        batch_size: prompts per rollout, ``--rollout-batch-size``.
        seed: ``--rollout-seed``.

    Raises:
        DataError: there are no prompts.
        ConfigError: the batch size is below 1.
    """

    def __init__(self, prompts: Sequence[PromptRecord], *, batch_size: int, seed: int) -> None:
        if not prompts:
            raise DataError("no prompts to sample from", expected="at least one prompt")
        if batch_size < 1:
            raise ConfigError(
                f"rollout_batch_size is {batch_size}", where="--rollout-batch-size", expected="at least 1"
            )
        self._prompts = tuple(prompts)
        self._batch_size = batch_size
        self._seed = seed
        self._cached: tuple[int, list[int]] | None = None

    def batch(self, rollout_id: int) -> tuple[PromptRecord, ...]:
        """The prompts of a rollout, ``batch_size`` of them.

        Args:
            rollout_id: counted from 0; any order, any number of times.
        """
        if rollout_id < 0:
            raise ValueError(f"rollout_id must not be negative, came {rollout_id}")
        first = rollout_id * self._batch_size
        drawn = []
        for position in range(first, first + self._batch_size):
            epoch, offset = divmod(position, len(self._prompts))
            drawn.append(self._prompts[self._order(epoch)[offset]])
        return tuple(drawn)

    def _order(self, epoch: int) -> list[int]:
        """Prompt indices of an epoch in the order in which they are drawn."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._without_repeats(epoch))
        return self._cached[1]

    def _shuffled(self, epoch: int) -> list[int]:
        def key(index: int) -> bytes:
            return hashlib.sha256(f"{self._seed}/{epoch}/{index}".encode()).digest()

        return sorted(range(len(self._prompts)), key=key)

    def _without_repeats(self, epoch: int) -> list[int]:
        """The shuffled epoch, its head changed so that the batch across the epoch's start repeats no prompt.

        Repeats matter because a candidate's noise comes from its prompt's id: the second group would be a copy of
        the first. Only positions before the last batch are exchanged, so the previous epoch's end is known without
        looking further back.
        """
        order = self._shuffled(epoch)
        carried = epoch * len(order) % self._batch_size  # how many prompts the shared batch has already
        if carried == 0 or len(order) < 2 * self._batch_size:
            return order
        seen = set(self._shuffled(epoch - 1)[-carried:])
        head = self._batch_size - carried
        spare = iter([place for place in range(head, len(order) - self._batch_size) if order[place] not in seen])
        for place in range(head):
            if order[place] in seen:
                other = next(spare)
                order[place], order[other] = order[other], order[place]
        return order
