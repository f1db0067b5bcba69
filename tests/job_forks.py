"""Commands of `qerl` in forks of a process that has imported their libraries: a job's imports take longer than it."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch

from tests.forks import hash_code, run_program, use_package

#: Asks the process at `address` for a fork in its place; calls of Python for anything else are Python's.
_COMMAND = """#!{python} -IS
import json, os, socket, sys
arguments = sys.argv[1:]
if {name!r} == "python":
    if arguments[:3] != ["-P", "-m", "qerl"]:
        os.execv({python!r}, [{python!r}, *arguments])
    arguments = arguments[3:]
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    asked = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [1, 2])
    server.sendall(asked)
    status = server.recv(8)
if len(status) < 8:
    sys.exit("the process that forks for jobs has ended")
status = int.from_bytes(status, "big", signed=True)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
_ON_PARENTS_DEATH, _NAME = 1, 15  # PR_SET_PDEATHSIG and PR_SET_NAME of prctl(2)


@cache
def commands() -> Path:
    """A folder with `python` and `qerl` for the beginning of PATH, as long as this process lives."""
    folder = Path(tempfile.mkdtemp(prefix="qerl-jobs-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    for name in ("python", "qerl"):
        text = _COMMAND.format(python=sys.executable, name=name, address=listener.getsockname())
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    if os.fork() == 0:
        try:
            _serve(listener)
        except Exception:  # noqa: BLE001
            traceback.print_exc()  # os._exit prints nothing, and jobs only see that nobody answers
        finally:
            os._exit(1)
    listener.close()
    return folder


def _serve(listener: socket.socket) -> NoReturn:
    ctypes.CDLL(None).prctl(_ON_PARENTS_DEATH, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    for logger in (logging.getLogger(), logging.getLogger("qerl")):
        logger.handlers.clear()  # the tests'
    for path in _modules():
        import_module(path)
    if torch.cuda.is_initialized():
        raise RuntimeError("an import has started CUDA, which forks of this process can't use")
    hash_code()
    gc.collect()
    gc.freeze()
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            try:
                _answer(client)
            finally:
                os._exit(1)
        client.close()


def _modules() -> tuple[str, ...]:
    """The modules of jobs that need no GPU, and the harnesses, which evaluations import when they use them.

    A job of TRL, which no test of the DAG runs, imports for seconds what the others don't need.
    """
    from qerl.workflow.rules import KINDS

    paths = [kind.does for kind in KINDS.values() if hasattr(kind, "does")]
    return (*(path.partition(":")[0] for path in paths), "qerl.evals.lm_eval", "qerl.evals.lighteval")


def _answer(client: socket.socket) -> NoReturn:
    """Run what a client asks for in a fork with its outputs, and tell it the exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, outputs, _, _ = socket.recv_fds(client, 8, 2)
    with client.makefile("rb") as stream:
        arguments, folder, environment = json.loads(stream.read(int.from_bytes(size, "big")))
    job = os.fork()
    if job == 0:
        client.close()
        for number, output in enumerate(outputs, start=1):
            os.dup2(output, number)
        run_program(partial(_qerl, arguments), Path(folder), environment)
    status = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    client.sendall(status.to_bytes(8, "big", signed=True))
    os._exit(0)


def _qerl(arguments: Sequence[str]) -> None:
    """`python -m qerl` with the package of the caller's PYTHONPATH."""
    if package := os.environ.get("PYTHONPATH", "").partition(os.pathsep)[0]:
        use_package(Path(package))
    sys.argv = ["qerl", *arguments]
    if arguments[0] == "rule":  # the name of this process, for tests that look for it
        ctypes.CDLL(None).prctl(_NAME, f"qerl {json.loads(arguments[1])['kind']}".encode())
    torch.set_num_threads(1)  # a fork has no other threads
    runpy.run_module("qerl", run_name="__main__", alter_sys=True)
