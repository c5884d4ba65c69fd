"""What tests of offload, load waves and throughput do with a trainer, alone or as one rank of two."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from tiny_family import TinyAdapter
from tiny_training import make_trainer, repeatable, tiny_groups
from torch import Tensor

from relax_sdk.training import Trainer, trainer


def local_tensors(made: Trainer) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters, buffers and optimizer state by name, each as the plain local tensor."""
    named = [*made._module.named_parameters(), *made._module.named_buffers()]
    for index, state in enumerate(made._optimizer.state.values()):
        named += [(f"optimizer.{index}.{name}", value) for name, value in state.items()]
    with torch.no_grad():
        for name, tensor in named:
            yield name, tensor.to_local() if hasattr(tensor, "to_local") else tensor


def copies(made: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in local_tensors(made)}


def storage_bytes(made: Trainer) -> int:
    return sum(tensor.untyped_storage().nbytes() for _, tensor in local_tensors(made))


def train_with_pause(*, pause: bool, **changes: Any) -> dict[str, Any]:
    """Two rollouts; between them, and before the first, the rank is offloaded and woken when ``pause`` is set."""
    made = make_trainer(updates=2, **changes)
    seen: dict[str, Any] = {"away": [], "same": [], "metrics": []}
    for seed in range(2):
        if pause:
            identities = [id(parameter) for parameter in made._module.parameters()]
            before = copies(made)
            made.offload()
            seen["away"].append(storage_bytes(made))
            made.wake()
            after = copies(made)
            seen["same"].append(
                before.keys() == after.keys()
                and all(torch.equal(before[name], after[name]) for name in before)
                and identities == [id(parameter) for parameter in made._module.parameters()]
            )
        seen["metrics"].append(repeatable(made.update(tiny_groups(seed=seed)).metrics))
    return {**seen, "end": copies(made)}


def load_in_waves(wave: int) -> tuple[float, float]:
    """Start of this rank's load, and the moment when it had sharded the model."""

    class Slow(TinyAdapter):
        def load_train_model(self, *args: Any, **kwargs: Any) -> Any:
            times.append(time.monotonic())
            time.sleep(0.2)
            return super().load_train_model(*args, **kwargs)

    times: list[float] = []
    plain = trainer.prepare_module

    def noted(*args: Any, **kwargs: Any) -> Any:
        module = plain(*args, **kwargs)
        times.append(time.monotonic())
        return module

    trainer.prepare_module = noted
    try:
        make_trainer(Slow(), fsdp={"load_wave_size": wave})
    finally:
        trainer.prepare_module = plain
    return times[0], times[1]


def tflops(candidates: int) -> dict[str, float]:
    """``perf/...`` of an update that takes 2 s by a clock that every rank reads alike."""
    made = make_trainer(mode="full", micro=1)
    ticks = iter((10.0, 12.0))
    plain, trainer.time = trainer.time, type("Clock", (), {"perf_counter": staticmethod(lambda: next(ticks))})
    try:
        metrics = made.update(tiny_groups(2, candidates)).metrics
    finally:
        trainer.time = plain
    return {name: value for name, value in metrics.items() if name.startswith("perf/")}


def offload_scenarios() -> dict[str, Any]:
    """Everything above, on this rank of two."""
    trained = {
        (mode, pause): train_with_pause(pause=pause, mode=mode) for mode in ("full", "lora") for pause in (False, True)
    }
    return {"offload": trained, "waves": [load_in_waves(wave) for wave in (1, 2)], "tflops": [tflops(4), tflops(3)]}
