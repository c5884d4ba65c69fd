"""A site folder of made-up distributions, with real package metadata, put in front of ``sys.path``."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ADAPTER = """
class Adapter:
    family = "fake"
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
"""


@dataclasses.dataclass
class Site:
    """Writes distributions and modules."""

    folder: Path

    def module(self, name: str, source: str) -> Path:
        path = self.folder / f"{name}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        importlib.invalidate_caches()
        return path

    def distribution(self, name: str, entry_points: dict[str, str], *, version: str = "1.0") -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        lines = [f"{key} = {value}" for key, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[relax_sdk.plugins]", *lines, ""]), encoding="utf-8")

    def plugin(self, name: str, source: str) -> None:
        """A distribution ``<name>-dist`` with one plug-in module ``<name>_plugin``."""
        self.module(f"{name}_plugin", source)
        self.distribution(f"{name}-dist", {name: f"{name}_plugin"})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def model_plugin() -> str:
    """A plug-in that registers the model ``{name}`` with the adapter of module ``{name}_adapter``."""
    return """
    from relax_sdk import ModelSpec, hookimpl

    @hookimpl
    def relax_register_models(register):
        register(ModelSpec(name="{name}", adapter="{name}_adapter:Adapter"))
    """


@pytest.fixture
def adapter_source() -> str:
    return ADAPTER
