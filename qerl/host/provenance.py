"""The origin of results: stamp, code version, and files that are written completely or not at all."""

from __future__ import annotations

import ast
import errno
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from importlib.util import resolve_name
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from qerl import __version__
from qerl.host.lease import alone
from qerl.settings.base import ConfigError

# Files that are written completely or not at all, and checks for a clock that was set back.

#: Errors of a write for which there is no room.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: How libraries in Rust ("No space left on device (os error 28)") and Python state an error of the system.
_STATED = re.compile(r"(?:\(os error|\[Errno) (\d+)")
#: Seconds by which the clocks of several machines may differ.
CLOCK_SKEW = 60


def cache_folder(name: str) -> Path:
    """The user's folder for files that can be recreated."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qerl" / name


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """A context in which a write that finds no room is an `OSError` that names a file or `place`.

    Python names no file if the disk is full. Libraries in Rust, and copies of folders, state the system's error in
    words alone. All other errors pass as they are.
    """
    try:
        yield
    except Exception as error:  # tokenizers raises no narrower one
        stated = _STATED.search(str(error))
        number = int(stated[1]) if stated else 0
        # A ValueError is a sentence for the user, which may quote such words.
        # An error of the system may name the file that was written; the error of a copy names its source first.
        named = isinstance(error, OSError) and error.filename is not None and error.filename2 is None
        if number not in NO_ROOM or isinstance(error, ValueError) or named:
            raise
        raise OSError(number, os.strerror(number), str(place)) from error


def write_json(path: Path, value: Any) -> None:
    """Write a result completely or not at all."""
    write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if the process is killed or the power fails."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`, with bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with writing(path.parent):
        partial.write_bytes(content)
        put(partial, path)


def share(path: Path) -> None:
    """Give a file, or the safetensors files of a folder, the mode of new files, which the umask decides.

    safetensors writes files that only their owner can read.
    """
    os.umask(mask := os.umask(0o077))
    for file in path.rglob("*.safetensors") if path.is_dir() else [path]:
        file.chmod(0o666 & ~mask)


def put(partial: Path, path: Path) -> None:
    """Rename a finished file or folder after its content has reached the disk."""
    flush(partial)
    partial.replace(path)
    _fsync(path.parent)


def make_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write the folder `target` unless it exists, completely or not at all, by one process at a time."""
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.partial")
    with writing(target.parent), alone(partial):
        shutil.rmtree(partial / target.name, ignore_errors=True)
        fill(partial / target.name)
        put(partial / target.name, target)
        shutil.rmtree(partial)


def flush(path: Path) -> None:
    """Wait until a file, or a folder with its content, is on the disk. Links are ignored."""
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
    """Raise `ConfigError` unless a file can be made at `path`, before hours of work are lost."""
    path = path.absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.is_dir() or (folder != path and folder.exists()))
    if not folder.is_dir():
        raise ConfigError(f"{path} can't be made, because {folder} is a file; choose another folder")
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"can't write to {folder} ({error.strerror}); make it writable, make room, or name another "
            "place (`out`, --out)"
        ) from None


def check_clock(paths: Iterable[Path]) -> None:
    """Raise `ConfigError` if a file is from the future: after the clock is set back, Snakemake trusts stale files."""
    now = time.time()
    for path in paths:
        for file in itertools.chain([path], path.rglob("*")):
            written = file.lstat().st_mtime if os.path.lexists(file) else now
            if written > now + CLOCK_SKEW:
                raise ConfigError(
                    f"{file} is from the future ({datetime.fromtimestamp(written):%Y-%m-%d %H:%M:%S}), so the clock "
                    "was set back; set it right, or date the files anew: "
                    f"find {path} -exec touch -h -d @{now:.0f} {{}} +"
                )


# The code version of a result: a hash of modules and of all modules that they import.

PACKAGE = Path(__file__).parents[1]
#: The version of the package. Modules take it from here, because `qerl` itself can load every module on demand, so
#: that all code would decide the results of a module that imports it.
VERSION = __version__

#: Modules that decide no result, because they only report progress and origin, or plan: the fields of a job decide.
TELLING = ("qerl.host.console", "qerl.host.provenance", "qerl.jobs", "qerl.report_jobs", "qerl.trackers")
#: Suffixes of files beside a module, which it names in a string: CUDA sources, and templates and styles of pages.
_BESIDE = (".cu", ".j2", ".css", ".js")


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
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = _with_packages(_imports(nodes, package))
    return code, frozenset(names), sorted(text for text in texts if Path(text).suffix in _BESIDE)


def code_of(modules: Iterable[str], root: Path, counts: Callable[[str], bool]) -> dict[str, str]:
    """The code of modules under `root` and of all modules that they load from there and for which `counts` is true.

    Comments, docstrings and layout of Python don't count; in files that a module names (`_BESIDE`) they do. A module
    is loaded by an import; what is loaded by its name as text isn't detected.
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


# The stamp on every result: commit, machine, versions, seed and time.

_GIT_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")


LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "llmcompressor",
    "compressed-tensors",
    "bitsandbytes",
    "triton",
    "flash-linear-attention",
    "vllm",
    "lm-eval",
    "lighteval",
)


# The commit is taken from the checkout that tracks the package, not from a project that it is installed into. A wheel
# or a ZIP has none, so every stamp also has the version and a hash of the files. QERL_COMMIT states a commit where
# git can't be asked.
def _git(*arguments: str) -> str | None:
    """The output of git in the package's folder. None if git refuses or isn't installed."""
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

    A package from a wheel, or unpacked without git, has no commit. QERL_COMMIT can state one.
    """
    commit = os.environ.get("QERL_COMMIT")
    checkout = {"commit": commit, "dirty": None} if commit else _checkout()
    return {**checkout, "version": VERSION, "files": _hash_of_files(PACKAGE)}


def machine() -> dict[str, Any]:
    """CPU, cores this process may use, GPUs with their driver, memory in GiB, and a short label for captions.

    `host` is a hash that is the same for all processes of a machine, whatever container they are in, until it boots.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch, gpus = sys.modules.get("torch"), []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    models = re.findall(r"(?m)^model name\s*: *(.*)$", _of_kernel("/proc/cpuinfo") or "")
    cpu = models[0] if models else platform.processor() or platform.machine()
    boot = _of_kernel("/proc/sys/kernel/random/boot_id") or platform.node()
    kinds = " + ".join(f"{count}x {name}" for name, count in Counter(gpus).items())
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": gpus or None,
        "driver": _of_kernel("/sys/module/nvidia/version") if gpus else None,
        "cuda": torch.version.cuda if torch and gpus else None,
        "host": hashlib.sha256(boot.encode()).hexdigest()[:8],
        "label": kinds or f"{cpu}, {cores} cores",
    }


def _of_kernel(path: str) -> str | None:
    """What a file of the kernel says; None on a system without it."""
    return Path(path).read_text(encoding="utf-8").strip() if Path(path).is_file() else None


def installed_version(library: str) -> str | None:
    """The installed version of a library, or None."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide results."""
    installed = {name: version for name in LIBRARIES if (version := installed_version(name))}
    return {"python": platform.python_version(), **installed}


def stamp(seed: int | None = None) -> dict[str, Any]:
    """The stamp of a result: code, machine, versions, seed and time (UTC)."""
    return {
        **code_state(),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
