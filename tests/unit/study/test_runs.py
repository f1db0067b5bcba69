"""A study's data: gathered from stored results, written as it is read, and paired; what doesn't fit is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from qerl.report_jobs import GatherJob
from qerl.results.schema import (
    EvaluationResult,
    Machine,
    OutcomeRow,
    Provenance,
    ResultError,
    TaskScore,
    write,
    write_rows,
)
from qerl.settings.run import RunSettings
from qerl.study.runs import (
    Study,
    differences,
    gather_study,
    gathered,
    means,
    outcomes,
    read_studies,
    read_study,
    write_study,
)
from tests.synthetic_results import NO_METRICS, listing, write_json, write_lines, write_run
from tests.unit.study.test_dose import study

STAMP = Provenance(commit="d" * 40, dirty=False, machine=Machine(label="m"), versions={"torch": "2"}, time="2026")
ONE = "e-bf16-lora-seed0"
#: A problem's right completions, all of them, and distinct solutions by task.
COUNTS = {"countdown": (3, 4, 2), "checks": (1, 3, None)}


def store_run(folder: Path, seed: int, experiment: str = "e", status: str = "ok") -> list[Path]:
    base = {"model": "tiny", "dataset": "countdown", "steps": 3}
    steps = [NO_METRICS | {"step": step, "reward": step / 8, "entropy/sampler": 0.5} for step in (1, 2, 3)]
    run = write_run(folder, "bf16-lora", seed, steps, experiment, base, status)
    if status != "ok":
        write_json(run, json.loads(run.read_text()) | {"reason": "too hot"})
        write_lines(run.parent / "metrics.jsonl", steps)
    return [run, store_evaluation(folder, run.parent.name, run.parent.name, status)]


def store_evaluation(folder: Path, name: str, run: str | None, status: str = "ok") -> Path:
    rows, scores = [], {}
    for task, (right, drawn, distinct) in COUNTS.items() if status == "ok" else ():
        rows.append(OutcomeRow(dataset=task, problem="p1", right=right, drawn=drawn, distinct=distinct))
        scores[task] = TaskScore(harness="qerl", problems=1, repeats=drawn, accuracy=right / drawn)
    policy = {"eval": name, "model": "tiny", "weights": "bf16", "run": run, "arm": run and "bf16-lora"}
    policy |= {"experiment": run and "e", "varied": {}}
    file = folder / "evaluate" / name / "result.json"
    write(file, EvaluationResult(tasks=scores, status=status, provenance=STAMP, **policy))
    write_rows(file.with_name("outcomes.jsonl"), rows)
    return file


def job(folder: Path, paths: list[Path], only_finished: bool = False) -> GatherJob:
    (folder / "protocol.md").write_text("Compared are arms.\n")
    return GatherJob(
        study="s",
        decides=True,
        experiments={"e": "3m"},
        sizes={"tiny": "3m"},
        protocol=folder / "protocol.md",
        pretrained={},
        tasks={"countdown": ("countdown", "test", 1.0), "checks": ("countdown", "validation", 0.5)},
        results=listing(paths, folder),
        only_finished=only_finished,
        out=folder / "study",
    )


def test_runs_steps_and_outcomes_are_those_of_the_files(tmp_path):
    paths = [*store_run(tmp_path, 0), store_evaluation(tmp_path, "base-tiny-bf16", None)]
    gather_study(job(tmp_path, [*paths, *store_run(tmp_path, 0, "elsewhere")]))
    made = read_study(tmp_path / "study")
    [run, base] = made.runs.to_dict("records")
    assert (run["run"], base["run"]) == (ONE, "base-tiny-bf16")
    assert (run["role"], run["size"], run["commit"], run["evaluated_time"]) == ("main", "3m", "0123456789ab", "2026")
    assert RunSettings.model_validate_json(run["settings"]).steps == 3
    assert (base["role"], base["arm"], base["model"]) == ("base", "", "tiny")
    assert made.steps[["reward", "entropy/sampler"]].to_numpy().tolist() == [[n / 8, 0.5] for n in (1, 2, 3)]
    rows = made.outcomes[made.outcomes["run"] == ONE].set_index("split")
    assert rows.loc["test", ["right", "drawn", "distinct"]].tolist() == [3, 4, 2]
    assert rows.loc["validation", ["right", "drawn"]].tolist() == [1, 3]
    assert rows["distinct"].isna().tolist() == (rows.index == "validation").tolist()


def test_a_failed_run_keeps_its_reason_and_has_no_outcome(tmp_path):
    made = gathered(job(tmp_path, store_run(tmp_path, 0, "e", "diverged after 3 of 9 steps")))
    assert made.runs[["status", "reason"]].to_numpy().tolist() == [["diverged after 3 of 9 steps", "too hot"]]
    assert (len(made.outcomes), len(made.steps)) == (0, 3)


def test_a_run_that_lacks_steps_is_refused(tmp_path):
    paths = store_run(tmp_path, 0)
    file = paths[0].with_name("metrics.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ResultError, match=r"metrics\.jsonl has 2 steps, and .*run\.json tells of 3; copy both again"):
        gathered(job(tmp_path, paths))


def test_only_finished_runs_are_taken_if_so_asked(tmp_path):
    done = store_run(tmp_path, 0)
    trained, _ = store_run(tmp_path, 1)
    paths = [*done, trained, tmp_path / "train/three/run.json"]
    made = gathered(job(tmp_path, paths, only_finished=True))
    assert {*made.runs["run"]} == {*made.steps["run"]} == {*made.outcomes["run"]} == {ONE}
    with pytest.raises(ResultError, match=r"e-bf16-lora-seed1/run\.json has no evaluation"):
        gathered(job(tmp_path, paths[:-1]))
    with pytest.raises(ResultError, match=r"three/run\.json doesn't exist"):
        gathered(job(tmp_path, [*done, paths[-1]]))


# --- files


@pytest.fixture
def made():
    return study({"nvfp4": 0.05}, seeds=1, problems=5)


def test_runs_in_several_folders_are_one_study(made, tmp_path):
    runs = made.runs["run"].tolist()
    for name, share in (("early", runs[:2]), ("late", runs[2:])):
        frames = [frame[frame["run"].isin(share)] for _, frame in made.frames()]
        write_study(tmp_path / name, type(made)(made.header, *frames))
    whole = read_studies([tmp_path / "early", tmp_path / "late"])
    write_study(tmp_path / "all", made)
    parts = ["early" if run in runs[:2] else "late" for run in whole.runs["run"]]
    assert whole.runs["part"].tolist() == parts
    whole = replace(whole, runs=whole.runs.drop(columns=["part", "protocol"]))
    read = read_study(tmp_path / "all")
    assert read.header == made.header
    for frames in zip(whole.frames(), read.frames(), made.frames(), strict=True):
        columns = [*frames[0][1].columns[:2], *frames[0][1].columns[-2:]]
        joined, alone, written = (frame.sort_values(columns).reset_index(drop=True) for _, frame in frames)
        pd.testing.assert_frame_equal(joined, alone)
        pd.testing.assert_frame_equal(alone, written, check_dtype=False, rtol=1e-6)
    write_study(tmp_path / "empty", Study(made.header, *(frame.iloc[:0] for _, frame in made.frames())))
    with pytest.raises(ResultError, match=f"run {runs[0]} is in {tmp_path}/early and {tmp_path}/all; keep"):
        read_studies([tmp_path / "early", tmp_path / "empty", tmp_path / "all"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"runs": lambda rows: pd.concat([rows, rows])}, "runs.parquet has a row twice of bf16-3m-0-0"),
        ({"steps": lambda rows: pd.concat([rows, rows])}, "steps.parquet has a row twice of bf16-3m-0-0"),
        ({"outcomes": lambda rows: pd.concat([rows, rows])}, "outcomes.parquet has a row twice of bf16-3m-0-0"),
        ({"runs": lambda rows: rows.iloc[1:]}, "steps.parquet has rows that runs.parquet lacks of bf16-3m-0-0"),
        ({"steps": lambda rows: rows.iloc[3:]}, "steps.parquet has no row of bf16-3m-0-0"),
        ({"outcomes": lambda rows: rows.iloc[:-15]}, "outcomes.parquet has no row of paper-bf16-3m-2-0"),
        ({"outcomes": lambda rows: rows.assign(right=5)}, "outcomes.parquet has 5 right of 4 completions"),
        ({"outcomes": lambda rows: rows.assign(right=-1)}, "outcomes.parquet has -1 right of 4 completions"),
        ({"outcomes": lambda rows: rows.assign(right=0, drawn=0)}, "outcomes.parquet has 0 right of 0 completions"),
    ],
)
def test_files_that_contradict_each_other_are_refused(made, tmp_path, changed, said):
    write_study(tmp_path, replace(made, **{name: change(getattr(made, name)) for name, change in changed.items()}))
    with pytest.raises(ResultError, match=said):
        read_study(tmp_path)


def test_a_damaged_page_of_a_file_is_named(made, tmp_path):
    write_study(tmp_path, made)
    file = tmp_path / "steps.parquet"
    damaged = bytearray(file.read_bytes())
    damaged[4:200] = bytes(byte ^ 0xFF for byte in damaged[4:200])
    file.write_bytes(damaged)
    with pytest.raises(ResultError, match=r"steps\.parquet is no whole Parquet file"):
        read_study(tmp_path)


def test_other_files_are_refused(made, tmp_path):
    file = tmp_path / "runs.parquet"
    with pytest.raises(ResultError, match=r"runs\.parquet doesn't exist"):
        read_study(tmp_path)
    file.write_text("no table")
    with pytest.raises(ResultError, match="no whole Parquet file"):
        read_study(tmp_path)
    write_study(tmp_path, made)
    table = pq.read_table(file)
    pq.write_table(table.drop_columns("seed"), file)
    with pytest.raises(ResultError, match="other columns"):
        read_study(tmp_path)
    pq.write_table(table.replace_schema_metadata({}), file)
    with pytest.raises(ResultError, match="doesn't state its study"):
        read_study(tmp_path)
    write_study(tmp_path, made)
    write_study(tmp_path / "other", replace(made, header=made.header.model_copy(update={"study": "other"})))
    with pytest.raises(ResultError, match="several studies"):
        read_studies([tmp_path, tmp_path / "other"])
    (tmp_path / "other/runs.parquet").replace(file)
    with pytest.raises(ResultError, match="several studies"):
        read_study(tmp_path)


# --- pairs


def counted(right_of, problems=("p", "q", "r")):
    """Runs and counts of a study: (arm, model, seed) -> right of eight completions of each problem."""
    runs, counts = [], []
    for (arm, model, seed), right in right_of.items():
        identity = {"run": f"{arm}-{model}-{seed}", "role": "main", "experiment": "e", "size": "s", "arm": arm}
        runs.append({**identity, "model": model, "seed": seed, "rate": 1e-3, "status": "ok"})
        counts += [
            {"run": runs[-1]["run"], "problem": p, "right": n, "drawn": 8} for p, n in zip(problems, right, strict=True)
        ]
    return pd.DataFrame(runs), pd.DataFrame(counts)


def test_pass_at_k_of_each_problem_of_each_run():
    frame = outcomes(*counted({("a", "m", 0): (0, 4, 8), ("b", "m", 0): (1, 2, 3)}), k=2)
    by_arm = frame.pivot_table(index="arm", columns="problem", values="value")
    # 1 - C(8 - c, 2) / C(8, 2) by hand.
    assert by_arm.loc["a"].tolist() == pytest.approx([0, 1 - 6 / 28, 1])
    assert by_arm.loc["b"].tolist() == pytest.approx([1 - 21 / 28, 1 - 15 / 28, 1 - 10 / 28])


def test_pairs_share_base_and_seed_and_a_failed_run_takes_its_pair_along():
    counts = {("a", "m", 0): (8, 4, 0), ("b", "m", 0): (4, 4, 0), ("a", "n", 1): (8, 8, 8), ("b", "n", 1): (0, 8, 8)}
    frame = outcomes(*counted({**counts, ("a", "m", 7): (8, 8, 8)}), k=1)
    mixed = pd.concat([frame[frame["arm"] == "a"], frame[frame["arm"] == "b"].iloc[::-1]])
    for rows in (frame, mixed):  # paired by name, not by place
        pairs = differences(rows, "a", "b")
        assert {(model, seed) for model, seeds in pairs.items() for seed in seeds} == {("m", 0), ("n", 1)}
        np.testing.assert_allclose([pairs["m"][0], pairs["n"][1]], [[0.5, 0, 0], [1, 0, 0]])


@pytest.mark.parametrize("problems", [("p", "q", "s"), ("p", "q", "q")])
def test_runs_on_different_problems_are_no_pair(problems):
    one = outcomes(*counted({("a", "m", 0): (1, 2, 3)}), k=1)
    other = outcomes(*counted({("b", "m", 0): (1, 2, 3)}, problems=problems), k=1)
    with pytest.raises(ResultError, match="different problems"):
        differences(pd.concat([one, other]), "a", "b")


def test_a_missing_number_is_no_difference():
    """Its p value would be the smallest of all, and Holm's correction would take it from the others."""
    frame = outcomes(*counted({("a", "m", 0): (1, 2, 3), ("b", "m", 0): (1, 2, 3)}), k=1)
    frame.loc[4, "value"] = np.nan
    with pytest.raises(ResultError, match="a or b lacks the measure on some problem from m with seed 0"):
        differences(frame, "a", "b")


def test_means_over_steps_are_of_runs_that_ended_well():
    runs, _ = counted({("a", "m", 0): (), ("b", "m", 0): (), ("c", "m", 0): ()}, problems=())
    runs.loc[runs["arm"] == "c", "status"] = "diverged after 1 of 2 steps"
    steps = pd.DataFrame({"run": np.repeat(runs["run"], 2), "entropy": [1.0, 3.0, 5.0, 6.0, 9.0, 9.0]})
    frame = means(runs, steps, "entropy")
    assert dict(zip(frame["arm"], frame["value"], strict=True)) == {"a": 2.0, "b": 5.5}
    np.testing.assert_allclose(differences(frame, "b", "a")["m"][0], [3.5])
