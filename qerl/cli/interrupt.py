"""Ctrl-C ends a command with a sentence. The entry point imports this ahead of everything else: it costs nothing."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible() -> Iterator[None]:
    """Leave the process where the block is interrupted, and say how to go on: what a command has finished is kept."""
    try:
        yield
    except KeyboardInterrupt:
        print("qerl: interrupted; run the same command to continue", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
