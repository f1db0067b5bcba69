"""The version of the code that makes a result: a hash of modules and of all that they import."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

#: Modules that decide nothing about a result: they tell of its progress, and where it comes from.
TELLING = ("qerl.data.inputs", "qerl.host.progress", "qerl.provenance")
#: An import path in a text, of what is loaded by its name.
_IMPORT_PATH = re.compile(r"[a-z_]\w*(\.\w+)+(:\w+)?")


def _remove_docstrings(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """Remove texts that are statements: docstrings of modules, classes, functions and fields. Returns these texts."""
    removed: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            removed |= {statement.value for statement in node.body if _is_text(statement)}  # type: ignore[attr-defined]
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return removed


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def module_file(name: str, root: Path) -> Path | None:
    """The file of a module under `root`. None if the name isn't a module there but a name imported from one."""
    base = root / Path(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _imports(nodes: Iterable[ast.AST], package: str) -> set[str]:
    """Full names of the modules that a module of `package` imports. An imported name may be a module too."""
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
    """Modules in texts: `package.module`, `package.module.Class`, `package.module:function`."""
    paths = [text.partition(":")[0] for text in texts if _IMPORT_PATH.fullmatch(text)]
    return {*paths, *(path.rpartition(".")[0] for path in paths)}


def _with_packages(names: Iterable[str]) -> set[str]:
    """Importing a module runs the packages around it, too; the outermost one of this package only loads on demand."""
    modules = set(names)
    for name in names:
        package = name.rpartition(".")[0]
        while "." in package:
            modules.add(package)
            package = package.rpartition(".")[0]
    return modules


@cache
def _parsed(source: bytes, package: str) -> tuple[str, frozenset[str], list[str]]:
    """A module without what says nothing, the modules that it loads, and its CUDA sources, which lie beside it."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))  # once, because Snakemake waits for this at every call
    removed = _remove_docstrings(nodes)
    kept = [node for node in nodes if node not in removed]
    texts = _texts(kept)
    names = _with_packages(_imports(kept, package) | _named(texts))
    return ast.dump(tree), frozenset(names), sorted(text for text in texts if Path(text).suffix == ".cu")


def code_of(modules: Iterable[str], root: Path, counts: Callable[[str], bool]) -> dict[str, str]:
    """The code of modules under `root` and of all that they load from there, as far as `counts` says of a name.

    It is blind to comments, docstrings and layout of Python, not of the CUDA sources that a module names. A module is
    loaded by an import, or by a text that is its import path; a computed name isn't seen.
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
            seen[name], loads, kernels = _parsed(file.read_bytes(), package)
            seen[name] += "".join((file.parent / kernel).read_text() for kernel in kernels)
            queue.extend(loads)
    return seen


def hash_of_code(modules: Iterable[str], root: Path, counts: Callable[[str], bool]) -> str:
    """A hash of `code_of`."""
    code = code_of(modules, root, counts)
    return hashlib.sha256("".join(f"{name}{code[name]}" for name in sorted(code)).encode()).hexdigest()[:12]


@cache
def code_version(*modules: str) -> str:
    """The hash of modules of this package and of all they import from it.

    Rules carry it as a parameter: editing a comment reruns nothing, editing the loss reruns what was trained with it.
    """
    for name in modules:
        if module_file(name, PACKAGE.parent) is None:
            raise ModuleNotFoundError(f"{name} is not a module of {PACKAGE.name}")
    return hash_of_code(modules, PACKAGE.parent, decides)


def of_this_package(name: str) -> bool:
    """Whether a module is one of this package's."""
    return name.split(".")[0] == PACKAGE.name


def decides(name: str) -> bool:
    """Whether a module is one of this package's, and may decide a result."""
    return of_this_package(name) and not any(f"{name}.".startswith(f"{module}.") for module in TELLING)
