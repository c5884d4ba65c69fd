"""Offload: give a rank's device memory away while engines sample, and take it back bit for bit.

Parameters, buffers and optimizer state stay the same tensors throughout. Only their storages change: each is copied to
pinned host memory and resized to 0, later resized back and filled. FSDP2 keeps views of its shards' storages, so
giving a parameter other data would free nothing.

The host side is `relax_sdk.weights.HostBlocks`, allocated when first needed and used again ever after. Gradients and
FSDP2's gathered parameters are freed rather than kept: the next update makes them anew. Plain tensor attributes of a
module, which neither `parameters` nor `buffers` lists, stay where they are.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from relax_sdk.errors import TrainingError
from relax_sdk.weights import HostBlocks

__all__ = ["StorageOffload"]


class StorageOffload:
    """Moves what one rank holds on its device to the host and back.

    Args:
        module: the sharded module.
        optimizer: its optimizer; state that it creates later is found at the next offload.
        device: only storages on this device move.
        block_bytes: size of a host block; a power of two wastes nothing.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, device: torch.device, block_bytes: int = 1 << 26
    ) -> None:
        self._module, self._optimizer = module, optimizer
        self._device = torch.empty(0, device=device).device
        self._host = HostBlocks(self._device, block_bytes=block_bytes)
        # (storage, its size, its place in the host's stream), while they are away.
        self._away: list[tuple[torch.UntypedStorage, int, int]] | None = None
        self._failed: str | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether the storages are away."""
        return self._away is not None

    @property
    def host_bytes(self) -> int:
        """Host memory held by the blocks; it never shrinks, and grows only with what is offloaded."""
        return self._host.nbytes

    def require_resident(self, purpose: str) -> None:
        """Refuse what needs the weights.

        Raises:
            TrainingError: they are away, or an earlier move failed halfway.
        """
        if self._failed is not None:
            raise TrainingError(f"{purpose} needs the weights, which were lost: {self._failed}")
        if self.is_offloaded:
            raise TrainingError(
                f"{purpose} needs the weights, which are offloaded to the host", next_step="call wake() first"
            )

    def offload(self) -> int:
        """Copy every storage to the host and free it on the device; nothing when that was done already.

        Returns:
            The bytes that were freed, gradients and gathered parameters aside.

        Raises:
            TrainingError: host memory ran out, a copy failed, or an earlier move did. The rank cannot go on.
        """
        if self.is_offloaded:
            return 0
        self.require_resident("offload()")
        try:
            self._drop_temporaries()
            away = list(self._placed())
            self._host.reserve(away[-1][1] + away[-1][2] if away else 0)
            self._host.synchronize()
            for storage, size, place in away:
                self._host.copy(storage, size, place, to_host=True)
            self._host.synchronize()
            for storage, _, _ in away:
                storage.resize_(0)
            if self._device.type == "cuda":
                # Other processes on the device cannot use what reference cycles hold or the allocator merely keeps.
                gc.collect()
                torch.cuda.empty_cache()
        except (RuntimeError, MemoryError) as error:
            raise self._failure("offloading to the host", error) from error
        self._away = away
        return sum(size for _, size, _ in away)

    def wake(self) -> int:
        """Bring every storage back as it was; nothing when nothing is away.

        Returns:
            The bytes that came back.

        Raises:
            TrainingError: the device has no room, a copy failed, or an earlier move did. The rank cannot go on.
        """
        if self._away is None:
            self.require_resident("wake()")
            return 0
        away, self._away = self._away, None
        try:
            for storage, size, place in away:
                storage.resize_(size)
                self._host.copy(storage, size, place, to_host=False)
            self._host.synchronize()
        except (RuntimeError, MemoryError) as error:
            raise self._failure("waking from the host", error) from error
        return sum(size for _, size, _ in away)

    def _drop_temporaries(self) -> None:
        """Free gathered parameters and gradients."""
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _placed(self) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
        """Each storage on the device once, however many tensors share it, with its size and place in the stream."""
        seen: set[int] = set()
        place = 0
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if tensor.device != self._device or size == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            yield storage, size, place
            place = HostBlocks.after(place, size)

    @torch.no_grad()
    def _tensors(self) -> Iterator[Tensor]:
        yield from map(_local, self._module.parameters())
        yield from map(_local, self._module.buffers())
        for state in self._optimizer.state.values():
            yield from (_local(value) for value in state.values() if isinstance(value, Tensor))

    def _failure(self, what: str, error: BaseException) -> TrainingError:
        self._failed = f"{what} failed: {error}"
        return TrainingError(
            self._failed, where=f"{self._device}, {self.host_bytes / 1e9:.1f} GB of host memory held for it"
        )


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, which shares its storage; a plain tensor as it is."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard
