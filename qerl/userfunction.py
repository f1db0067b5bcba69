"""Functions that a configuration names by import path (`module:function`): rewards and data sets of the user.

Modules are found among the installed ones, then in the working directory.
"""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qerl.config import ConfigError
from qerl.provenance import hash_of_code, of_this_package


def load(path: str) -> Callable[..., Any]:
    """Import the function `module:function`; a `ConfigError` says which part of the path is wrong.

    What the module itself raises while it is imported is passed on.
    """
    module_name, _, name = path.partition(":")
    # The installed command `qerl` hasn't the working directory on its path as `python -m qerl` has. It comes last, so
    # that a file in it can't take the place of a package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{path}: there is no module {module_name}; put {module_name.replace('.', '/')}.py into the working "
            "directory, or install it"
        ) from None
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{path}: module {module_name} ({module.__file__}) has no function {name}")
    if not callable(function):
        raise ConfigError(f"{path}: {name} is no function but of type {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def call(path: str, *arguments: Any, key: str, limit: float | None = None) -> Any:
    """What the function returns. `key` is where the configuration names it, and in `limit` seconds it must be done.

    What it raises is passed on with a note that names it; over the limit, a `ConfigError` says where it was.
    """
    function = load(path)
    try:
        with _limited(limit, key):
            return function(*arguments)
    except _OverTime as error:
        place = traceback.extract_tb(error.__traceback__)[-2]  # the last one is the handler of the signal
        raise ConfigError(
            f"{key} {path} wasn't done after {limit:g} s (it was at {place.filename}, line {place.lineno}); mend it, "
            "or allow it more time: then the run goes on from its last checkpoint"
        ) from error
    except Exception as error:
        error.add_note(f"{key} {path} raised this; mend the function, or what it depends on, and start again")
        raise


class _OverTime(BaseException):
    """No `Exception`, which the function might catch."""


@contextmanager
def _limited(limit: float | None, key: str) -> Iterator[None]:
    """Interrupt the block after `limit` seconds, Python code and waiting alike, by SIGALRM."""
    if limit is None:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(f"{key} can be limited in time in the main thread only; train there, or set timeout: null")

    def expire(*_: Any) -> None:
        raise _OverTime

    before = signal.signal(signal.SIGALRM, expire)
    other_timer = signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *other_timer)
        signal.signal(signal.SIGALRM, before)


def source_version(path: str) -> str:
    """A hash of the function's module and of the modules that it imports from beside it, blind to comments and layout.

    Beside it is the folder on the path that holds its module or package; of installed ones, their own package. Runs and
    rules carry it, so that a change of these files counts as a change of the settings.
    """
    load(path)
    name = path.partition(":")[0]
    source = inspect.getsourcefile(sys.modules[name]) if getattr(sys.modules[name], "__file__", None) else None
    if source is None:
        raise ConfigError(f"{path}: the module has no source file, so a change of it couldn't be noticed")
    file, depth = Path(source), name.count(".")
    root = file.parents[depth + (file.name == "__init__.py")]
    top = name.partition(".")[0]

    def counts(other: str) -> bool:
        return other.partition(".")[0] == top or not (_is_installed(root) or of_this_package(other))

    # Importing a module of a package runs the package, and those around it.
    packages = [name.rsplit(".", level)[0] for level in range(depth + 1)]
    return hash_of_code(packages, root, counts)


def _is_installed(root: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(root.parts)) or root == Path(sysconfig.get_path("stdlib"))
