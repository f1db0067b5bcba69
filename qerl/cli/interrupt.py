"""Ctrl-C and full memory end a command with a sentence.

The entry point imports this ahead of everything else: it costs nothing.
"""

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
