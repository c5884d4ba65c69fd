"""The public surface: `__all__` is true, the version is one, and the command line loads nothing heavy."""

from __future__ import annotations

import ast
import importlib
import json
import os
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import relax_sdk

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "sglang", "diffusers", "transformers", "numpy", "open_clip", "tensorboard", "matplotlib")


def all_problems(source: str, name: str) -> list[str]:
    """``__all__`` names something that the module lacks or is not sorted out; a package's omits what it imports."""
    tree = ast.parse(source)
    bound: set[str] = set()
    exported: list[str] | None = None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            bound |= names
            if "__all__" in names and node.value is not None:
                exported = ast.literal_eval(node.value)
        elif isinstance(node, ast.If):
            bound |= {
                alias.asname or alias.name
                for child in ast.walk(node)
                if isinstance(child, ast.ImportFrom)
                for alias in child.names
            } | {child.name for child in ast.walk(node) if isinstance(child, ast.FunctionDef | ast.ClassDef)}
    if exported is None:
        return [f"{name}: no __all__"] if bound - {"annotations"} else []
    found = [f"{name}: __all__ names {item!r}, which is not there" for item in exported if item not in bound]
    if len(set(exported)) != len(exported):
        found.append(f"{name}: __all__ repeats a name")
    if name.endswith("__init__.py"):
        own = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("relax_")
            for alias in node.names
        }
        found += [f"{name}: imports {item!r} but does not export it" for item in sorted(own - set(exported))]
    return found


def test_all_lists_are_true() -> None:
    found = []
    packages = [ROOT / "relax_sdk", *(ROOT / "plugins").glob("*/relax_*")]
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.name == "__init__.py" or "__all__" in source:
            found += all_problems(source, str(path.relative_to(ROOT)))
    assert found == []


def test_the_checker_sees_a_violation() -> None:
    assert all_problems("__all__ = ['f']\ndef f(): ...", "x.py") == []
    assert len(all_problems("__all__ = ['g']\ndef f(): ...", "x.py")) == 1
    assert len(all_problems("from relax_sdk.a import b, c\n__all__ = ['b']", "p/__init__.py")) == 1
    assert len(all_problems("x = 1", "p/__init__.py")) == 1


def test_every_public_name_of_the_package_can_be_imported() -> None:
    for name in relax_sdk.__all__:
        assert getattr(relax_sdk, name) is not None
    assert set(relax_sdk.__all__) <= set(dir(relax_sdk))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = relax_sdk.nothing


def test_every_protocol_is_exported() -> None:
    protocols = importlib.import_module("relax_sdk.protocols")
    for part in ("adapter", "engine", "records", "reward", "sampling", "tensors", "transport", "weight_sync"):
        module = importlib.import_module(f"relax_sdk.protocols.{part}")
        assert set(module.__all__) - set(protocols.__all__) - {"SAMPLE_ID_MODES", "dtype_name"} == set(), part


def test_the_version_is_written_once_in_effect() -> None:
    for path in (ROOT / "pyproject.toml", *(ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        assert project["version"] == relax_sdk.__version__, path


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plugins", "list"], ["train", "--help"], ["config", "explain"], ["doctor"], ["preflight"]],
    ids=" ".join,
)
def test_commands_that_start_nothing_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom relax_sdk.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit: pass\n"
        f"import json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)"
    )
    done = run_python(code)
    assert json.loads(done.stderr.splitlines()[-1]) == [], done.stderr


@pytest.mark.parametrize("module", ["relax_sdk", "relax_sdk.cli", "relax_sdk.protocols", "relax_sdk.preflight"])
def test_torch_free_rooms_import_nothing_heavy(module: str) -> None:
    done = run_python(f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def cpu_seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run_python(code).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"]], ids=" ".join)
def test_help_and_listing_are_quick(arguments: list[str]) -> None:
    command = f"import sys; from relax_sdk.cli import main; main({arguments!r})"
    cpu_seconds(command)  # writes byte code
    extra = min(cpu_seconds(command) for _ in range(3)) - min(cpu_seconds("pass") for _ in range(3))
    assert extra < cpu_seconds("import torch") / 2
