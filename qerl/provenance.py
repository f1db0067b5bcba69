"""The stamp on every result, and the version of the code that made it."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from qerl import __version__
from qerl.config import ConfigError

PACKAGE = Path(__file__).parent
#: Modules that decide nothing about a result: settings reach a rule resolved, the others only tell about it.
TELLING = ("qerl.config", "qerl.inputs", "qerl.plan", "qerl.progress", "qerl.provenance")
_GIT_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
#: Seconds that clocks of several machines may differ by.
CLOCK_SKEW = 60
LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "llmcompressor",
    "compressed-tensors",
    "bitsandbytes",
    "triton",
    "vllm",
    "lm-eval",
    "lighteval",
)


def _git(*arguments: str) -> str | None:
    """What git says in the package's folder; none where it refuses, or isn't installed."""
    # Within a hook of git these name the repository of the hook.
    environment = {key: value for key, value in os.environ.items() if key not in _GIT_PLACES}
    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        return None
    return None if answer.returncode else answer.stdout.strip()


def _checkout() -> dict[str, Any]:
    """Commit and state of the checkout that the package is a part of.

    A folder may lie in a repository that doesn't track it, as the .venv of another project does.
    """
    tracked = _git("ls-files", "--error-unmatch", "--", "__init__.py") is not None
    commit = _git("rev-parse", "--verify", "HEAD") if tracked else None
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--", ".")) if commit else None}


def _hash_of_files(folder: Path) -> str:
    """A hash of names and bytes of all source files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".cu")):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def code_state() -> dict[str, Any]:
    """Version and hash of this package's files; commit of its git checkout and whether the files differ from it.

    Installed from a wheel, or unpacked without git, it has no commit; QERL_COMMIT tells one.
    """
    told = os.environ.get("QERL_COMMIT")
    checkout = {"commit": told, "dirty": None} if told else _checkout()
    return {**checkout, "version": __version__, "files": _hash_of_files(PACKAGE)}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def machine() -> dict[str, Any]:
    """CPU, cores this process may use, GPUs, memory in GiB, and a short label for captions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = _gpus()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    label = f"{len(gpus)}x {gpus[0]}" if gpus else f"{_cpu_name()}, {cores} cores"
    return {"cpu": _cpu_name(), "cores": cores, "memory_gib": round(memory, 1), "gpu": gpus or None, "label": label}


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide results."""
    installed = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed


def stamp(seed: int | None = None) -> dict[str, Any]:
    """Where a result comes from: code, machine, versions, seed and time (UTC)."""
    return {
        **code_state(),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cache_folder(name: str) -> Path:
    """The user's folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl" / name


# --- files that are whole or not there -------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    """Write a result whole or not at all."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, whenever the process is killed or the power fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    put(partial, path)


def put(partial: Path, path: Path) -> None:
    """Rename a finished file or folder, its content on the disk before its name is."""
    flush(partial)
    partial.replace(path)
    _fsync(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on the disk; links are left alone."""
    for inner in path.iterdir() if path.is_dir() else ():
        if not inner.is_symlink():
            flush(inner)
    _fsync(path)


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_writable(path: Path) -> None:
    """Raise `ConfigError` unless a file can be made where `path` is to be: said before hours are spent on it."""
    path = path.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir() or (folder != path and folder.exists()))
    if not folder.is_dir():
        raise ConfigError(f"{path} can't be made, because {folder} is a file; choose another folder")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"can't write to {folder} ({error.strerror}); make it writable, make room, or choose another folder"
        ) from None


# --- times of files --------------------------------------------------------------------------------------------------


def _files(path: Path) -> Iterator[Path]:
    """A path and, of a folder, all in it."""
    yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in sorted(names))


def check_clock(paths: Iterable[Path]) -> None:
    """Raise `ConfigError` where a file is from the future: with the clock set back, Snakemake takes stale for new."""
    now = time.time()
    for path in paths:
        for file in _files(path):
            written = file.lstat().st_mtime if os.path.lexists(file) else now
            if written > now + CLOCK_SKEW:
                raise ConfigError(
                    f"{file} is from the future ({datetime.fromtimestamp(written):%Y-%m-%d %H:%M:%S}), so the clock "
                    "was set back; set it right, or date the files anew: "
                    f"find {path} -exec touch -h -d @{now:.0f} {{}} +"
                )


# --- the version of code: what a rule depends on ---------------------------------------------------------------------


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
    """The file of a module under `root`; None for what is no module there (a name imported from one)."""
    base = root / Path(*name.split("."))
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()), None)


def _imports(tree: ast.Module, package: str) -> set[str]:
    """What a module of `package` imports, by whole names; a name imported from a module may be one too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def _kernels(tree: ast.Module) -> list[str]:
    """Names of CUDA sources that a module names; they lie beside it."""
    constants = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return sorted(value for value in constants if isinstance(value, str) and value.endswith(".cu"))


@cache
def _parsed(source: bytes, package: str) -> tuple[str, frozenset[str], list[str]]:
    tree = _without_docstrings(ast.parse(source))
    return ast.dump(tree), frozenset(_imports(tree, package)), _kernels(tree)


def hash_of_code(modules: Iterable[str], root: Path, counts: Callable[[str], bool]) -> str:
    """A hash of modules under `root` and of all that they import from there, as far as `counts` says of a name.

    It is blind to comments, docstrings and layout of Python, not of the CUDA sources that a module names; imports by a
    computed name aren't seen.
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


def _only_tells(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in TELLING)


def of_this_package(name: str) -> bool:
    """Whether a module is one of this package's."""
    return name.split(".")[0] == PACKAGE.name
