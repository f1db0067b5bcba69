"""Jobs of a study, and the arms of real models beside its own."""

from pathlib import Path

import pytest

from qerl.settings.base import ConfigError, read_yaml
from qerl.study.outcomes import MISMATCH, NUMBERS, PRIMARY, SECONDARY
from qerl.workflow.costs import Costs, evaluation_work, run_work, total
from qerl.workflow.plan import plan_from
from qerl.workflow.stages import Jobs
from qerl.workflow.study_jobs import real_arms

ROOT = Path(__file__).parents[3]


def planned(name, **changes):
    return plan_from({**read_yaml(ROOT / f"config/{name}.yaml"), **changes}, ROOT / "config/mini.yaml")


@pytest.fixture(scope="module")
def plan():
    return planned("exploration")


def test_the_numbers_of_arms_and_comparisons_are_those_of_the_protocol(plan):
    protocol = (ROOT / "docs/exploration-protocol.md").read_text()
    for arm, number in NUMBERS.items():
        [row] = [line for line in protocol.splitlines() if line.startswith(f"| {number} |") and f"`{arm}`" in line]
        assert row
    for name, arms in {**PRIMARY, **MISMATCH, **SECONDARY}.items():
        assert name == "-".join(NUMBERS[arm] for arm in arms)
    assert {run.arm for run in plan.runs.values()} == set(NUMBERS)


def test_the_job_of_the_data_says_what_each_experiment_answers(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    jobs = Jobs(plan)
    job = jobs.gather("planned")
    assert set(job.experiments) == {run.experiment for run in plan.runs.values()}
    assert {name for name, of in job.experiments.items() if of.role == "pilot"} == {
        name for name in job.experiments if name.startswith("pilot")
    }
    assert all(name.endswith(of.size) for name, of in job.experiments.items())
    assert job.sizes == {name: name.partition("-")[0] for name in plan.config.models}
    assert job.tasks["countdown-validation"] == ("countdown", "validation", 1.0)
    assert jobs.gather("finished").only_finished
    assert jobs.page("planned").data == [job.out]
    assert jobs.published().data == sorted(Path("results/reference/exploration").iterdir()) != []
    assert len(job.model_dump_json()) < 100_000  # the shell's limit of an argument is 128 KiB


def test_data_of_finished_runs_are_stale_when_a_result_comes_or_changes(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs, seen = Jobs(plan), [[]]
    one, two = map(Path, jobs.files.studied[:2])
    for file, text in ((one, "failed"), (one, "ok"), (two, "ok")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        seen.append(jobs.content("gather", "finished"))
    assert [len(content) for content in seen] == [0, 1, 1, 2]
    assert seen[1] != seen[2]
    assert jobs.content("gather", "planned") == []


def test_real_arms_are_matched_by_what_makes_them_arms(plan):
    real = planned("paper")
    arms = {(arm.experiment, arm.number): arm for arm in real_arms(plan, real)}
    assert {arm.arm for (experiment, _), arm in arms.items() if experiment == "gsm8k-7b"} == {
        "bf16-lora",
        "nvfp4-lora",
        "nvfp4-lora-aqn",
        "bf16-lora-aqn",
        "nvfp4-lora-aqn-consistent",
    }
    names = {"1": "bf16-lora", "2": "nvfp4-lora", "5": "nvfp4-lora-aqn", "8": "bf16-lora-aqn"}
    assert all(arms["gsm8k-3b", number].arm == name for number, name in names.items())
    assert {experiment for experiment, _ in arms}.isdisjoint({"ranks-3b", "schedules-3b", "learning-rates-7b"})


def test_hours_are_those_of_the_plan(plan):
    """Three seeds of an arm cost what its three runs and evaluations do."""
    real = planned("paper")
    [arm] = [arm for arm in real_arms(plan, real) if (arm.experiment, arm.number) == ("bigmath-7b", "2")]
    runs = [run for run in real.runs.values() if (run.experiment, run.arm) == ("bigmath-7b", "nvfp4-lora")]
    costs = Costs("h200")
    scored = [work for e in real.evaluations.values() if e.run in runs for work in evaluation_work(real, e)]
    works = [run_work(run) for run in runs]
    assert arm.seeds == len(runs) == 3
    assert arm.hours[3] == str(total([*map(costs.rollout, works + scored), *map(costs.update, works)]))
    assert set(arm.hours) == {1, 3, 12, 21}


STUDY = {"decides": False, "protocol": "docs/dose-protocol.md"}


def test_a_study_of_an_unknown_experiment_is_refused():
    study = {**STUDY, "experiments": [{"experiment": "countdwn", "size": "tiny"}]}
    with pytest.raises(ConfigError, match=r"study\.experiments\[0\]\.experiment names 'countdwn'.*countdown"):
        planned("exploration-small", study=study)


def test_a_study_of_an_experiment_that_is_not_scored_is_refused_before_it_runs():
    experiments = read_yaml(ROOT / "config/exploration-small.yaml")["experiments"]
    experiments["countdown"]["tasks"] = []
    with pytest.raises(
        ConfigError, match=r"study\.experiments\[0\] names countdown, which has no scores.*countdown\.tasks"
    ):
        planned("exploration-small", experiments=experiments)


def test_an_experiment_that_is_compared_is_no_pilot():
    compared = [{"experiment": name, "size": "tiny", "pilot": "countdown"} for name in ("comparisons", "countdown")]
    with pytest.raises(ConfigError, match=r"study\.experiments\[0\]\.pilot=countdown is itself compared"):
        planned("exploration-small", study={**STUDY, "experiments": compared})
