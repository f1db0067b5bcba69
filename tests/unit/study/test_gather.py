"""A study's data from stored results, against what was stored."""

from pathlib import Path

import pytest

from qerl.jobs import GatherJob
from qerl.results.schema import (
    EvaluationResult,
    Machine,
    OutcomeRow,
    Provenance,
    Quartiles,
    RunResult,
    RunSummary,
    StepMetrics,
    TaskScore,
)
from qerl.results.store import ResultError, write, write_rows
from qerl.results.study_data import read_study
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from qerl.study.gather import gather_study, gathered

STAMP = Provenance(commit="d" * 40, dirty=False, machine=Machine(label="m"), versions={"torch": "2"}, time="2026")
#: A problem's right completions, all of them, and distinct solutions by task.
COUNTS = {"countdown": (3, 4, 2), "checks": (1, 3, None)}


def store_run(folder: Path, name: str, experiment: str, status: str = "ok", steps: int = 3) -> list[Path]:
    settings = parse(RunSettings, {"model": "tiny", "dataset": "countdown", "steps": steps}, "")
    cost = {"seconds": 2.0, "peak_memory_bytes": None, "trainable_parameters": 1, "weight_bytes": 1}
    rates = {"rollout_tokens_per_second": 1.0, "update_tokens_per_second": 1.0}
    summary = RunSummary(steps=steps, step_seconds=Quartiles(p25=1, median=1, p75=1), **cost, **rates)
    ended = {"summary": summary} if status == "ok" else {"status": status, "reason": "too hot"}
    run = RunResult(
        run=name, experiment=experiment, arm="bf16", varied={}, settings=settings, provenance=STAMP, **ended
    )
    write(folder / "train" / name / "run.json", run)
    required = {field.alias or key: 0 for key, field in StepMetrics.model_fields.items() if field.is_required()}
    rows = [{**required, "step": step, "reward": step / 8, "entropy/sampler": 0.5} for step in range(1, steps + 1)]
    write_rows(folder / "train" / name / "metrics.jsonl", [StepMetrics.model_validate(row) for row in rows])
    return [folder / "train" / name / "run.json", *store_evaluation(folder, name, name, status)]


def store_evaluation(folder: Path, name: str, run: str | None, status: str = "ok") -> list[Path]:
    counts = COUNTS if status == "ok" else {}
    rows = [
        OutcomeRow(dataset=task, problem="p1", right=right, drawn=drawn, distinct=distinct)
        for task, (right, drawn, distinct) in counts.items()
    ]
    scores = {
        task: TaskScore(harness="qerl", problems=1, repeats=drawn, accuracy=right / drawn)
        for task, (right, drawn, _) in counts.items()
    }
    of_run = {"run": run, "arm": run and "bf16", "experiment": run and "e", "varied": {}}
    result = EvaluationResult(
        eval=name, model="tiny", weights="bf16", tasks=scores, status=status, provenance=STAMP, **of_run
    )
    write(folder / "evaluate" / name / "result.json", result)
    write_rows(folder / "evaluate" / name / "outcomes.jsonl", rows)
    return [folder / "evaluate" / name / "result.json"]


def job(folder: Path, paths: list[Path], **changes) -> GatherJob:
    (folder / "protocol.md").write_text("Compared are arms.\n")
    (folder / "results.txt").write_text("".join(f"{path}\n" for path in paths))
    values = {
        "study": "s",
        "decides": True,
        "experiments": {"e": "3m"},
        "sizes": {"tiny": "3m"},
        "protocol": folder / "protocol.md",
        "pretrained": {},
        "tasks": {"countdown": ("countdown", "test", 1.0), "checks": ("countdown", "validation", 0.5)},
        "results": folder / "results.txt",
        "only_finished": False,
        "out": folder / "study",
    }
    return GatherJob(**{**values, **changes})


def test_runs_steps_and_outcomes_are_those_of_the_files(tmp_path):
    paths = [*store_run(tmp_path, "one", "e"), *store_evaluation(tmp_path, "base-tiny-bf16", None)]
    gather_study(job(tmp_path, [*paths, *store_run(tmp_path, "other", "elsewhere")]))
    study = read_study(tmp_path / "study")
    assert study.runs["run"].tolist() == ["one", "base-tiny-bf16"]
    [run, base] = study.runs.to_dict("records")
    assert (run["role"], run["size"], run["commit"], run["evaluated_time"]) == ("main", "3m", "d" * 12, "2026")
    assert RunSettings.model_validate_json(run["settings"]).steps == 3
    assert (base["role"], base["arm"], base["model"]) == ("base", "", "tiny")
    assert study.steps["reward"].tolist() == [1 / 8, 2 / 8, 3 / 8]
    assert study.steps["entropy/sampler"].tolist() == [0.5] * 3
    rows = study.outcomes[study.outcomes["run"] == "one"].set_index("split")
    assert rows.loc["test", ["right", "drawn", "distinct"]].tolist() == [3, 4, 2]
    assert rows.loc["validation", ["right", "drawn"]].tolist() == [1, 3]
    assert rows["distinct"].isna().tolist() == (rows.index == "validation").tolist()


def test_a_failed_run_keeps_its_reason_and_has_no_outcome(tmp_path):
    study = gathered(job(tmp_path, store_run(tmp_path, "one", "e", "diverged after 3 of 9 steps")))
    assert study.runs[["status", "reason"]].to_numpy().tolist() == [["diverged after 3 of 9 steps", "too hot"]]
    assert len(study.outcomes) == 0
    assert len(study.steps) == 3


def test_only_finished_runs_are_taken_if_so_asked(tmp_path):
    done = store_run(tmp_path, "one", "e")
    trained, _ = store_run(tmp_path, "two", "e")
    paths = [*done, trained, tmp_path / "train/three/run.json"]
    study = gathered(job(tmp_path, paths, only_finished=True))
    assert study.runs["run"].tolist() == ["one"]
    assert set(study.steps["run"]) == set(study.outcomes["run"]) == {"one"}
    with pytest.raises(ResultError, match=r"two/run\.json has no evaluation"):
        gathered(job(tmp_path, paths[:-1]))
    with pytest.raises(ResultError, match=r"three/run\.json doesn't exist"):
        gathered(job(tmp_path, [*done, paths[-1]]))
