"""What ends a process: Ctrl-C, the signals by which a cluster announces the end of a job, full memory, and limits.

The entry point imports this module ahead of everything else, so it must import nothing slow.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType

#: What clusters send before they end a job: SLURM's `--signal` sends any of these, its preemption SIGTERM.
ANNOUNCEMENTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Interrupted(KeyboardInterrupt):
    """The process ends because of the signal `number`; what is finished is kept."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.number = number


@contextmanager
def interruptible() -> Iterator[None]:
    """Leave the process where the block is interrupted, and say how to go on: what a command has finished is kept.

    The exit status is 128 plus the number of the signal, as a shell has it.
    """
    try:
        with handling(_interrupt):
            yield
    except KeyboardInterrupt as error:
        print("qerl: interrupted; run the same command to continue", file=sys.stderr)
        sys.exit(128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT))


def _interrupt(number: int) -> None:
    raise Interrupted(number)


class Announcement:
    """The announced end of this process: `number` is that of the first signal, and 0 before it."""

    number = 0


@contextmanager
def announced(alone: bool = True) -> Iterator[Announcement]:
    """A context in which a signal only sets `number`, so that the work comes to a point from which it can continue.

    With `alone`, a second signal interrupts at once. Processes of one run get the same signal from the cluster and from
    the process that started them, so they take it as one.
    """
    end = Announcement()

    def note(number: int) -> None:
        if end.number and alone:
            raise Interrupted(number)
        end.number = number

    with handling(note):
        yield end


@contextmanager
def handling(handle: Callable[[int], None]) -> Iterator[None]:
    """A context in which `handle` gets the number of each announcement. Python allows this in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def call(number: int, _: FrameType | None) -> None:
        handle(number)

    # One that is ignored stays so: `nohup` ignores SIGHUP.
    handled = [number for number in ANNOUNCEMENTS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, call) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


#: How the loader of libraries, the system and PyTorch state that memory is full.
_FULL = ("failed to map segment", "Cannot allocate memory", "can't allocate memory", "std::bad_alloc")


@contextmanager
def within_memory() -> Iterator[None]:
    """Leave the process with a sentence where the block needs more memory than there is, or than it may have."""
    try:
        yield
    except (MemoryError, ImportError, OSError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in _FULL):
            raise
        print(
            "qerl: this machine's memory is full, or a limit of this process is reached (ulimit -v, a container's); "
            "make room, raise the limit or take a smaller model, and start again: what is finished stays",
            file=sys.stderr,
        )
        sys.exit(2)


# Limits of time and memory for what foreign files let a library compute: chat templates and regular expressions.
#
# No thread can interrupt a regular expression or a power of integers, so a process of its own tries them first.

#: Seconds of CPU time, which a busy machine doesn't use up, and bytes of memory.
SECONDS = 5
_BYTES = 2**31
#: Seconds after which the process is ended whatever it does.
_WAIT = 120
_LIMITED = """
import json, resource, sys
given = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"],) * 2)
resource.setrlimit(resource.RLIMIT_AS, (given["bytes"],) * 2)
"""
#: As transformers renders: its tag "generation" alone is left out, which changes no text.
_TEMPLATE = """
import re
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
environment.filters["tojson"] = lambda value, **options: json.dumps(value)
environment.globals["strftime_now"] = str
def refuse(message):
    raise ValueError(message)
environment.globals["raise_exception"] = refuse
template = re.sub(r"{%-?\\s*(end)?generation\\s*-?%}", "", given["template"])
for messages in given["chats"]:
    try:
        environment.from_string(template).render(messages=messages, add_generation_prompt=True, **given["tokens"])
    except MemoryError:
        raise
    except Exception:
        pass  # what a template raises is said where its text is used
"""
_PATTERNS = """
import re
for pattern in map(re.compile, given["patterns"]):
    for name in given["names"]:
        pattern.fullmatch(name), pattern.match(name)
"""
_TEXT = "Two trains leave at 9 and at 10. Which arrives first, and when? " * 5
_CHATS = [
    [{"role": "user", "content": _TEXT}],
    [{"role": "system", "content": _TEXT}, {"role": "user", "content": _TEXT}],
    [{"role": role, "content": _TEXT} for role in ("user", "assistant", "user")],
]


@cache
def template_ends(template: str, tokens: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether a chat template renders short chats, or raises an error, within the limits; `tokens` are its names."""
    return _ends(_TEMPLATE, {"template": template, "chats": _CHATS, "tokens": dict(tokens)})


def patterns_end(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether regular expressions are valid and match names, or don't, within the limits."""
    return _ends(_PATTERNS, {"patterns": [*patterns], "names": [*names]})


def _ends(script: str, given: Mapping[str, object]) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _LIMITED + script],
            input=json.dumps({**given, "seconds": SECONDS, "bytes": _BYTES}),
            text=True,
            capture_output=True,
            timeout=_WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
