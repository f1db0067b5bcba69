"""The drift of KL(sampler || trainer): its statistics, and the table of tiny runs on NVFP4 weights."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from qerl.report.tables import change, drift, slope_per_step, verdict
from qerl.results.schema import ResultError
from qerl.results.statistics import ENDS, Interval
from qerl.settings.base import ConfigError, read_yaml
from qerl.study.runs import read_study
from qerl.workflow.plan import plan_from
from tests.synthetic_results import NO_METRICS, write_run, write_table

ROOT = Path(__file__).parents[3]
STEPS = np.arange(1000)


def autocorrelated(seed: int, steps: int = 1000) -> np.ndarray:
    """Noise of which each value has 0.8 of the previous one."""
    draws = np.random.default_rng(seed).normal(size=steps)
    for step in range(1, steps):
        draws[step] += 0.8 * draws[step - 1]
    return draws


def test_a_slope_is_that_of_least_squares_through_the_means_of_blocks():
    values = 3e-6 * STEPS + 1e-4 * autocorrelated(0)
    fitted = stats.linregress(25 + 50 * np.arange(20), values.reshape(20, 50).mean(1))
    found = slope_per_step(values)
    assert found.mean == pytest.approx(fitted.slope)
    assert found.high - found.low == pytest.approx(2 * 2.10092 * fitted.stderr, rel=1e-5)  # t of 18 degrees
    assert slope_per_step(2.0 + 0.5 * np.arange(47)).mean == pytest.approx(0.5)  # of unequal blocks
    assert slope_per_step(np.zeros(40)) == Interval(0.0, 0.0, 0.0)


def test_intervals_cover_what_is_true_of_steps_that_depend_on_each_other():
    """Within the spread of 400 runs. Intervals that took the steps for independent would cover half of the slopes."""
    runs = [autocorrelated(seed) for seed in range(400)]
    slopes = [slope_per_step(run) for run in runs]
    changes = [change(run[:100], run[-100:]) for run in runs]
    assert 0.91 <= np.mean([found.low <= 0 <= found.high for found in slopes]) <= 0.98
    assert 0.85 <= np.mean([found.low <= 0 <= found.high for found in changes]) <= 0.98


@pytest.mark.parametrize(
    ("rise", "noise", "said"),
    [(0.0, 0.1, "no drift"), (0.5, 0.1, "no drift"), (-0.5, 0.1, "no drift"), (9.0, 0.1, "drift"), (0.0, 9.0, None)],
)
def test_the_verdict_is_by_the_rise_over_all_steps_and_its_interval(rise, noise, said):
    kl = 1e-5 * (1 + rise * STEPS / 1000 + noise * autocorrelated(1))
    assert verdict(kl[:100].mean(), slope_per_step(kl), 1000) == (said or "undecided")


def metrics(kl: list[float]) -> list[dict]:
    return [NO_METRICS | {"step": n + 1, "mismatch/kl": value, "entropy": 1.0 - n} for n, value in enumerate(kl)]


def test_the_table_has_a_row_per_run_in_the_units_of_its_headings(tmp_path):
    kl = {
        0: [1e-5 * (1 + value / 10) for value in autocorrelated(2, 40)],
        1: [1e-5 * (1 + step + step % 2) for step in range(40)],
    }
    made = [write_run(tmp_path, "nvfp4-lora", seed, metrics(values)) for seed, values in kl.items()]
    write_table("drift", made, tmp_path / "tables")
    table = pd.read_csv(tmp_path / "tables/drift.csv").set_index("seed")
    assert list(table["verdict"]) == ["no drift", "drift"]
    assert table.loc[1, "kl_slope"] == pytest.approx(1e-2)  # both steps of a block differ alike
    assert table.loc[1, "kl_change"] == pytest.approx(20e-5)  # windows of 20 steps
    assert (table.loc[1, "entropy_first"], table.loc[1, "entropy_last"]) == pytest.approx((-8.5, -28.5))
    shown = " ".join((tmp_path / "tables/drift.md").read_text().split())
    assert "| 1.0e−02 [1.0e−02, 1.0e−02] | drift" in shown
    assert "Seeds per arm: 2" in shown


def test_the_published_table_is_that_of_the_committed_steps():
    study = read_study(ROOT / "results/reference/drift")
    runs = study.runs[study.runs["role"] == "main"]
    named = runs[["run", "model", "experiment", "arm", "weights", "seed"]].astype({"seed": int})
    made = drift(study.steps.merge(named.assign(variant="", training="LoRA"), on="run"))
    stored = pd.read_csv(ROOT / "docs/results/drift/drift.csv")
    columns = [name for name in made if name.startswith(("kl_", "entropy_"))]
    np.testing.assert_allclose(made[columns], stored[columns], rtol=1e-6)
    assert list(made["verdict"]) == list(stored["verdict"])
    page = (ROOT / "docs/results/drift.md").read_text()
    for row in made.to_dict("records"):
        slope, low, high = (f"{row[f'kl_slope{end}']:.1e}".replace("e-0", "e-").replace("-", "−") for end in ENDS)
        assert f"| {row['weights'].upper()} | {row['seed']} |" in page
        assert f"{slope} [{low}, {high}]" in page


def test_a_run_of_few_steps_is_refused(tmp_path):
    short = pd.DataFrame(metrics([1e-5] * 19)).assign(run="r", seed=0)
    short[["model", "experiment", "arm", "variant", "weights", "training"]] = ""
    with pytest.raises(ResultError, match="run 'r' has 19 steps"):
        drift(short)
    values = read_yaml(ROOT / "config/drift.yaml")
    values["experiments"]["long"]["base"]["steps"] = 19
    with pytest.raises(ConfigError, match=r"steps=19 is too short for `drift: true`"):
        plan_from(values, ROOT / "config/mini.yaml")
