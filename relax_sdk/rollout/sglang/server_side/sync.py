"""Weight sync inside SGLang's worker: announced, checked, copied from the sender's buffer, verified, committed.

A full sync writes straight into the parameters; once its first bucket is written, the earlier weights are gone, and
an abort leaves the worker without valid weights until a whole sync succeeds. An adapter sync fills one of two
buffers, so that an abort brings the earlier adapter back. Checksums are computed from what the worker holds after
the copy, never from what it was sent.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import SyncOffer, WeightBucket
from relax_sdk.rollout.sglang.server_side.destinations import Destination, destinations, name_mapper
from relax_sdk.rollout.sglang.server_side.lora import LoraLayer, LoraPart, wrap_layers
from relax_sdk.weights import OpenBuffer, buffer_for, bytes_checksum, combine_checksums

__all__ = ["WeightReceiver"]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SHOWN = 5


@dataclasses.dataclass
class _Open:
    """A sync between `begin` and `commit`."""

    offer: SyncOffer
    buffer: OpenBuffer
    views: Mapping[str, Tensor]
    received: int = 0
    buckets: int = 0
    checksums: list[str] = dataclasses.field(default_factory=list)


class WeightReceiver:
    """The transformer's weights and their version, in one worker.

    Args:
        transformer: SGLang's module.
        device: where it computes.
        tensor_parallel: how many ways its layers are split.
    """

    def __init__(self, transformer: nn.Module, *, device: torch.device, tensor_parallel: int = 1) -> None:
        if tensor_parallel != 1:
            raise WeightSyncError(f"tensor parallelism of {tensor_parallel}", expected="layers that are whole")
        self.version = 0
        self.invalid: str | None = None
        self._transformer, self._device = transformer, device
        self._mapper = name_mapper(transformer)
        # Before any layer is wrapped: full syncs are checked against these.
        self._parameters = dict(transformer.named_parameters())
        self._mode: str | None = None
        self._layers: dict[str, LoraLayer] = {}
        self._slots: list[Tensor] = []
        self._placed: dict[str, Destination] = {}
        self._layout: SyncOffer | None = None
        self._active = -1
        self._open: _Open | None = None
        self._undo: tuple[int, int, str | None, str | None] | None = None

    def begin(self, offer: SyncOffer) -> None:
        """Check the whole announcement against the model and open the sender's buffer; nothing is written.

        Raises:
            WeightSyncError: everything that does not fit.
        """
        self._close()
        self._undo = None
        mode = offer.manifest.mode
        if self._mode is not None and mode != self._mode:
            raise WeightSyncError(
                f"a sync in mode {mode!r} came after one in mode {self._mode!r}: "
                + (
                    "the layers are LoRA-wrapped, and a full sync would miss them"
                    if mode == "full"
                    else "the base is no longer the one that the adapter was trained on"
                )
            )
        counts = collections.Counter(name for name, _ in offer.tensors)
        _refuse([f"{name!r} comes {count} times" for name, count in counts.items() if count > 1], offer)
        views = self._full_views(offer) if mode == "full" else {}
        placed = self._adapter_places(offer) if mode == "adapter" else {}
        with contextlib.ExitStack() as refused:
            buffer = OpenBuffer.open(buffer_for(offer.buffers, self._device), self._device)
            refused.callback(buffer.close)
            # Only now is the model touched: wrapped layers do not unwrap.
            views = self._adapter_views(offer, placed) if mode == "adapter" else views
            refused.pop_all()
        self._open = _Open(offer, buffer, views)

    @torch.inference_mode()
    def receive(self, bucket: WeightBucket) -> None:
        """Copy a bucket to its places and compare the checksum of the places.

        Raises:
            WeightSyncError: out of order, beyond the announcement, or not the bytes that were sent.
        """
        sync = self._require_open()
        if (bucket.index, bucket.first) != (sync.buckets, sync.received):
            raise WeightSyncError(
                f"bucket {bucket.index} begins at tensor {bucket.first}",
                expected=f"bucket {sync.buckets} at tensor {sync.received}",
            )
        try:
            entries = sync.offer.entries(bucket)
        except ValueError as error:
            raise WeightSyncError(str(error)) from error
        dtype = _DTYPES[sync.offer.dtype]
        data = sync.buffer.slot(bucket.slot)[: bucket.bytes].view(dtype)
        parts = data.split([_size(shape) for _, shape, _ in entries])
        places = [sync.views[name] for name, _, _ in entries]
        if sync.offer.manifest.mode == "full" and self.invalid is None:
            self.invalid = f"weights are partly those of an unfinished sync after version {self.version}"
        torch._foreach_copy_(places, [part.view(place.shape) for part, place in zip(parts, places, strict=True)])
        held = torch.cat([place.reshape(-1).to(dtype) for place in places]).view(torch.uint8)
        checksum = bytes_checksum(held)
        if checksum != bucket.checksum:
            raise WeightSyncError(
                f"bucket {bucket.index} ({bucket.count} tensors, first {entries[0][0]!r}) arrived with checksum "
                f"{checksum}",
                expected=bucket.checksum,
            )
        sync.checksums.append(checksum)
        sync.buckets += 1
        sync.received += bucket.count

    def commit(self, version: int) -> str:
        """Adopt what came; returns `combine_checksums` of the buckets as they are held.

        Raises:
            WeightSyncError: not everything announced has come.
        """
        sync = self._require_open()
        if sync.received != sync.offer.manifest.tensors:
            raise WeightSyncError(
                f"{sync.received} tensors came", expected=f"{sync.offer.manifest.tensors}, as announced"
            )
        self._undo = (self.version, self._active, self.invalid, self._mode)
        mode = sync.offer.manifest.mode
        if mode == "adapter":
            self._active = self._spare
            self._use_slot()
        self._mode, self.version, self.invalid = mode, version, None
        self._forget_derived()
        self._close()
        return combine_checksums(sync.checksums)

    def abort(self, *, undo: bool) -> None:
        """Drop an open sync; with ``undo`` take back the last commit. After a full sync the weights may be invalid."""
        before = self._undo if undo else None
        self._close()
        self._undo = None
        if before is not None:
            version, active, invalid, mode = before
            full = self._mode == "full"
            self.version, self._active = version, active
            self.invalid = f"the weights of version {version} are overwritten" if full else invalid
            self._mode = "full" if full else mode
            if not full and self._layers:
                self._use_slot()
            self._forget_derived()

    def require_valid(self, version: int) -> None:
        """Refuse to sample.

        Raises:
            WeightSyncError: the weights are not whole, of another version, or a sync is open.
        """
        if self._open is not None:
            raise WeightSyncError("a weight sync is open")
        if self.invalid is not None:
            raise WeightSyncError(self.invalid, next_step="sync the weights again")
        if version != self.version:
            raise WeightSyncError(f"the request is for policy version {version}", expected=str(self.version))

    def lost(self, why: str) -> None:
        """The parameters' memory was given up without a copy."""
        self.invalid = why

    def drop_spare(self) -> None:
        """Free the adapter buffer that is not in use; the next sync allocates it again."""
        self._undo = None
        if self._slots:
            self._slots[self._spare] = self._slots[self._spare].new_empty(0)

    @property
    def wrapped(self) -> Mapping[str, LoraLayer]:
        """The LoRA layers by name; empty before the first adapter sync."""
        return self._layers

    def _full_views(self, offer: SyncOffer) -> dict[str, Tensor]:
        placed, problems = destinations([name for name, _ in offer.tensors], self._parameters, self._mapper)
        views = {name: place.view(self._parameters[place.parameter].detach()) for name, place in placed.items()}
        problems += _shape_problems(offer, views)
        claims: dict[str, list[tuple[int, int]]] = {name: [] for name in self._parameters}
        for place in placed.values():
            claims[place.parameter].append((place.part or 0, place.parts or 1))
        missing = sorted(
            name
            for name, claimed in claims.items()
            if not claimed or sorted(claimed) != [(part, len(claimed)) for part in range(len(claimed))]
        )
        if missing:
            problems.append(
                f"{len(missing)} parameters of the engine are not, or not exactly once, in the sync: {missing[:_SHOWN]}"
            )
        _refuse(problems, offer)
        return views

    def _adapter_places(self, offer: SyncOffer) -> dict[str, Destination]:
        """Check names and shapes; returns where each adapted layer's weight lies."""
        assert offer.adapter is not None
        problems = []
        halves: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, shape in offer.tensors:
            layer, _, leaf = name.rpartition(".lora_")
            if leaf not in ("A.weight", "B.weight"):
                problems.append(f"{name!r} is no adapter tensor")
                continue
            halves.setdefault(layer, {})[leaf[0]] = shape
        problems += [f"{layer!r} has only lora_{next(iter(pair))}" for layer, pair in halves.items() if len(pair) != 2]
        placed, unknown = destinations([f"{layer}.weight" for layer in halves], self._parameters, self._mapper)
        problems += unknown
        for layer, pair in halves.items():
            destination = placed.get(f"{layer}.weight")
            if destination is None or len(pair) != 2:
                continue
            weight = destination.view(self._parameters[destination.parameter])
            if weight.dim() != 2:
                problems.append(f"{layer!r} is no linear layer: its weight has shape {list(weight.shape)}")
                continue
            rows, columns = weight.shape
            rank = offer.adapter.rank
            for half, expected in (("A", (rank, columns)), ("B", (rows, rank))):
                if pair[half] != expected:
                    problems.append(
                        f"{layer}.lora_{half}.weight has shape {list(pair[half])}, expected {list(expected)}"
                    )
        _refuse(problems, offer)
        first = self._layout
        if first is not None and (first.adapter, first.dtype, first.tensors) != (
            offer.adapter,
            offer.dtype,
            offer.tensors,
        ):
            raise WeightSyncError(
                f"the adapter changed: {offer.adapter!r}, {len(offer.tensors)} tensors of {offer.dtype}",
                expected=f"as in the first sync: {first.adapter!r}, {len(first.tensors)} tensors of {first.dtype}",
            )
        return placed

    def _adapter_views(self, offer: SyncOffer, placed: dict[str, Destination]) -> dict[str, Tensor]:
        """Wrap the layers the first time, and lay the tensors out in the spare buffer."""
        assert offer.adapter is not None
        if self._layout is None:
            parts = {place.parameter.removesuffix(".weight"): place.parts or 1 for place in placed.values()}
            scale = offer.adapter.alpha / offer.adapter.rank
            self._layers = wrap_layers(self._transformer, parts, scale=scale)
            # Two, so that the adapter in use stays whole until the next one is.
            self._slots = [torch.empty(0, dtype=_DTYPES[offer.dtype], device=self._device) for _ in range(2)]
            # The layers keep this scale, and an abort this layout.
            self._placed, self._layout = placed, offer
        size = sum(_size(shape) for _, shape in offer.tensors)
        if self._slots[self._spare].numel() != size:
            self._slots[self._spare] = torch.empty(size, dtype=_DTYPES[offer.dtype], device=self._device)
        return self._slot_views(offer, self._spare)

    @property
    def _spare(self) -> int:
        return 0 if self._active != 0 else 1

    def _slot_views(self, offer: SyncOffer, slot: int) -> dict[str, Tensor]:
        sizes = [_size(shape) for _, shape in offer.tensors]
        parts = self._slots[slot].split(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(offer.tensors, parts, strict=True)}

    def _use_slot(self) -> None:
        """Point every LoRA layer at the active buffer, or at nothing when there was no adapter before."""
        for layer in self._layers.values():
            layer.adapters = {}
        if self._active < 0 or self._layout is None:
            return
        views = self._slot_views(self._layout, self._active)
        for name, destination in self._placed.items():
            stem = name.removesuffix(".weight")
            part = destination.part or 0
            self._layers[destination.parameter.removesuffix(".weight")].adapters[part] = LoraPart(
                views[f"{stem}.lora_A.weight"], views[f"{stem}.lora_B.weight"]
            )

    def _forget_derived(self) -> None:
        """Drop what SGLang computed from the earlier weights."""
        from sglang.multimodal_gen.runtime.cache.conditioning import invalidate_conditioning_caches

        invalidate_conditioning_caches()
        refresh: Any = getattr(self._transformer, "refresh_weight_derived_caches", None)
        if refresh is not None:
            refresh(weights_path=None)

    def _require_open(self) -> _Open:
        if self._open is None:
            raise WeightSyncError("no weight sync is open")
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self._open.buffer.close()
            self._open = None


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _shape_problems(offer: SyncOffer, views: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{name!r} has shape {list(shape)}, the engine's {list(views[name].shape)}"
        for name, shape in offer.tensors
        if name in views and tuple(views[name].shape) != shape
    ]


def _refuse(problems: list[str], offer: SyncOffer) -> None:
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightSyncError(
            f"a {offer.manifest.mode} sync of {len(offer.tensors)} tensors does not fit the engine's model: "
            + "; ".join(problems[:_SHOWN])
            + more
        )
