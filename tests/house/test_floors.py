"""The floors of the house: who may import whom. The checker reads source, so imports inside functions count."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

FLOORS = {
    "errors": 0,
    "files": 1,
    "protocols": 1,
    "config": 2,
    "registry": 2,
    "metrics": 2,
    "flow": 2,
    "objectives": 2,
    "weights": 2,
    "control": 2,
    "sglang_plugin": 4,
    "data": 3,
    "preflight": 3,
    "rollout": 3,
    "rewards": 3,
    "training": 3,
    "weight_sync": 3,
    "testing": 3,
    "runtime": 4,
    "cli": 5,
    "__main__": 6,
}
ROOT_FLOOR = 2
TORCH_FREE = {"errors", "files", "protocols", "config", "registry", "metrics", "data", "preflight", "cli"}
HEAVY = {
    "torch",
    "torchvision",
    "ray",
    "sglang",
    "diffusers",
    "transformers",
    "peft",
    "open_clip",
    "numpy",
    "safetensors",
}
PLUGIN_SURFACE = {"relax_sdk", "relax_sdk.protocols", "relax_sdk.flow", "relax_sdk.weights", "relax_sdk.errors"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module, with ``names`` taken from it; ``deferred`` inside a function."""

    module: str
    names: tuple[str, ...]
    line: int
    deferred: bool
    typing_only: bool


def imports_of(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Every import of a source text, wherever it stands."""

    def visit(node: ast.AST, deferred: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno, deferred, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, base] if base else parts)
            yield Import(base, tuple(alias.name for alias in node.names), node.lineno, deferred, typing_only)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, deferred, True)
            for child in node.orelse:
                yield from visit(child, deferred, typing_only)
        else:
            inner = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner, typing_only)

    yield from visit(ast.parse(source), False, False)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "relax_sdk" and len(parts) > 1 else None


def targets(item: Import) -> Iterator[str]:
    """Modules that an import reaches: ``from relax_sdk import errors`` reaches ``relax_sdk.errors``."""
    if item.module != "relax_sdk" or not item.names:
        yield item.module
        return
    for name in item.names:
        yield f"relax_sdk.{name}" if name in FLOORS else f"relax_sdk:{name}"


def core_violations(sources: Mapping[str, str]) -> list[str]:
    """Broken rules in modules of relax_sdk (dotted name -> text; a package's name ends in ``.__init__``)."""
    found = []
    for name, source in sources.items():
        is_package = name.endswith(".__init__")
        module = name.removesuffix(".__init__")
        room = room_of(module)
        if room is not None and room not in FLOORS:
            found.append(f"{module}: the room {room!r} has no floor")
            continue
        for item in imports_of(source, module, is_package=is_package):
            place = f"{module}:{item.line}"
            top = item.module.split(".")[0]
            if room in TORCH_FREE and top in HEAVY and not item.deferred and not item.typing_only:
                found.append(f"{place}: a torch-free room imports {item.module} when it is imported")
            if top.startswith("relax_") and top != "relax_sdk":
                found.append(f"{place}: the core imports the plug-in package {item.module}")
            if top == "relax_sdk":
                found += [f"{place}: {text}" for target in targets(item) if (text := _step(room, target))]
    return found


def _step(room: str | None, target: str) -> str | None:
    """What is wrong with a room (None: the package itself) reaching a module of the core."""
    if target == "relax_sdk:__version__":
        return None
    if ":" in target:
        return "a room imports from the public package" if room is not None else None
    other = room_of(target)
    if other is None or other == room:
        return None
    if other not in FLOORS:
        return f"imports {target}, whose room has no floor"
    floor = ROOT_FLOOR + 1 if room is None else FLOORS[room]
    if FLOORS[other] < floor:
        return None
    kind = "the same floor" if FLOORS[other] == floor else "a higher floor"
    return f"{room or 'relax_sdk'} (floor {floor}) imports {other} (floor {FLOORS[other]}), {kind}"


def plugin_violations(sources: Mapping[str, str]) -> list[str]:
    """Imports of relax_sdk beyond its public surface, in modules of plug-in packages."""
    found = []
    for name, source in sources.items():
        module = name.removesuffix(".__init__")
        for item in imports_of(source, module, is_package=name.endswith(".__init__")):
            if item.module.split(".")[0] != "relax_sdk":
                continue
            inner = f"relax_sdk.{item.names[0]}" if item.module == "relax_sdk" and item.names[:1] else item.module
            reached = inner if item.module == "relax_sdk" and room_of(inner) in FLOORS else item.module
            if reached not in PLUGIN_SURFACE:
                found.append(f"{module}:{item.line}: a plug-in imports {reached}")
    return found


def read_package(folder: Path) -> dict[str, str]:
    return {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def test_every_room_imports_only_lower_floors() -> None:
    assert core_violations(read_package(ROOT / "relax_sdk")) == []


def test_plugins_import_only_the_public_surface() -> None:
    for folder in sorted((ROOT / "plugins").glob("*/relax_*")):
        assert plugin_violations(read_package(folder)) == []


def test_every_floor_is_a_room() -> None:
    rooms = {path.stem for path in (ROOT / "relax_sdk").iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms -= {"__init__", "__pycache__", "py"}
    assert rooms - set(FLOORS) == set(), "rooms without a floor"


def test_the_checker_sees_a_violation() -> None:
    cases = {
        "relax_sdk.config.x": ("from relax_sdk.registry import Registry", "the same floor"),
        "relax_sdk.flow.x": ("def f():\n    import relax_sdk.runtime.loop", "a higher floor"),
        "relax_sdk.rollout.x": ("if TYPE_CHECKING:\n    from relax_sdk.training import Trainer", "the same floor"),
        "relax_sdk.preflight.x": ("from ..data import load_prompts", "the same floor"),
        "relax_sdk.data.__init__": ("from . import sampler\nfrom ..cli import main", "a higher floor"),
        "relax_sdk.registry.x": ("from relax_sdk import hookimpl", "public package"),
        "relax_sdk.metrics.x": ("from relax_sdk import cli", "a higher floor"),
        "relax_sdk.protocols.x": ("import torch", "torch-free"),
        "relax_sdk.cli.x": ("from ray import init", "torch-free"),
        "relax_sdk.rewards.x": ("import relax_pickscore.scorer", "plug-in package"),
        "relax_sdk.secret.x": ("", "has no floor"),
        "relax_sdk.__init__": ("from relax_sdk.runtime import train", "a higher floor"),
    }
    for module, (source, expected) in cases.items():
        found = core_violations({module: source})
        assert len(found) == 1, (module, found)
        assert expected in found[0]


def test_the_checker_lets_the_allowed_pass() -> None:
    fine = {
        "relax_sdk.protocols.x": "if TYPE_CHECKING:\n    import torch\nfrom relax_sdk.errors import RelaxError",
        "relax_sdk.cli.x": "def f():\n    import torch\nfrom relax_sdk import __version__, errors",
        "relax_sdk.rollout.x": "import torch\nfrom relax_sdk.flow import ode_step\nfrom .identity import plan_groups",
        "relax_sdk.__init__": "from relax_sdk.registry import hookimpl",
    }
    assert core_violations(fine) == []


def test_the_plugin_checker_sees_a_violation() -> None:
    assert plugin_violations({"relax_x.a": "from relax_sdk import hookimpl\nimport relax_sdk.protocols"}) == []
    assert len(plugin_violations({"relax_x.a": "def f():\n    from relax_sdk.rollout import RolloutDriver"})) == 1
    assert len(plugin_violations({"relax_x.a": "from relax_sdk import registry"})) == 1
