"""The stamp on every result: commit, machine, versions, seed and time."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from qerl.provenance.code_version import PACKAGE
from qerl.provenance.version import VERSION

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


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
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
    kinds = " + ".join(f"{count}x {name}" for name, count in Counter(gpus).items())
    label = kinds or f"{_cpu_name()}, {cores} cores"
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
    """The stamp of a result: code, machine, versions, seed and time (UTC)."""
    return {
        **code_state(),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
