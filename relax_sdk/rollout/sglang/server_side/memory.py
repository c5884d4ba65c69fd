"""Memory hand-over inside SGLang's worker: parameters leave the device and come back in the same tensors.

A parameter's storage is resized to zero, which frees it whoever refers to it. Weights that never change (VAE, text
encoder; the transformer under adapter sync) get one host copy, pinned, made at the first release and kept for good:
later releases copy nothing. Under full sync the transformer is freed without a copy, since the next sync overwrites
it. Buffers and caches, a few MB, stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from relax_sdk.errors import RolloutError
from relax_sdk.weights import HostBlocks

__all__ = ["DeviceMemory"]


@dataclasses.dataclass
class _Block:
    """One storage on the device; ``place`` is where its host copy begins, once there is one."""

    storage: torch.UntypedStorage
    nbytes: int
    place: int | None = None


class DeviceMemory:
    """The parameters of a pipeline's modules, in or out of device memory.

    Args:
        modules: by name; only what lies on ``device`` is handled.
        device: the worker's.
        disposable: names of modules whose content need not survive a release.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], *, device: torch.device, disposable: Iterable[str] = ()
    ) -> None:
        self._device = device
        self._disposable = frozenset(disposable)
        self._host, self._end = HostBlocks(device), 0
        self._blocks: dict[str, list[_Block]] = {}
        self._out: set[str] = set()
        seen: set[int] = set()
        _own_storages([parameter for module in modules.values() for parameter in module.parameters()])
        for name, module in modules.items():
            blocks = self._blocks[name] = []
            for parameter in module.parameters():
                storage = parameter.untyped_storage()
                # Tied parameters share one storage; the first module that holds it hands it over.
                if parameter.device.type != device.type or storage._cdata in seen:
                    continue
                seen.add(storage._cdata)
                blocks.append(_Block(storage, storage.nbytes()))

    @property
    def released(self) -> frozenset[str]:
        """Names of the modules that are out of device memory."""
        return frozenset(self._out)

    @torch.inference_mode()
    def release(self) -> int:
        """Free every module that is in; returns the bytes freed.

        Raises:
            RolloutError: the host copy could not be made; nothing was freed then.
        """
        going = [name for name in self._blocks if name not in self._out]
        try:
            for name in going:
                if name not in self._disposable:
                    self._copy_out(self._blocks[name])
            self._host.synchronize()
        except (RuntimeError, MemoryError) as error:
            raise RolloutError(f"the engine's weights could not be copied to host memory: {error}") from error
        freed = 0
        for name in going:
            for block in self._blocks[name]:
                block.storage.resize_(0)
                freed += block.nbytes
            self._out.add(name)
        if self._device.type == "cuda":
            # No garbage collection: storages are freed whoever refers to them, and it takes half a second.
            torch.cuda.empty_cache()
        return freed

    @torch.inference_mode()
    def resume(self, names: Iterable[str] | None = None) -> list[str]:
        """Allocate modules again and fill them from their host copies.

        Args:
            names: which; None for all that are out.

        Returns:
            Modules whose content is undefined until they are written.

        Raises:
            RolloutError: an unknown name, or no device memory.
        """
        wanted = list(self._blocks) if names is None else list(names)
        unknown = sorted(set(wanted) - set(self._blocks))
        if unknown:
            raise RolloutError(f"no modules {unknown}", expected=f"some of {sorted(self._blocks)}")
        coming = [name for name in wanted if name in self._out]
        empty = []
        try:
            for name in coming:
                for block in self._blocks[name]:
                    block.storage.resize_(block.nbytes)
                    if block.place is not None:
                        self._host.copy(block.storage, block.nbytes, block.place, to_host=False)
                if name in self._disposable:
                    empty.append(name)
                self._out.discard(name)
            self._host.synchronize()
        except RuntimeError as error:
            raise RolloutError(f"the engine could not take its device memory again: {error}") from error
        return empty

    def _copy_out(self, blocks: list[_Block]) -> None:
        for block in blocks:
            if block.place is None:
                end = HostBlocks.after(self._end, block.nbytes)
                self._host.reserve(end)
                self._host.copy(block.storage, block.nbytes, self._end, to_host=True)
                block.place, self._end = self._end, end


def _own_storages(parameters: Iterable[Tensor]) -> None:
    """Move parameters out of storages that cannot be resized, such as a checkpoint mapped into memory."""
    moved: dict[int, torch.UntypedStorage] = {}
    for parameter in parameters:
        storage = parameter.untyped_storage()
        if storage.resizable():
            continue
        # Once per storage: a whole checkpoint may be mapped as one.
        if storage._cdata not in moved:
            moved[storage._cdata] = storage.clone()
        whole = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        parameter.data = whole.set_(
            moved[storage._cdata], parameter.storage_offset(), parameter.shape, parameter.stride()
        )
