"""What ends a process: Ctrl-C, and the signals by which a cluster announces the end of a job.

The entry point imports this module ahead of everything else, so it must import nothing slow.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """The announced end of this process: `number` is the first signal's, and 0 before it."""

    number = 0


@contextmanager
def announced(alone: bool = True, also: Sequence[int] = ()) -> Iterator[Announcement]:
    """A context in which a signal only sets `number`, so that the work comes to a point from which it can continue.

    `also` are further signals than `ANNOUNCEMENTS`. With `alone`, a second signal interrupts at once. Processes of one
    run get the same signal from the cluster and from the process that started them, so they take it as one.
    """
    end = Announcement()

    def note(number: int) -> None:
        if end.number and alone:
            raise Interrupted(number)
        end.number = number

    with handling(note, (*ANNOUNCEMENTS, *also)):
        yield end


@contextmanager
def handling(handle: Callable[[int], None], signals: Sequence[int] = ANNOUNCEMENTS) -> Iterator[None]:
    """A context in which `handle` gets the number of each signal. Python allows this in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def call(number: int, _: FrameType | None) -> None:
        handle(number)

    # One that is ignored stays so: `nohup` ignores SIGHUP.
    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, call) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
