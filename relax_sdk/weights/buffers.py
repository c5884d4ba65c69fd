"""The double buffer that a weight sync sends through: memory of one process that others on the machine open.

On CUDA it is device memory opened by IPC handle, on a CPU a mapped file without a name, which nothing can leave behind.
`SendBuffer` owns it and gives out a `BufferHandle`; `OpenBuffer` is the other end. What lies in the slots, and when
they may be written, is the business of the weight sync. Left out: other machines, and peer access between devices (a
receiver opens the buffer of its own).
"""

from __future__ import annotations

import base64
import contextlib
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from relax_sdk.errors import WeightSyncError
from relax_sdk.protocols import BufferHandle

__all__ = ["OpenBuffer", "SendBuffer", "buffer_for"]

_ALIGNMENT = 512
"""Slots start at multiples of this many bytes, as the allocator's own blocks do."""
_MEMORY_NAME = "relax-weights"
_SHARED_FIELDS = (
    "handle",
    "storage_bytes",
    "storage_offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync_required",
)
"""What `UntypedStorage._share_cuda_` returns after the device index, in order; bytes travel as base64."""
_BYTES_FIELDS = frozenset({"handle", "counter_handle", "event_handle"})


class SendBuffer:
    """The owner's end; made by `open`.

    Attributes:
        handle: how another process opens the buffer, once for each process that will.
    """

    def __init__(self, memory: Tensor, handle: BufferHandle) -> None:
        self._memory: Tensor | None = memory
        self.handle = handle

    @classmethod
    @contextlib.contextmanager
    def open(cls, device: torch.device, slot_bytes: int, *, slots: int = 2) -> Iterator[Self]:
        """A buffer of ``slots`` times ``slot_bytes`` (rounded up to 512), given back when the block ends.

        By then no receiver may read it: on CUDA its memory goes back to this process's allocator, which keeps it for
        the next sync until ``torch.cuda.empty_cache()``; on a CPU it goes back to the system.

        Args:
            device: where the memory is.
            slot_bytes: of one slot.
            slots: how many.

        Raises:
            WeightSyncError: the machine has not that much memory free.
            torch.OutOfMemoryError: the device has none.
        """
        slot_bytes = -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT
        make = _cuda_buffer if device.type == "cuda" else _file_buffer
        with make(device, slot_bytes, slots) as (memory, handle):
            buffer = cls(memory, handle)
            # The caller's frame keeps its own reference, which would outlive the block.
            del memory
            try:
                yield buffer
            finally:
                buffer._memory = None

    def slot(self, index: int) -> Tensor:
        """Slot ``index``: uint8, [slot_bytes]."""
        return _slot(self._memory, self.handle, index)

    def flush(self) -> None:
        """Wait until everything written so far can be read by another process."""
        if self._memory is not None and self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)


class OpenBuffer:
    """A receiver's end; made by `open`."""

    def __init__(self, memory: Tensor, handle: BufferHandle) -> None:
        self._memory: Tensor | None = memory
        self._handle = handle

    @classmethod
    def open(cls, handle: BufferHandle, device: torch.device) -> Self:
        """Map a sender's buffer into this process. A handle serves one opening.

        Args:
            handle: the sender's.
            device: this process's own device, whatever its index at the sender.

        Raises:
            WeightSyncError: the handle is of another device, or its memory is not there.
        """
        _check_device(handle, device)
        try:
            memory = _open_cuda(handle, device) if handle.kind == "cuda_ipc" else _open_file(handle)
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise WeightSyncError(
                f"cannot open the sender's buffer: {type(error).__name__}: {error}",
                where=_described(handle),
                expected="memory of a living process on this machine",
            ) from error
        return cls(memory, handle)

    def slot(self, index: int) -> Tensor:
        """Slot ``index``: uint8, [slot_bytes]; the sender's own memory, to be copied from.

        Raises:
            WeightSyncError: there is no such slot, or the buffer is closed.
        """
        return _slot(self._memory, self._handle, index)

    def close(self) -> None:
        """Free the mapping; the caller holds no slot any more. Safe to call twice."""
        if self._memory is None:
            return
        device, self._memory = self._memory.device, None
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.ipc_collect()


def buffer_for(handles: Sequence[BufferHandle], device: torch.device) -> BufferHandle:
    """The handle that a receiver on ``device`` opens: its device's by UUID, or on a CPU the single one.

    Raises:
        WeightSyncError: none fits; the message lists what came.
    """
    if device.type == "cpu":
        fitting = [handle for handle in handles if handle.kind == "file"]
        wanted = "one memory-mapped file, for a receiver on a CPU"
    else:
        own = _normal_uuid(_uuid_of(device))
        fitting = [h for h in handles if h.kind == "cuda_ipc" and _normal_uuid(h.device_uuid) == own]
        wanted = f"memory of this receiver's device {_uuid_of(device)}"
    if len(fitting) != 1:
        raise WeightSyncError(
            f"{len(fitting)} of {len(handles)} buffers fit this receiver: " + ", ".join(map(_described, handles)),
            expected=wanted,
        )
    return fitting[0]


@contextlib.contextmanager
def _file_buffer(device: torch.device, slot_bytes: int, slots: int) -> Iterator[tuple[Tensor, BufferHandle]]:
    size = slot_bytes * slots
    with contextlib.ExitStack() as stack:
        try:
            # Such a file has no limit of its own: the system would end a process rather than refuse.
            if (free := _available_bytes()) < size:
                raise OSError(errno.ENOMEM, f"{free} bytes are free")
            descriptor = os.memfd_create(_MEMORY_NAME)
            stack.callback(os.close, descriptor)
            # Its pages are reserved, so that writing cannot fail later.
            os.posix_fallocate(descriptor, 0, size)
            memory = _mapped(descriptor, size)
        except OSError as error:
            raise WeightSyncError(
                f"no memory for a send buffer of {size} bytes: {error.strerror}",
                expected="that much free, or a smaller --weight-sync-bucket-size-mb",
            ) from error
        # Another process of the same user (and of the same process numbers) reaches the file through the descriptor,
        # while that is open.
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        try:
            yield memory, BufferHandle(kind="file", slots=slots, slot_bytes=slot_bytes, address={"path": path})
        finally:
            del memory


def _available_bytes() -> int:
    """Memory that the machine can give without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (kibibytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(kibibytes)


def _open_file(handle: BufferHandle) -> Tensor:
    size, path = handle.slots * handle.slot_bytes, handle.address["path"]
    descriptor = os.open(path, os.O_RDWR)
    try:
        found = os.fstat(descriptor).st_size
        # The descriptor's number may have been given to another file since.
        name = str(Path(path).readlink())
        if not name.startswith(f"/memfd:{_MEMORY_NAME} ") or found != size:
            raise ValueError(f"it is {name} of {found} bytes, expected {size}")
        return _mapped(descriptor, size)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int) -> Tensor:
    """The tensor holds the only reference to the mapping, which ends with it."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


@contextlib.contextmanager
def _cuda_buffer(device: torch.device, slot_bytes: int, slots: int) -> Iterator[tuple[Tensor, BufferHandle]]:
    memory = torch.empty(slots * slot_bytes, dtype=torch.uint8, device=device)
    # torch keeps a shared storage until its receiver has let go of it, and for good when that never opened it or died.
    # So what is shared is a storage that does not own the memory.
    lent: Any = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), memory.device, memory.nbytes)
    with torch.cuda.device(device):
        _, *values = lent._share_cuda_()
    shared = dict(zip(_SHARED_FIELDS, values, strict=True))
    handle = BufferHandle(
        kind="cuda_ipc",
        device_uuid=_uuid_of(device),
        slots=slots,
        slot_bytes=slot_bytes,
        address={
            name: base64.b64encode(value).decode() if name in _BYTES_FIELDS else value for name, value in shared.items()
        },
    )
    try:
        yield memory, handle
    finally:
        del memory, lent
        with torch.cuda.device(device):
            torch.cuda.ipc_collect()


def _open_cuda(handle: BufferHandle, device: torch.device) -> Tensor:
    values = [
        base64.b64decode(handle.address[name]) if name in _BYTES_FIELDS else handle.address[name]
        for name in _SHARED_FIELDS
    ]
    torch.cuda.init()
    index = _index_of(device)
    with torch.cuda.device(index):
        storage = torch.UntypedStorage._new_shared_cuda(index, *values)
        memory = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
        return memory.set_(storage)


def _check_device(handle: BufferHandle, device: torch.device) -> None:
    if (handle.kind == "cuda_ipc") != (device.type == "cuda"):
        raise WeightSyncError(f"a receiver on {device.type!r} cannot open {_described(handle)}")
    if device.type == "cuda" and _normal_uuid(handle.device_uuid) != _normal_uuid(_uuid_of(device)):
        raise WeightSyncError(
            f"the buffer is memory of device {handle.device_uuid!r}, this receiver's device is {_uuid_of(device)!r}",
            expected="the buffer of the rank on the receiver's own device",
        )


def _slot(memory: Tensor | None, handle: BufferHandle, index: int) -> Tensor:
    if memory is None:
        raise WeightSyncError(f"slot {index} of a buffer that is closed", where=_described(handle))
    if not 0 <= index < handle.slots:
        raise WeightSyncError(f"slot {index} of a buffer with {handle.slots}", where=_described(handle))
    return memory[index * handle.slot_bytes : (index + 1) * handle.slot_bytes]


def _described(handle: BufferHandle) -> str:
    what = handle.device_uuid if handle.kind == "cuda_ipc" else handle.address.get("path")
    return f"{handle.kind} {what} ({handle.slots} x {handle.slot_bytes} bytes)"


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _uuid_of(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(_index_of(device))
    return str(properties.uuid)


def _normal_uuid(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
