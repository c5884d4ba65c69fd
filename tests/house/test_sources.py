"""Every source file: a docstring, a bounded size, and no text that belongs to one machine or to later."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_STEP_LINES = 120
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jsonl", ".sh", ".cfg", ""}
SKIPPED_FOLDERS = {"__pycache__", "build", "dist", "runs", "node_modules"}
# Spelled in parts, so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": re.compile("/" + r"(?:work/(?:main|shared)|tmp/w|root|home/\w+)\b"),
    "unfinished work": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
    "a folder beside the repository": re.compile(r"\.\./sha" + r"red"),
    "a document outside the repository": re.compile(r"\b(?:ma" + r"th\.md|seed guid" + r"e|design not" + r"e)\b"),
}
ALLOWED = {(".ci/run", "a folder beside the repository")}
"""It looks there for larger prompt files, and does without."""


def size_problems(source: str, name: str, *, max_lines: int = MAX_FILE_LINES) -> list[str]:
    """Too long a file, or too long a function (from ``def`` to its last line)."""
    lines = len(source.splitlines())
    found = [f"{name}: {lines} lines, at most {max_lines}"] if lines > max_lines else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


def text_problems(text: str, name: str) -> list[str]:
    return [
        f"{name}:{number}: {what}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line) and (name, what) not in ALLOWED
    ]


def package_files() -> Iterator[Path]:
    """Modules of the installed packages: the core's and the plug-ins'."""
    for package in (ROOT / "relax_sdk", *sorted((ROOT / "plugins").glob("*/relax_*"))):
        yield from (path for path in sorted(package.rglob("*.py")) if not SKIPPED_FOLDERS & set(path.parts))


def text_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = parts[0].startswith(".") and parts[0] not in (".ci", ".github")
        if hidden or SKIPPED_FOLDERS & set(parts) or any(part.endswith(".egg-info") for part in parts):
            continue
        if path.is_file() and path.suffix in TEXT_SUFFIXES and path.stat().st_size < 2_000_000:
            yield path


def test_every_module_says_what_it_does() -> None:
    missing = [
        str(path.relative_to(ROOT))
        for path in package_files()
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert missing == []


def test_files_and_functions_stay_short() -> None:
    found = []
    for path in package_files():
        found += size_problems(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    assert found == []


def test_the_training_step_fits_on_a_page() -> None:
    path = ROOT / "relax_sdk" / "runtime" / "step.py"
    assert size_problems(path.read_text(encoding="utf-8"), "step.py", max_lines=MAX_STEP_LINES) == []


def test_no_text_belongs_to_one_machine_or_to_later() -> None:
    found = []
    for path in text_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a file without a suffix may be anything
        found += text_problems(text, str(path.relative_to(ROOT)))
    assert found == []


def test_nothing_is_printed_outside_the_command_line() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in package_files()
        if "cli" not in path.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_the_checkers_see_a_violation() -> None:
    long_function = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert len(size_problems(long_function, "x.py")) == 1
    assert size_problems("def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1), "x.py") == []
    assert len(size_problems("\n" * (MAX_FILE_LINES + 1), "x.py")) == 1
    assert text_problems("ls ../sha" + "red/data", ".ci/run") == []
    elsewhere = ("as in the seed guid" + "e", "see ma" + "th.md: step 0", "the design not" + "e", "../sha" + "red/x")
    for line in elsewhere:
        assert len(text_problems(line, "x.py")) == 1, line
    for line in ("see " + "/work/" + "main/x", "# TO" + "DO: later", "path = '/ro" + "ot/x'", "/home" + "/ann/x"):
        assert len(text_problems(line, "x.py")) == 1, line
    assert text_problems("/dev/shm and /tmp/run and a rooted tree", "x.py") == []
