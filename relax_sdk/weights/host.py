"""Host memory that device storages are copied to and back from: pinned, in equal blocks, allocated once.

One stream of bytes; a place in it is given to each storage and stays its own. Equal blocks of a power of two, because
torch's pinned allocator rounds every request up to one. What is freed on the device, and when, is the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostBlocks"]

_ALIGNMENT = 512


class HostBlocks:
    """Grows as places are asked for and never shrinks.

    Args:
        device: where the storages are; host memory is pinned for CUDA.
        block_bytes: size of a block; a power of two wastes nothing.
    """

    def __init__(self, device: torch.device, *, block_bytes: int = 1 << 26) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self.blocks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Host memory held."""
        return len(self.blocks) * self._block_bytes

    @staticmethod
    def after(place: int, size: int) -> int:
        """The next free place behind ``size`` bytes at ``place``."""
        return place + -(-size // _ALIGNMENT) * _ALIGNMENT

    def reserve(self, end: int) -> None:
        """Allocate blocks until the stream has ``end`` bytes.

        Raises:
            RuntimeError, MemoryError: the host has not that much.
        """
        while self.nbytes < end:
            self.blocks.append(self._new_block())

    def copy(self, storage: torch.UntypedStorage, size: int, place: int, *, to_host: bool) -> None:
        """Start copying a storage to or from bytes ``place .. place + size - 1``, block by block.

        Done once the device is synchronised.
        """
        content = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        done = 0
        while done < size:
            block, offset = divmod(place + done, self._block_bytes)
            count = min(size - done, self._block_bytes - offset)
            host, here = self.blocks[block][offset : offset + count], content[done : done + count]
            target, source = (host, here) if to_host else (here, host)
            target.copy_(source, non_blocking=True)
            done += count

    def synchronize(self) -> None:
        """Wait for every copy."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _new_block(self) -> Tensor:
        return torch.empty(self._block_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
