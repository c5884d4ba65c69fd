"""Replay throughput on one device: transitions per second and MFU of a reference loop and of the trainer.

    python benchmarks/replay.py                 # a CUDA device: 12 layers of full width, 384x384, 3 trained steps
    python benchmarks/replay.py --device cpu    # a tiny module, to show that the script runs; writes no result

Both train a Qwen-Image transformer of random weights, made on the device, with the same functions, optimizer and
figures: anchors, forward, backward, one optimizer step. The reference is a plain loop over an unsharded module, one
candidate and one step a forward. The trainer runs as in a training run, FSDP2 included, at several numbers of
candidates a forward; its row ``1 x 1`` is the reference's shape. The matrix rate is measured before and after; the
MFU refers to the larger of the two. Writes ``benchmarks/results/replay.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from relax_qwen_image.adapter import QwenImageAdapter
from relax_qwen_image.geometry import TOKEN_CHANNELS, token_grid
from relax_qwen_image.loading import TrainBundle
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from relax_sdk.config import FlowGrpoSection, FsdpSection, LoraSection, OptimizerSection
from relax_sdk.files import write_text_atomically
from relax_sdk.flow import flow_match_sigmas
from relax_sdk.objectives import grpo_clip_loss
from relax_sdk.protocols import Trajectory
from relax_sdk.training import (
    FlopsModel,
    Trainer,
    TrainerSettings,
    TrainGroup,
    build_optimizer,
    measure_matrix_rate,
    replay_cells,
    trainable_parameters,
)
from relax_sdk.weights import inject_lora

OUTPUT = Path(__file__).parent / "results" / "replay.json"
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
TINY = {"attention_head_dim": 32, "num_attention_heads": 4, "joint_attention_dim": 64, "axes_dims_rope": (8, 12, 12)}
RANK, ALPHA = 64, 128.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train: what moves, and whether blocks are recomputed."""

    mode: str
    checkpointing: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured line; ``forward`` is candidates x steps. Empty figures mean that the device's memory ran out."""

    mode: str
    checkpointing: bool
    loop: str
    forward: str
    seconds: float | None = None
    transitions_per_s: float | None = None
    speedup: float | None = None
    model_tflops: float | None = None
    mfu: float | None = None
    peak_memory_gb: float | None = None
    first_ratio_max_deviation: float | None = None


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one configuration took."""

    seconds: float
    flops: float
    peak_bytes: int
    deviation: float | None


class RandomAdapter(QwenImageAdapter):
    """Qwen-Image without a checkpoint: the module is built where it is trained."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def load_train_model(self, model_path: str, *, revision: str | None, dtype: torch.dtype) -> TrainBundle:
        """A transformer with torch's own initialisation, on the benchmark's device."""
        from diffusers import QwenImageTransformer2DModel

        sizes = TINY if self._options.tiny else {}
        default = torch.get_default_dtype()
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(self._options.device):
                module = QwenImageTransformer2DModel(num_layers=self._options.layers, **sizes)
        finally:
            torch.set_default_dtype(default)
        return TrainBundle(transformer=module)


def make_groups(options: argparse.Namespace) -> list[TrainGroup]:
    """Groups of random latents on a real schedule: only their shapes matter."""
    rows, columns = token_grid(options.size, options.size)
    sigmas = torch.tensor(flow_match_sigmas(12, rows * columns, SCHEDULER))
    steps = torch.tensor([1, 3, 5])
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        TrainGroup(
            trajectory=Trajectory(
                sigmas=sigmas,
                timesteps=sigmas[:-1] * 1000,
                sde_indices=steps,
                sample_indices=torch.arange(options.candidates),
                rollout_log_probs=torch.zeros(options.candidates, len(steps)),
                latents=normal(options.candidates, len(steps), rows * columns, TOKEN_CHANNELS),
                next_latents=normal(options.candidates, len(steps), rows * columns, TOKEN_CHANNELS),
                conditions={"encoder_hidden_states": normal(options.text_tokens, 64 if options.tiny else 3584)},
                height=options.size,
                width=options.size,
                policy_version=0,
                group_index=index,
                rollout_id=0,
                sde_type="sde",
                eta=0.7,
                sigma_clamp=float(sigmas[1]),
                seed_hash="0" * 64,
            ),
            advantages=normal(options.candidates).double(),
        )
        for index in range(options.groups)
    ]


def settings(case: Case, *, micro: int, steps: int | None) -> TrainerSettings:
    """The values of the eight-GPU recipes."""
    lora = case.mode == "lora"
    return TrainerSettings(
        model_path="",
        model_revision=None,
        fsdp=FsdpSection(
            trainable_mode="lora" if lora else "full",
            master_dtype="fp32" if lora else None,
            activation_checkpointing=case.checkpointing,
        ),
        lora=LoraSection(rank=RANK, alpha=ALPHA) if lora else LoraSection(),
        optimizer=OptimizerSection(lr=1e-5),
        flow_grpo=FlowGrpoSection(eps_clip=1e-4),
        micro_batch_size=micro,
        seed=1,
        replay_steps_per_forward=steps,
    )


def cells(groups: list[TrainGroup]) -> list[tuple[TrainGroup, int, int]]:
    """Every (group, candidate, trained step)."""
    return [
        (group, slot, column)
        for group in groups
        for slot in range(len(group.advantages))
        for column in range(len(group.trajectory.sde_indices))
    ]


class ReferenceLoop:
    """What the trainer is compared with: unsharded, one cell a forward; LoRA in the base's dtype."""

    def __init__(self, adapter: RandomAdapter, case: Case, *, device: torch.device) -> None:
        self._adapter, self._device = adapter, device
        self._settings = settings(case, micro=1, steps=1)
        self._module: nn.Module = adapter.load_train_model("", revision=None, dtype=torch.bfloat16).transformer
        if case.mode == "lora":
            inject_lora(self._module, rank=RANK, alpha=ALPHA, target_modules=adapter.lora_target_modules)
        if case.checkpointing:
            blocks: Any = self._module.get_submodule(adapter.block_module_names[0])
            for index, block in enumerate(blocks):
                blocks[index] = checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        self._module.train()
        self._trained = trainable_parameters(self._module)
        self._optimizer = build_optimizer(self._trained, self._settings.optimizer)
        self._flops = FlopsModel(self._module)

    def update(self, groups: list[TrainGroup]) -> tuple[float, float]:
        """Anchors, then forward and backward of every cell, then one step; model FLOPs and the largest |rho - 1|."""
        grpo, todo = self._settings.flow_grpo, cells(groups)
        with torch.no_grad():
            anchors = [self._replay(*cell) for cell in todo]
        deviations = []
        for (group, slot, column), anchor in zip(todo, anchors, strict=True):
            with self._flops.counting("cell"):
                log_prob = self._replay(group, slot, column)
            advantage = group.advantages[[slot]].to(self._device, torch.float32)
            loss, clip = grpo_clip_loss(log_prob, anchor, advantage, eps_clip=grpo.eps_clip)
            torch.autograd.backward(loss / len(todo))
            deviations.append(clip.ratio_max_deviation)
        nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        count = self._flops["cell"]
        return float(len(todo) * (2 * count.forward + count.backward)), float(torch.stack(deviations).max())

    def _replay(self, group: TrainGroup, slot: int, column: int) -> Tensor:
        return replay_cells(self._adapter, self._module, group.trajectory, (slot,), (column,), device=self._device)


def measure(update: Callable[[], tuple[float | None, float]], options: argparse.Namespace) -> Measured:
    """One update to warm up, then the median of ``--repeats``."""
    device = torch.device(options.device)
    flops, deviation = update()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(options.repeats):
        wait_for(device)
        start = time.perf_counter()
        update()
        wait_for(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Measured(statistics.median(times), flops or 0.0, peak, deviation)


def run_reference(
    adapter: RandomAdapter, case: Case, groups: list[TrainGroup], options: argparse.Namespace
) -> Measured:
    """Build, measure and drop the reference loop."""
    loop = ReferenceLoop(adapter, case, device=torch.device(options.device))
    return measure(lambda: loop.update(groups), options)


def run_trainer(
    adapter: RandomAdapter,
    case: Case,
    groups: list[TrainGroup],
    options: argparse.Namespace,
    *,
    micro: int,
    steps: int | None,
) -> Measured:
    """Build, measure and drop a trainer."""
    trainer = Trainer(adapter, settings(case, micro=micro, steps=steps), device=torch.device(options.device))

    def update() -> tuple[None, float]:
        return None, trainer.update(groups).metrics["train/first_update_ratio_max_deviation"]

    return measure(update, options)


def rows_of(case: Case, options: argparse.Namespace, rate: Callable[[], float]) -> Iterator[Row]:
    """The reference first; the trainer's rows are compared with it and share its model FLOPs."""
    adapter, groups = RandomAdapter(options), make_groups(options)
    transitions = len(cells(groups))
    steps = len(groups[0].trajectory.sde_indices)
    reference: Measured | None = None
    shapes: list[tuple[str, int, int]] = [("reference", 1, 1), ("trainer", 1, 1)]
    shapes += [("trainer", micro, steps) for micro in options.micro]
    for loop, micro, per_forward in shapes:
        row = Row(case.mode, case.checkpointing, loop, f"{micro} x {per_forward}")
        try:
            if loop == "reference":
                found = reference = run_reference(adapter, case, groups, options)
            else:
                found = run_trainer(adapter, case, groups, options, micro=micro, steps=per_forward)
        except torch.OutOfMemoryError:
            found = None
        free(options)
        if found is None or reference is None:
            yield row
            continue
        per_second = reference.flops / found.seconds
        yield dataclasses.replace(
            row,
            seconds=found.seconds,
            transitions_per_s=transitions / found.seconds,
            speedup=reference.seconds / found.seconds,
            model_tflops=per_second / 1e12,
            mfu=per_second / rate(),
            peak_memory_gb=found.peak_bytes / 1e9,
            first_ratio_max_deviation=found.deviation,
        )


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(options: argparse.Namespace) -> None:
    """Give the last configuration's memory back before the next is built."""
    gc.collect()
    if torch.device(options.device).type == "cuda":
        torch.cuda.empty_cache()


def table(rows: list[Row]) -> str:
    """The rows as text."""
    lines = [
        f"{'trained':<8}{'recompute':<11}{'loop':<11}{'forward':<9}{'transitions/s':>14}{'speed-up':>10}"
        f"{'TFLOP/s':>9}{'MFU':>8}{'peak GB':>9}{'max|rho-1|':>12}"
    ]
    for row in rows:
        head = f"{row.mode:<8}{'yes' if row.checkpointing else 'no':<11}{row.loop:<11}{row.forward:<9}"
        if row.seconds is None:
            lines.append(head + "out of memory".rjust(14))
            continue
        lines.append(
            f"{head}{row.transitions_per_s:>14.2f}{row.speedup:>10.2f}{row.model_tflops:>9.3g}{row.mfu:>8.1%}"
            f"{row.peak_memory_gb:>9.1f}{row.first_ratio_max_deviation:>12.2g}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line; a CPU gets the tiny module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, help="transformer blocks (12, on a CPU 2)")
    parser.add_argument("--size", type=int, help="pixels of a side (384, on a CPU 64)")
    parser.add_argument("--text-tokens", type=int, default=64)
    parser.add_argument(
        "--groups",
        type=int,
        default=2,
        help="prompts: with 8 candidates of each, a rank's share of a step in the recipes",
    )
    parser.add_argument("--candidates", type=int, default=8, help="of a group")
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 2, 4, 8], help="candidates of a trainer's forward")
    parser.add_argument("--modes", nargs="+", default=["lora", "full"], choices=("lora", "full"))
    parser.add_argument("--recompute", nargs="+", default=["no", "yes"], choices=("no", "yes"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file (benchmarks/results/replay.json; on a CPU none)")
    options = parser.parse_args()
    options.tiny = options.device == "cpu"
    options.layers = options.layers or (2 if options.tiny else 12)
    options.size = options.size or (64 if options.tiny else 384)
    if options.output is None and not options.tiny:
        options.output = OUTPUT
    return options


def main() -> None:
    """Measure every case, print the table, write the figures."""
    options = parse()
    device = torch.device(options.device)
    if options.tiny:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    size, seconds = (256, 0.05) if options.tiny else (8192, 2.0)

    def matrix_rate() -> float:
        return measure_matrix_rate(device, torch.bfloat16, size=size, seconds=seconds)

    before = matrix_rate()
    cases = [Case(mode, recompute == "yes") for mode in options.modes for recompute in options.recompute]
    rows = [row for case in cases for row in rows_of(case, options, lambda: before)]
    rate = max(before, matrix_rate())
    rows = [row if row.mfu is None else dataclasses.replace(row, mfu=row.mfu * before / rate) for row in rows]
    dist.destroy_process_group()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, {options.layers} layers, {options.size}x{options.size}, {rate / 1e12:.4g} TFLOP/s of matrix products"
    )
    print(table(rows))
    if options.output is None:
        return
    shape = ("layers", "size", "text_tokens", "groups", "candidates", "repeats")
    result = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "device": name,
        "torch": torch.__version__,
        **{key: getattr(options, key) for key in shape},
        "trained_steps": 3,
        "dtype": "bfloat16",
        "lora_rank": RANK,
        "matrix_tflops": rate / 1e12,
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_text_atomically(options.output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
