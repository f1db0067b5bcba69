"""Runs shared out over GPUs, for which processes on the CPU stand: each ends with the bits of the run alone."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml

import qerl
from qerl.host.process import Interrupted
from qerl.jobs import KilledError
from qerl.results.paths import METRICS
from qerl.rl import shares
from qerl.rl.shares import deal, expected_tokens, train_runs
from qerl.rl.train import Trainer, train_run
from qerl.settings.base import ConfigError
from tests.conftest import nightly
from tests.faults.conftest import SETTINGS, forked
from tests.faults.test_cohort import FAILING, assert_same, finished, make_jobs, steps_of, train_alone
from tests.faults.test_files import CUT, cut_before
from tests.tiny import write_sums

#: The last one trains in full, and so beside no other.
RUNS = {
    "long": {"steps": 6, "seed": 3, "adapter": {"rank": 2, "dropout": 0.1}},
    "middle": {"steps": 5, "seed": 2, "loss": {"name": "ppo"}},
    "short": {"steps": 2, "seed": 1},
    "full": {"steps": 4, "method": "full", "adapter": {}},
}


@pytest.fixture
def jobs(run):
    return lambda folder, **changes: make_jobs(run.folder, run.folder / folder, tuple(RUNS), runs=RUNS, **changes)


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    """The runs, each trained by itself in this process."""
    made = tmp_path_factory.mktemp("alone")
    return train_alone(made, lambda folder: make_jobs(inputs, folder, tuple(RUNS), runs=RUNS))


@contextmanager
def two_free(most):
    yield ["0", "1"][:most]


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs, whose processes are forks that compute on the CPU."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(shares, "lease_free", two_free)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)


# --- the sharing-out ---


def dealt(groups, gpus, monkeypatch):
    """What `deal` gives each GPU, for runs that are numbers of tokens."""
    monkeypatch.setattr(shares, "expected_tokens", lambda job: job.tokens)
    named = [[Fake(f"{g}-{r}", tokens) for r, tokens in enumerate(group)] for g, group in enumerate(groups)]
    found = deal(named, gpus)
    assert sorted(job.out for share in found for part in share for job in part) == sorted(
        job.out for group in named for job in group
    )
    for part in (part for share in found for part in share):
        assert len({job.out.partition("-")[0] for job in part}) == 1  # no cohort of runs that can't be one
    return [[[job.tokens for job in part] for part in share] for share in found]


class Fake:
    def __init__(self, out, tokens):
        self.out, self.tokens = out, tokens


def longest(shares_):
    return max(sum(map(sum, share)) for share in shares_)


@pytest.mark.parametrize("gpus", [2, 3])
def test_the_fullest_gpu_has_at_most_what_the_rule_of_the_longest_guarantees(gpus, monkeypatch):
    """Graham's bound (1969): 4/3 - 1/(3 m) of the best sharing-out on m machines, which is searched here."""
    numbers = torch.Generator().manual_seed(0)
    for count in range(1, 8):
        tokens = torch.randint(1, 30, (count,), generator=numbers).tolist()
        best = min(
            max(sum(t for t, at in zip(tokens, places, strict=True) if at == gpu) for gpu in range(gpus))
            for places in product(range(gpus), repeat=count)
        )
        assert longest(dealt([tokens], gpus, monkeypatch)) <= (4 / 3 - 1 / (3 * gpus)) * best


def test_groups_stay_whole_where_the_gpus_end_together_all_the_same(monkeypatch):
    assert dealt([[5, 5, 5, 5], [5, 5, 5, 5]], 2, monkeypatch) == [[[5] * 4], [[5] * 4]]
    assert dealt([[5, 5]] * 3, 2, monkeypatch) == [[[5, 5], [5]], [[5, 5], [5]]]
    assert dealt([[5, 5, 5, 5]], 2, monkeypatch) == [[[5, 5]], [[5, 5]]]
    assert dealt([[7], [6], [5], [4]], 2, monkeypatch) == [[[7], [4]], [[6], [5]]]
    assert dealt([[3]], 4, monkeypatch) == [[[3]]]


def test_the_expected_work_is_what_is_left_at_the_lengths_so_far(jobs):
    _, _, short, full = jobs("work")
    rollout = full.settings.rollout
    each = rollout.prompts * rollout.group_size * rollout.sampling.max_tokens
    assert (expected_tokens(short), expected_tokens(full)) == (2 * each, 4 * each)
    assert forked(lambda: (cut_before("step-000003.pt", full.work), train_run(full))) == CUT
    [metrics] = full.work.glob(f"*/{METRICS}")
    drawn = [int(n) for n in re.findall(r'"completion_tokens": ?(\d+)', metrics.read_text())]
    assert len(drawn) == 3
    assert expected_tokens(full) == round(sum(drawn) / 3)


# --- what they compute, and what ends them ---


def test_a_run_that_fails_leaves_all_others_and_its_error_crosses_the_processes(run, jobs, alone, two_gpus):
    run.reward(FAILING)
    function = {"function": "fault_reward:stuck", "timeout": 0.5}
    made = jobs("shared", middle={"reward": {"functions": {"own": function}}})
    with pytest.raises(ConfigError, match=r"^middle: reward\.functions\.own .* after 0\.5 s"):
        train_runs(made)
    for job in (made[0], *made[2:]):
        assert_same(job, alone[job.id])
    broken = {"reward": {"functions": {"own": "fault_reward:broken"}}}
    with pytest.raises(RuntimeError, match=r"^(full|short): of this run \(ZeroDivisionError\)") as failed:
        train_runs(jobs("broken", short=broken, full=broken)[2:])
    assert "in broken\n" in failed.value.__notes__[0]  # the traceback of the other process


def test_a_killed_process_is_a_sentence_at_the_end_and_the_next_call_continues(jobs, alone, two_gpus, monkeypatch):
    step = Trainer.step

    def killed(self, at, *rest):
        if (self.settings.seed, at) == (3, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, at, *rest)

    made = jobs("shared")
    said = r"^the process of GPU 0, which trained long, full, was killed, possibly.* continue from their last"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(KilledError, match=said):
            train_runs(made)
    assert [finished(job) for job in made] == [False, True, True, False]
    assert steps_of(made[0]) == 3
    train_runs([job for job in made if not finished(job)])  # finished ones are left out, as callers do
    for job in made:
        assert_same(job, alone[job.id])


# --- signals ---


def at_work(processes):
    """Those of the processes that have not ended."""
    states = {number: Path(f"/proc/{number}/stat") for number in processes}
    return [number for number, stat in states.items() if stat.exists() and ") Z " not in stat.read_text()]


@pytest.fixture
def start(jobs, two_gpus, monkeypatch, heeded_signals):
    """Starts a fork that trains two runs in two more. It ends with the number of the signal that ended the runs."""
    for name in ("long", "middle"):
        monkeypatch.setitem(RUNS, name, {**RUNS[name], "steps": 5000, "checkpoint_every": 5000})
    made, started = jobs("signalled")[:2], []

    def start():
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            status = 1
            try:
                train_runs(made)
            except Interrupted as error:
                status = error.number
            finally:
                os._exit(status)
        started.append(child)
        while not all([*job.work.glob(f"*/{METRICS}")] for job in made):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
            time.sleep(0.05)
        forks = [int(number) for number in Path(f"/proc/{child}/task/{child}/children").read_text().split()]
        assert len(forks) == 2
        return child, forks, made

    yield start
    for child in started:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def status_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["to the command", "to all processes, as a terminal does"])
def test_a_signal_ends_all_runs_after_their_step(start, send):
    child, forks, made = start()
    send(child, signal.SIGINT)
    assert status_of(child) == signal.SIGINT
    assert not at_work(forks)
    for job in made:
        [metrics] = job.work.glob(f"*/{METRICS}")
        assert steps_of(job) == len(metrics.read_text().splitlines()) < 5000


def test_a_second_signal_ends_all_at_once(start, monkeypatch):
    monkeypatch.setattr(Trainer, "_save", lambda *_: time.sleep(3600))
    child, forks, _ = start()
    os.kill(child, signal.SIGTERM)
    time.sleep(0.5)
    assert at_work([child])
    assert at_work(forks)
    os.kill(child, signal.SIGTERM)
    assert status_of(child) == signal.SIGTERM
    assert not at_work(forks)


def test_the_processes_end_with_the_command_whose_locks_they_need(start):
    child, forks, _ = start()
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL
    while at_work(forks):  # until the test's limit
        time.sleep(0.05)


# --- the command, whose processes are started anew ---

COMMAND = """
from contextlib import contextmanager, suppress
import torch
from qerl.__main__ import main
from qerl.rl import shares

@contextmanager
def lease_free(most):
    yield ["0", "1"]

if __name__ == "__main__":
    torch.cuda.device_count = lambda: 2
    shares.lease_free = lease_free
    main()
"""


@nightly
def test_the_lines_of_all_processes_are_on_the_screen_and_in_the_log(run):
    """A terminal has lines, too: two processes can't draw bars on one."""
    values = {
        **SETTINGS,
        "model": "base",
        "dataset": str(write_sums(run.folder / "problems.jsonl")),
        "steps": 3,
        "seeds": [0, 1, 2],
        "out": "several",
    }
    (run.folder / "several.yaml").write_text(yaml.safe_dump(values))
    (run.folder / "command.py").write_text(COMMAND)
    environment = {**os.environ, "PYTHONPATH": f"{Path(qerl.__file__).parents[1]}:{run.folder}", "TTY_COMPATIBLE": "1"}
    done = subprocess.run(
        [sys.executable, "command.py", "train", "several.yaml"],
        capture_output=True, text=True, env=environment, check=False, cwd=run.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    stored = (run.folder / "several/log.txt").read_text()
    for seed in range(3):
        line = f"seed{seed}: steps: 3 of 3, reward"
        assert sum(line in shown for shown in done.stderr.splitlines()) == 1
        assert line in stored
    assert "\x1b" not in done.stderr
