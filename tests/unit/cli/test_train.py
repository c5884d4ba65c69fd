"""``relax-sdk train`` hands a checked configuration to the runtime and turns the outcome into an exit code."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_sdk.cli.progress import LineObserver, LiveObserver, terminal_observer
from relax_sdk.errors import RewardError


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], list[dict[str, Any]]]:
    """Replace the runtime: it loads torch and Ray, and is tested elsewhere."""
    calls: list[dict[str, Any]] = []

    def install(body: Callable[..., Any]) -> list[dict[str, Any]]:
        def train(config: Any, *, registry: Any, observer: Any) -> Any:
            calls.append({"config": config, "registry": registry, "observer": observer})
            return body(config, observer)

        module = types.ModuleType("relax_sdk.runtime")
        module.train = train  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "relax_sdk.runtime", module)
        return calls

    return install


def test_the_run_folder_is_the_only_output(relax, climodel, runtime):
    def body(config, observer):
        observer.phase("rollout 1", 1, 2)
        observer.line("rollout 1/3  taste 0.5")
        return types.SimpleNamespace(run_dir=config.run_dir)

    calls = runtime(body)
    ended = relax("train", "--plugin", "climodel", "--run-dir", "out", "--num-rollout", "3")
    assert (ended.code, ended.out) == (0, f"{Path.cwd() / 'out'}\n")
    assert ended.err == "rollout 1/3  taste 0.5\n"
    assert calls[0]["config"].run.num_rollout == 3
    assert calls[0]["registry"].model("climodel").name == "climodel"


@pytest.mark.parametrize(("error", "code"), [(RewardError("taste is NaN for sample 3"), 1), (KeyboardInterrupt(), 130)])
def test_outcomes(relax, climodel, runtime, error, code):
    def body(config, observer):
        raise error

    runtime(body)
    ended = relax("train", "--plugin", "climodel")
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.strip() in ("error: taste is NaN for sample 3", "interrupted")


def test_a_bug_keeps_its_traceback(climodel, runtime, monkeypatch):
    from relax_sdk.cli import main

    def body(config, observer):
        raise AssertionError("a bug")

    runtime(body)
    with pytest.raises(AssertionError, match="a bug"):
        main(["train", "--plugin", "climodel"])


def test_the_runtime_is_not_reached_when_preflight_fails(relax, climodel, runtime):
    calls = runtime(lambda config, observer: None)
    assert relax("train", "--plugin", "climodel", "--lr", "0").code == 4
    assert calls == []


def test_a_pipe_gets_lines_and_a_terminal_gets_a_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for stream, kind in ((io.StringIO(), LineObserver), (Terminal(), LiveObserver)):
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal_observer() as observer:
            assert type(observer) is kind
            observer.phase("rollout 1", 1, 2)
            observer.phase("waiting")
            observer.line("reward [0.5] /a/path")
        assert "reward [0.5] /a/path" in stream.getvalue()
