"""The code version of a result: a hash of modules and of all modules that they import."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

#: Modules that decide no result, because they only report progress and origin.
TELLING = ("qerl.data.inputs", "qerl.host.progress", "qerl.host.screen", "qerl.provenance", "qerl.trackers")
#: Suffixes of files beside a module, which it names in a string: CUDA sources, and templates and styles of pages.
_BESIDE = (".cu", ".j2", ".css", ".js")
#: An import path in a string, by which a module is loaded at run time.
_IMPORT_PATH = re.compile(r"[a-z_]\w*(\.\w+)+(:\w+)?")


def _walk(tree: ast.AST) -> tuple[str, list[ast.AST]]:
    """The code of a tree as text, and its nodes, without docstrings of modules, classes, functions and fields.

    Every call of Snakemake waits for it. It takes a third of the time of `ast.dump` and `ast.walk`. Empty fields are
    left out, because versions of Python differ in them, and results move between machines.
    """
    code: list[str] = []
    nodes: list[ast.AST] = []
    stack: list[object] = [tree]
    while stack:
        part = stack.pop()
        if isinstance(part, ast.AST):
            nodes.append(part)
            fields = {name: value for name in part._fields if (value := getattr(part, name, None)) not in (None, [])}
            code.append(f"{part.__class__.__name__}({','.join(fields)})")
            stack.extend(fields.values())
        elif isinstance(part, list):
            kept = [one for one in part if not _is_text(one)]
            code.append(str(len(kept)))
            stack.extend(kept)
        else:
            code.append(repr(part))
    return "\n".join(code), nodes


def _is_text(statement: object) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def module_file(name: str, root: Path) -> Path | None:
    """The file of a module under `root`, or None if the name isn't a module there."""
    base = root / Path(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _imports(nodes: Iterable[ast.AST], package: str) -> set[str]:
    """Full names that a module of `package` imports; some may be names within modules."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def _texts(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _named(texts: Iterable[str]) -> set[str]:
    """Modules named in strings: `package.module`, `package.module.Class`, `package.module:function`."""
    paths = [text.partition(":")[0] for text in texts if _IMPORT_PATH.fullmatch(text)]
    return {*paths, *(path.rpartition(".")[0] for path in paths)}


def _with_packages(names: Iterable[str]) -> set[str]:
    """The names with their parent packages, which an import also runs, except the outermost, which loads on demand."""
    modules = set(names)
    for name in names:
        package = name.rpartition(".")[0]
        while "." in package:
            modules.add(package)
            package = package.rpartition(".")[0]
    return modules


@cache
def _parsed(source: bytes, package: str) -> tuple[str, frozenset[str], list[str]]:
    """A module's code without comments and docstrings, the modules that it loads, and the files that it names."""
    code, nodes = _walk(ast.parse(source))
    texts = _texts(nodes)
    names = _with_packages(_imports(nodes, package) | _named(texts))
    return code, frozenset(names), sorted(text for text in texts if Path(text).suffix in _BESIDE)


def code_of(modules: Iterable[str], root: Path, counts: Callable[[str], bool]) -> dict[str, str]:
    """The code of modules under `root` and of all modules that they load from there and for which `counts` is true.

    Comments, docstrings and layout of Python don't count; those of files that a module names (`_BESIDE`) do. A module
    is loaded by an import, or by a string that is its import path; computed names aren't detected.
    """
    seen: dict[str, str] = {}
    queue, met = [*_with_packages(modules)], set[str]()
    while queue:
        name = queue.pop()
        if name in met or not counts(name):
            continue
        met.add(name)
        if file := module_file(name, root):
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            seen[name], loads, files = _parsed(file.read_bytes(), package)
            seen[name] += "".join((file.parent / beside).read_text(encoding="utf-8") for beside in files)
            queue.extend(loads)
    return seen


def hash_of_code(modules: Iterable[str], root: Path, counts: Callable[[str], bool]) -> str:
    """A hash of `code_of`."""
    code = code_of(modules, root, counts)
    return hashlib.sha256("".join(f"{name}{code[name]}" for name in sorted(code)).encode()).hexdigest()[:12]


@cache
def code_version(*modules: str) -> str:
    """The hash of modules of this package and of all they import from it.

    Rules have it as a parameter: editing a comment reruns nothing, and editing the loss reruns trainings.
    """
    for name in modules:
        if module_file(name, PACKAGE.parent) is None:
            raise ModuleNotFoundError(f"{name} is not a module of {PACKAGE.name}")
    return hash_of_code(modules, PACKAGE.parent, decides)


def of_this_package(name: str) -> bool:
    """Whether a module belongs to this package."""
    return name.split(".")[0] == PACKAGE.name


def decides(name: str) -> bool:
    """Whether a module belongs to this package and may decide a result."""
    return of_this_package(name) and not any(f"{name}.".startswith(f"{module}.") for module in TELLING)
