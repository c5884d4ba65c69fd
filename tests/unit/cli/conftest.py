"""The command line in this process: what it prints, and the code it leaves with."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_sdk.cli import main


@dataclasses.dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def relax(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """Call ``relax-sdk`` in an empty folder, without the caller's own RELAX_* variables."""
    for name in [name for name in os.environ if name.startswith("RELAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Ended:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        captured = capsys.readouterr()
        return Ended(int(caught.value.code or 0), captured.out, captured.err)

    return call


ADAPTER = """
class Adapter:
    family = "toy"
    supported_tasks = ("t2i",)
    lora_target_modules = ("to_q",)
    block_module_names = ("blocks",)
    def load_train_model(self, model_path, *, revision, dtype): ...
    def validate_sampling(self, sampling): return []
    def build_rollout_request(self, plan, sampling, *, scheduler_config): ...
    def validate_rollout_response(self, request, response): ...
    def pack_trajectory(self, request, response): ...
    def replay_transition(self, model, batch): ...
    def artifact_tracks(self): return ("image",)
    def weight_name_map(self): return str
    def load_embedded_model(self, model_path, *, revision, device, dtype): ...
    def pack_initial_noise(self, noise): ...

class Taste:
    components = ("taste",)
    required_tracks = ("image",)
    def score(self, batch): ...
"""

PLUGIN = """
from pathlib import Path
from relax_sdk import ModelSpec, RewardSpec, hookimpl

@hookimpl
def relax_register_models(register):
    register(ModelSpec(name="climodel", adapter="climodel_adapter:Adapter", description="A made-up model.",
                       presets={"demo": "climodel_plugin:demo"}, default_preset="demo"))

@hookimpl
def relax_register_rewards(register):
    register(RewardSpec(name="clitaste", scorer="climodel_adapter:Taste", components=("taste",)))
    register(RewardSpec(name="clisour", scorer="climodel_adapter:Adapter"))

def demo():
    root = Path(__file__).parent
    return {
        "backend": {"colocate": True},
        "model": {"model_path": str(root / "model")},
        "rollout": {"prompt_data": root / "prompts.jsonl", "rollout_batch_size": 2, "n_samples_per_prompt": 2},
        "sampling": {"sampling_config": {"sde_indices": [1]}},
        "optimizer": {"lr": 1e-3},
        "flow_grpo": {"num_updates_per_batch": 2},
        "reward": {"scorer_path": "clitaste"},
    }
"""


@pytest.fixture
def climodel(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed plug-in ``climodel`` whose preset passes preflight, and a broken one, ``cliwilted``."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "climodel_plugin.py").write_text(PLUGIN)
    (folder / "climodel_adapter.py").write_text(ADAPTER)
    (folder / "cliwilted_plugin.py").write_text("import no_such_library\n")
    (folder / "model" / "transformer").mkdir(parents=True)
    (folder / "model" / "scheduler").mkdir()
    (folder / "model" / "scheduler" / "scheduler_config.json").write_text("{}")
    (folder / "prompts.jsonl").write_text('{"prompt": "a red square"}\n{"prompt": "a blue circle"}\n')
    for name in ("climodel", "cliwilted"):
        info = folder / f"{name}_dist-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[relax_sdk.plugins]\n{name} = {name}_plugin\n")
    monkeypatch.syspath_prepend(str(folder))
    for module in ("climodel_plugin", "climodel_adapter"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return folder
