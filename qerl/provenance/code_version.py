"""The version of the code that makes a result: a hash of modules and of all that they import."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


#: Modules that decide nothing about a result: settings reach a rule resolved, the others only tell about it.
TELLING = ("qerl.settings", "qerl.data.inputs", "qerl.plan", "qerl.host.progress", "qerl.provenance")


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return tree


def module_file(name: str, root: Path) -> Path | None:
    """The file of a module under `root`. None if the name isn't a module there but a name imported from one."""
    base = root / Path(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _imports(tree: ast.Module, package: str) -> set[str]:
    """Full names of the modules that a module of `package` imports. An imported name may be a module too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def _kernels(tree: ast.Module) -> list[str]:
    """Names of the CUDA sources beside a module that the module mentions."""
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return sorted(value for value in constants if isinstance(value, str) and value.endswith(".cu"))


@cache
def _parsed(source: bytes, package: str) -> tuple[str, frozenset[str], list[str]]:
    tree = _without_docstrings(ast.parse(source))
    return ast.dump(tree), frozenset(_imports(tree, package)), _kernels(tree)


def hash_of_code(modules: Iterable[str], root: Path, counts: Callable[[str], bool]) -> str:
    """A hash of modules under `root` and of all their imports from there for which `counts` is true.

    It ignores comments, docstrings and layout of Python, but not of the CUDA sources that a module names. It doesn't
    see imports by a computed name.
    """
    seen: dict[str, str] = {}
    queue = list(modules)
    while queue:
        name = queue.pop()
        file = module_file(name, root)
        if name not in seen and counts(name) and file is not None:
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            seen[name], imports, kernels = _parsed(file.read_bytes(), package)
            seen[name] += "".join((file.parent / kernel).read_text() for kernel in kernels)
            queue.extend(imports)
    digest = hashlib.sha256("".join(f"{name}{seen[name]}" for name in sorted(seen)).encode())
    return digest.hexdigest()[:12]


@cache
def code_version(*modules: str) -> str:
    """The hash of modules of this package and of all they import from it.

    Rules carry it as a parameter: editing a comment reruns nothing, editing the loss reruns what was trained with it.
    """
    for name in modules:
        if module_file(name, PACKAGE.parent) is None:
            raise ModuleNotFoundError(f"{name} is not a module of {PACKAGE.name}")
    return hash_of_code(modules, PACKAGE.parent, lambda name: of_this_package(name) and not _only_tells(name))


def of_this_package(name: str) -> bool:
    """Whether a module is one of this package's."""
    return name.split(".")[0] == PACKAGE.name


def _only_tells(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in TELLING)
