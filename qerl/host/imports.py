"""Imports of large libraries, clear errors for missing ones, and user functions by import path (`module:function`)."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import inspect
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import metadata
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from qerl.host.provenance import hash_of_code, installed_version, of_this_package
from qerl.settings.base import ConfigError
from qerl.settings.data import DatasetSettings, FunctionData, ReasoningGymData
from qerl.settings.run import EngineSettings, RunSettings

# Faster imports of large libraries, and clear errors for missing ones.

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


def requirements(extra: str = "") -> list[Requirement]:
    """What an extra of this package requires, or with none the package itself; none if it isn't installed."""
    try:
        declared = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    except metadata.PackageNotFoundError:  # as in a working tree on PYTHONPATH
        return []
    marked = [(one, one.marker.evaluate({"extra": ""}) if one.marker else True) for one in declared]
    if not extra:
        return [one for one, always in marked if always]
    return [one for one, always in marked if not always and one.marker and one.marker.evaluate({"extra": extra})]


def extras() -> list[str]:
    """The extras of this package; none if the package itself isn't installed."""
    try:
        return metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


def check_installed(extra: str) -> None:
    """Raise `ConfigError` unless the libraries of an extra of this package are installed, before any long work."""
    for requirement in requirements(extra):
        if installed_version(requirement.name) is None:
            raise ConfigError(
                f"{requirement.name} isn't installed; install it with the extra `{extra}`, as in "
                f"pip install '{DISTRIBUTION}[{extra}]'"
            )


def check_engine(settings: EngineSettings, key: str) -> None:
    """Raise `ConfigError` if the settings under `key` select vLLM in this process and it isn't installed."""
    if settings.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"{key}=vllm needs vLLM, which isn't installed here; install it (README, One GPU), or use {key}=native"
        )


def check_libraries(names: Iterable[str], key: str) -> None:
    """Raise `ConfigError` if a library that `key` names, such as a tracker's, isn't installed."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # None: a folder of that name, such as W&B leaves behind
            raise ConfigError(
                f"{key}: {name} isn't installed; install it with the extra `{name}`, as in "
                f"pip install '{DISTRIBUTION}[{name}]', or leave it out"
            )


# Without the collector a training's imports take 7 s of CPU time instead of 10, an evaluation's 7 to 9 instead of 11.
@contextmanager
def imports(without: Collection[str] = ()) -> Iterator[None]:
    """A context for the imports at the start of a process, whose objects are exempted from garbage collection.

    Modules are a million objects that stay until the process ends. The collector would scan them repeatedly during the
    imports, and once more at the end. Functions of a library must not use it, because all other objects of the process,
    such as a notebook's, would then never be collected either.

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


def begin(functions: Sequence[str], without: Collection[str], *arguments: Any) -> None:
    """Begin another process: load functions, as `module:name`, and call the first with the others and `arguments`.

    Python itself would load their modules ahead of any context. `imports` explains the libraries `without`.
    """
    with imports(without):
        pairs = [function.partition(":") for function in functions]
        first, *others = [attrgetter(name)(importlib.import_module(module)) for module, _, name in pairs]
    first(*others, *arguments)


@contextmanager
def absent(libraries: Collection[str]) -> Iterator[None]:
    """A context in which libraries that aren't imported yet seem not to be installed.

    It sets None in `sys.modules`, as Python documents (The import system, "The module cache"). With other versions than
    `DO_WITHOUT` nothing is hidden, because they may not work without these libraries.
    """
    known = all(metadata.version(name) in versions for name, versions in DO_WITHOUT.items())
    hidden = [name for name in libraries if name not in sys.modules] if known else []
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


# User functions that a configuration names by import path (`module:function`): rewards and data sets.
#
# Modules are searched among the installed ones first, then in the working directory.

#: The arguments of a reward for one completion, and the keywords by which TRL's rewards are known.
_OF_REWARD, _OF_TRL = ("answer", "problem"), {"completions", "prompts"}
#: The specification and hash of each module that `check_unchanged` has seen; a reload makes a new specification.
_SEEN: dict[str, tuple[ModuleSpec | None, str]] = {}


def load(path: str, key: str = "") -> Callable[..., Any]:
    """Import the function `module:function`. Raises `ConfigError`, which says which part of the path is wrong.

    Errors name its `key` in the configuration. Errors that the module raises during its import propagate, with a
    note that names the function.
    """
    module_name, _, name = path.partition(":")
    named = f"{key} {path}".strip()
    # The working directory isn't on the path of the command `qerl` and of rules. It is added last, so that a file in it
    # can't shadow a package.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise ConfigError(f"{named}: the module ends the process; it must only define functions") from error
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{named}: there is no module {module_name}; put {module_name.replace('.', '/')}.py into the working "
                "directory, or install it"
            ) from None
        error.add_note(f"importing {named} raised this error; correct the module, and start again")
        raise
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{named}: module {module_name} ({module.__file__}) has no function {name}")
    if not callable(function):
        raise ConfigError(f"{named}: {name} is of type {type(function).__name__}, not a function; name a function")
    return function  # type: ignore[no-any-return]


def check(path: str, key: str) -> None:
    """Raise `ConfigError` unless the function can be imported and accepts the arguments of a function of `key`."""
    function, is_reward = load(path, key), key != "origin.function"
    arguments = _OF_REWARD if is_reward else ()
    # That of an object is its method; of a class, an instance of it is the value.
    plain = inspect.isroutine(function) or isinstance(function, (partial, type))
    called: Any = function if plain else type(function).__call__
    if not is_reward and (inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)):
        raise ConfigError(f"{key} {path} is `async`, and it is called without waiting; write it as a plain `def`")
    if is_reward and (inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)):
        raise ConfigError(f"{key} {path} has `yield`, so that its value is a generator; `return` a number instead")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return
    if is_reward and takes_batches(function):
        return
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if is_reward and {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds:
        raise ConfigError(
            f"{key} {path} takes any arguments, so that it may mean one completion or, as in TRL, many; name its "
            "parameters, such as `completions` or `answer, problem`"
        )
    try:
        signature.bind(*arguments)
    except TypeError:
        name, given = path.partition(":")[2], ", ".join(arguments)
        raise ConfigError(
            f"{key} {path} is defined as {name}{signature}, but it is called as {name}({given}); "
            f"write `def {name}({given})`{', or name a parameter `completions`, as in TRL' * is_reward}"
        ) from None


def check_environment(path: str, arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless an environment's class can be imported, takes the arguments and has the methods."""
    made = load(path, "environment.name")
    if lacking := [name for name in ("reset", "step") if not callable(getattr(made, name, None))]:
        raise ConfigError(
            f"environment.name {path} has no method {lacking[0]}; name a class with `reset(self, problem)` and "
            "`step(self, text)`"
        )
    try:
        inspect.signature(made).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"environment.arguments don't fit {path}{inspect.signature(made)}: {error}") from None


def check_functions(settings: RunSettings) -> None:
    """Check that the rewards and the environment of a run can be imported and are called as they are defined."""
    for name, reward in settings.reward.functions.items():
        check(reward.function, f"reward.functions.{name}")
    if settings.environment:
        check_environment(settings.environment.name, settings.environment.arguments)


def check_origin(dataset: DatasetSettings, key: str) -> None:
    """Check that the function or library that makes a data set can be imported; `key` is that of its origin."""
    if isinstance(dataset.origin, FunctionData):
        check(dataset.origin.function, "origin.function")
    if isinstance(dataset.origin, ReasoningGymData):
        check_libraries(["reasoning_gym"], f"{key}.source")


def takes_batches(function: Callable[..., Any]) -> bool:
    """Whether a reward takes many completions by TRL's keywords, as its parameters say."""
    try:
        return bool(_OF_TRL & set(inspect.signature(function).parameters))
    except ValueError:  # some functions written in C have no signature
        return False


def path_of(function: Callable[..., Any], key: str) -> str:
    """The import path of a function object. Raises `ConfigError` if another process couldn't import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    path = f"{module}:{name}"
    if module in (None, "__main__") or not name.isidentifier() or load(path) is not function:
        raise ConfigError(
            f"{key} is {path}, which a resumed run can't import; define the function in a file, such as mine.py, "
            "and import it from there"
        )
    return path


#: Calls a function in the main thread and returns its value, for a thread that has set this: a signal, and so a time
#: limit, interrupts the main thread alone.
main_thread: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("main_thread", default=None)


def call(path: str, *arguments: Any, key: str, limit: float | None = None, where: str = "") -> Any:
    """Call the function, with a limit of `limit` seconds, and return its value. `key` is its key in the configuration.

    What is awaitable is returned as it is (`results_of`). `where` ends what errors tell of the call.

    Its errors propagate, with a note that names it. Raises `ConfigError` with the file and line if it exceeds the limit
    or ends the process.
    """
    return guarded(partial(load(path, key), *arguments), f"{key} {path}", limit, where)


def guarded(work: Callable[[], Any], name: str, limit: float | None = None, where: str = "") -> Any:
    """The value of `work`, which calls or awaits functions of the user that errors `name`; see `call`."""
    in_main_thread = main_thread.get()

    def within_limit() -> Any:
        with _limited(limit):
            return work()

    try:
        return in_main_thread(within_limit) if in_main_thread else within_limit()
    except _OverTime as error:
        # Not the handler of the signal, which is in this file.
        place = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__][-1]
        raise ConfigError(
            f"{name} wasn't done after {limit:g} s{where} (it was at {place.filename}, line {place.lineno}); mend it, "
            "or allow it more time: then the run goes on from its last checkpoint"
        ) from error
    except SystemExit as error:
        raise ConfigError(
            f"{name} ended the process with code {error.code!r}{where}; raise an error there, or return a value"
        ) from error
    except Exception as error:
        error.add_note(f"{name} raised this{where}; mend the function, or what it depends on, and start again")
        raise


def results_of(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """What coroutines return, which run side by side; also within a notebook, whose thread has a loop already."""

    async def gathered() -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gathered())
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(asyncio.run, gathered()).result()
    finally:
        thread.shutdown(wait=False)


class _OverTime(BaseException):
    """The time limit is exceeded. It isn't an `Exception`, which the function might catch."""


@contextmanager
def _limited(limit: float | None) -> Iterator[None]:
    """A context that SIGALRM interrupts after `limit` seconds, also while it waits; only the main thread can be."""
    if limit is None or threading.current_thread() is not threading.main_thread():
        yield
        return

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
    """A hash of the function's module and of the neighbouring modules that it imports, without comments and layout.

    Neighbours are in the folder of `sys.path` that contains its module or package, or for installed modules in their
    package. Runs and rules include the hash, so that a change of these files counts as a change of settings.
    """
    load(path)
    name = path.partition(":")[0]
    source = inspect.getsourcefile(sys.modules[name]) if getattr(sys.modules[name], "__file__", None) else None
    if source is None:
        raise ConfigError(f"{path}: the module has no source file to hash; use a module with Python source")
    file, depth, top = Path(source), name.count("."), name.partition(".")[0]
    root = file.parents[depth + (file.name == "__init__.py")]
    installed = {"site-packages", "dist-packages"} & set(root.parts) or root == Path(sysconfig.get_path("stdlib"))

    def counts(other: str) -> bool:
        return other.partition(".")[0] == top or not (installed or of_this_package(other))

    # Importing a module of a package also runs the package and its parents.
    packages = [name.rsplit(".", level)[0] for level in range(depth + 1)]
    return hash_of_code(packages, root, counts)


def check_unchanged(path: str) -> None:
    """Raise `ConfigError` if the source has changed since this process first imported it.

    Python doesn't import a module twice, so a notebook would run the old function and record it as the new one.
    """
    version, spec = source_version(path), sys.modules[path.partition(":")[0]].__spec__
    seen_spec, seen_version = _SEEN.get(path, (None, version))
    if spec is seen_spec and version != seen_version:
        raise ConfigError(f"{path} has changed since this process imported it; start Python anew, or reload its module")
    _SEEN[path] = (spec, version)
