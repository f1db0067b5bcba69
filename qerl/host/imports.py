"""Faster imports of large libraries, and a sentence for a missing one."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from qerl.settings.base import ConfigError
from qerl.settings.rollout import EngineSettings

DISTRIBUTION = "qerl"

#: What transformers, PEFT and accelerate import wherever it is installed, for functions that no job of a policy calls:
#: assisted generation (sklearn), losses of object detection (scipy), layers of bitsandbytes, jobs on SageMaker (boto3).
OPTIONAL = ("sklearn", "scipy", "bitsandbytes", "boto3")
#: The versions that are known to do without: others import what they find.
DO_WITHOUT = {
    "transformers": SpecifierSet("~=5.17.0"),
    "peft": SpecifierSet("~=0.21.2"),
    "accelerate": SpecifierSet("~=1.15"),
}


def check_installed(extra: str) -> None:
    """Raise `ConfigError` unless the libraries of an extra of this package are installed, before any long work.

    If the package itself isn't installed, as in a working tree on PYTHONPATH, its extras are unknown and nothing is
    checked.
    """
    try:
        declared = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        return
    for requirement in declared:
        if requirement.marker and requirement.marker.evaluate({"extra": extra}) and not _is_there(requirement):
            raise ConfigError(
                f"{requirement.name} isn't installed; install it with the extra `{extra}`, as in "
                f"pip install '{DISTRIBUTION}[{extra}]'"
            )


def check_engine(settings: EngineSettings, key: str) -> None:
    """Raise `ConfigError` where the settings under `key` ask for vLLM, in this process, and it isn't installed."""
    if settings.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{key}=vllm needs vLLM, which isn't installed here; install it (README, One GPU), or use {key}=native"
        )


def _is_there(requirement: Requirement) -> bool:
    try:
        metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def imports(without: Collection[str] = ()) -> Iterator[None]:
    """Exempt the objects of a block of imports from garbage collection. The block stands at the start of a process.

    Modules stay until the process ends, and they are a million objects. The collector would scan them repeatedly while
    they are made, and once more at the end. This is 3 of the 10 s of CPU time of a training's imports. A library's
    function must not do so, because all other objects of the process would be kept for good, too.

    Inside the block, the libraries `without` look as if they weren't installed. After it, they can be imported.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with absent(without):
            yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


@contextmanager
def absent(libraries: Collection[str]) -> Iterator[None]:
    """Make the libraries that aren't imported yet look as if they weren't installed, for the length of the block.

    Python's documented way: a None in `sys.modules` (The import system, "The module cache"). Libraries that know how to
    do without them do; with versions other than `DO_WITHOUT` nothing is hidden, because they may not know.
    """
    hidden = [name for name in libraries if name not in sys.modules] if _do_without() else []
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
        if "bitsandbytes" in hidden and "peft" in sys.modules:
            # PEFT asks when it makes an adapter too, and keeps its first answer.
            from peft.import_utils import is_bnb_4bit_available

            is_bnb_4bit_available()
    finally:
        for name in hidden:
            del sys.modules[name]


def _do_without() -> bool:
    return all(metadata.version(name) in versions for name, versions in DO_WITHOUT.items())
