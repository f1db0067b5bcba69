"""Which runs of a workflow train side by side, and how many at a time."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from qerl.cli.workflow import run_job
from qerl.jobs import CohortJob, TrainJob
from qerl.memory_model import runs_that_fit
from qerl.models.random import random_config
from qerl.results.paths import VERSION
from qerl.results.schema import OK, RunResult, read
from qerl.rl.cohort import store
from qerl.rl.train import Trainer
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from qerl.workflow import cohorts
from qerl.workflow.costs import sheet, totals
from qerl.workflow.rules import Jobs
from tests.jobs import SETTINGS, train_job, write_inputs
from tests.unit.workflow.test_memory_model import ASKED, SEVEN
from tests.unit.workflow.test_plan import planned, with_experiment

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def jobs_of(side_by_side=4, seeds=(0, 1, 2), arms=None):
    given = with_experiment(arms=arms or {"a": {}, "b": {"adapter.rank": 4}}, grid={"seed": list(seeds)})
    return Jobs(planned({**given, "side_by_side": side_by_side}))


def groups(**changes):
    return list(jobs_of(**changes).plan.cohorts.values())


def test_runs_of_one_base_and_engine_are_together():
    names = [f"e-{arm}-seed{seed}" for arm in "ab" for seed in range(3)]
    assert groups(side_by_side=1) == []
    assert groups(side_by_side=4) == [names[:4], names[4:]]
    assert groups(side_by_side=5) == [names[:5]]  # one alone has its own job
    for other in (
        {"weights": "bf16"},
        {"dtype": "float32"},
        {"dataset": "numbers"},
        {"rollout.native.sleep": True},
        {"adapter.targets": ["q_proj", "experts.down_proj"]},
        {"weights": "bf16", "method": "full"},
        {"processes": 2},
    ):
        arms = {"a": {}, "other": other, "b": {"adapter.rank": 4}}
        found = groups(side_by_side=6, arms=arms)
        assert found[0] == names
        assert [f"e-other-seed{seed}" for seed in range(3)] in found or len(found) == 1
    assert len(groups(arms={"a": {}, "other": {"processes": 2}})) == 1


def noted(jobs, run):
    """Finish the run's job as the workflow does: the mark of its cohort is there, and its version is written."""
    for mark in map(str, jobs.mark(run)):
        path = CohortJob.path(jobs.plan, mark.rpartition("/")[2])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    job = jobs.job("train", run)
    job.out.mkdir(parents=True)
    (job.out / VERSION).write_text(job.version)


def test_a_finished_run_keeps_its_mark_whatever_becomes_of_its_cohort():
    """Snakemake would rerun a run whose inputs have other names."""
    first = jobs_of()
    [mark] = first.mark("e-a-seed0")
    assert mark.flags["ancient"]
    assert first.mark("e-a-seed2") == first.mark("e-b-seed0") == [mark] != first.mark("e-b-seed1")
    for run in ("e-a-seed0", "e-a-seed1"):
        noted(first, run)
    assert (
        jobs_of().plan.cohorts == first.plan.cohorts
    )  # though some are finished, as a plan on a node of a cluster finds
    changes = {"side_by_side": 2}, {"side_by_side": 1}, {"seeds": (0, 1, 2, 3)}, {"arms": {"a": {}, "b": {"steps": 3}}}
    for change in changes:
        other = jobs_of(**change)
        assert other.mark("e-a-seed0") == other.mark("e-a-seed1") == [mark]
        assert other.mark("e-a-seed2") != [mark]  # its cohort is another one
    changed = jobs_of(arms={"a": {"steps": 3}, "b": {"adapter.rank": 4}})
    assert changed.mark("e-a-seed0") not in ([], [mark])
    alone = jobs_of(side_by_side=1, seeds=(5,))
    noted(alone, "e-a-seed5")
    assert jobs_of(seeds=(5, 6)).mark("e-a-seed5") == []


def test_a_cohort_decides_nothing_of_its_runs():
    alone, together = jobs_of(side_by_side=1), jobs_of()
    for run in together.plan.runs:
        assert together.deciding("train", run) == alone.deciding("train", run)
        job, other = (jobs.job("train", run) for jobs in (alone, together))
        assert job.version.split() == other.version.split()[:1]
        assert (job.deciding, job.locks) == (other.deciding, other.locks)


def test_the_plan_counts_cohorts():
    plan = jobs_of().plan
    lines = totals(plan, sheet(plan, "h200"), "h200")
    assert "6 runs train side by side in 2 jobs; each has its part of the hours of their common rollouts" in lines
    plan = jobs_of(side_by_side=1).plan
    assert not any("side by side" in line for line in totals(plan, sheet(plan, "h200"), "h200"))


def test_only_runs_without_results_are_trained_and_as_many_at_a_time_as_fit(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    settings = parse(RunSettings, SETTINGS, "test")
    runs = []
    for number in range(7):
        paths = tmp_path / "base", tmp_path / "data", tmp_path / f"work/r{number}", tmp_path / f"out/r{number}"
        policy = {"version": "now cohort", "on_failure": "row" if number == 5 else "stop"}
        runs.append(train_job(settings.model_copy(update={"seed": number}), *paths, **policy))
    for run, version in ((runs[0], "now another"), (runs[1], "before cohort")):
        run.out.mkdir(parents=True)
        (run.out / "run.json").touch()
        (run.out / "version.txt").write_text(version)
    store(runs[2]).mkdir(parents=True)
    (store(runs[2]) / "run.json").touch()
    trained = []
    monkeypatch.setattr(cohorts, "train_cohort", trained.append)
    monkeypatch.setattr(cohorts, "fitting", lambda runs: 2)
    mark = tmp_path / "cohorts/some"
    cohorts.train_side_by_side(CohortJob(runs=runs, out=mark))
    assert [[run.id for run in some] for some in trained] == [["r1", "r3"], ["r4", "r5"]]  # the last one isn't alone
    assert all(run.out == store(run) and run.on_failure == "stop" for some in trained for run in some)
    assert mark.is_file()

    def failing(some):
        raise ValueError(f"of {some[0].id}")

    mark.unlink()
    monkeypatch.setattr(cohorts, "train_cohort", failing)
    cohorts.train_side_by_side(CohortJob(runs=runs, out=mark))  # one has results, for which its job waits
    assert mark.is_file()
    mark.unlink()
    cohorts.train_side_by_side(CohortJob(runs=runs[3:6], out=mark))  # a failure of one is a row, of its own job
    with pytest.raises(ValueError, match="of r3"):
        cohorts.train_side_by_side(CohortJob(runs=runs[3:5], out=tmp_path / "other"))
    assert [mark.is_file(), (tmp_path / "other").is_file()] == [True, False]


@pytest.mark.parametrize("gigabytes", [0, 12, 24])
def test_as_many_runs_as_the_memory_model_allows_share_the_gpu(tmp_path, monkeypatch, gigabytes):
    random_config("7B").save_pretrained(tmp_path / "base")
    gpus = {"0": SimpleNamespace(total=gigabytes * 1e9)} if gigabytes else {}
    monkeypatch.setattr(cohorts, "devices", lambda: gpus)
    asked = {"prompts": ASKED.prompts, "group_size": ASKED.group, "max_prompt_tokens": ASKED.prompt_tokens}
    rollout = {**asked, "sampling": {"max_tokens": ASKED.max_tokens}}
    base = {"model": "m", "dataset": "d", "gradient_checkpointing": "auto", "rollout": rollout}
    settings = parse(RunSettings, {**base, "adapter": {"rank": ASKED.rank}}, "test")
    runs = [train_job(settings, *(tmp_path / name for name in ("base", "data", "work", "out")))] * 40
    most = runs_that_fit(SEVEN, replace(ASKED, runs=40), gigabytes * 1e9) if gigabytes else 40
    assert cohorts.fitting(runs) == max(1, most)
    assert (most > 1) == (gigabytes != 12)


def test_a_failure_is_a_row_by_the_runs_own_job_and_results_are_taken_without_training(tmp_path, monkeypatch):
    write_inputs(tmp_path)
    runs = []
    for name, limit in (("late", 1e-9), ("one", None), ("two", None)):
        settings = parse(RunSettings, {**SETTINGS, "seed": len(runs)}, "test")
        paths = tmp_path / "base", tmp_path / "data", tmp_path / "work" / name, tmp_path / "out" / name
        runs.append(train_job(settings, *paths, version="v c", on_failure="row", time_limit=limit))
    run_job(CohortJob(runs=runs, out=tmp_path / "mark"))
    assert not (tmp_path / "out").exists()
    assert [run.gpus for run in runs] == [1, 0, 0]
    monkeypatch.setattr(Trainer, "step", None)
    shutil.move(store(runs[2]), other := runs[2].finished / "other")
    with pytest.raises(ConfigError, match="has results of another base or of other problems; delete it"):
        run_job(runs[2])  # which holds no GPU with which it could train
    shutil.move(other, store(runs[2]))
    for run in runs:
        run_job(run)
    status = [read(RunResult, run.out / "run.json").status for run in runs]
    assert status == ["timeout of 1e-09 h after 1 of 4 steps", OK, OK]
    assert {path.name for path in runs[1].out.iterdir()} == {*TrainJob.writes, VERSION}
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"late", "finished"}  # its checkpoint stays
    assert not any((tmp_path / "work/finished").iterdir())
