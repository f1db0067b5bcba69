"""Runs of several processes against runs of one on the same batch: replicas, shards and hosts (gloo, on the CPU)."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
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
from qerl.models.policy import choose_device
from qerl.results.schema import RolloutRow, StoredCompletion, read_rows
from qerl.rl.parallel import Processes, start_processes
from qerl.rl.train import Trainer, train_run
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from tests import jobs
from tests.conftest import nightly
from tests.forks import run_program
from tests.jobs import metrics_of, train_job, write_inputs
from tests.scaling import CASES, PAGE, RESULTS, page

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


def trained(folder: Path, place: Path, name: str, values: dict, hours: float | None = None, **changes):
    """Weights and metrics of a run in a folder `name`, or its state alone if it ends after some hours."""
    own = parse(RunSettings, {**values, **changes}, "test")
    base = folder / ("base" if own.method == "full" else "nvfp4")
    job = train_job(
        own, base, folder / "data", place / f"work-{name}", place / name, time_limit=hours, on_failure="row"
    )
    train_run(job)
    return results(job.out) if hours is None else None


def results(out: Path):
    [weights] = (out / "policy").glob("*model.safetensors")
    return load_file(weights), metrics_of(out)


def assert_same(one, other, few: float = 0.0) -> None:
    """Equal up to the order of sums, on which a processor decides, but for a share of `few` weights.

    AdamW divides a gradient by its own size. So where it is near zero, its rounding moves the weight by a part of the
    learning rate: such weights are few, and move by less than a tenth of it.
    """
    exact = ("reward", "completion_tokens", "noise/norm", "problems", "silent/completions")
    close = ("loss", "entropy", "grad_norm", "mismatch/kl", "mismatch/max_ratio", "reference/kl", "clip_ratio/high")
    assert any(row["grad_norm"] > 0 for row in one[1])
    for a, b in zip(one[1], other[1], strict=True):
        assert [a[key] for key in exact] == [b[key] for key in exact]
        assert [a[key] for key in close] == pytest.approx([b[key] for key in close], rel=1e-5, abs=1e-6)
    assert one[0].keys() == other[0].keys()
    ours, theirs = (torch.cat([weights[name].flatten() for name in one[0]]) for weights in (one[0], other[0]))
    assert (~torch.isclose(ours, theirs, atol=1e-6, rtol=1e-6)).float().mean() <= few
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.slow
def test_two_processes_make_the_same_loss_and_weights_as_one(inputs, tmp_path, forking):
    assert_same(*(trained(inputs, tmp_path, str(count), SETTINGS, processes=count) for count in (1, 2)))
    alone, shared = (stored_rollouts(tmp_path / name / "rollouts") for name in ("1", "2"))
    assert len(alone) == 2 * 3 * 4  # the first and the last step
    for a, b in zip(alone, shared, strict=True):
        assert a.tokens == b.tokens
        assert len(a.entropies) == len(a.tokens)
        assert a.entropies == pytest.approx(b.entropies, abs=2e-3)


def stored_rollouts(folder: Path) -> list[StoredCompletion]:
    return [c for file in sorted(folder.iterdir()) for row in read_rows(RolloutRow, file) for c in row.completions]


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
    monkeypatch.setattr("qerl.rl.cohort.deliver_run", lambda *_: start_processes(2, fail, 1))
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
    said = "qerl.settings.base.ConfigError: each of the 2 processes imports the script that starts them"
    assert done.stderr.splitlines()[-1].startswith(said)
    assert 'write `if __name__ == "__main__":` before the calls' in done.stderr
    assert "Traceback" not in done.stderr.partition("ConfigError")[2]


@pytest.mark.slow
def test_all_processes_of_a_run_end_by_a_signal_with_a_checkpoint(inputs, tmp_path, monkeypatch, forking):
    """The command and its processes are forks here; `tests/faults/test_kill.py` starts both anew."""
    own = parse(RunSettings, {**SETTINGS, "processes": 2, "steps": 500, "checkpoint_every": 500}, "test")
    job = train_job(own, inputs / "nvfp4", inputs / "data", tmp_path / "work", tmp_path / "r")
    monkeypatch.setattr(sys, "argv", ["qerl", "rule", job.model_dump_json()])
    output = tmp_path / "said"
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(output, os.O_CREAT | os.O_WRONLY), 2)
        run_program(main, tmp_path, {**os.environ})
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


def test_the_second_process_loads_onto_its_own_gpu(monkeypatch):
    """safetensors takes "cuda" for the first GPU, whichever is current: both processes would share it and hang."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_device() == torch.device("cuda:1")


def test_what_can_not_start_processes_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="processes=2 needs 2 GPUs here, and this machine has 1"):
        start_processes(2, fail, 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="set `processes` in its settings, and call it without a launcher"):
        start_processes(2, fail, 0)


# --- shards of a policy that is trained in full ---

FULL = {
    **SETTINGS,
    "weights": "bf16",
    "method": "full",
    # Three groups: one process of two and of four has fewer than another. Some completions are silent.
    "rollout": {"prompts": 3, "group_size": 4, "sampling": {"max_tokens": 24}},
    "reward": {"overlong_buffer": 23},
    "loss": {"name": "dapo", "updates_per_rollout": 2},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "warmup_ratio": 0.0},
    "micro_batch_tokens": 60,
    "checkpoint_every": 10,
}


def test_shards_train_as_one_process_and_continue_on_other_numbers_of_processes(inputs, tmp_path, forking):
    alone = trained(inputs, tmp_path, "one", FULL)
    assert any(row["silent/completions"] for row in alone[1])
    assert_same(alone, trained(inputs, tmp_path, "two", FULL, processes=2), 1e-4)
    # Two processes are stopped after the first step; one and four continue, these with what only saves memory.
    trained(inputs, tmp_path, "stopped", FULL, hours=1e-9, processes=2)
    sparing = {"gradient_checkpointing": True, "rollout": {**FULL["rollout"], "native": {"sleep": True}}}
    for count, changes in ((1, {}), (4, sparing)):
        shutil.copytree(tmp_path / "work-stopped", tmp_path / f"work-{count}")
        assert_same(alone, trained(inputs, tmp_path, str(count), FULL, processes=count, **changes), 1e-4)


# --- the table of measured runs ---


def test_the_page_has_the_table_of_the_stored_results():
    assert PAGE.read_text() == page(), "run `python -m tests.scaling`"
    missing = [name for name in CASES if not (RESULTS / name).exists()]
    assert page().count("not measured") == len(missing)


def test_every_case_is_a_run_on_as_many_gpus():
    for case in CASES.values():
        assert case.run().gpus == case.gpus
        assert case.compared is None or CASES[case.compared[0]].size == case.size


# --- hosts of a run: network namespaces with host names and folders of their own ---

NEW_NETWORK, NEW_HOSTNAME = 0x40000000, 0x04000000
LIMIT = 8
#: Untrained completions differ in their length alone.
LENGTHS = {
    "rollout": {"prompts": 2, "group_size": 4, "sampling": {"max_tokens": 24}},
    "reward": {"overlong_buffer": 23},
    "optimizer": {"name": "adamw", "learning_rate": 1e-4},
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """A network namespace with an address, in which runs are started by forks of this process."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.name, self.link = f"qerl{os.getpid()}n{number}", f"q{os.getpid()}n{number}"
        ip("netns", "add", self.name)

    def connect(self) -> None:
        ip("link", "set", self.link, "netns", self.name)
        ip("-n", self.name, "addr", "add", f"10.77.0.{self.number + 1}/24", "dev", self.link)
        ip("-n", self.name, "link", "set", "lo", "up")
        self.plug("up")

    def plug(self, state: str) -> None:
        ip("-n", self.name, "link", "set", self.link, state)

    def start(self, settings: RunSettings) -> int:
        """Train in a fork on this host; what it raises is written to `said` in the host's folder."""
        child = os.fork()
        if child:
            return child
        try:
            os.setpgid(0, 0)
            self._enter()
            job = train_job(
                settings, self.folder / "base", self.folder / "data", self.folder / "work", self.folder / "out"
            )
            train_run(job)
        except KilledError as error:
            (self.folder / "said").write_text(str(error))
        except BaseException:  # noqa: BLE001
            (self.folder / "said").write_text(traceback.format_exc())
        os._exit(0)

    def _enter(self) -> None:
        libc, host = ctypes.CDLL(None, use_errno=True), f"host-{self.number}".encode()
        with open(f"/run/netns/{self.name}") as namespace:
            assert libc.setns(namespace.fileno(), NEW_NETWORK) == 0
        assert libc.unshare(NEW_HOSTNAME) == 0
        assert libc.sethostname(host, len(host)) == 0
        os.environ |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511", "NODE_RANK": str(self.number)}
        os.environ["GLOO_SOCKET_IFNAME"] = self.link


@pytest.fixture
def hosts(tmp_path):
    made = []
    try:
        for number in (0, 1):
            made.append(Host(number, write_inputs(tmp_path / str(number))))
        ip("link", "add", made[0].link, "type", "veth", "peer", "name", made[1].link)
        for host in made:
            host.connect()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        for host in made:
            ip("netns", "del", host.name)
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    yield made
    for host in made:
        ip("netns", "del", host.name)


def ended(children: list[int], seconds: float) -> bool:
    """Whether all children end within a time; those that don't are killed with their processes."""
    until = time.monotonic() + seconds
    left = list(children)
    while left and time.monotonic() < until:
        left = [child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.05)
    for child in left:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not left


def test_a_lost_host_ends_the_run_by_name_and_back_it_continues_to_what_one_process_trains(
    hosts, forking, monkeypatch, tmp_path
):
    first, second = hosts
    step = Trainer.step

    def lose_power(self, number, *rest):
        if number == 3 and os.environ.get("NODE_RANK") == "1" and not (tmp_path / "lost").exists():
            (tmp_path / "lost").touch()
            second.plug("down")  # no packet tells the other host
            os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, number, *rest)

    monkeypatch.setattr(Trainer, "step", lose_power)
    settings = parse(RunSettings, {**jobs.SETTINGS, **LENGTHS}, "test")
    shared = settings.model_copy(update={"processes": 2, "nodes": 2, "node_timeout": LIMIT})

    assert ended([host.start(shared) for host in hosts], 120)
    assert (tmp_path / "lost").exists()
    said = (first.folder / "said").read_text()
    assert said.startswith(f"another machine of the run has ended or hasn't answered for {LIMIT} seconds; ")
    assert said.count("\n") == 0
    assert max(file.name for file in first.folder.glob("work/*/step-*")) == "step-000002.pt"
    assert not list(second.folder.glob("work/*/step-*"))  # hosts share no folder

    second.plug("up")
    (first.folder / "said").unlink()
    assert ended([host.start(shared) for host in hosts], 120)
    assert not (first.folder / "said").exists(), (first.folder / "said").read_text()
    assert not (second.folder / "out").exists()

    alone = tmp_path / "alone"
    shutil.copytree(first.folder / "base", alone / "base")
    train_run(train_job(settings, alone / "base", first.folder / "data", alone / "work", alone / "out"))
    assert_same(results(alone / "out"), results(first.folder / "out"))
