"""Faster imports of large libraries, and clear errors for missing ones."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from qerl.settings.base import ConfigError
from qerl.settings.rollout import EngineSettings

DISTRIBUTION = "qerl"

#: Libraries that transformers, PEFT and accelerate import if they are installed, for functions that no job of a policy
#: calls: assisted generation (sklearn), object detection (scipy), layers of bitsandbytes, SageMaker (boto3).
OPTIONAL = ("sklearn", "scipy", "bitsandbytes", "boto3")
#: The versions that are known to work without these libraries; with other versions nothing is hidden.
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
    for requirement in requirements(extra):
        if installed_version(requirement.name) is None:
            raise ConfigError(
                f"{requirement.name} isn't installed; install it with the extra `{extra}`, as in "
                f"pip install '{DISTRIBUTION}[{extra}]'"
            )


def extras() -> list[str]:
    """The extras of this package; none if the package itself isn't installed."""
    try:
        return metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


def requirements(extra: str = "") -> list[Requirement]:
    """What an extra of this package requires, or with none the package itself; none if it isn't installed."""
    try:
        declared = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:
        return []
    if not extra:
        return [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [one for one in declared if one.marker and one.marker.evaluate({"extra": extra})]


def installed_version(library: str) -> str | None:
    """The installed version of a library, or None."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def check_engine(settings: EngineSettings, key: str) -> None:
    """Raise `ConfigError` if the settings under `key` select vLLM in this process and it isn't installed."""
    if settings.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{key}=vllm needs vLLM, which isn't installed here; install it (README, One GPU), or use {key}=native"
        )


def check_trackers(names: Iterable[str], key: str) -> None:
    """Raise `ConfigError` if the library of a tracker under `key` isn't installed."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # None: a folder of that name, such as W&B leaves behind
            raise ConfigError(
                f"{key}: {name} isn't installed; install it with the extra `{name}`, as in "
                f"pip install '{DISTRIBUTION}[{name}]', or leave it out"
            )


@contextmanager
def imports(without: Collection[str] = ()) -> Iterator[None]:
    """A context for the imports at the start of a process, whose objects are exempted from garbage collection.

    Modules are a million objects that stay until the process ends. The collector would scan them repeatedly during the
    imports, and once more at the end: 3 of the 10 s of CPU time of a training's imports. Functions of a library must
    not use it, because all other objects of the process would then never be collected either.

    Within the context, the libraries `without` seem not to be installed. Afterwards they can be imported.
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
    """A context in which libraries that aren't imported yet seem not to be installed.

    It sets None in `sys.modules`, as Python documents (The import system, "The module cache"). With other versions than
    `DO_WITHOUT` nothing is hidden, because they may not work without these libraries.
    """
    hidden = [name for name in libraries if name not in sys.modules] if _do_without() else []
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
        if "bitsandbytes" in hidden and "peft" in sys.modules:
            # PEFT also checks for bitsandbytes when it makes an adapter, and caches its first result.
            from peft.import_utils import is_bnb_4bit_available

            is_bnb_4bit_available()
    finally:
        for name in hidden:
            del sys.modules[name]


def _do_without() -> bool:
    return all(metadata.version(name) in versions for name, versions in DO_WITHOUT.items())
