"""The user's screen and the progress of long work; what libraries print goes to a log."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import fill
from typing import IO, Protocol, TextIO, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

# The user's screen: what the project says appears there, and what libraries print goes to a log.

#: The variable with a path that opens the screen, for processes that a command starts. Their standard error is the log.
SCREEN = "QERL_SCREEN"
#: How a character is written that the screen's encoding lacks: as its number.
UNKNOWN = "backslashreplace"
log = logging.getLogger("qerl")
#: The console on the screen while standard error is a log.
_console: Console | None = None
#: The run of a cohort that this thread trains; empty where one run says all.
_run: ContextVar[str] = ContextVar("run", default="")


@contextmanager
def naming(run: str) -> Iterator[None]:
    """A context whose lines and progress have the run's name before them, for threads that print in turn."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def _name_run(record: logging.LogRecord) -> bool:
    if run := _run.get():
        record.msg, record.args = f"{run}: {record.getMessage()}", ()
    return True


log.addFilter(_name_run)


#: Characters of the categories of `_HIDDEN` that text needs: the joiners are part of words and of emoji.
_NEEDED = "\n\t\u200c\u200d"
#: Unicode's categories of control characters, of format characters such as bidirectional overrides, and the like.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def visible(text: str) -> str:
    """The text with each control or format character as its number, such as `\\x1b`, but line breaks and tabs.

    What models, templates and files say may hold sequences that a terminal obeys, or that reorder what is read.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if character not in _NEEDED and unicodedata.category(character) in _HIDDEN
        else character
        for character in text
    )


class VisibleConsole(Console):
    """A console on which texts can't control the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Segments of a renderable: text becomes `visible`, and rich's own control codes stay."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


class VisibleFormatter(logging.Formatter):
    """Formats a record, tracebacks included, without characters that control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of a record."""
        return visible(super().format(record))


def console() -> Console:
    """The console for progress: the screen, or else standard error."""
    return _console or VisibleConsole(stderr=True)


def wrapped(sentence: str, screen: Console) -> str:
    """A sentence for a terminal, in lines that don't end within a word. Elsewhere it stays one line."""
    if not screen.is_terminal:
        return sentence
    lines = (fill(line, screen.width, break_long_words=False, break_on_hyphens=False) for line in sentence.splitlines())
    return "\n".join(lines)


class ScreenHandler(logging.Handler):
    """Shows the lines of a log on a console, above a progress bar if there is one."""

    def __init__(self, shown: Console) -> None:
        super().__init__()
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message; a warning or an error says so."""
        level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        self._shown.print(Text(wrapped(level + record.getMessage(), self._shown)), soft_wrap=True)


# At the file descriptors, not by settings of each library: only there do C++ and other processes print too. A run's
# processes reach the screen by a path in /proc, since their standard error is the log.
@contextmanager
def quiet(log_file: Path | None = None) -> Iterator[None]:
    """Send what is printed to `log_file`, by libraries in any language and in any process that the block starts.

    Progress and the lines of the project's log stay on the screen; the lines are in the file too. Without a file, what
    was printed is shown only if the block fails by an error that isn't the user's.
    """
    if log_file:
        log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") if log_file else TemporaryFile() as file:
        try:
            with _redirected(file):
                yield
        except (ValueError, OSError):  # the command line says one sentence of it
            raise
        except Exception:
            file.seek(0)
            printed = "" if log_file else file.read().decode(errors="replace").replace("\r", "\n")
            sys.stderr.write(f"qerl: the log is {log_file}\n" if log_file else visible(printed))
            raise


@contextmanager
def _redirected(file: IO[bytes]) -> Iterator[None]:
    """Point standard output and error to a file; progress and the project's log stay on what standard error was.

    Processes that start now open the screen anew. Where it is a file, neither may overwrite what the other wrote.
    """
    global _console
    before = {number: os.dup(number) for number in (1, 2)}
    _point({number: file.fileno() for number in before})
    screen = before[2]
    fcntl.fcntl(screen, fcntl.F_SETFL, fcntl.fcntl(screen, fcntl.F_GETFL) | os.O_APPEND)
    os.environ[SCREEN] = f"/proc/{os.getpid()}/fd/{screen}"
    try:
        with os.fdopen(os.dup(screen), "w", buffering=1, errors=UNKNOWN) as stream:
            handler = _show(stream)
            try:
                yield
            finally:
                _console = None
                log.removeHandler(handler)
    finally:
        del os.environ[SCREEN]
        _point(before)
        for number in before.values():
            os.close(number)


def _point(descriptors: dict[int, int]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    for number, target in descriptors.items():
        os.dup2(target, number)


def _show(stream: TextIO) -> ScreenHandler:
    """Show progress and the project's log on a stream."""
    global _console
    _console = VisibleConsole(file=stream)
    handler = ScreenHandler(_console)
    log.addHandler(handler)
    return handler


def configure_logging() -> None:
    """Log time-stamped lines to standard error, which Snakemake's rules redirect to their log files.

    They are also shown on the screen of the command that started this process, if it has one.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)
    if path := os.environ.get(SCREEN):
        with suppress(OSError):  # a screen may be a socket, which can't be opened
            _show(Path(path).open("a", buffering=1, errors=UNKNOWN))  # noqa: SIM115


# Progress of long work: a bar on a terminal, or a line at intervals in a log.

T = TypeVar("T")

#: Seconds between two lines of progress in a log.
LOG_EVERY = 15.0


class Advance(Protocol):
    """Counts one more item as done, and shows what is to be said of it."""

    def __call__(self, about: str = "") -> None: ...  # noqa: D102


@contextmanager
def showing(total: int, what: str, start: int = 0) -> Iterator[Advance]:
    """A context that shows how many of `total` are done, `start` of them before, and the time left.

    On a terminal it is a bar. Runs side by side have lines there, too, since a terminal has one live display.
    """
    screen, done, begun = console(), start, time.monotonic()
    if screen.is_terminal and not _run.get():
        whole = Column(no_wrap=True)  # where the line is short, what is said of an item takes several
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(10),
            MofNCompleteColumn(table_column=whole),
            TextColumn("{task.fields[about]}", markup=False, table_column=Column(overflow="fold")),
            TimeRemainingColumn(table_column=whole),
        )
        alone = screen.stderr  # else what libraries print belongs in the log
        with Progress(*columns, console=screen, redirect_stdout=alone, redirect_stderr=alone) as display:
            task = display.add_task(what, total=total, completed=start, about="")
            yield lambda about="": display.update(task, advance=1, about=about)
        return
    last = begun

    def advance(about: str = "") -> None:
        nonlocal done, last
        done, now = done + 1, time.monotonic()
        if now - last > LOG_EVERY or done == total:
            last = now
            left = (now - begun) / (done - start) * (total - done)
            parts = [f"{what}: {done} of {total}", about, f"{left:.0f} s left" if done < total else ""]
            log.info(", ".join(filter(None, parts)))

    yield advance


def track(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield `items` and show how many of `total` are done."""
    with showing(total, what) as advance:
        for item in items:
            yield item
            advance()
