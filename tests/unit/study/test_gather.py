"""A study's data from stored results, against what was stored."""

import json
from pathlib import Path

import pytest

from qerl.jobs import GatherJob
from qerl.results.schema import (
    EvaluationResult,
    Machine,
    OutcomeRow,
    Provenance,
    TaskScore,
)
from qerl.results.store import ResultError, write, write_rows
from qerl.settings.run import RunSettings
from qerl.study.data import gather_study, gathered, read_study
from tests.synthetic_results import NO_METRICS, write_json, write_lines, write_run

STAMP = Provenance(commit="d" * 40, dirty=False, machine=Machine(label="m"), versions={"torch": "2"}, time="2026")
ONE = "e-bf16-lora-seed0"
#: A problem's right completions, all of them, and distinct solutions by task.
COUNTS = {"countdown": (3, 4, 2), "checks": (1, 3, None)}


def store_run(folder: Path, seed: int, experiment: str = "e", status: str = "ok") -> list[Path]:
    base = {"model": "tiny", "dataset": "countdown", "steps": 3}
    run = write_run(folder, "bf16-lora", seed, [], experiment, base, status)
    write_json(run, json.loads(run.read_text()) | ({} if status == "ok" else {"reason": "too hot"}))
    steps = [NO_METRICS | {"step": step, "reward": step / 8, "entropy/sampler": 0.5} for step in (1, 2, 3)]
    write_lines(run.parent / "metrics.jsonl", steps)
    return [run, *store_evaluation(folder, run.parent.name, run.parent.name, status)]


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
    of_run = {"run": run, "arm": run and "bf16-lora", "experiment": run and "e", "varied": {}}
    result = EvaluationResult(
        eval=name, model="tiny", weights="bf16", tasks=scores, status=status, provenance=STAMP, **of_run
    )
    file = folder / "evaluate" / name / "result.json"
    write(file, result)
    write_rows(file.with_name("outcomes.jsonl"), rows)
    return [file]


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
    paths = [*store_run(tmp_path, 0), *store_evaluation(tmp_path, "base-tiny-bf16", None)]
    gather_study(job(tmp_path, [*paths, *store_run(tmp_path, 0, "elsewhere")]))
    study = read_study(tmp_path / "study")
    assert study.runs["run"].tolist() == [ONE, "base-tiny-bf16"]
    [run, base] = study.runs.to_dict("records")
    assert (run["role"], run["size"], run["commit"], run["evaluated_time"]) == ("main", "3m", "0123456789ab", "2026")
    assert RunSettings.model_validate_json(run["settings"]).steps == 3
    assert (base["role"], base["arm"], base["model"]) == ("base", "", "tiny")
    assert study.steps["reward"].tolist() == [1 / 8, 2 / 8, 3 / 8]
    assert study.steps["entropy/sampler"].tolist() == [0.5] * 3
    rows = study.outcomes[study.outcomes["run"] == ONE].set_index("split")
    assert rows.loc["test", ["right", "drawn", "distinct"]].tolist() == [3, 4, 2]
    assert rows.loc["validation", ["right", "drawn"]].tolist() == [1, 3]
    assert rows["distinct"].isna().tolist() == (rows.index == "validation").tolist()


def test_a_failed_run_keeps_its_reason_and_has_no_outcome(tmp_path):
    study = gathered(job(tmp_path, store_run(tmp_path, 0, "e", "diverged after 3 of 9 steps")))
    assert study.runs[["status", "reason"]].to_numpy().tolist() == [["diverged after 3 of 9 steps", "too hot"]]
    assert len(study.outcomes) == 0
    assert len(study.steps) == 3


def test_only_finished_runs_are_taken_if_so_asked(tmp_path):
    done = store_run(tmp_path, 0)
    trained, _ = store_run(tmp_path, 1)
    paths = [*done, trained, tmp_path / "train/three/run.json"]
    study = gathered(job(tmp_path, paths, only_finished=True))
    assert study.runs["run"].tolist() == [ONE]
    assert set(study.steps["run"]) == set(study.outcomes["run"]) == {ONE}
    with pytest.raises(ResultError, match=r"e-bf16-lora-seed1/run\.json has no evaluation"):
        gathered(job(tmp_path, paths[:-1]))
    with pytest.raises(ResultError, match=r"three/run\.json doesn't exist"):
        gathered(job(tmp_path, [*done, paths[-1]]))
