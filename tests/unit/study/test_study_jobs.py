"""Jobs of a study."""

from pathlib import Path

import pytest

from qerl.settings.base import ConfigError, read_yaml
from qerl.workflow.plan import plan_from
from qerl.workflow.rules import Jobs

ROOT = Path(__file__).parents[3]


def planned(name="dose", **changes):
    return plan_from({**read_yaml(ROOT / f"config/{name}.yaml"), **changes}, ROOT / "config/mini.yaml")


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_the_arms_are_those_of_the_protocol_and_have_equal_pairs(plan):
    protocol = (ROOT / "docs/dose-protocol.md").read_text()
    names = {run.arm for run in plan.runs.values()}
    for name in names:  # `random-1`, `-4`, `-16` are in one row
        assert f"`{name}`" in protocol or f"`-{name.rpartition('-')[2]}`" in protocol
    pairs: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for run in plan.runs.values():
        pairs.setdefault((run.experiment, run.arm), set()).add((run.settings.model, run.settings.seed))
    for (experiment, _), found in pairs.items():
        assert found == pairs[experiment, "bf16"]
        assert len(found) == 3 * (1 if experiment.startswith("pilot") else 6)


def test_all_arms_of_an_experiment_but_the_papers_have_one_rate(plan):
    for experiment in plan.config.experiments:
        of_one = [run for run in plan.runs.values() if run.experiment == experiment]
        rates = {run.settings.optimizer.learning_rate for run in of_one if not run.arm.startswith("paper")}
        assert len(rates) == 1


def test_the_job_of_the_data_says_what_each_experiment_answers(plan, monkeypatch):
    monkeypatch.chdir(ROOT)
    jobs = Jobs(plan)
    job = jobs.of("gather", "planned")
    assert job.experiments == {run.experiment: run.settings.model.partition("-")[0] for run in plan.runs.values()}
    assert job.sizes == {name: name.partition("-")[0] for name in plan.config.models}
    assert job.tasks["hot"] == ("countdown", "test", 1.3)
    assert jobs.of("gather", "finished").only_finished
    assert jobs.of("page", "planned").data == [job.out]
    committed = Path("results/reference/dose")
    assert jobs.of("published").data == sorted({file.parent for file in committed.glob("*/runs.parquet")}) != []
    # A base is measured before its runs are.
    assert committed / "121m/dose-121m.json" in jobs.of("published").doses
    assert len(job.model_dump_json()) < 100_000  # the shell's limit of an argument is 128 KiB


def test_doses_are_of_arms_that_change_the_weights_as_their_run_begins(plan):
    job, large = Jobs(plan).of("dose", "3m-1"), Jobs(plan).of("dose", "25m-1")
    changed = {"nvfp4", "random-1", "random-4", "random-16", "aqn-1", "aqn-2", "aqn-4", "aqn-6", "aqn-8"}
    assert set(job.arms) == changed | {"aqn-truncated", "aqn-consistent", "paper-aqn"}
    assert set(large.arms) == {"nvfp4", "aqn-4", "aqn-6", "aqn-8"}
    assert (job.arms["aqn-4"].sigma, large.arms["aqn-4"].sigma) == (0.16, 0.32)
    assert job.arms["nvfp4"].sigma == 0
    assert job.arms["random-4"].checkpoint != job.arms["random-16"].checkpoint != job.checkpoint


def test_data_of_finished_runs_are_stale_when_a_result_comes_or_changes(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs, seen = Jobs(plan), [[]]
    one, two = plan.studied[:2]
    for file, text in ((one, "failed"), (one, "ok"), (two, "ok")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        seen.append(jobs.content("gather", "finished"))
    assert [len(content) for content in seen] == [0, 1, 1, 2]
    assert seen[1] != seen[2]
    assert jobs.content("gather", "planned") == []


def test_a_study_of_an_unknown_experiment_is_refused():
    study = read_yaml(ROOT / "config/dose-small.yaml")["study"]
    study["experiments"] = [{"experiment": "dos", "size": "tiny"}]
    with pytest.raises(ConfigError, match=r"study\.experiments\[0\]\.experiment names 'dos'.*dose"):
        planned("dose-small", study=study)


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_study_of_an_experiment_that_is_not_scored_is_refused_before_it_runs(split):
    config = read_yaml(ROOT / "config/dose-small.yaml")
    if split == "test":
        config["experiments"]["dose"]["tasks"] = []
    for task in config["evaluation"]["tasks"]:
        task["split"] = split
    with pytest.raises(ConfigError, match=r"study\.experiments\[0\] names dose, which has no scores.*dose\.tasks"):
        planned("dose-small", experiments=config["experiments"], evaluation=config["evaluation"])
