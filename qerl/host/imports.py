"""Imports of large libraries: quicker, and missing ones said in a sentence."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from packaging.requirements import Requirement

from qerl.settings.base import ConfigError
from qerl.settings.rollout import EngineSettings

DISTRIBUTION = "qerl"


def check_installed(extra: str) -> None:
    """Raise `ConfigError` unless the libraries of an extra of this package are there: said before anything long.

    Where the package itself isn't installed, as in a working tree on PYTHONPATH, nothing is known of its extras.
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
def imports() -> Iterator[None]:
    """Exempt the objects of a block of imports from garbage collection. The block stands at the start of a process.

    Modules stay until the process ends, and they are a million objects. The collector would scan them repeatedly while
    they are made, and once more at the end. This is 3 of the 10 s of CPU time of a training's imports. A library's
    function must not do so, because all other objects of the process would be kept for good, too.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
