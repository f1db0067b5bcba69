"""Runs side by side after a kill, or beside a run that fails: each ends with the bits of an undisturbed run."""

import json
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from qerl.host.process import Interrupted
from qerl.rl import cohort
from qerl.rl.cohort import train_cohort
from qerl.rl.train import TimeLimitError, Trainer, train_run
from qerl.rollout import factory
from qerl.rollout.engine import EngineSampler
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from tests.faults.conftest import REWARD, SETTINGS, forked
from tests.faults.test_files import CUT, cut_before
from tests.jobs import metrics_of, train_job, untimed

pytestmark = pytest.mark.slow
#: Runs of different lengths.
RUNS = {
    "short": {"steps": 2, "seed": 1, "noise": {"schedule": "constant"}},
    "middle": {"steps": 5, "seed": 2, "loss": {"name": "ppo"}, "checkpoint_every": 2},
    "long": {"steps": 6, "seed": 3, "adapter": {"rank": 2, "dropout": 0.1}},
}
#: Kills at random moments, by the sampler.
KILLS = {"eager": 20, "engine": 10}


def make_jobs(inputs, folder, names=tuple(RUNS), row=None, runs=RUNS, **changes):
    """The jobs of runs in `folder`, with the changes of each to settings, and to its row in the sheet of runs."""
    sys.modules.pop("fault_reward", None)
    torch.set_num_threads(1)  # as in forks
    made = []
    for name in names:
        settings = parse(RunSettings, {**SETTINGS, **runs[name], **changes.get(name, {})}, name)
        paths = inputs / "base", inputs / "data", folder / name / "work", folder / name / "out"
        made.append(train_job(settings, *paths, id=name, **(row or {}).get(name, {})))
    return made


@pytest.fixture
def jobs(run):
    return lambda folder, **changes: make_jobs(run.folder, run.folder / folder, **changes)


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    """The undisturbed runs, each trained by itself."""
    return train_alone(tmp_path_factory.mktemp("alone"), lambda folder: make_jobs(inputs, folder))


def train_alone(folder, make):
    """Train each of the jobs that `make` makes in the folder, by itself. Returns them by name."""
    (folder / "fault_reward.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        made = make(folder)
        for job in made:
            train_run(job)
    return {job.id: job for job in made}


def trained(job):
    return [load_file(file) for file in sorted((job.out / "policy").rglob("*.safetensors"))]


def assert_same(job, other):
    """To the bit, in metrics and in weights."""
    assert untimed(metrics_of(job.out)) == untimed(metrics_of(other.out))
    torch.testing.assert_close(trained(job), trained(other), rtol=0, atol=0)


def assert_close(job, other):
    """As the engine rounds, which decodes other batches after a kill."""
    rows, others = (untimed(metrics_of(one.out)) for one in (job, other))
    for row, expected in zip(rows, others, strict=True):
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-5)


def finished(job):
    return (job.out / "run.json").is_file()


def seconds_until(function, limit=None):
    """Call the function in a fork, which the kernel kills after `limit` seconds of its processors' time, if given.

    Returns its seconds, or None if it was killed. A busy machine makes neither the fork nor its limit longer.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.setitimer(signal.ITIMER_PROF, limit or 0)  # its signal kills, as no handler is set
            function()
            status = 0
        finally:
            os._exit(status)
    _, status, used = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) in ({0} if limit is None else {0, -signal.SIGPROF})
    return None if status else used.ru_utime + used.ru_stime


@pytest.mark.usefixtures("alone")  # imports and hashes for a second or two, which each fork would do again
@pytest.mark.parametrize("sampler", KILLS)
def test_a_cohort_killed_at_any_moment_continues_as_if_it_were_not(jobs, monkeypatch, sampler):
    if sampler == "engine":
        monkeypatch.setattr(factory, "native_class", lambda *_: EngineSampler)
    whole, moments = jobs("whole"), random.Random(0)
    longest = seconds_until(lambda: train_cohort(whole))
    kills = cohorts = 0
    while kills < KILLS[sampler]:
        killed = jobs(f"killed-{cohorts}")
        # As callers do, the finished ones are left out.
        while left := [job for job in killed if not finished(job)]:
            limit = moments.uniform(0.05, 0.6) * longest if kills < KILLS[sampler] else None
            kills += seconds_until(lambda left=left: train_cohort(left), limit) is None
        for job, other in zip(killed, whole, strict=True):
            (assert_same if sampler == "eager" else assert_close)(job, other)
        cohorts += 1


def steps_of(job):
    """The step of the newest checkpoint."""
    return max(int(file.stem.removeprefix("step-")) for file in job.work.glob("*/step-*.pt"))


def test_runs_that_stand_at_different_steps_continue_together_or_alone(jobs, alone):
    """A cohort ends as one run writes a checkpoint and another has finished; then all go on, or each by itself."""
    together = jobs("killed")
    assert forked(lambda: (cut_before("step-000004.pt", together[2].work), train_cohort(together))) == CUT
    assert finished(together[0])
    assert [steps_of(job) for job in together[1:]] == [4, 3]
    shutil.copytree(together[0].out.parent.parent, together[0].out.parents[2] / "apart")
    train_cohort(together)  # a finished one is trained anew
    for job in together:
        assert_same(job, alone[job.id])
    for job in jobs("apart")[1:]:
        train_run(job)
        assert_same(job, alone[job.id])


def test_a_cohort_continues_what_runs_alone_have_begun(jobs, alone):
    together = jobs("together")
    for job, name in zip(together, ("step-000001.pt", "step-000004.pt", "step-000005.pt"), strict=True):
        assert forked(lambda job=job, name=name: (cut_before(name, job.work), train_run(job))) == CUT
    before = metrics_of(next(together[2].work.glob("*/metrics.jsonl")).parent)
    train_cohort(together)
    for job in together:
        assert_same(job, alone[job.id])
    assert metrics_of(together[2].out)[:4] == before[:4]  # with their seconds: not done again


def test_a_run_whose_state_is_half_removed_is_not_continued_from_the_rest(jobs, alone):
    """A kill while a finished run's state is removed leaves no checkpoint without what it stored beside."""
    unlink = os.unlink
    for count in range(1, 9):
        [job] = jobs(f"cut-{count}", names=["short"])

        def train(job=job, count=count):
            left = [count]

            def unlink_or_end(path, *rest, **options):
                if finished(job):
                    left[0] -= 1
                    if not left[0]:
                        os._exit(CUT)
                unlink(path, *rest, **options)

            os.unlink = unlink_or_end
            train_run(job)

        if forked(train) != CUT:
            break
        train_run(job)
        assert_same(job, alone["short"])
        stored = {file.name for file in (job.out / "rollouts").iterdir()}
        assert stored == {file.name for file in (alone["short"].out / "rollouts").iterdir()}
    assert count > 4


# --- one run fails ---------------------------------------------------------------------------------------------------

FAILING = f"""
import time
calls = 0
{REWARD}
def broken(answer, problem):
    global calls
    calls += 1
    if calls > 5:
        raise ZeroDivisionError("of this run")
    return letters(answer, problem)

def stuck(answer, problem):
    global calls
    calls += 1
    if calls > 5:
        time.sleep(3600)
    return letters(answer, problem)
"""


@pytest.mark.parametrize(
    ("reward", "error", "words"),
    [
        ({"function": "fault_reward:broken"}, ZeroDivisionError, r"^middle: of this run"),
        (
            {"function": "fault_reward:stuck", "timeout": 0.5},
            ConfigError,
            r"^middle: reward\.functions\.custom .* after 0\.5 s",
        ),
    ],
)
def test_a_reward_that_fails_ends_its_run_alone_and_the_error_names_it(run, jobs, alone, reward, error, words):
    run.reward(FAILING)
    together = jobs("together", middle={"reward": reward})
    with pytest.raises(error, match=words):
        train_cohort(together)
    assert [finished(job) for job in together] == [True, False, True]
    for job in (together[0], together[2]):
        assert_same(job, alone[job.id])


def test_a_run_over_its_time_leaves_and_continues_with_a_higher_limit(jobs, alone):
    together = jobs("together", row={"middle": {"time_limit": 1e-9}})
    with pytest.raises(TimeLimitError, match=r"^middle: the run is over its time limit of 1e-09 h after 1 of 5 steps"):
        train_cohort(together)
    for job in (together[0], together[2]):
        assert_same(job, alone[job.id])
    train_cohort([jobs("together")[1]])
    assert_same(together[1], alone["middle"])


def test_a_failure_that_is_a_result_is_no_error_of_the_cohort(jobs, alone):
    together = jobs("together", row={"long": {"time_limit": 1e-9, "on_failure": "row"}})
    train_cohort(together)
    assert json.loads((together[2].out / "run.json").read_text())["status"] == "timeout of 1e-09 h after 1 of 6 steps"
    for job in together[:2]:
        assert_same(job, alone[job.id])


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def announce(monkeypatch, heeded_signals):
    """Sends a signal to this process, and waits until the cohort has seen it."""
    train, ends = cohort.train_run, []
    monkeypatch.setattr(cohort, "train_run", lambda job, place, end: (ends.append(end), train(job, place, end)))

    def send(number, seen=lambda: ends[-1].number):
        os.kill(os.getpid(), number)
        while not seen():
            time.sleep(0.01)

    return send


def test_a_signal_ends_all_runs_after_their_step(jobs, alone, monkeypatch, announce):
    step = Trainer.step

    def announcing(self, at, *rest):
        if self.settings.seed == 3 and at == 3:
            announce(signal.SIGINT)
        return step(self, at, *rest)

    together = jobs("together")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", announcing)
        with pytest.raises(Interrupted) as ended:
            train_cohort(together)
    assert ended.value.number == signal.SIGINT
    assert finished(together[0])
    assert steps_of(together[1]) == steps_of(together[2]) == 3
    train_cohort(together[1:])
    for job in together:
        assert_same(job, alone[job.id])


def test_a_second_signal_ends_runs_amid_their_step(jobs, alone, monkeypatch, announce):
    generate, requests = cohort.Seat.generate, []

    def interrupted(self, *rest):
        requests.append(self.run)
        if requests.count(2) == 3 and self.run == 2:
            announce(signal.SIGINT)
            announce(signal.SIGTERM, lambda: self.meeting._end)
        return generate(self, *rest)

    together = jobs("together")
    with monkeypatch.context() as patch:
        patch.setattr(cohort.Seat, "generate", interrupted)
        with pytest.raises(Interrupted) as ended:
            train_cohort(together)
    assert ended.value.number == signal.SIGTERM
    assert steps_of(together[2]) == 2
    train_cohort(together[1:])
    for job in together:
        assert_same(job, alone[job.id])
