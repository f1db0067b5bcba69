"""Comparison of LaTeX expressions by math-verify in a helper process, under limits that hold for any input.

math-verify bounds its time by SIGALRM, which works in a main thread only and can't interrupt the arithmetic of big
numbers in C. Here a helper process forks for each comparison, and the kernel ends a fork that uses more than
`CPU_SECONDS` or `MEMORY_BYTES`. This works in any thread of any process for any expression. The limit is CPU time, so
that a busy machine gives the same verdicts as an idle one.

This file is also the helper's program; it imports nothing of this package.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from typing import BinaryIO, NoReturn, cast

CPU_SECONDS = 2.0
MEMORY_BYTES = 2 << 30

#: Exit statuses of a fork; a signal ends it at a limit, and any other status is an error of the comparison itself.
_EQUAL, _DIFFERENT, _LIMIT = 0, 10, 11
#: math-verify's limits in seconds of wall-clock time, which are so high that only ours take effect.
_NEVER = 3600


def equal(expected: str, answer: str) -> bool | None:
    """Whether `answer` is mathematically equal to `expected` (LaTeX, without delimiters); None above the limits."""
    status = _helper.ask(json.dumps([expected, answer]).encode() + b"\n")
    return None if status not in (_EQUAL, _DIFFERENT) else status == _EQUAL


# math-verify's own limit is SIGALRM, which needs the main thread; elsewhere it fails, and the library turns that into
# "wrong". The kernel's limit of CPU time holds in any thread, and verdicts don't depend on the machine's load. A
# comparison costs about five milliseconds.
class _Helper:
    """The helper process, started with the first question; one question at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes) -> int:
        """The exit status of the question's fork, or minus the number of the signal that ended it."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                # -P: the folder of this file isn't searched for modules, whose names could hide those of libraries.
                command = [sys.executable, "-P", __file__]
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                atexit.register(_stop, self.process)
            stdin, stdout = cast(BinaryIO, self.process.stdin), cast(BinaryIO, self.process.stdout)
            try:
                stdin.write(question)
                stdin.flush()
                status = int(stdout.readline() or 1)
            except BrokenPipeError:  # it couldn't start
                status = 1
        if status > 0 and status not in (_DIFFERENT, _LIMIT):
            raise RuntimeError(f"the comparison of {question.decode().strip()} failed; its error stands above")
        return status


def _stop(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes, which ends the helper
        pass


def _start_anew() -> None:
    """Forget the helper in a forked process, which can't share its parent's pipes."""
    global _helper
    _helper = _Helper()


_helper = _Helper()
os.register_at_fork(after_in_child=_start_anew)


# --- in the helper ---------------------------------------------------------------------------------------------------


def _compare(expected: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    gold, target = (
        parse(f"$\\boxed{{{content}}}$", extraction_config=latex, parsing_timeout=_NEVER)
        for content in (expected, answer)
    )
    return bool(verify(gold, target, timeout_seconds=_NEVER))


def _judge(question: bytes) -> NoReturn:
    """Compare and exit with the verdict as status; the kernel's SIGPROF ends the process when its time is up."""
    status = 1
    try:
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        status = _EQUAL if _compare(*json.loads(question)) else _DIFFERENT
    except (MemoryError, RecursionError):
        status = _LIMIT
    finally:
        if status == 1:
            traceback.print_exc()
        os._exit(status)


def _serve() -> None:
    # The parent handles Ctrl-C; this process ends when its pipe closes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # math-verify prints to standard output
    # Import and warm up once, before any fork.
    _compare("\\frac{1}{2}", "\\sqrt{x+1}")
    for question in sys.stdin.buffer:
        fork = os.fork()
        if fork == 0:
            _judge(question)
        _, status = os.waitpid(fork, 0)
        replies.write(b"%d\n" % os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    _serve()
