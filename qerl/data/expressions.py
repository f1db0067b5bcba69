"""Verdicts of libraries on what policies wrote, in a helper process, under limits that hold for any input.

LaTeX expressions are compared by math-verify, and answers to problems of reasoning-gym are scored by its task.

math-verify bounds its time by SIGALRM, which works in a main thread only and can't interrupt the arithmetic of big
numbers in C. Here a helper process forks for each comparison, and the kernel ends a fork that uses more than
`CPU_SECONDS` or `MEMORY_BYTES`. This works in any thread of any process for any expression. The limit is CPU time, so
that a busy machine gives the same verdicts as an idle one.

This file is also the helper's program; it imports nothing of this package.
"""

from __future__ import annotations

import ast
import atexit
import inspect
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from typing import Any, BinaryIO, NoReturn, cast

CPU_SECONDS = 2.0
MEMORY_BYTES = 2 << 30

#: Exit statuses of a fork; a signal ends it at a limit, and any other status is an error of the comparison itself.
_DONE, _LIMIT = 0, 11
#: math-verify's limits in seconds of wall-clock time, which are so high that only ours take effect.
_NEVER = 3600


def equal(expected: str, answer: str) -> bool | None:
    """Whether `answer` is mathematically equal to `expected` (LaTeX, without delimiters); None above the limits."""
    points = _helper.ask(json.dumps([expected, answer]).encode() + b"\n")
    return None if points is None else points == 1


def score(answer: str, entry: str) -> float | None:
    """The points, from 0 to 1, that a task of reasoning-gym gives an answer; None above the limits.

    `entry` is JSON with `task`, `arguments` (of its configuration), `level` (of its curriculum, or null), and `answer`
    and `metadata` as the task makes them.
    """
    return _helper.ask(json.dumps([answer, json.loads(entry)]).encode() + b"\n")


# math-verify's own limit is SIGALRM, which needs the main thread; elsewhere it fails, and the library turns that into
# "wrong". The kernel's limit of CPU time holds in any thread, and verdicts don't depend on the machine's load. A
# comparison costs about five milliseconds.
class _Helper:
    """The helper process, started with the first question; one question at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes) -> float | None:
        """The points that the question's fork gives, 1 for equal expressions; None if it exceeded a limit."""
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
                status, _, points = stdout.readline().partition(b" ")
            except BrokenPipeError:  # it couldn't start
                status = b""
        if int(status or 1) > 0 and int(status or 1) != _LIMIT:
            raise RuntimeError(f"the comparison of {question.decode().strip()} failed; its error stands above")
        return float(points) if int(status) == _DONE else None


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


# Several scorers of reasoning-gym have Python evaluate the answer (`eval`, or SymPy's `parse_expr`). An answer that
# could call any function thereby, and so run any code, counts as an empty one.

#: The calls that an answer for `parse_expr` may have. It may have no text, which SymPy would evaluate, too.
_FUNCTIONS = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "sqrt", "Integral")
_PARTS = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Name, ast.Tuple, ast.expr_context)
#: What scorers raise for answers that they can't read.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)


def task_of(name: str, arguments: Mapping[str, Any], level: int | None, seed: int, size: int) -> Any:
    """A data set of reasoning-gym. Its errors about name, arguments and level propagate."""
    from reasoning_gym.factory import create_curriculum, create_dataset

    of_level = {}
    if level is not None:
        curriculum = create_curriculum(name)
        if level >= (count := max(len(attribute.levels) for attribute in curriculum.attributes.values())):
            raise ValueError(f"level {level} is too high: there are levels 0 to {count - 1}")
        curriculum.set_global_level(level)
        of_level = vars(curriculum.generate_configuration())
    return create_dataset(name, **{**of_level, **arguments, "seed": seed, "size": size})


@cache
def _scorer(name: str, arguments: str, level: int | None) -> tuple[Callable[..., float], str]:
    task = task_of(name, json.loads(arguments), level, seed=0, size=1)
    return task.score_answer, inspect.getsource(type(task).score_answer)


def points_of(answer: str, entry: Mapping[str, Any]) -> float:
    """The points of an answer in this process, without limits; `score` explains the entry."""
    scorer, source = _scorer(entry["task"], json.dumps(entry["arguments"], sort_keys=True), entry["level"])
    evaluated = ("eval(" in source and "(" in answer) or ("parse_expr(" in source and not _is_formula(answer))
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # some scorers print what is wrong
            return float(scorer("" if evaluated else answer, entry))
    except _UNREADABLE:
        return 0.0


def _is_formula(answer: str) -> bool:
    """Whether an answer for `parse_expr` has numbers, names, operators and calls of `_FUNCTIONS` alone."""
    try:
        parts = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError):
        return False
    return all(
        isinstance(part, _PARTS)
        or (isinstance(part, ast.Constant) and isinstance(part.value, (int, float)))
        or (isinstance(part, ast.Call) and getattr(part.func, "id", "") in _FUNCTIONS and not part.keywords)
        for part in parts
    )


def _judge(question: bytes, result: int) -> NoReturn:
    """Compare, write the points to the file `result` and exit; SIGPROF ends the process when its time is up."""
    status = 1
    try:
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        first, second = json.loads(question)
        points = _compare(first, second) if isinstance(second, str) else points_of(first, second)
        os.write(result, b"%r" % float(points))
        status = _DONE
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
        if b'"task": ' in question:  # loaded once, before any fork
            _, entry = json.loads(question)
            _scorer(entry["task"], json.dumps(entry["arguments"], sort_keys=True), entry["level"])
        read, write = os.pipe()
        fork = os.fork()
        if fork == 0:
            _judge(question, write)
        os.close(write)
        with os.fdopen(read, "rb") as result:
            points = result.read()
        _, status = os.waitpid(fork, 0)
        replies.write(b"%d %s\n" % (os.waitstatus_to_exitcode(status), points))


if __name__ == "__main__":
    _serve()
