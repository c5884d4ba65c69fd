"""Which tensors go into which bucket: the same answer on every rank, before anything is drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from relax_sdk.errors import WeightSyncError

__all__ = ["BucketPlan", "BucketSpan", "plan_buckets"]

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class BucketSpan:
    """Tensors ``first .. first + count - 1`` of the list, ``bytes`` together."""

    first: int
    count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The buckets of a sync in sending order.

    Attributes:
        dtype: of every tensor.
        spans: the buckets.
        slot_bytes: what the largest of them needs.
        slots: 2, so that one is filled while the other is read; 1 when there is but one bucket.
    """

    dtype: torch.dtype
    spans: tuple[BucketSpan, ...]
    slot_bytes: int
    slots: int


def plan_buckets(tensors: Sequence[tuple[str, tuple[int, ...]]], *, dtype: str, bucket_bytes: int) -> BucketPlan:
    """Put tensors back to back into buckets, in order.

    Args:
        tensors: names and shapes.
        dtype: ``"bfloat16"`` or ``"float32"``.
        bucket_bytes: a bucket holds at most this many, except that one tensor is never split.

    Raises:
        WeightSyncError: there is nothing to send, or no such dtype.
    """
    if dtype not in _ITEM_BYTES:
        raise WeightSyncError(f"wire dtype {dtype!r}", expected=" or ".join(map(repr, _ITEM_BYTES)))
    sizes = [_ITEM_BYTES[dtype] * math.prod(shape) for _, shape in tensors]
    if not sum(sizes):
        raise WeightSyncError(f"nothing to send: {len(sizes)} tensors of 0 bytes")
    spans: list[BucketSpan] = []
    first = size = 0
    for index, tensor_bytes in enumerate(sizes):
        # A bucket of 0 bytes cannot be sent: a tensor without elements stays with its neighbour.
        if size and size + tensor_bytes > bucket_bytes and tensor_bytes:
            spans.append(BucketSpan(first=first, count=index - first, bytes=size))
            first, size = index, 0
        size += tensor_bytes
    spans.append(BucketSpan(first=first, count=len(sizes) - first, bytes=size))
    return BucketPlan(
        dtype=torch.float32 if dtype == "float32" else torch.bfloat16,
        spans=tuple(spans),
        slot_bytes=max(span.bytes for span in spans),
        slots=min(2, len(spans)),
    )
