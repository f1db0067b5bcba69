"""The table of runs on several GPUs: that of the page, by hand, and of a run of two processes on the CPU."""

import json
import re
from pathlib import Path

import pytest

from tests import scaling
from tests.gpu.time_scaling import time_case, write_inputs
from tests.scaling import CASES, PAGE, RESULTS, Case, page, table


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_the_page_has_the_table_of_the_stored_results():
    assert PAGE.read_text() == page(), "run `python -m tests.scaling`"
    missing = [name for name in CASES if not (RESULTS / name).exists()]
    assert page().count("not measured") == len(missing)


def test_every_case_is_a_run_on_as_many_gpus():
    for case in CASES.values():
        assert case.run().gpus == case.gpus
        assert case.compared is None or CASES[case.compared[0]].size == case.size


def change(folder: Path, name: str, seconds: list[float], idle: float | None) -> None:
    """A copy of a run with other seconds."""
    rows = [json.loads(line) for line in (folder / "real/metrics.jsonl").read_text().splitlines()]
    for row, taken in zip(rows, seconds, strict=True):
        row |= {"seconds/step": taken, "seconds/idle": idle, "seconds/idle_max": idle and 2 * idle}
    (folder / name).mkdir()
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / name / "run.json").write_text((folder / "real/run.json").read_text())


@pytest.mark.usefixtures("forking")
def test_a_case_is_timed_and_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "test")
    small = {"rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 12}}, "steps": 3, "dtype": "float32"}
    real = Case("real", "tiny", 2, {**small, "weights": "bf16"}, (6, 0.8))
    (tmp_path / "scratch").mkdir()
    write_inputs(real, tmp_path / "scratch")
    time_case("real", real, tmp_path / "scratch", tmp_path)
    assert sorted(file.name for file in (tmp_path / "real").iterdir()) == ["metrics.jsonl", "run.json"]
    rows = [json.loads(line) for line in (tmp_path / "real/metrics.jsonl").read_text().splitlines()]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(0 < row["completion_length"] < 12 for row in rows)  # drawn lengths, cut at 12
    change(tmp_path, "one", [99, 4.0, 4.0], None)
    change(tmp_path, "two", [99, 4.0, 6.0], 0.25)
    cases = {"one": Case("a", "7B"), "two": Case("b", "7B", 2, compared=("one", 2, 1.9)), "none": Case("c", "7B")}
    monkeypatch.setattr(scaling, "CASES", {"real": real} | cases)
    first, *others = cells(table(tmp_path))[2:]
    assert re.fullmatch(r"\d+\.\d\d", first[2])
    assert re.fullmatch(r"\d+\.\d\d, \d+\.\d\d", first[5])
    assert [row[:4] for row in others] == [
        ["a", "1", "4.00", ""],
        ["b", "2", "5.00", "1.60"],
        ["c", "1", "not measured", ""],
    ]
    assert others[1][4:6] == ["1.9", "0.25, 0.50"]
