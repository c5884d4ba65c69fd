"""A checksum both sides of a weight sync compute over the same tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["TensorDigest", "tensor_checksum"]


class TensorDigest:
    """sha256 over names and raw bytes, fed one tensor at a time."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor of any device and dtype."""
        self._digest.update(name.encode())
        self._digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """The digest of everything added so far."""
        return self._digest.hexdigest()


def tensor_checksum(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """`TensorDigest` over ``(name, tensor)`` pairs, in order."""
    digest = TensorDigest()
    for name, tensor in named_tensors:
        digest.add(name, tensor)
    return digest.hexdigest()
