"""The speed of this code, measured alternately with that of the baseline's commit.

One interpreter can't import two versions of a package, so each version has its own process. They take turns: while one
works, the other waits for its next request. Load that lasts longer than a turn therefore slows both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from qerl.checkpoints.files import weights_format_of
from qerl.gates import worker
from qerl.gates.baselines import machine_class, own_baseline
from qerl.host.console import log
from qerl.host.provenance import PACKAGE
from qerl.jobs import SpeedJob
from qerl.results.schema import Provenance, SpeedPairs, SpeedResult
from qerl.results.store import write
from qerl.settings.base import ConfigError

#: The module is imported so that its content counts in the code version, but the worker runs it as a file.
WORKER = Path(worker.__file__)
WORKLOADS = ("rollout", "update")
_ERROR_LINES = 5


def measure_speed(job: SpeedJob) -> None:
    """Time this code alternately with the baseline's; without a baseline, the result has no samples."""
    provenance = Provenance.of_now()
    baseline = own_baseline(job.baselines, provenance.machine, job.key)
    if baseline is None:
        log.warning("no baseline of %s for this workload: nothing to compare with", machine_class(provenance.machine))
    samples = compare(baseline.commit, job.checkpoint, job.rounds, Path("work/gates")) if baseline else {}
    commit = baseline.commit if baseline else None
    write(job.out, SpeedResult(baseline=commit, samples=samples, provenance=provenance))


# Two processes, because one interpreter can't hold two versions of a package. On a CPU each has one thread: with two
# that wait for each other, any other program made times ten times longer.
def compare(commit: str, checkpoint: Path, rounds: int, work: Path) -> dict[str, SpeedPairs]:
    """Seconds per token of this code and of the code of `commit`, by workload, with one pair per round."""
    folders = {"now": PACKAGE.parent, "baseline": unpacked(commit, work / "code")}
    commits = {"now": os.environ.get("QERL_COMMIT"), "baseline": commit}
    samples: dict[str, dict[str, list[float]]] = {name: {"now": [], "baseline": []} for name in WORKLOADS}
    with tempfile.TemporaryDirectory(prefix="qerl-speed-") as folder, ExitStack() as stack:
        workers = {
            name: stack.enter_context(started(code, commits[name], checkpoint, Path(folder) / name))
            for name, code in folders.items()
        }
        for turn in range(rounds + 1):
            for workload in WORKLOADS:
                # The order alternates, so that neither version always runs right after the other.
                for name in sorted(workers, reverse=bool(turn % 2)):
                    seconds = workers[name].ask(workload)
                    if turn:  # the first is a warm-up
                        # Repeats within a turn share its disturbances, so the fastest of them is one sample.
                        samples[workload][name].append(min(seconds))
            log.info("round %d of %d", turn, rounds)
    return {workload: SpeedPairs(**times) for workload, times in samples.items()}


# --- the baseline's code ---------------------------------------------------------------------------------------------


def unpacked(commit: str, folder: Path) -> Path:
    """A folder with the package at `commit`, ready for import, which is unpacked once."""
    target = folder / commit
    if target.is_dir():
        return target.resolve()
    repository = ["git", "-C", str(PACKAGE.parent)]
    if subprocess.run([*repository, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True).returncode:
        raise ConfigError(
            f"commit {commit[:12]} of the baseline isn't in this clone; fetch it (git fetch --unshallow), "
            "or make a new baseline (qerl gate accept)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        archive, code = Path(name) / "code.zip", Path(name) / "code"
        subprocess.run([*repository, "archive", "--output", str(archive), commit, PACKAGE.name], check=True)
        shutil.unpack_archive(archive, code)
        code.rename(target)
    return target.resolve()


# --- workers ---------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A process that samples and trains on request."""

    process: subprocess.Popen[str]
    errors: Path

    def tell(self, request: Any) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def ask(self, request: Any) -> list[float]:
        """Send a request and wait for its answer."""
        assert self.process.stdout is not None
        self.tell(request)
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        return cast(list[float], json.loads(line))

    def _ended(self) -> ConfigError:
        code = self.process.wait()
        last = self.errors.read_text(encoding="utf-8").strip().splitlines()[-_ERROR_LINES:]
        return ConfigError(f"the timed process ended with exit code {code}: {' | '.join(last)}")


@contextmanager
def started(code: Path, commit: str | None, checkpoint: Path, folder: Path) -> Iterator[Worker]:
    """A context with a worker that imports the package from the folder `code` and trains in `folder`."""
    folder.mkdir(parents=True)
    errors = folder / "errors.txt"
    # One thread: with several that wait for each other, another program on the machine would slow all of them.
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    if commit:
        environment["QERL_COMMIT"] = commit  # unpacked code isn't in a clone from which to read its commit
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        errors.open("w", encoding="utf-8") as stderr,
        subprocess.Popen([sys.executable, str(WORKER)], env=environment, cwd=folder, stderr=stderr, **pipes) as process,  # type: ignore[call-overload]
    ):
        worker = Worker(process, errors)
        try:
            policy = {"checkpoint": str(checkpoint.resolve()), "weights": weights_format_of(checkpoint)}
            worker.tell({"code": str(code), "folder": str(folder), **policy})
            yield worker
        finally:
            process.kill()
