"""The records of a weight sync: what is announced, how the sender's memory is opened, and what lies in it.

Bytes never travel through these records. A sender owns a double buffer on its device; the engine opens it once per
sync and copies bucket after bucket out of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from relax_sdk.protocols.base import Record

__all__ = ["AdapterConfig", "BufferHandle", "FullWeightManifest", "SyncOffer", "SyncReport", "WeightBucket"]

WireDtype = Literal["bfloat16", "float32"]


class FullWeightManifest(Record):
    """What a sync must deliver: how many tensors, how many bytes, and which names and shapes in which order."""

    mode: Literal["full", "adapter"]
    tensors: int = Field(gt=0)
    bytes: int = Field(gt=0)
    ordered_name_shape_hash: str

    @classmethod
    def describe(cls, mode: Literal["full", "adapter"], entries: Iterable[tuple[str, tuple[int, ...], int]]) -> Self:
        """Build the manifest of ``(name, shape, bytes)`` entries in the order in which they are sent.

        The hash is sha256 over ``name|d0,d1,...`` lines.
        """
        digest = hashlib.sha256()
        count = total = 0
        for name, shape, size in entries:
            digest.update(f"{name}|{','.join(str(dim) for dim in shape)}\n".encode())
            count += 1
            total += size
        return cls(mode=mode, tensors=count, bytes=total, ordered_name_shape_hash=digest.hexdigest())


class AdapterConfig(Record):
    """The LoRA layers that an adapter sync writes: the update is B A x times ``alpha / rank``."""

    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    target_modules: tuple[str, ...] = Field(min_length=1)


class BufferHandle(Record):
    """How another process on the same machine opens a sender's double buffer.

    ``cuda_ipc`` is memory of the device ``device_uuid``, ``file`` a memory-mapped file. ``address`` holds what the
    kind needs, as JSON values. Slot s covers the bytes ``s * slot_bytes`` up to ``(s + 1) * slot_bytes``.
    """

    kind: Literal["cuda_ipc", "file"]
    device_uuid: str = Field("", description="UUID of the device as torch reports it; empty for a CPU.")
    slots: int = Field(2, ge=1)
    slot_bytes: int = Field(gt=0)
    address: dict[str, Any]


class SyncOffer(Record):
    """Everything about a sync that is known before a byte moves, so that an engine can refuse it untouched.

    ``tensors`` are names and shapes in sending order, all of one dtype. ``buffers`` has one handle per device of the
    engine, the ranks of the engine in order; every one of them holds the same bytes.
    """

    manifest: FullWeightManifest
    dtype: WireDtype
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[BufferHandle, ...] = Field(min_length=1)
    adapter: AdapterConfig | None = Field(None, description="Present exactly when the manifest's mode is adapter.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.manifest.mode == "adapter") != (self.adapter is not None):
            raise ValueError(f"mode is {self.manifest.mode!r} but adapter is {self.adapter!r}")
        item = 2 if self.dtype == "bfloat16" else 4
        described = FullWeightManifest.describe(
            self.manifest.mode, ((name, shape, item * _count(shape)) for name, shape in self.tensors)
        )
        if described != self.manifest:
            raise ValueError(f"the listed tensors make {described!r}, but the manifest is {self.manifest!r}")
        return self

    @property
    def item_bytes(self) -> int:
        """Bytes of one element on the wire."""
        return 2 if self.dtype == "bfloat16" else 4

    def entries(self, bucket: WeightBucket) -> tuple[tuple[str, tuple[int, ...], int], ...]:
        """``(name, shape, byte offset in the slot)`` of a bucket's tensors, which lie back to back.

        Raises:
            ValueError: the bucket reaches beyond the list, or its byte count is not theirs.
        """
        listed = self.tensors[bucket.first : bucket.first + bucket.count]
        if len(listed) != bucket.count:
            raise ValueError(f"bucket {bucket.index} ends beyond the {len(self.tensors)} announced tensors")
        placed, offset = [], 0
        for name, shape in listed:
            placed.append((name, shape, offset))
            offset += self.item_bytes * _count(shape)
        if offset != bucket.bytes:
            raise ValueError(f"bucket {bucket.index} says {bucket.bytes} bytes, its tensors have {offset}")
        return tuple(placed)


class WeightBucket(Record):
    """Tensors ``first .. first + count - 1`` of the offer, now in slot ``slot`` of every buffer of the engine.

    ``checksum`` is `relax_sdk.weights.bytes_checksum` of the slot's first ``bytes`` bytes.
    """

    index: int = Field(ge=0)
    slot: int = Field(ge=0)
    first: int = Field(ge=0)
    count: int = Field(gt=0)
    bytes: int = Field(gt=0)
    checksum: str


class SyncReport(Record):
    """The outcome of a committed weight sync. ``timings`` are seconds by phase: open, send, commit."""

    policy_version: int = Field(ge=0)
    manifest: FullWeightManifest
    seconds: float = Field(ge=0)
    timings: Mapping[str, float] = Field(default_factory=dict)


def _count(shape: Iterable[int]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total
