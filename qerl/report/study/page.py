"""The page of a study, made from its Parquet files alone, with its tables as CSV and its figures beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from qerl.jobs.study import PageJob
from qerl.provenance.files import write_text
from qerl.report.study import background, figures, text
from qerl.report.study.arms import arm_table, failed_runs, pass_curves, power_table, rate_table, run_table, used_rates
from qerl.report.study.calibration import calibration_table
from qerl.report.study.claims import claim_table
from qerl.report.study.comparisons import (
    Outcome,
    all_outcomes,
    comparison_table,
    decision_table,
    pair_table,
    secondary_table,
    trend_table,
)
from qerl.report.study.equal_rates import equal_rate_table
from qerl.report.study.followers import follower_table
from qerl.results.files import ResultError
from qerl.results.paths import STUDY_FILES, STUDY_PAGE, STUDY_PARTS
from qerl.results.study import Study, read_studies


@dataclass(frozen=True)
class Tables:
    """All tables of a page, in full precision."""

    decisions: pd.DataFrame
    comparisons: pd.DataFrame
    followers: pd.DataFrame
    equal_rates: pd.DataFrame
    secondary: pd.DataFrame
    claims: pd.DataFrame
    arms: pd.DataFrame
    rates: pd.DataFrame
    used_rates: pd.DataFrame
    power: pd.DataFrame
    trend: pd.DataFrame
    curves: pd.DataFrame
    calibration: pd.DataFrame
    failed: pd.DataFrame
    runs: pd.DataFrame


def write_page(job: PageJob) -> None:
    """Write the page to `job.out`, and its tables and figures to a folder beside it."""
    study = read_studies(job.data)
    primary = all_outcomes(study)
    if not primary:
        folders = " and ".join(map(str, job.data))
        raise ResultError(
            f"the data in {folders} has no outcome of a main run on test problems, so there is nothing to compare"
        )
    tables = make_tables(study, primary)
    parts = job.out / STUDY_PARTS
    shutil.rmtree(parts, ignore_errors=True)
    _write_tables(tables, primary, parts)
    drawn = _draw(study, primary, tables, parts)
    write_text(job.out / STUDY_PAGE, _page(job, study, tables, drawn))


def make_tables(study: Study, primary: Sequence[Outcome]) -> Tables:
    """The tables of a study."""
    return Tables(
        decisions=decision_table(primary),
        comparisons=comparison_table(primary, study.runs),
        followers=follower_table(study),
        equal_rates=equal_rate_table(study),
        secondary=secondary_table(primary),
        claims=claim_table(study, primary),
        arms=arm_table(study),
        rates=rate_table(study),
        used_rates=used_rates(study),
        power=power_table(study),
        trend=trend_table(primary),
        curves=pass_curves(study),
        calibration=calibration_table(study),
        failed=failed_runs(study),
        runs=run_table(study),
    )


def _write_tables(tables: Tables, primary: Sequence[Outcome], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, frame in vars(tables).items():
        if len(frame):
            frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    by_experiment: dict[str, list[pd.DataFrame]] = {}
    for outcome in primary:
        by_experiment.setdefault(outcome.experiment, []).append(pair_table(outcome))
    for experiment, frames in by_experiment.items():
        pd.concat(frames).to_csv(folder / f"pairs-{experiment}.csv", index=False, float_format="%.6g")


def _draw(study: Study, primary: Sequence[Outcome], tables: Tables, folder: Path) -> set[str]:
    """Draw the figures for which there are results; returns their names."""
    makers: dict[str, Callable[[Path], None]] = {
        "forest": lambda stem: figures.forest(primary, stem),
        "entropy_reward": lambda stem: figures.entropy_and_reward(study, stem),
        "reward": lambda stem: figures.rewards(study, stem),
        "pass_at_k": lambda stem: figures.pass_curves(tables.curves, stem),
    }
    if len(tables.rates):
        makers["learning_rates"] = lambda stem: figures.rates(tables.rates, stem)
    if len({outcome.size for outcome in primary}) > 1:
        makers["trend"] = lambda stem: figures.trend(primary, stem)
    for name, draw in makers.items():
        draw(folder / name)
    return set(makers)


def _page(job: PageJob, study: Study, tables: Tables, drawn: set[str]) -> str:
    """The page as Markdown."""
    data = [Path(os.path.relpath(part / name, job.out)) for part in job.data for name in STUDY_FILES]
    sections = [
        text.head(study, job),
        text.decisions(tables.decisions),
        text.comparisons(tables.comparisons, tables.rates),
        text.followers(tables.followers),
        text.equal_rates(tables.equal_rates),
        text.claims(tables.claims),
        text.arms(tables.arms, tables.secondary),
        background.rates(tables.rates, tables.used_rates),
        text.trend(tables.trend, drawn),
        background.power(tables.power, tables.comparisons),
        background.calibration(tables.calibration),
        background.failures(tables.failed, tables.comparisons),
        background.real(job, tables.power),
        background.data(study, data),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"
