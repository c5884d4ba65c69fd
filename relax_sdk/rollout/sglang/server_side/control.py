"""The requests that the plug-in answers itself, inside SGLang's worker.

They come through ``/update_weights_from_tensor`` with a load format of our own, whose only payload is one JSON text
``{"op": ..., ...}``; the answer is one JSON text too, in the response's message. An operation runs on every rank of
the engine and succeeds when it did on all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from relax_sdk.errors import RelaxError, WeightSyncError
from relax_sdk.protocols import SyncOffer, WeightBucket
from relax_sdk.rollout.sglang.server_side.memory import DeviceMemory
from relax_sdk.rollout.sglang.server_side.recipe import Recipe, recipe_of
from relax_sdk.rollout.sglang.server_side.sync import WeightReceiver
from relax_sdk.rollout.sglang.session import CONTROL_FORMAT, SESSION_VARIABLE, STOCK_VARIABLE

__all__ = ["WorkerControl", "answer_control", "guard_forward"]

_TRANSFORMER = "transformer"
_ATTRIBUTE = "_relax_control"
_SAME_ON_ALL_RANKS = ("version", "invalid", "checksum")


class WorkerControl:
    """What a worker holds for our engine. Made at the first operation, when the pipeline is loaded.

    Args:
        worker: SGLang's ``GPUWorker``.
    """

    def __init__(self, worker: Any) -> None:
        from sglang.multimodal_gen.runtime.distributed import get_local_torch_device, get_tp_world_size
        from sglang.multimodal_gen.runtime.post_training.weights_updater import get_updatable_modules

        self._worker = worker
        self._modules = get_updatable_modules(worker.pipeline)
        self._device = torch.device(get_local_torch_device())
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self.receiver = WeightReceiver(
            self._modules[_TRANSFORMER], device=self._device, tensor_parallel=get_tp_world_size()
        )
        self._memory: DeviceMemory | None = None

    @classmethod
    def of(cls, worker: Any) -> WorkerControl:
        """The worker's own, made when it is first asked for."""
        control: WorkerControl | None = getattr(worker, _ATTRIBUTE, None)
        if control is None:
            control = cls(worker)
            setattr(worker, _ATTRIBUTE, control)
        return control

    def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run one operation.

        Raises:
            RelaxError: it failed.
        """
        operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "begin": self._begin,
            "receive": self._receive,
            "commit": self._commit,
            "abort": self._abort,
            "release": self._release,
            "resume": self._resume,
            "state": self._state,
        }
        operation = operations.get(str(request.get("op")))
        if operation is None:
            raise WeightSyncError(f"unknown operation {request.get('op')!r}", expected=", ".join(operations))
        return operation(request)

    def describe(self) -> dict[str, Any]:
        """Device and model of this worker, for its report."""
        uuid = ""
        if self._device.type == "cuda":
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return {"device": str(self._device), "uuid": uuid, "modules": sorted(self._modules)}

    def check_request(self, recipe: Recipe) -> None:
        """Refuse a sampling request that the weights are not there for."""
        if self._memory is not None and self._memory.released:
            raise WeightSyncError(f"released from device memory: {sorted(self._memory.released)}")
        self.receiver.require_valid(recipe.policy_version)

    def _begin(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._memory is not None and _TRANSFORMER in self._memory.released:
            # Writing there would end this process with a segmentation fault.
            raise WeightSyncError(f"the {_TRANSFORMER} is released from device memory", next_step="resume it first")
        self.receiver.begin(SyncOffer(**_tuples(request["offer"])))
        return {}

    def _receive(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.receiver.receive(WeightBucket(**request["bucket"]))
        return {}

    def _commit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        checksum = self.receiver.commit(int(request["policy_version"]))
        # Captured graphs replay the weights of capture time.
        self._worker._drop_breakable_cuda_graphs("weight sync")
        return {"checksum": checksum}

    def _abort(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self.receiver.abort(undo=bool(request["undo"]))
        return {"version": self.receiver.version, "invalid": self.receiver.invalid}

    def _release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        disposable = [_TRANSFORMER] if request["sync_mode"] == "full" else []
        if self._memory is None:
            self._memory = DeviceMemory(self._modules, device=self._device, disposable=disposable)
        if disposable:
            self.receiver.lost(f"the weights of version {self.receiver.version} were released for the next sync")
        self.receiver.drop_spare()
        return {"freed_bytes": self._memory.release()}

    def _resume(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._memory is None:
            return {}
        self._memory.resume([_TRANSFORMER] if request["weights_only"] else None)
        self._worker._drop_breakable_cuda_graphs("weights moved")
        return {}

    def _state(self, request: Mapping[str, Any]) -> dict[str, Any]:
        memory: dict[str, int] = {}
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            memory = {
                "free_bytes": free,
                "total_bytes": total,
                "allocated_bytes": torch.cuda.memory_allocated(self._device),
                "reserved_bytes": torch.cuda.memory_reserved(self._device),
            }
        return {
            "session": os.environ.get(SESSION_VARIABLE, ""),
            "version": self.receiver.version,
            "invalid": self.receiver.invalid,
            "released": sorted(self._memory.released) if self._memory is not None else [],
            "lora_calls": {name: layer.calls for name, layer in self.receiver.wrapped.items()},
            **memory,
        }


def answer_control(original: Callable[..., Any], worker: Any, request: Any) -> tuple[bool, str]:
    """AROUND ``GPUWorkerPostTrainingMixin.update_weights_from_tensor``.

    A request of another format is refused: stock updates skip what they do not know. Only the benchmark that compares
    with them lets them through.
    """
    if request.load_format != CONTROL_FORMAT:
        if os.environ.get(STOCK_VARIABLE):
            passed: tuple[bool, str] = original(worker, request)
            return passed
        return False, f"only load_format {CONTROL_FORMAT!r} is served here: stock updates skip unknown names"
    try:
        outcome: dict[str, Any] = {
            "ok": True,
            **WorkerControl.of(worker).run(json.loads(request.serialized_named_tensors[0])),
        }
    except Exception as error:  # noqa: BLE001 - told to the engine; the other ranks wait for this one's outcome
        outcome = {
            "ok": False,
            "error": f"{error}" if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}",
        }
    outcomes = _from_all_ranks(outcome)
    failed = [
        (f"rank {rank}: " if len(outcomes) > 1 else "") + str(item["error"])
        for rank, item in enumerate(outcomes)
        if not item["ok"]
    ]
    for name in _SAME_ON_ALL_RANKS:
        values = [item.get(name) for item in outcomes]
        if not failed and any(value != values[0] for value in values):
            failed.append(f"the engine's ranks hold different weights: {name} {values}")
    # Told apart in the message: an error in SGLang's own sense counts towards ending its event loop.
    answer = {"ok": False, "error": "; ".join(failed)} if failed else outcome
    return True, json.dumps(answer)


def guard_forward(original: Callable[..., Any], worker: Any, batch: list[Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``GPUWorker.execute_forward``: only whole weights of the right version, and through every adapter.

    A LoRA layer that a forward passes by would leave the adapter without effect and everything else looking well.
    """
    from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import OutputBatch

    control = WorkerControl.of(worker)
    try:
        for request in batch:
            control.check_request(recipe_of(request))
    except (RelaxError, ValueError, KeyError, TypeError) as error:
        return OutputBatch(error=f"relax-sdk: {error}")
    before = {name: layer.calls for name, layer in control.receiver.wrapped.items()}
    result = original(worker, batch, *args, **kwargs)
    idle = [name for name, layer in control.receiver.wrapped.items() if layer.calls == before[name]]
    if idle and not getattr(result, "error", None):
        return OutputBatch(error=f"relax-sdk: {len(idle)} LoRA layers were passed by (first: {idle[0]!r})")
    return result


def _from_all_ranks(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    from sglang.multimodal_gen.runtime.distributed import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [outcome]
    outcomes: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(outcomes, outcome, group=group.cpu_group)
    return outcomes


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, which frozen records hold."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
