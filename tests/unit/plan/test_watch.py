"""The state of a workflow: by its files, by processes that really run, and by the leases that they have."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qerl.cli import commands as cli
from qerl.host import gpu_lease
from qerl.plan import plan
from qerl.plan import watch as watching
from qerl.plan.stored import store
from qerl.plan.watch import hours_left, leased, running_jobs, watched_jobs
from qerl.results.catalogue import check
from qerl.settings.base import ConfigError, parse
from qerl.settings.config import Config
from tests.synthetic_results import NO_METRICS, write_json, write_lines, write_run

ROOT = Path(__file__).parents[3]
#: A stand-in for the package whose jobs take long: the command line and the working directory are those of a rule.
SLOW = "import sys, time\nprint(sys.argv, flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Two arms of two seeds, nothing begun; steps take half an hour on one GPU."""
    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load((ROOT / "config/mini.yaml").read_text())
    base = {"model": "miniature", "dataset": "arithmetic", "steps": 4}
    experiment = {"base": base, "arms": {"a": {}, "b": {"rollout.group_size": 16}}, "grid": {"seed": [0, 1]}}
    made = plan(parse(Config, {**values, "experiments": {"e": experiment}, "benches": {}}, "test"))
    file = store(made)
    check(file)
    return tmp_path / file.parent


def steps(count, seconds=1800.0):
    return [{**NO_METRICS, "step": n, "reward": n / 8, "seconds/step": seconds} for n in range(1, count + 1)]


def finish(results, run, **changes):
    folder = results / "train" / run
    write_run(results, "nvfp4-lora", 0, steps(4), **changes)
    (results / "train/main-nvfp4-lora-seed0").rename(folder)


def begin(results, run, count):
    state = results.parents[1] / "work/mini" / run / "0123456789abcdef"
    state.mkdir(parents=True)
    write_lines(state / "metrics.jsonl", steps(count))
    return state.parent


def log(results, rule, job, text):
    file = results / "logs" / rule / f"{job}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def runs(results, running=()):
    jobs = watched_jobs(results, dict(running))
    return {job.job.id: job for job in jobs if job.job.rule == "train"}, jobs


def test_jobs_that_have_not_begun_wait_and_nobody_knows_their_hours(results):
    trained, jobs = runs(results)
    assert {job.state for job in jobs} == {"waits"}
    assert {(job.job.id, job.progress) for job in trained.values()} == {
        (f"e-{arm}-seed{seed}", "step 0 of 4") for arm in "ab" for seed in (0, 1)
    }
    assert {hours_left(job, jobs) for job in trained.values()} == {None}
    assert {job.job.rule for job in jobs} == {"quantize", "train", "evaluate"}


def test_states_and_hours_follow_from_files_and_processes(results):
    """e-a-seed0 is done, e-a-seed1 is in its second step, e-b-seed0 failed after one, e-b-seed1 waits."""
    finish(results, "e-a-seed0")
    begin(results, "e-a-seed1", 1)
    begin(results, "e-b-seed0", 1)
    log(results, "train", "e-b-seed0", "starts\nqerl: no room; make room\n\n")
    log(results, "train", "e-a-seed1", "steps: 1 of 4\n")
    trained, jobs = runs(results, {results / "train/e-a-seed1": os.getpid()})
    assert {name: job.state for name, job in trained.items()} == {
        "e-a-seed0": "done",
        "e-a-seed1": "running",
        "e-b-seed0": "failed",
        "e-b-seed1": "waits",
    }
    assert trained["e-a-seed1"].where.startswith(socket.gethostname())
    assert trained["e-b-seed0"].where == "qerl: no room; make room"
    assert trained["e-a-seed1"].progress == "step 1 of 4, reward 0.125"
    assert [job.spent for job in trained.values()] == [2.0, 0.5, 0.5, 0.0]
    assert [hours_left(job, jobs) for job in trained.values()] == [0.0, 1.5, 1.5, 2.0]


def test_the_hours_of_a_run_are_those_of_its_arm_before_those_of_others(results):
    begin(results, "e-a-seed0", 1)
    state = begin(results, "e-b-seed0", 1) / "0123456789abcdef/metrics.jsonl"
    write_lines(state, steps(1, seconds=7200.0))
    trained, jobs = runs(results)
    assert hours_left(trained["e-a-seed1"], jobs) == 4 * 0.5
    assert hours_left(trained["e-b-seed1"], jobs) == 4 * 2.0


def test_other_jobs_take_as_long_as_those_of_their_rule(results):
    """Snakemake's table of times has one row a run of the job."""
    write_json(results / "evaluate/e-a-seed0/result.json", {})
    table = results / "benchmarks/evaluate/e-a-seed0.tsv"
    table.parent.mkdir(parents=True)
    table.write_text("s\th:m:s\tmax_rss\n3600.0\t1:00:00\t10\n")
    _, jobs = runs(results)
    evaluations = {job.job.id: job for job in jobs if job.job.rule == "evaluate"}
    gpus = evaluations["e-a-seed0"].job.gpus
    assert evaluations["e-a-seed0"].spent == gpus
    assert hours_left(evaluations["e-a-seed1"], jobs) == gpus


def test_a_failure_that_is_a_result_has_its_status(results):
    finish(results, "e-a-seed0", status="out of memory after 4 of 9 steps")
    trained, _ = runs(results)
    assert (trained["e-a-seed0"].state, trained["e-a-seed0"].where) == ("failed", "out of memory after 4 of 9 steps")


def test_a_run_of_another_machine_is_known_by_its_lock(results):
    (begin(results, "e-a-seed0", 1) / "lock").write_text("17 on elsewhere")
    (begin(results, "e-a-seed1", 1) / "lock").write_text(f"17 on {socket.gethostname()}")  # left by a killed process
    trained, _ = runs(results)
    assert (trained["e-a-seed0"].state, trained["e-a-seed0"].where) == ("running", "elsewhere, by its lock")
    assert trained["e-a-seed1"].state == "waits"


@pytest.mark.parametrize("flags", [[], ["-P"]])
def test_processes_of_rules_are_found_by_their_output(tmp_path, monkeypatch, flags):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "qerl").mkdir()
    (tmp_path / "qerl/__init__.py").touch()
    (tmp_path / "qerl/__main__.py").write_text(SLOW)
    command = [sys.executable, *flags, "-m", "qerl", "rule", json.dumps({"kind": "train", "out": "results/x/train/r"})]
    asks = [*command[:-1], "--help"]
    with (
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process,
        subprocess.Popen(asks, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as other,
    ):
        process.stdout.readline()
        other.stdout.readline()
        assert running_jobs()[tmp_path / "results/x/train/r"] == process.pid
        process.kill()
        other.kill()
    assert tmp_path / "results/x/train/r" not in running_jobs()


def test_gpus_of_a_process_are_those_of_its_leases(tmp_path, monkeypatch):
    uuids = {"0": "GPU-aa", "1": "GPU-bb", "2": "GPU-cc"}
    monkeypatch.setattr(gpu_lease, "_uuids", lambda: uuids)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert leased(os.getpid()) == []
    with gpu_lease.lease(2):
        assert leased(os.getpid()) == ["GPU 0", "GPU 1"]


def test_the_command_prints_once_where_there_is_no_terminal_and_writes_nothing(results, monkeypatch):
    finish(results, "e-a-seed0")
    begin(results, "e-b-seed0", 1)
    log(results, "train", "e-b-seed0", "qerl: no room\n")
    before = {file: file.stat().st_mtime_ns for file in results.parents[1].rglob("*")}
    monkeypatch.setattr(watching, "running_jobs", dict)
    said = CliRunner().invoke(cli.app, ["watch", str(results), "--once"], catch_exceptions=False).stdout
    (train,) = [line.split() for line in said.splitlines() if line.split()[:2] == ["train", "1"]]
    assert train == ["train", "1", "0", "1", "2", "2.50", "5.50"]
    assert "no room" in said
    assert "e-b-seed1" not in said
    everything = CliRunner().invoke(cli.app, ["watch", str(results), "--all"], catch_exceptions=False).stdout
    assert "e-b-seed1" in everything
    assert before == {file: file.stat().st_mtime_ns for file in results.parents[1].rglob("*")}


def test_a_folder_without_a_plan_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"has no plan\.json, which the workflow writes when it starts"):
        watched_jobs(tmp_path, {})
