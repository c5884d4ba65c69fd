"""What the README says can be typed, opened, run, or looked up in a recorded result."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from relax_sdk.cli.app import cli
from relax_sdk.config import options
from relax_sdk.errors import WeightSyncError
from relax_sdk.metrics.names import METRICS, find_metric
from relax_sdk.protocols import FullWeightManifest, SyncOffer, WeightBucket
from relax_sdk.registry import EngineSpec, RewardSpec
from relax_sdk.weights import SendBuffer, bytes_checksum

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SURFACE = {"relax_sdk", "relax_sdk.protocols", "relax_sdk.flow", "relax_sdk.weights", "relax_sdk.errors"}
OTHER_FLAGS = {"--attention-backend"}
"""Of `sglang serve`."""
RESULTS = ROOT / "benchmarks" / "results"
CPU = torch.device("cpu")


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run_block(word: str) -> dict[str, Any]:
    (block,) = (block for block in python_blocks() if word in block)
    names: dict[str, Any] = {"__name__": "readme_block"}
    exec(compile(block, "README.md", "exec"), names)
    return names


def known_flags() -> Iterator[str]:
    for option in options():
        yield from (flag for flag in (option.flag, option.off, *option.aliases) if flag)

    def of(command: click.Command) -> Iterator[str]:
        for parameter in command.params:
            yield from (*parameter.opts, *parameter.secondary_opts)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from of(found)

    yield from of(cli)


def test_every_flag_exists() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert len(named) > 20
    assert named - set(known_flags()) - OTHER_FLAGS == set()


def test_every_link_leads_somewhere() -> None:
    targets = re.findall(r"\]\((?!http)([^)]+)\)", README)
    headings = {
        "#" + re.sub(r"[^a-z -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)", README, re.M)
    }
    missing = [item for item in targets if not (item in headings if item[0] == "#" else (ROOT / item).exists())]
    assert missing == []


def test_every_metric_is_in_the_table() -> None:
    families = "|".join(sorted({metric.name.partition("/")[0] for metric in METRICS}))
    named = re.findall(rf"`((?:{families})/[\w/]+)`", README)
    assert len(named) > 3
    assert [name for name in named if find_metric(name) is None] == []


def test_examples_import_the_public_surface_alone() -> None:
    for block in python_blocks():
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relax_sdk"):
                assert node.module in SURFACE


def test_the_reward_scores() -> None:
    names = run_block("class Redness")
    specs: list[RewardSpec] = []
    names["relax_register_rewards"](specs.append)
    assert specs[0].name == "redness"


def test_the_engine_receives_a_sync_and_refuses_what_it_should() -> None:
    names = run_block("class MyEngine")
    specs: list[EngineSpec] = []
    names["relax_register_engines"](specs.append)
    assert specs[0].adapter_protocol is not None

    engine = names["MyEngine"]()
    engine.model, engine.device = torch.nn.Linear(3, 2), CPU
    sent = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([7.0, 8.0])}
    flat = torch.cat([tensor.view(-1) for tensor in sent.values()]).view(torch.uint8)
    with SendBuffer.open(CPU, flat.numel(), slots=1) as buffer:
        buffer.slot(0)[: flat.numel()] = flat
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sent.items())
        sizes = [(name, shape, sent[name].nbytes) for name, shape in shapes]
        offer = SyncOffer(
            manifest=FullWeightManifest.describe("full", sizes),
            dtype="float32",
            tensors=shapes,
            buffers=(buffer.handle,),
            adapter=None,
        )
        bucket = WeightBucket(index=0, slot=0, first=0, count=2, bytes=flat.numel(), checksum=bytes_checksum(flat))
        engine.begin_sync(offer)
        engine.receive(bucket)
        for name, tensor in sent.items():
            assert torch.equal(engine.staged[name], tensor)
        buffer.slot(0)[0] += 1
        with pytest.raises(WeightSyncError, match="other bytes"):
            engine.receive(bucket)
        engine.buffer.close()
        engine.model = torch.nn.Linear(2, 3)
        with pytest.raises(WeightSyncError, match="not this model's"):
            engine.begin_sync(offer)


def sync_rows(layers: int) -> Iterator[str]:
    """Rows of the README's table, as the recorded result has them."""
    result = json.loads((RESULTS / f"weight_sync_{layers}.json").read_text(encoding="utf-8"))
    full, adapter = result["full"], result["adapter"]
    yield (
        f"| full, {layers} layers | {full['tensors']:,} | {full['bytes'] / 1e9:.1f} GB | {full['stream_s']:.2f} s "
        f"| {full['stock_s']:.2f} s | {full['device_copy_s']:.3f} s |"
    )
    size = f"{adapter['bytes'] / 1e9:.2f} GB"
    yield f"| adapter, {layers} layers | {adapter['tensors']:,} | {size} | {adapter['stream_s']:.2f} s | | |"


@pytest.mark.parametrize("layers", [12, 60])
def test_figures_of_weight_sync_are_the_recorded_ones(layers: int) -> None:
    for row in sync_rows(layers):
        assert row in README


def test_figures_of_the_hand_over_are_the_recorded_ones() -> None:
    result = json.loads((RESULTS / "weight_sync_60.json").read_text(encoding="utf-8"))
    for mode in ("full", "adapter"):
        later = result[mode]["handover"][-1]
        cells = " | ".join(f"{later[name]:.2f} s" for name in ("release_s", "resume_weights_s", "resume_rest_s"))
        assert f"| {mode} sync | {cells} |" in README
    assert f"one pinned copy ({result['adapter']['handover'][0]['release_s']:.0f} s, once)" in README
    first = [f"{result[mode]['stream_first_s']:.2f} s" for mode in ("full", "adapter")]
    assert f"takes {first[0]} in full, {first[1]} for the adapter" in " ".join(README.split())


def test_figures_of_the_replay_are_the_recorded_ones() -> None:
    result = json.loads((RESULTS / "replay.json").read_text(encoding="utf-8"))
    names = {"reference": "plain loop", "trainer": "trainer"}
    for row in result["rows"]:
        assert (
            f"| {names[row['loop']]} | {row['forward']} | {row['transitions_per_s']:.1f} | {100 * row['mfu']:.1f} % "
            f"| {row['peak_memory_gb']:.1f} GB |"
        ) in README
    text = " ".join(README.split())
    assert f"{result['groups'] * result['candidates']} candidates with {result['trained_steps']} trained steps" in text
    assert f"({result['matrix_tflops']:.0f} TFLOP/s here)" in text


def test_the_kills_are_those_recorded() -> None:
    recorded = json.loads((RESULTS / "kill_roles.json").read_text(encoding="utf-8"))
    text = " ".join(README.split())
    assert f"{recorded['clean']} of {recorded['kills']} runs ended clean" in text
    assert f"the slowest after {recorded['slowest_s']} s" in text


def test_every_benchmark_is_listed() -> None:
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == set(re.findall(r"^\| `(\w+\.py)` \|", README, flags=re.MULTILINE))
