"""The printed numbers: their shape, and the marks of the paper's contradictions, derived here from the numbers."""

import csv
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from qerl.report_jobs import FigureJob, TableJob
from qerl.results.printed import BARS, CURVE_FIGURES, FOLDER, MODELS, NAMES, SCHEDULES, TABLES
from qerl.settings.base import parse, read_yaml
from qerl.settings.workflow import Config
from qerl.workflow.plan import plan

KEY = ["table", "model", "weights", "method", "noise", "rank", "setting", "metric"]
SPEED = {"qwen2.5-3b": "table5", "qwen2.5-7b": "table6", "qwen2.5-14b": "table7", "qwen2.5-32b": "table8"}


def rows_of(name: str) -> list[dict]:
    with (FOLDER / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


ALL = [row for name in (*TABLES, "figure1", "figure11", "text") for row in rows_of(name)]
QUOTIENT = "quotient of the printed throughputs"
ROWS = [row for row in ALL if row["printed"] and row["note"] != QUOTIENT]


def only(**values) -> dict:
    (found,) = every(**values)
    return found


def every(**values) -> list[dict]:
    return [row for row in ROWS if all(row[key] == value for key, value in values.items())]


def number(row: dict) -> float:
    return float(row["printed"])


def rate(table: str, weights: str, batch: int) -> float:
    return number(only(table=table, weights=weights, metric="rollout_rate", setting=f"bs={batch}"))


def place(row: dict) -> tuple:
    return tuple(row[key] for key in KEY)


def wrong_differences() -> dict[tuple, str]:
    found = {}
    for row in [row for row in ROWS if row["metric"].endswith("/delta")]:
        metric = row["metric"].removesuffix("/delta")
        same = {key: row[key] for key in ("table", "model", "weights", "method", "noise")}
        base = only(table=row["table"], model=row["model"], weights="bf16", method="none", metric=metric)
        difference = number(only(**same, metric=metric)) - number(base)
        if abs(difference - number(row)) > 0.05:
            found[place(row)] = f"{difference:+.1f}".replace("-", "−")
    return found


def wrong_ratios() -> dict[tuple, str]:
    found = {}
    for model, batch in product(SPEED, (2, 8)):
        ratio = rate(SPEED[model], "nvfp4", batch) / rate(SPEED[model], "bf16", batch)
        row = only(table=SPEED[model], metric="rollout_speedup", setting=f"bs={batch}")
        if abs(ratio - number(row)) > 0.05:
            found[place(row)] = f"{ratio:.2f}"
    return found


def two_speeds_of_a_step() -> dict[tuple, str]:
    """Table 3 against Tables 6 and 7, where neither setting of checkpointing has its number."""
    found = {}
    for row in every(table="table3", weights="nvfp4", metric="step_speedup"):
        same = {"table": SPEED[row["model"]], "weights": "nvfp4", "metric": "step_speedup", "unit": "ratio"}
        others = [other for gc in ("on", "off") for other in every(**same, setting=f"{row['setting']}; gc={gc}")]
        if others and number(row) not in map(number, others):
            found |= {place(other): f"{number(row):g}" for other in others}
            found[place(row)] = f"{number(others[0]):g}"
    return found


def one_number_for_two_batches() -> dict[tuple, str]:
    """Table 9 (batch 1, rank 16) against batch 2 of Tables 5 to 8; BF16's are equal, so one run is meant."""
    found = {}
    for model, weights in product(MODELS, ("bf16", "nvfp4")):
        rank = only(table="table9", model=model, weights=weights, rank="16", metric="rollout_rate")
        batch = only(table=SPEED[model], weights=weights, setting="bs=2", metric="rollout_rate")
        equal = number(rank) == number(batch)
        assert equal or weights == "nvfp4"
        found[place(rank)] = "batch of 2" if equal else f"{number(batch):g}"
        found[place(batch)] = "batch of 1" if equal else f"{number(rank):g}"
    return found


def batches_that_grow_too_fast() -> dict[tuple, str]:
    found = {}
    for model, weights in product(MODELS, ("bf16", "nvfp4")):
        growth = rate(SPEED[model], weights, 8) / rate(SPEED[model], weights, 2)
        if growth > 8 / 2:
            row = only(table=SPEED[model], weights=weights, setting="bs=8", metric="rollout_rate")
            found[place(row)] = f"{growth:.1f} times"
    return found


def two_starts_of_the_noise() -> dict[tuple, str]:
    table, text = (only(table=name, metric="noise.sigma_start") for name in ("table4", "text"))
    assert number(table) != number(text)
    return {place(table): f"{number(text):g}", place(text): f"{number(table):g}"}


def test_contradictions_are_marked_and_nothing_else_is():
    derived = [
        wrong_differences(), wrong_ratios(), two_speeds_of_a_step(), one_number_for_two_batches(),
        batches_that_grow_too_fast(), two_starts_of_the_noise(),
    ]  # fmt: skip
    marked = {place(row): row["inconsistent"] for row in ROWS if row["inconsistent"]}
    assert marked.keys() == {key for check in derived for key in check}
    for check in derived:
        for key, says in check.items():
            assert says in marked[key]
    assert [len(check) for check in derived] == [9, 1, 8, 16, 8, 2]


def test_schema():
    counts = Counter(map(place, ALL))
    assert max(counts.values()) == 1
    for row in ALL:
        assert list(row) == [*KEY, "printed", "unit", "inconsistent", "note"]
        assert row["model"] in ("", *MODELS)
        assert row["weights"] in ("", "bf16", "nf4", "mxfp4", "nvfp4")
        assert row["method"] in ("", "none", "full", "lora")
        assert row["unit"] in ("", "%", "points", "ratio", "GB", "tokens/s", "s")
        if row["unit"] and row["printed"]:
            assert number(row) is not None
        elif row["printed"] == "out of memory":
            assert row["metric"] == "step_speedup"
    assert {path.stem for path in FOLDER.glob("*.csv")} == {*TABLES, "figure1", "figure11", "text", "curves", "series"}


def test_ratios_that_the_paper_does_not_print_are_quotients_of_its_throughputs():
    derived = [row for row in ALL if row["note"] == QUOTIENT]
    assert len(derived) == 12 + 2 + 6
    for row in derived:
        same = {key: row[key] for key in ("model", "weights", "rank", "setting")}
        above, below = (
            {number(other) for other in every(metric="rollout_rate", **same | {"weights": weights})}
            for weights in (row["weights"], "bf16")
        )
        assert row["printed"] in {f"{a / b:.2f}" for a, b in product(above, below)}


def test_averages_of_table_2_follow_from_their_parts():
    averages = every(table="table2", metric="average")
    assert len(averages) == 18
    for row in averages:
        same = {key: row[key] for key in KEY if key != "metric"}
        parts = [number(only(**same, metric=name)) for name in ("math500", "aime24", "aime25", "amc23")]
        assert sum(parts) / 4 == pytest.approx(number(row), abs=0.0501)


def test_figures_agree_with_the_tables():
    for row in every(table="figure1", metric="gsm8k"):
        same = {key: row[key] for key in ("model", "weights", "method", "noise")}
        assert number(row) == number(only(table="table1", metric="gsm8k", **same))
    for weights in ("bf16", "nvfp4"):
        figure = only(table="figure1", metric="rollout_rate", weights=weights)
        assert number(figure) == round(rate("table6", weights, 8))
    for row in every(table="figure1", metric="step_speedup"):
        assert number(row) == number(only(table="table3", **{key: row[key] for key in KEY if key != "table"}))
    for row in every(table="figure11", metric="rollout_speedup_nf4"):
        same = {"model": row["model"], "rank": row["rank"], "metric": "rollout_rate"}
        above, below = only(table="table9", weights="nvfp4", **same), only(table="figure11", weights="nf4", **same)
        assert number(above) / number(below) == pytest.approx(number(row), abs=0.05)


def made(config: str, *experiments: str) -> tuple[list[str], list[str]]:
    """The paper's tables and figures that a configuration makes, of these experiments or all, without benches."""
    values = read_yaml(Path(config))
    if experiments:
        values |= {"experiments": {name: values["experiments"][name] for name in experiments}, "benches": {}}
    planned = plan(parse(Config, values, "test"))
    return tuple(
        [name for name in names if name in NAMES] for names in (TableJob.names(planned), FigureJob.names(planned))
    )


def test_only_what_a_configuration_feeds_is_made():
    tables, figures = made("config/paper.yaml")
    assert tables == list(TABLES)
    assert sorted(figures) == sorted({*BARS, *CURVE_FIGURES, SCHEDULES})
    tables, figures = made("config/paper.yaml", "gsm8k-7b")
    assert tables == ["table1", "table2", "table4"]  # bases are evaluated on the data sets of Table 2
    assert figures == [f"figure{number}" for number in (1, 4, 5, 15, 16, 17)]
    assert made("config/mini.yaml") == ([], [])
