"""A killed training job continues from its checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qerl.cli.workflow import run_job
from qerl.jobs import TrainJob
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests import jobs
from tests.forks import call, fork_processes
from tests.jobs import metrics_of, train_job, write_inputs

pytestmark = [pytest.mark.slow]
SETTINGS = {
    **jobs.SETTINGS,
    "processes": 2,
    "steps": 8,
    "rollout": {"prompts": 4, "group_size": 4, "sampling": {"max_tokens": 12}},
    "optimizer": {"learning_rate": 1e-2},
    # The length of a completion is what those of an untrained policy differ in.
    "reward": {"overlong_buffer": 11},
    "checkpoint_every": 2,
}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def job(tmp_path):
    write_inputs(tmp_path, num_hidden_layers=1)

    def of(name: str) -> TrainJob:
        settings = parse(RunSettings, SETTINGS, "test")
        return train_job(settings, tmp_path / "base", tmp_path / "data", tmp_path / f"work-{name}", tmp_path / name)

    return of


#: The command `qerl`, as pip installs it.
COMMAND = "import sys\nfrom qerl.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def start(job: TrainJob, folder: Path) -> subprocess.Popen:
    """Start the job by a command in a working directory with a file that no library of its processes may import."""
    (folder / "struct.py").write_text("raise SystemExit('imported from the working directory')")
    (folder / "bin").mkdir()
    (folder / "bin/qerl").write_text(COMMAND)
    command = [sys.executable, "bin/qerl", "rule", job.model_dump_json()]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def children(process: subprocess.Popen) -> list[Path]:
    """The entries in /proc of the processes that the job started."""
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [Path("/proc") / pid for pid in started]


def finish(job: TrainJob, folder: Path) -> None:
    """Run the job to its end, in forks and on one thread."""

    def program() -> None:
        with pytest.MonkeyPatch.context() as patch:
            fork_processes(patch)
            run_job(job)

    run = call(program, folder, ENVIRONMENT)
    assert run.returncode == 0, run.stderr


def test_sigkill_leaves_a_run_that_continues_bit_for_bit(job, tmp_path):
    """Of two processes; one ends at once, between any two writes, in `tests/faults/test_files.py`."""
    finish(job("whole"), tmp_path)
    victim = start(job("killed"), tmp_path)
    while len(list(tmp_path.glob("work-killed/*/step-*.pt"))) < 2:
        assert victim.poll() is None, victim.stderr.read()
        time.sleep(0.01)
    workers = children(victim)
    assert len(workers) >= 2
    assert not any("/sklearn/" in (worker / "maps").read_text() for worker in workers)  # the command hid it
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    while any(worker.exists() for worker in workers):  # a process left over would write beside the next run
        time.sleep(0.1)
    assert not (tmp_path / "killed").exists()
    [metrics] = tmp_path.glob("work-killed/*/metrics.jsonl")
    before = metrics_of(metrics.parent)[0]
    finish(job("killed"), tmp_path)
    assert metrics_of(tmp_path / "killed")[0] == before  # with its seconds: not done again
    whole, killed = (load_file(tmp_path / name / "policy/adapter_model.safetensors") for name in ("whole", "killed"))
    torch.testing.assert_close(killed, whole, rtol=0, atol=0)
    assert any(tensor.count_nonzero() for key, tensor in whole.items() if "lora_B" in key)  # something was learned
    rewards = [[row["reward"] for row in metrics_of(tmp_path / name)] for name in ("whole", "killed")]
    assert rewards[0] == rewards[1]
    assert len(rewards[0]) == 8
    assert not (tmp_path / "work-killed").exists()
