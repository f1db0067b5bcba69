"""Two processes of one run against one process on the same batch (gloo, on the CPU)."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from typer.testing import CliRunner

from qerl.__main__ import main
from qerl.cli import commands as cli
from qerl.jobs import KilledError
from qerl.models.blocks import NoisyRMSNorm
from qerl.models.policy import choose_device
from qerl.models.quantize import quantize_checkpoint
from qerl.results.schema import RolloutRow, StoredCompletion
from qerl.results.store import read_rows
from qerl.rl.parallel import Processes, start_processes
from qerl.rl.train import make_trainer, train_run
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from tests.conftest import nightly
from tests.forks import run_program
from tests.jobs import train_job, write_inputs

SETTINGS = {
    "model": "tiny",
    "dataset": "arithmetic",
    "weights": "nvfp4",
    "dtype": "float32",
    "steps": 2,
    # Three groups for two processes; dynamic sampling, a second update, the reference, dropout and noise take part.
    "rollout": {"prompts": 3, "group_size": 4, "resample": 1, "sampling": {"max_tokens": 40}},
    # The length of a completion is what those of an untrained policy differ in.
    "reward": {"overlong_buffer": 39},
    "adapter": {"rank": 4, "dropout": 0.1},
    "noise": {"schedule": "constant", "sigma_start": 0.05},
    "loss": {"name": "dapo", "kl": 0.05, "updates_per_rollout": 2, "correction": "token-truncate"},
    # AdamW divides a gradient by its size: where that is near zero, the order of additions shows.
    "optimizer": {"name": "adamw", "learning_rate": 1e-4},
    # One process takes all in one row, two cut it.
    "micro_batch_tokens": 2000,
    "checkpoint_every": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("run"))
    quantize_checkpoint(folder / "base", folder / "nvfp4", "nvfp4")
    return folder


def settings(**changes) -> dict:
    return parse(RunSettings, {**SETTINGS, **changes}, "test").model_dump(mode="json")


def run(folder, name: str, **changes):
    own = parse(RunSettings, settings(**changes), "test")
    train_run(train_job(own, folder / "nvfp4", folder / "data", folder / f"work-{name}", folder / name))
    weights = load_file(folder / name / "policy/adapter_model.safetensors")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return weights, rows


@pytest.mark.slow
def test_two_processes_make_the_same_loss_and_weights_as_one(folder, monkeypatch, forking):
    monkeypatch.setenv("QERL_COMMIT", "test")
    (one, one_rows), (two, two_rows) = run(folder, "one", processes=1), run(folder, "two", processes=2)
    exact = ("reward", "completion_tokens", "noise/norm", "problems", "learning_rate")
    close = ("loss", "entropy", "grad_norm", "mismatch/kl", "mismatch/max_ratio", "reference/kl", "clip_ratio/high")
    assert any(row["grad_norm"] > 0 for row in one_rows)
    for a, b in zip(one_rows, two_rows, strict=True):
        assert [a[key] for key in exact] == [b[key] for key in exact]
        assert [a[key] for key in close] == pytest.approx([b[key] for key in close], abs=1e-6, rel=1e-5)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-6, rtol=0, msg=name)
    alone, shared = (stored_rollouts(folder / name / "rollouts") for name in ("one", "two"))
    assert len(alone) == 2 * 3 * 4  # the first and the last step
    for a, b in zip(alone, shared, strict=True):
        assert a.tokens == b.tokens
        assert len(a.entropies) == len(a.tokens)
        assert a.entropies == pytest.approx(b.entropies, abs=2e-3)


def stored_rollouts(folder: Path) -> list[StoredCompletion]:
    return [c for file in sorted(folder.iterdir()) for row in read_rows(RolloutRow, file) for c in row.completions]


def record_noise(folder, values: dict) -> None:
    """Write the noise that each process has at step 3."""
    trainer = make_trainer(parse(RunSettings, values, "test"), folder / "nvfp4", folder / "data", folder / "unused")
    with trainer.noise.at(3, 4):
        noise = [m.noise.clone() for m in trainer.policy.lm.modules() if isinstance(m, NoisyRMSNorm)]
    torch.save(noise, folder / f"noise-{trainer.processes.count}-{trainer.processes.rank}.pt")


def test_the_noise_is_the_same_in_every_process_and_for_any_number_of_them(folder, forking):
    for count in (1, 2):
        given = folder, settings(processes=count)
        start_processes(count, record_noise, *given) or record_noise(*given)
    alone, *others = (torch.load(folder / f"noise-{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert any(z.abs().sum() > 0 for z in alone)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))


def fail(rank: int) -> None:
    if Processes().rank == rank:
        raise ValueError("the disk is on fire")


def test_the_failure_of_a_process_ends_the_run_and_is_reported(forking):
    with pytest.raises(RuntimeError, match=r"process 1 of 2 failed.*disk is on fire"):
        start_processes(2, fail, 1)


def test_a_killed_process_is_one_whose_run_may_be_tried_again(monkeypatch, tmp_path):
    def launch(*_):
        killed = ProcessFailure(local_rank=1, pid=2, exitcode=-signal.SIGKILL, error_file="none")
        raise ChildFailedError("a run", {1: killed})

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: launch)
    with pytest.raises(KilledError, match=r"process 1 of 2 was killed.*continues from its last checkpoint"):
        start_processes(2, fail, 1)
    monkeypatch.setattr("qerl.rl.train.train_run", lambda *_: start_processes(2, fail, 1))
    own = parse(RunSettings, {"model": "m", "dataset": "d", "processes": 2}, "test")
    job = train_job(own, Path("m"), Path("d"), tmp_path / "work", tmp_path / "r")
    left = CliRunner().invoke(cli.app, ["rule", job.model_dump_json()])
    assert left.exit_code == 137
    assert left.stderr.startswith("qerl: process 1 of 2 was killed")


@nightly
def test_a_script_that_every_process_would_run_again_is_told_what_to_write(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from qerl.rl.parallel import start_processes\nstart_processes(2, print)\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.stderr.splitlines()[-1].startswith(
        "qerl.settings.base.ConfigError: each of the 2 processes imports the "
    )
    assert 'write `if __name__ == "__main__":` before the calls' in done.stderr
    assert "Traceback" not in done.stderr.partition("ConfigError")[2]


def test_processes_of_a_run_import_nothing_from_the_working_directory_first_and_no_library_that_it_hid(tmp_path):
    script, place = tmp_path / "script.py", tmp_path / "place"
    place.mkdir()
    (place / "struct.py").write_text("raise SystemExit('imported from the working directory')")
    (tmp_path / "job.py").write_text(
        "try:\n    import sklearn\nexcept ImportError:\n    sklearn = None\n"
        "def say(what):\n    print(what, 'with' if sklearn else 'without', 'sklearn')\n"
    )
    script.write_text(
        "from qerl.host.imports import OPTIONAL, absent\n"
        "if __name__ == '__main__':\n    with absent(OPTIONAL):\n        from job import say\n"
        "        from qerl.rl.parallel import start_processes\n"
        "    start_processes(2, say, 'a process of the run')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, script]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split("\n").count("a process of the run without sklearn") == 2, done.stderr


@pytest.mark.slow
def test_all_processes_of_a_run_end_by_a_signal_with_a_checkpoint(folder, tmp_path, monkeypatch, forking):
    """The command and its processes are forks here; `tests/faults/test_kill.py` starts both anew."""
    own = parse(RunSettings, {**SETTINGS, "processes": 2, "steps": 500, "checkpoint_every": 500}, "test")
    job = train_job(own, folder / "nvfp4", folder / "data", tmp_path / "work", tmp_path / "r")
    monkeypatch.setattr(sys, "argv", ["qerl", "rule", job.model_dump_json()])
    output = tmp_path / "said"
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), 2)
        run_program(main, tmp_path, {**os.environ, "QERL_COMMIT": "test"})
    try:
        ended = (0, 0)
        while ended == (0, 0) and not [*tmp_path.glob("work/*/metrics.jsonl")]:
            time.sleep(0.1)
            ended = os.waitpid(command, os.WNOHANG)
        assert ended == (0, 0), output.read_text()
        os.kill(command, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    finally:
        with suppress(ProcessLookupError):
            os.killpg(command, signal.SIGKILL)
    said = output.read_text()
    assert status == 128 + signal.SIGTERM, said
    assert said.splitlines()[-1] == "qerl: interrupted; run the same command to continue"
    [metrics], [checkpoint] = tmp_path.glob("work/*/metrics.jsonl"), tmp_path.glob("work/*/step-*")
    steps = len(metrics.read_text().splitlines())
    assert steps < 500
    assert checkpoint.name == f"step-{steps:06d}.pt"


def test_a_launcher_around_the_run_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="set `processes` in its settings, and call it without a launcher"):
        start_processes(2, fail, 0)


def test_more_processes_than_gpus_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="processes=2 needs 2 GPUs here, and this machine has 1"):
        start_processes(2, fail, 0)


def test_the_second_process_loads_onto_its_own_gpu(monkeypatch):
    """safetensors takes "cuda" for the first GPU, whichever is current: both processes would share it and hang."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_device() == torch.device("cuda:1")
