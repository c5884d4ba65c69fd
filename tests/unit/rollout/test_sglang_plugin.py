"""The entry point is inert in anybody else's SGLang, and in ours every hook is registered and reported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import fake_sglang
import pytest
from fake_sglang import World, plain_transformer, server_transformer

from relax_sdk import sglang_plugin
from relax_sdk.rollout.sglang.server_side import plugin
from relax_sdk.rollout.sglang.session import LIFELINE_VARIABLE, SESSION_VARIABLE
from relax_sdk.rollout.sglang.targets import LOAD_MODEL, REQUIRED_HOOKS


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = fake_sglang.install(monkeypatch)
    made.modules = {"transformer": server_transformer(plain_transformer())}
    monkeypatch.delenv(LIFELINE_VARIABLE, raising=False)
    return made


# --- somebody else's server -------------------------------------------------------------------------------------------


def test_sglang_finds_the_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="sglang.multimodal_gen.plugins", name="relax_sdk")
    assert entry.value == "relax_sdk.sglang_plugin:activate"
    assert entry.load() is sglang_plugin.activate


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_session_nothing_is_imported_or_changed(value: str | None) -> None:
    code = (
        "import sys\n"
        "from relax_sdk.sglang_plugin import activate\n"
        "activate()\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'ray', 'sglang', 'diffusers', 'relax_sdk.rollout'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    environ = {name: text for name, text in os.environ.items() if name != SESSION_VARIABLE}
    environ |= {} if value is None else {SESSION_VARIABLE: value}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=environ
    )
    assert done.stdout.strip() == "[]"


def test_both_sides_mean_the_same_variable() -> None:
    assert sglang_plugin._SESSION_VARIABLE == SESSION_VARIABLE


def test_with_a_session_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[bool] = []
    monkeypatch.setattr(plugin, "install", lambda: called.append(True))
    sglang_plugin.activate()
    assert called == []
    monkeypatch.setenv(SESSION_VARIABLE, str(tmp_path))
    sglang_plugin.activate()
    assert called == [True]


# --- our own ----------------------------------------------------------------------------------------------------------


def test_every_required_target_is_hooked_around(world: World) -> None:
    before = threading.active_count()
    plugin.install()
    assert sorted(world.registered) == sorted(REQUIRED_HOOKS)
    assert {kind for _, kind in world.registered.values()} == {"around"}
    assert len({hook for hook, _ in world.registered.values()}) == len(REQUIRED_HOOKS)
    assert threading.active_count() == before, "a worker watches no lifeline: its parent does"


@pytest.mark.parametrize("lacking", [[], ["take_step's target"]])
def test_a_worker_reports_what_took_hold_after_it_has_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: list[str]
) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, str(tmp_path))
    applied = sorted(REQUIRED_HOOKS)[len(lacking) :]
    world.patched.update([*applied, "somebody.elses.target"])
    worker = types.SimpleNamespace(rank=3, pipeline="loaded")
    order: list[str] = []

    def load(worker: Any) -> str:
        assert not list(tmp_path.iterdir())
        order.append("loaded")
        return "result"

    assert plugin._hooks()[LOAD_MODEL](load, worker) == "result"
    assert order == ["loaded"]
    (path,) = tmp_path.iterdir()
    assert path.name == "worker-3.json"
    report = json.loads(path.read_text())
    assert report == {
        "rank": 3,
        "pid": os.getpid(),
        "hooks": applied,
        "worker": {"device": "cpu", "uuid": "", "modules": ["transformer"]},
    }


def test_a_model_that_does_not_load_is_not_reported(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SESSION_VARIABLE, str(tmp_path))

    def fail(worker: Any) -> None:
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file"):
        plugin._hooks()[LOAD_MODEL](fail, types.SimpleNamespace(rank=0))
    assert list(tmp_path.iterdir()) == []


def test_the_lifeline_is_not_passed_on_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's copy of the number would be another file."""
    reading, writing = os.pipe()
    ended = threading.Event()
    monkeypatch.setattr(plugin.os, "killpg", lambda group, number: ended.set())
    monkeypatch.setenv(LIFELINE_VARIABLE, str(reading))
    plugin._watch_lifeline()
    assert LIFELINE_VARIABLE not in os.environ
    assert not ended.wait(0.1), "the owner lives"
    os.close(writing)
    assert ended.wait(5)
    os.close(reading)
