"""The speeds that price a plan are those of the committed measurements."""

import csv
import json
from pathlib import Path
from statistics import median

import pytest

from tests.speeds import SPEEDS, table

ROOT = Path(__file__).parents[2]


def test_the_file_is_the_table_of_the_measurements():
    assert SPEEDS.read_text() == table().to_csv(index=False), "run `python -m tests.speeds`"


def test_speeds_are_medians_of_stored_samples():
    """Rows of GPUs: decoded tokens a second of a point, or the completions' tokens over the seconds of an update."""
    with SPEEDS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["machine"] != "cpu"]
    assert {row["engine"] for row in rows} == {"native", "vllm"}
    assert {row["machine"] for row in rows} == {"h100", "h200"}
    for row in rows:
        content = json.loads((ROOT / row["source"]).read_text())
        if row["rollout_tokens_per_second"]:
            [point] = [point for point in content["points"] if point["sequences"] == int(row["sequences"])]
            rate = median(point["samples"])
        else:
            work = content["work"]
            assert work["prompts"] * work["group_size"] == int(row["sequences"])
            tokens = work["prompts"] * work["group_size"] * work["tokens"]
            rate = tokens / median(step["update"] for step in content["steps"])
        assert float(row["rollout_tokens_per_second"] or row["update_tokens_per_second"]) == pytest.approx(
            rate, abs=0.5
        )
