"""Progress of long work: a bar on a terminal, or a line at intervals in a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
log = logging.getLogger("qerl")

#: Seconds between two lines of progress in a log.
LOG_EVERY = 15.0


def configure_logging() -> None:
    """Log time-stamped lines to standard error, which Snakemake's rules redirect to their log files."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    log.setLevel(logging.INFO)
    # It warns about a missing optional package for a function that isn't used here.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def track(items: Iterable[T], total: int, what: str, start: int = 0) -> Iterator[T]:
    """Yield `items` and show how many of `total` are done, of which `start` were done before."""
    console = Console(stderr=True)
    return _bar(items, total, what, start, console) if console.is_terminal else _lines(items, total, what, start)


def _bar(items: Iterable[T], total: int, what: str, start: int, console: Console) -> Iterator[T]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total, completed=start)
        for item in items:
            yield item
            progress.advance(task)


def _lines(items: Iterable[T], total: int, what: str, start: int) -> Iterator[T]:
    last = time.monotonic()
    for done, item in enumerate(items, start + 1):
        yield item
        if time.monotonic() - last > LOG_EVERY or done == total:
            last = time.monotonic()
            log.info("%s: %d of %d", what, done, total)
