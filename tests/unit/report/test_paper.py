"""Results beside printed numbers: the right cell, difference and interval, or the reason why there is none."""

import re

import numpy as np
import pandas as pd
import pytest

from qerl.report import paper
from qerl.results.printed import FOLDER, NAMES, TABLES, read_cells
from qerl.results.readers import StoredResults
from tests.synthetic_results import write_evaluation, write_figure, write_paper_tree, write_run, write_table

MODEL = "qwen2.5-7b"


def column(values: list[int]) -> np.ndarray:
    return np.array(values)[:, None]


def beside(name: str, paths: list) -> pd.DataFrame:
    """A table of the paper, by weights, method, noise and metric of the 7B model."""
    cells = paper.cells_of(name)
    return paper.beside(cells, paper.ours(StoredResults(paths), cells))


def cell(frame: pd.DataFrame, weights: str, metric: str, noise: str = "off", method: str = "lora", **more) -> pd.Series:
    wanted = {"model": MODEL, "weights": weights, "metric": metric, "noise": noise, "method": method, **more}
    mask = np.logical_and.reduce([frame[key] == value for key, value in wanted.items()])
    return frame[mask].squeeze()


def trained(root, arm: str, seed: int, right: dict, experiment="e", data="gsm8k", status="ok", **settings) -> list:
    base = {"model": MODEL, "dataset": data, **settings}
    run = write_run(root, arm, seed, experiment=experiment, base=base, status=status)
    weights = arm.partition("-")[0]
    return [run, write_evaluation(root, run.parent.name, right, weights, run, MODEL)]


@pytest.fixture
def small(tmp_path):
    """Four problems of GSM8K: bases 2/4 and 1/4; NVFP4 LoRA 3/4 and 4/4 over two seeds; BF16 LoRA failed."""
    return [
        write_evaluation(tmp_path, "base-bf16", {"gsm8k": column([1, 1, 0, 0])}, "bf16", model=MODEL),
        write_evaluation(tmp_path, "base-nvfp4", {"gsm8k": column([1, 0, 0, 0])}, "nvfp4", model=MODEL),
        *trained(tmp_path, "nvfp4-lora", 0, {"gsm8k": column([1, 1, 1, 0])}),
        *trained(tmp_path, "nvfp4-lora", 1, {"gsm8k": column([1, 1, 1, 1])}),
        *trained(tmp_path, "bf16-lora", 0, {}, status="timeout"),
    ]


def test_accuracies_land_in_their_cells(small):
    frame = beside("table1", small)
    ours = cell(frame, "nvfp4", "gsm8k")
    assert (ours["printed"], ours["ours"], ours["seeds"], ours["source"]) == ("88.5", 87.5, 2, "e/nvfp4-lora")
    assert ours["difference"] == pytest.approx(87.5 - 88.5)
    assert ours["difference_low"] == pytest.approx(ours["ours_low"] - 88.5)
    delta = cell(frame, "nvfp4", "gsm8k/delta")
    assert (delta["ours"], delta["difference"]) == (37.5, pytest.approx(37.5 - 12.2))
    assert cell(frame, "bf16", "gsm8k", method="none")["ours"] == 50
    assert cell(frame, "nvfp4", "gsm8k/delta", method="none")["difference"] == pytest.approx(-25 + 2.9)
    assert frame.loc[frame["printed"] != "", "ours"].notna().sum() == 5


@pytest.fixture
def three_readings(tmp_path):
    """The base by the stock task 2/4, 3/4 if flexible, own prompt 1/4; NVFP4 LoRA 0/4, 2/4 and 4/4; NF4 not asked."""
    base = {"gsm8k": column([1, 1, 0, 0]), "gsm8k-own-prompt": column([1, 0, 0, 0])}
    base_flexible, flexible = {"gsm8k": column([1, 1, 1, 0])}, {"gsm8k": column([1, 1, 0, 0])}
    asked = {"gsm8k": column([0, 0, 0, 0]), "gsm8k-own-prompt": column([1, 1, 1, 1])}
    nvfp4 = write_run(tmp_path, "nvfp4-lora", 0, base={"model": MODEL, "dataset": "gsm8k"})
    nf4 = write_run(tmp_path, "nf4-lora", 0, base={"model": MODEL, "dataset": "gsm8k"})
    stock_only = {"gsm8k": asked["gsm8k"]}
    return [
        write_evaluation(tmp_path, "base-bf16", base, "bf16", model=MODEL, flexible=base_flexible),
        *(nvfp4, write_evaluation(tmp_path, "nvfp4", asked, "nvfp4", nvfp4, MODEL, flexible=flexible)),
        *(nf4, write_evaluation(tmp_path, "nf4", stock_only, "nf4", nf4, MODEL, flexible=flexible)),
    ]


def test_gsm8k_stands_beside_the_like_and_every_reading_in_a_column(three_readings, tmp_path):
    frame = beside("table1", three_readings)

    def ours(*which: str, **more: str) -> list[float]:
        return [cell(frame, *which, **more)["ours"] for which in [(which[0], metric) for metric in which[1:]]]

    readings = ("gsm8k", "gsm8k/strict", "gsm8k/flexible", "gsm8k/own-prompt")
    assert ours("bf16", *readings, method="none") == [50, 50, 75, 25]
    assert ours("nvfp4", *readings) == [100, 0, 50, 100]
    assert cell(frame, "nvfp4", "gsm8k/delta")["ours"] == 50
    extra = frame[frame["metric"].isin(readings[1:])]
    assert set(extra["printed"]) == {""}
    assert extra["difference"].isna().all()
    write_table("table1", three_readings, tmp_path)
    header = (tmp_path / "table1.md").read_text().splitlines()[0]
    assert all(name in header for name in ("GSM8K (%)", "strict (%)", "flexible (%)", "own prompt (%)"))
    # A trained policy with only the stock task has no number beside the paper's.
    for metric in ("gsm8k", "gsm8k/delta"):
        found = cell(frame, "nf4", metric)
        assert (found["status"], found["source"]) == ("gsm8k-own-prompt not run", "main/nf4-lora")
    assert ours("nf4", "gsm8k/flexible") == [50]


def test_a_cell_without_a_run_or_with_a_failed_one_says_so(small):
    frame = beside("table1", small)
    assert cell(frame, "bf16", "gsm8k")["status"] == "timeout"
    assert cell(frame, "bf16", "gsm8k/delta")["status"] == "timeout"
    assert cell(frame, "mxfp4", "gsm8k")["status"] == "not run"
    assert cell(frame, "nvfp4", "gsm8k", noise="exponential")["status"] == "not run"
    missing = frame[frame["status"] != "ok"]
    assert missing[["ours", "difference", "ours_low", "seeds"]].isna().all(axis=None)
    assert len(frame) == len(read_cells(FOLDER / "table1.csv"))


def test_a_cell_takes_only_results_with_its_properties(tmp_path):
    right = {"gsm8k": column([1, 0])}
    consistent = {"schedule": "exponential", "mode": "consistent"}
    paths = [
        *trained(tmp_path, "nvfp4-lora", 0, right, "rank", adapter={"rank": 16}),
        *trained(tmp_path, "bf16-lora", 0, right, "data", data="bigmath-3-5"),
        *trained(tmp_path, "nvfp4-lora-aqn", 0, right, "mode", noise=consistent),
        *trained(tmp_path, "nvfp4-lora-aqn", 0, right, "decay", noise={"schedule": "linear"}),
        *trained(tmp_path, "nvfp4-lora", 0, right, "recipe", recipe="awq"),
    ]
    frame = beside("table1", paths)
    assert cell(frame, "nvfp4", "gsm8k")["status"] == "not run (rank 16 was)"
    assert frame["ours"].isna().all()


def test_the_first_arm_of_the_configuration_stands_in_a_cell(tmp_path):
    paths = [
        *trained(tmp_path, "nf4-lora", 0, {}, "failed", status="out of memory"),
        *trained(tmp_path, "nf4-lora", 0, {"gsm8k": column([1, 0])}, "first"),
        *trained(tmp_path, "nf4-lora", 0, {"gsm8k": column([1, 1])}, "second"),
    ]
    found = cell(beside("table1", paths), "nf4", "gsm8k")
    assert (found["source"], found["ours"], found["seeds"]) == ("first/nf4-lora", 50, 1)
    paths += trained(tmp_path, "nf4-lora", 1, {}, "first", status="out of memory after 3 of 9 steps")
    paths += trained(tmp_path, "nf4-lora", 2, {}, "other", status="timeout of 1 h after 3 of 9 steps")
    found = cell(beside("table1", paths), "nf4", "gsm8k")
    assert (found["ours"], found["seeds"]) == (50, 1)
    assert found["note"] == "without 1 of our runs: out of memory after 3 of 9 steps"


def test_average_needs_all_of_its_data_sets(tmp_path):
    names = ("math500", "aime24", "aime25", "amc23")
    right = dict(zip(names, (column([1, 1]), column([0, 0]), column([1, 0]), column([1, 1, 0, 0])), strict=True))
    base = {name: np.zeros_like(values) for name, values in right.items()}
    paths = [
        write_evaluation(tmp_path, "base", base, "bf16", model=MODEL),
        *trained(tmp_path, "bf16-lora", 0, right, data="bigmath-3-5"),
        *trained(tmp_path, "nvfp4-lora", 0, {"math500": column([1, 0])}, data="bigmath-3-5"),
    ]
    frame = beside("table2", paths)
    assert cell(frame, "bf16", "average")["ours"] == 50
    assert cell(frame, "bf16", "average", method="none")["difference"] == pytest.approx(-28.9)
    assert cell(frame, "nvfp4", "average")["status"] == "not run"
    assert cell(frame, "nvfp4", "math500")["ours"] == 50


def test_hyperparameters_are_those_of_the_runs(tmp_path):
    paths = trained(tmp_path, "nvfp4-lora-aqn", 0, {"gsm8k": column([1])}, rollout={"prompts": 4, "group_size": 8})
    frame = beside("table4", paths)
    ours = {(row["metric"], row["setting"], row["weights"]): row for row in frame.to_dict("records")}
    assert ours["batch", "", ""]["ours"] == 32
    assert ours["batch", "", ""]["difference"] == 32 - 128
    assert ours["loss.updates_per_rollout", "data=gsm8k", ""]["difference"] == 1 - 4
    assert ours["rollout.group_size", "data=bigmath-3-5", ""]["status"] == "not run"
    assert ours["optimizer.name", "", ""]["ours"] == "adamw8bit"
    assert ours["optimizer.learning_rate", "", "bf16"]["status"] == "not run"
    assert ours["noise.sigma_start", "", ""]["ours"] == 0.01


# --- for people ------------------------------------------------------------------------------------------------------


def test_a_table_has_the_paper_s_rows_and_marks_contradictions(small):
    shown, footnotes = paper.paper_shape(beside("table1", small))
    rows = shown.to_dict("records")
    start = next(
        i for i, row in enumerate(rows) if (row["model"], row["weights"], row["training"]) == (MODEL, "NVFP4", "LoRA")
    )
    assert [row[""] for row in rows[start : start + 3]] == ["paper", "ours", "difference"]
    assert rows[start]["GSM8K (%)"] == "88.5"
    assert rows[start + 1]["GSM8K (%)"].startswith("87.5 [")
    assert rows[start + 1]["seeds"] == "2"
    assert rows[start + 2]["GSM8K (%)"] == "−1.0"
    marked = [row["Δ to BF16 base (points)"] for row in rows if "(" in row["Δ to BF16 base (points)"]]
    assert marked == ["+22.2 (a)", "+22.6 (b)", "+13.5 (c)"]
    assert "+14.5" in footnotes[2]
    assert sum(row[""] == "paper" for row in rows) == 20
    assert sum(row["GSM8K (%)"] == "timeout" for row in rows) == 1


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return write_paper_tree(tmp_path_factory.mktemp("paper"))


@pytest.mark.parametrize("name", TABLES)
def test_files_of_every_table(tmp_path, tree, name):
    write_table(name, tree, tmp_path)
    markdown, tex = ((tmp_path / f"{name}.{suffix}").read_text() for suffix in ("md", "tex"))
    csv = pd.read_csv(tmp_path / f"{name}.csv")
    assert csv["status"].notna().all()
    assert re.search("Machine: .*Seeds per arm: .*Commit: ", (tmp_path / f"{name}.txt").read_text())
    assert len({line.count("|") for line in markdown.splitlines() if line.startswith("|")}) == 1
    letters = set(re.findall(r" \(([a-z])\)", markdown.partition("\n\n")[0]))
    assert letters == set(re.findall(r"^- \(([a-z])\)", markdown, re.MULTILINE))
    body = tex.partition("\\midrule")[2].partition("\\bottomrule")[0]
    columns = len(re.search(r"\\begin\{tabular\}\{(l+)\}", tex).group(1))
    assert {len(re.findall(r"(?<!\\)&", row)) for row in body.split("\\\\\n") if row.strip()} == {columns - 1}
    assert not re.search(r"(?<!\\)[%#_]", body)


@pytest.mark.parametrize("name", sorted(NAMES - TABLES.keys()))
def test_files_of_every_figure(tmp_path, tree, name):
    write_figure(name, tree, tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / f"{name}.svg").stat().st_size > 2500
    told = (tmp_path / f"{name}.txt").read_text()
    assert "nothing is measured" in told or re.search(
        r"^The paper's Figure .* Machine: .*Seeds per arm: .*Commit: ", told
    )
