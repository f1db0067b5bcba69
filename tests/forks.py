"""Python programs in forks of the test process, which has already imported the modules that they need."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn

import pytest
import torch
from accelerate import PartialState
from torch.distributed.launcher import api

import qerl
from qerl.host.provenance import code_version
from tests.jobs import FUNCTIONS

#: Seconds after which a process of a run says where it is: far above what a test takes, and below its limit.
_HANGING = 300


def call(
    program: Callable[[], object], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Call `program` in a fork that works in `folder`: its exit status, and what it wrote."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            run_program(program, folder, environment)
        try:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        except BaseException:  # the test's limit
            os.kill(child, signal.SIGKILL)
            raise
        texts = (file.seek(0) or file.read() for file in (out, err))
        return subprocess.CompletedProcess([str(program)], status, *texts)


def use_package(folder: Path) -> None:
    """Have this fork import the package `qerl` in `folder`.

    Its modules are those that the test process has already, unless a file differs from theirs.
    """
    sys.path[:0] = [str(folder)]
    if _files(folder / "qerl") != _files(Path(qerl.__file__).parent):
        forget_package()


def forget_package() -> None:
    """Forget this package's modules, so that a fork imports another copy of them."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "qerl"]:
        del sys.modules[name]


def _files(package: Path) -> dict[Path, bytes]:
    found = (file for file in package.rglob("*") if file.suffix != ".pyc" and file.is_file())
    return {file.relative_to(package): file.read_bytes() for file in found}


def hash_code() -> None:
    """Hash the code of all jobs, which forks of this process then needn't do: it takes a second."""
    for function in FUNCTIONS:
        code_version(function.partition(":")[0])


def run_program(program: Callable[[], object], folder: Path, environment: Mapping[str, str]) -> NoReturn:
    """The body of a fork; it never returns to the test."""
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    status = 1
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        program()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def fork_processes(patch: pytest.MonkeyPatch) -> None:
    """Have a run of several processes fork them, which spares their imports, instead of starting them anew."""
    launch = api.elastic_launch

    def launch_forks(config, start):
        PartialState._reset_state()  # a fork would take this process's state for its own
        return partial(launch(replace(config, start_method="fork"), _start), start)

    torch.set_num_threads(1)  # a fork has no other threads
    patch.setattr(api, "elastic_launch", launch_forks)


def _start(start, *arguments):
    """Start a process that prints where it is if it hangs: nobody sees what processes wait for in each other."""
    faulthandler.dump_traceback_later(_HANGING)
    start(*arguments)
    faulthandler.cancel_dump_traceback_later()
