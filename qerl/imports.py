"""Imports of large libraries, quicker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports() -> Iterator[None]:
    """For a block of imports at the start of a process: what they make is left to the garbage collector never.

    Modules stay until the process ends. The collector would look through their million objects time and again as they
    are made, and once more at the end: of 15 s of CPU time that an evaluation's imports take with it, 6 s.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
