"""Imports of large libraries, quicker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports() -> Iterator[None]:
    """For a block of imports at the start of a process: the garbage collector never looks through what they make.

    Modules stay until the process ends, and they are a million objects. The collector would look through them time and
    again as they are made, and once more at the end: 3 of the 10 s of CPU time that the imports of a training take.
    In a library's functions it would be wrong: what else there is in the process is kept for good too.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
