"""Functions that a configuration names by import path (`module:function`): rewards and data sets of the user.

Modules are found among the installed ones, then in the working directory.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qerl.config import ConfigError


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


def source_version(path: str) -> str:
    """A hash of the file of the function's module, blind to comments and layout; what the module imports is left out.

    Runs and rules carry it, so that a change of the file counts as a change of the settings.
    """
    load(path)
    module = sys.modules[path.partition(":")[0]]
    file = inspect.getsourcefile(module) if getattr(module, "__file__", None) else None
    if file is None:
        raise ConfigError(f"{path}: the module has no source file, so a change of it couldn't be noticed")
    return hashlib.sha256(ast.dump(ast.parse(Path(file).read_bytes())).encode()).hexdigest()[:12]
