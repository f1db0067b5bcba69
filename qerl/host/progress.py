"""Progress of long work: a bar on a terminal, or a line at intervals in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from qerl.host.screen import VisibleFormatter, console, join_screen

T = TypeVar("T")
log = logging.getLogger("qerl")

#: The least columns of a screen on which a bar is drawn.
_BARRED = 80
#: Seconds between two lines of progress in a log.
LOG_EVERY = 15.0


def configure_logging() -> None:
    """Log time-stamped lines to standard error, which Snakemake's rules redirect to their log files."""
    handler = logging.StreamHandler()
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)
    join_screen()


class Advance(Protocol):
    """Counts one more item as done, and shows what is to be said of it."""

    def __call__(self, about: str = "") -> None: ...  # noqa: D102


def showing(total: int, what: str, start: int = 0) -> AbstractContextManager[Advance]:
    """A context that shows how many of `total` are done, of which `start` were done before, and the time left."""
    screen = console()
    return _bar(total, what, start, screen) if screen.is_terminal else _lines(total, what, start)


def track(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield `items` and show how many of `total` are done."""
    with showing(total, what) as advance:
        for item in items:
            yield item
            advance()


def _columns(width: int) -> list[ProgressColumn]:
    """The parts of a bar. Where the line is short, what is said of an item takes several, and the bar itself none."""
    whole, folded = Column(no_wrap=True), Column(overflow="fold")
    return [
        TextColumn("{task.description}"),
        *([BarColumn(10)] if width >= _BARRED else []),
        MofNCompleteColumn(table_column=whole),
        TextColumn("{task.fields[about]}", table_column=folded),
        TimeRemainingColumn(table_column=whole),
    ]


@contextmanager
def _bar(total: int, what: str, start: int, screen: Console) -> Iterator[Advance]:
    alone = screen.stderr  # else what libraries print belongs in the log
    with Progress(*_columns(screen.width), console=screen, redirect_stdout=alone, redirect_stderr=alone) as progress:
        task = progress.add_task(what, total=total, completed=start, about="")
        yield lambda about="": progress.update(task, advance=1, about=about)


@contextmanager
def _lines(total: int, what: str, start: int) -> Iterator[Advance]:
    done, begun = start, time.monotonic()
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
