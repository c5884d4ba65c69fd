"""What a source file of SGLang must contain, as records, and where a file departs from them.

Only `ast` reads the source, so nothing of it is imported or run. What is expected is compared as text (a signature, a
literal, a call as written), which also refuses harmless changes: that is wanted, because somebody should look at them.
Left out: what the engine expects, which is `contract`'s table.
"""

from __future__ import annotations

import abc
import ast
import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from relax_sdk.errors import nearest_name

__all__ = [
    "Calls",
    "Constant",
    "Default",
    "Expectation",
    "Flags",
    "Imported",
    "Inherits",
    "Members",
    "Route",
    "SelfAttributes",
    "Signature",
    "file_problems",
]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclasses.dataclass(frozen=True)
class _Mismatch:
    """One departure; ``line`` is where it stands, 0 when it stands nowhere."""

    expected: str
    found: str
    line: int = 0


class _AbsentError(Exception):
    """The class or function that an expectation is about does not exist."""

    def __init__(self, mismatch: _Mismatch) -> None:
        super().__init__(mismatch.expected)
        self.mismatch = mismatch


class _Source:
    """One parsed file; ``path`` is relative to the package's folder, with forward slashes."""

    def __init__(self, tree: ast.Module, path: str) -> None:
        self.tree = tree
        self.path = path

    def class_(self, name: str) -> ast.ClassDef:
        """The class of a name; the last one, which is the one that other modules see."""
        known = {item.name: item for item in _statements(self.tree.body) if isinstance(item, ast.ClassDef)}
        if name not in known:
            raise _AbsentError(_Mismatch(f"class {name}", _absent(name, known)))
        return known[name]

    def functions(self, name: str) -> list[_Function]:
        """Every function of a name, or method of a ``Class.name``, also those under ``if`` or ``try``."""
        owner, _, short = name.rpartition(".")
        scope: ast.Module | ast.ClassDef = self.class_(owner) if owner else self.tree
        known = [item for item in _statements(scope.body) if isinstance(item, _Function)]
        found = [item for item in known if item.name == short]
        if not found:
            line = scope.lineno if isinstance(scope, ast.ClassDef) else 0
            raise _AbsentError(_Mismatch(f"def {name}", _absent(short, {item.name for item in known}), line))
        return found


class Expectation(abc.ABC):
    """One thing that a file must contain; the subclasses are frozen records."""

    @abc.abstractmethod
    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        """Where the file departs from it; raises `_AbsentError` when there is nothing to look at."""


@dataclasses.dataclass(frozen=True)
class Signature(Expectation):
    """A function or method (``Class.method``) with exactly these parameters, in this order, and not ``async``."""

    name: str
    _: dataclasses.KW_ONLY
    parameters: str

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        expected = f"def {self.name}({self.parameters})"
        for function in source.functions(self.name):
            word = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
            found = f"{word} {self.name}({', '.join(_parameters(function.args))})"
            if found != expected:
                yield _Mismatch(expected, found, function.lineno)


@dataclasses.dataclass(frozen=True)
class Default(Expectation):
    """A parameter's default value, of a parameter that may be given by position."""

    name: str
    _: dataclasses.KW_ONLY
    parameter: str
    value: object

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        for function in source.functions(self.name):
            positional = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
            defaults = function.args.defaults
            known = dict(zip(positional[len(positional) - len(defaults) :], map(ast.unparse, defaults), strict=True))
            found = known.get(self.parameter, "no default")
            if found != repr(self.value):
                expected = f"{self.parameter}={self.value!r} in def {self.name}"
                yield _Mismatch(expected, found, function.lineno)


@dataclasses.dataclass(frozen=True)
class Members(Expectation):
    """Names that a class's body declares or assigns: fields of a record, members of an enumeration."""

    name: str
    _: dataclasses.KW_ONLY
    members: tuple[str, ...]

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        definition = source.class_(self.name)
        known = _assignments(definition.body)
        for member in self.members:
            if member not in known:
                yield _Mismatch(f"{self.name}.{member}", _absent(member, known), definition.lineno)


@dataclasses.dataclass(frozen=True)
class SelfAttributes(Expectation):
    """Attributes that a class's ``__init__`` sets on ``self``."""

    name: str
    _: dataclasses.KW_ONLY
    attributes: tuple[str, ...]

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        for function in source.functions(f"{self.name}.__init__"):
            stored = [item for item in ast.walk(function) if isinstance(item, ast.Attribute)]
            known = {
                item.attr for item in stored if isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self"
            }
            for name in self.attributes:
                if name not in known:
                    expected = f"self.{name} set in {self.name}.__init__"
                    yield _Mismatch(expected, _absent(name, known), function.lineno)


@dataclasses.dataclass(frozen=True)
class Constant(Expectation):
    """A literal that a module (``NAME``) or a class (``Class.NAME``) assigns."""

    name: str
    _: dataclasses.KW_ONLY
    value: object

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        owner, _, short = self.name.rpartition(".")
        known = _assignments(source.class_(owner).body if owner else source.tree.body)
        expected = f"{self.name} = {self.value!r}"
        if short not in known:
            yield _Mismatch(expected, _absent(short, known))
            return
        value = known[short]
        found = "no value" if value is None else ast.unparse(value)
        if found != repr(self.value):
            yield _Mismatch(expected, found, value.lineno if value else 0)


@dataclasses.dataclass(frozen=True)
class Imported(Expectation):
    """A name that the file imports from a module of SGLang, by an absolute or a relative import."""

    name: str
    _: dataclasses.KW_ONLY
    module: str

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        found = {}
        for item in ast.walk(source.tree):
            if isinstance(item, ast.ImportFrom) and self.name in [one.asname or one.name for one in item.names]:
                folders = PurePosixPath("sglang", source.path).parts[: -item.level] if item.level else ()
                found[".".join([*folders, *([item.module] if item.module else [])])] = item.lineno
        if self.module not in found:
            other, line = next(iter(found.items()), ("", 0))
            expected = f"{self.name} imported from {self.module}"
            yield _Mismatch(expected, f"from {other}" if found else "none", line)


@dataclasses.dataclass(frozen=True)
class Calls(Expectation):
    """Calls that a function or method makes: what is called (``self.f``), or the whole call as written (``f(x)``)."""

    name: str
    _: dataclasses.KW_ONLY
    calls: tuple[str, ...]

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        for function in source.functions(self.name):
            inside = [item for item in ast.walk(function) if isinstance(item, ast.Call)]
            known = {ast.unparse(item.func) for item in inside} | {ast.unparse(item) for item in inside}
            for call in self.calls:
                if call not in known:
                    yield _Mismatch(f"a call of {call} in {self.name}", _absent(call, known), function.lineno)


@dataclasses.dataclass(frozen=True)
class Inherits(Expectation):
    """A class with exactly these bases that defines none of ``inherited``: a hook on the base's method reaches it."""

    name: str
    _: dataclasses.KW_ONLY
    bases: str
    inherited: tuple[str, ...] = ()

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        definition = source.class_(self.name)
        bases = ", ".join(map(ast.unparse, definition.bases))
        if bases != self.bases:
            yield _Mismatch(f"class {self.name}({self.bases})", f"class {self.name}({bases})", definition.lineno)
        for item in _statements(definition.body):
            if isinstance(item, _Definition) and item.name in self.inherited:
                yield _Mismatch(f"{self.name}.{item.name} inherited", "a definition of its own", item.lineno)


@dataclasses.dataclass(frozen=True)
class Route(Expectation):
    """An HTTP route of one of the file's routers, with the router's prefix."""

    path: str
    _: dataclasses.KW_ONLY
    method: str

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        prefixes = {}
        for name, value in _assignments(source.tree.body).items():
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "APIRouter":
                prefixes[name] = next((_text(item.value) for item in value.keywords if item.arg == "prefix"), "")
        decorators = [item for one in source.tree.body if isinstance(one, _Function) for item in one.decorator_list]
        known = {
            f"{item.func.attr.upper()} {prefixes[item.func.value.id]}{_text(item.args[0])}"
            for item in decorators
            if isinstance(item, ast.Call) and item.args and isinstance(item.func, ast.Attribute)
            if isinstance(item.func.value, ast.Name) and item.func.value.id in prefixes
        }
        wanted = f"{self.method} {self.path}"
        if wanted not in known:
            yield _Mismatch(f"route {wanted}", _absent(wanted, known))


@dataclasses.dataclass(frozen=True)
class Flags(Expectation):
    """Command-line flags that a function declares with ``add_argument``, or compares an argument with."""

    name: str
    _: dataclasses.KW_ONLY
    flags: tuple[str, ...]

    def _mismatches(self, source: _Source) -> Iterator[_Mismatch]:
        for function in source.functions(self.name):
            words: list[ast.expr] = []
            for item in ast.walk(function):
                if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute):
                    words += item.args if item.func.attr == "add_argument" else []
                elif isinstance(item, ast.Compare):
                    words += item.comparators
            known = {text for word in words if (text := _text(word)).startswith("--")}
            for flag in self.flags:
                if flag not in known:
                    yield _Mismatch(f"{flag} in {self.name}", _absent(flag, known), function.lineno)


def file_problems(package_dir: Path, path: str, expectations: Iterable[Expectation]) -> Iterator[str]:
    """One text for each departure of a file: the file and line, what was expected, and what was found.

    A missing, unreadable or broken file is one departure. A missing class or function is one departure, however many
    expectations are about it.
    """
    name = f"sglang/{path}"
    try:
        content = (package_dir / path).read_bytes()
    except OSError as error:
        yield f"{name}: expected a readable file, found {error.strerror or error}"
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about an invalid escape, say, which is SGLang's own business
            source = _Source(ast.parse(content), path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        yield f"{name}{line}: expected Python source, found {type(error).__name__}: {getattr(error, 'msg', error)}"
        return
    texts = (
        f"{name}{f':{item.line}' if item.line else ''}: expected {item.expected}, found {item.found}"
        for expectation in expectations
        for item in _found(expectation, source)
    )
    yield from dict.fromkeys(texts)


def _found(expectation: Expectation, source: _Source) -> list[_Mismatch]:
    try:
        return list(expectation._mismatches(source))
    except _AbsentError as error:
        return [error.mismatch]


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.stmt]:
    """Statements of one scope, with those inside ``if``, ``try``, ``with``, ``match`` and loops."""
    for item in body:
        if isinstance(item, ast.stmt):
            yield item
        if not isinstance(item, _Definition | ast.expr):
            yield from _statements(ast.iter_child_nodes(item))


def _assignments(body: Iterable[ast.stmt]) -> dict[str, ast.expr | None]:
    """Names that a scope assigns or declares, with the last value; None for a declaration without one."""
    found: dict[str, ast.expr | None] = {}
    for item in _statements(body):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = item.value
        elif isinstance(item, ast.Assign):
            found |= {target.id: item.value for target in item.targets if isinstance(target, ast.Name)}
    return found


def _parameters(arguments: ast.arguments) -> list[str]:
    """Names in order, with ``/``, ``*``, ``*args`` and ``**kwargs`` as a signature writes them."""
    names = [item.arg for item in arguments.posonlyargs]
    names += ["/"] if names else []
    names += [item.arg for item in arguments.args]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [item.arg for item in arguments.kwonlyargs]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def _text(value: ast.expr) -> str:
    """A string as it stands in the source, an f-string with its fields left empty; "" for anything else."""
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(item) for item in value.values)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def _absent(name: str, known: Iterable[str]) -> str:
    nearest = nearest_name(name, known)
    return "none" if nearest is None else f"none; the nearest is {nearest}"
