"""The comparisons of a study's arms: estimates, intervals, decisions, the pairs behind them, and the trend by size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from qerl.report.exploration import (
    MISMATCH,
    NUMBERS,
    PRIMARY,
    SECONDARY,
    SENTENCES,
    compared,
    holds,
    is_controlled,
    verdicts,
)
from qerl.report.study.followers import astray, follower_table
from qerl.results.files import ResultError
from qerl.results.outcomes import by_run, differences, outcomes
from qerl.results.paired import PairedDifference, paired_difference
from qerl.results.schema.stored import DIVERGED, OK
from qerl.results.schema.study import MAIN
from qerl.results.study import Study

#: The values of k of the primary outcomes. With fewer completions of a problem, their number replaces the larger one.
PRIMARY_KS = (1, 64)
#: An arm that loses a larger share of its runs to divergence is unstable at its rate.
_UNSTABLE = 1 / 6


@dataclass(frozen=True)
class Outcome:
    """The comparisons of a size, task and measure."""

    experiment: str
    size: str
    task: str
    k: int
    #: `qerl.results.outcomes.outcomes` of the main runs.
    frame: pd.DataFrame
    comparisons: Mapping[str, PairedDifference]
    #: p values of the primary comparisons after Holm's correction.
    adjusted: Mapping[str, float]
    #: The number of runs of the placebo, all equal to those of the arm without noise.
    placebos: int
    #: The arms whose runs didn't have the entropy that they follow.
    astray: frozenset[str]

    @property
    def measure(self) -> str:
        """The name of the measure."""
        return f"pass@{self.k}"

    @property
    def key(self) -> dict[str, Any]:
        """The columns that identify the outcome."""
        return {"size": self.size, "task": self.task, "measure": self.measure}


def all_outcomes(study: Study) -> list[Outcome]:
    """The primary outcomes of each experiment and task, on test problems, the smaller size first.

    Raises ResultError where the placebo differs from the arm that it equals by construction.
    """
    followers = follower_table(study)
    unsorted = [
        outcome
        for experiment, task, frame in tested(study)
        for outcome in _outcomes(study, experiment, task, frame, frozenset(astray(followers, experiment)))
    ]
    return sorted(unsorted, key=lambda outcome: int(re.sub(r"\D", "", outcome.size) or 0))


def tested(study: Study) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Experiment, task and counts of right completions of main runs on test problems."""
    runs = study.runs[study.runs["role"] == MAIN]
    counts = study.outcomes[study.outcomes["split"] == "test"].merge(runs[["run", "experiment"]], on="run")
    for (experiment, task), of_one in counts.groupby(["experiment", "task"], sort=False):
        yield str(experiment), str(task), of_one


def primary_ks(counts: pd.DataFrame) -> list[int]:
    """The values of k of the primary outcomes of these counts."""
    drawn = int(counts["drawn"].min())
    return sorted({min(k, drawn) for k in PRIMARY_KS})


def _outcomes(study: Study, experiment: str, task: str, counts: pd.DataFrame, off: frozenset[str]) -> Iterator[Outcome]:
    runs = study.runs[study.runs["experiment"] == experiment]
    placebos = check_placebo(study, runs, counts)
    for k in primary_ks(counts):
        frame = outcomes(runs, counts, k)
        yield Outcome(experiment, str(runs["size"].iloc[0]), task, k, frame, *compared(frame), placebos, off)


def check_placebo(study: Study, runs: pd.DataFrame, counts: pd.DataFrame) -> int:
    """The number of runs of the placebo, which must have rewards and outcomes of the runs without noise, to the bit.

    Raises ResultError where one has not. docs/exploration-protocol.md compares nothing before that.
    """
    ended = runs[runs["status"] == OK]
    keys = ["model", "seed", "rate"]
    pairs = ended[ended["arm"] == "nvfp4-placebo"].merge(ended[ended["arm"] == "nvfp4"], on=keys, suffixes=("", "_of"))
    for run, other in zip(pairs["run"], pairs["run_of"], strict=True):
        for frame, columns in ((study.steps, ["step", "reward"]), (counts, ["problem", "right"])):
            one, two = (frame.loc[frame["run"] == name, columns].reset_index(drop=True) for name in (run, other))
            if not one.equals(two):
                raise ResultError(
                    f"{run} differs from {other}, though its noise is 0: the runs aren't reproducible, so nothing is "
                    "compared; find the cause and repeat the runs"
                )
    return len(pairs)


# --- tables ----------------------------------------------------------------------------------------------------------


def comparison_table(primary: Sequence[Outcome], runs: pd.DataFrame) -> pd.DataFrame:
    """One row per outcome and comparison; differences are fractions. p of Holm is NaN outside of the family.

    `rates` has the learning rates of the two arms, or one number if they are equal.
    """
    rows = [row for outcome in primary for row in _comparison_rows(outcome, runs)]
    return pd.DataFrame(rows)


def _comparison_rows(outcome: Outcome, runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    of_one = runs[runs["experiment"] == outcome.experiment]
    for name, (arm, other) in {**PRIMARY, **MISMATCH}.items():
        if name not in outcome.comparisons:
            continue
        difference = outcome.comparisons[name]
        adjusted = outcome.adjusted.get(name)
        yield {
            **outcome.key,
            "experiment": outcome.experiment,
            "comparison": name,
            "arm": arm,
            "other": other,
            "difference": difference.interval.mean,
            "difference_low": difference.interval.low,
            "difference_high": difference.interval.high,
            "p": difference.p,
            "p_holm": adjusted,
            "bases": difference.bases,
            "pairs": difference.pairs,
            "holds": None if adjusted is None else holds(difference, adjusted),
            "controlled": None if adjusted is None else is_controlled(name, outcome.astray),
            "rates": rates_of(of_one, arm, other),
            "lost_pairs": lost_pairs(of_one, arm, other),
            "unstable": ", ".join(one for one in (arm, other) if is_unstable(of_one, one)),
        }


def secondary_table(primary: Sequence[Outcome]) -> pd.DataFrame:
    """One row per outcome and comparison of the other arms, without correction; differences are fractions."""
    rows = []
    for outcome in primary:
        for name, (arm, other) in SECONDARY.items():
            if pairs := differences(outcome.frame, arm, other):
                difference = paired_difference(pairs)
                interval = difference.interval
                row = {**outcome.key, "comparison": name, "arm": arm, "other": other, "difference": interval.mean}
                row |= {"difference_low": interval.low, "difference_high": interval.high, "p": difference.p}
                rows.append({**row, "pairs": difference.pairs})
    return pd.DataFrame(rows)


def rates_of(runs: pd.DataFrame, arm: str, other: str) -> str:
    """The learning rates of two arms of an experiment, or one number if they are equal."""
    rates = [rate for name in (arm, other) for rate in runs.loc[runs["arm"] == name, "rate"].unique()]
    return ", ".join(f"{rate:g}" for rate in dict.fromkeys(rates))


def lost_pairs(runs: pd.DataFrame, arm: str, other: str) -> int:
    """The number of pairs of which a run failed."""
    of_arm, of_other = (runs.loc[runs["arm"] == name, ["model", "seed", "status"]] for name in (arm, other))
    pairs = of_arm.merge(of_other, on=["model", "seed"], suffixes=("", "_of"))
    return int(((pairs["status"] != OK) | (pairs["status_of"] != OK)).sum())


def is_unstable(runs: pd.DataFrame, arm: str) -> bool:
    """Whether over one in six runs of an arm diverged."""
    diverged = runs.loc[runs["arm"] == arm, "status"].str.startswith(DIVERGED)
    return bool(diverged.mean() > _UNSTABLE)


def decision_table(primary: Sequence[Outcome]) -> pd.DataFrame:
    """One row per outcome and sentence that holds."""
    return pd.DataFrame(
        [
            {
                **outcome.key,
                "experiment": outcome.experiment,
                "verdict": verdict,
                "sentence": SENTENCES[verdict],
                "placebos": outcome.placebos,
                "astray": ", ".join(sorted(NUMBERS[arm] for arm in outcome.astray)),
            }
            for outcome in primary
            for verdict in verdicts(outcome.comparisons, outcome.adjusted, outcome.astray)
        ]
    )


def pair_table(outcome: Outcome) -> pd.DataFrame:
    """The pairs behind an outcome: one row per comparison, base and seed, with both runs and their scores."""
    names = outcome.frame.drop_duplicates("run").set_index(["arm", "model", "seed"])["run"]
    rows = []
    for name, (arm, other) in {**PRIMARY, **MISMATCH}.items():
        one, two = by_run(outcome.frame, arm), by_run(outcome.frame, other)
        for model, seed in sorted(one.keys() & two.keys()):
            first, second = float(one[model, seed].mean()), float(two[model, seed].mean())
            rows.append(
                {
                    "comparison": name,
                    "measure": outcome.measure,
                    "base": model,
                    "seed": seed,
                    "difference": first - second,
                    "score": first,
                    "other_score": second,
                    "run": names[arm, model, seed],
                    "other_run": names[other, model, seed],
                }
            )
    return pd.DataFrame(rows)


def trend_table(primary: Sequence[Outcome]) -> pd.DataFrame:
    """One row per task, measure and comparison, with the difference and its interval at each size, as fractions."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for outcome in primary:
        for name in PRIMARY.keys() & outcome.comparisons.keys():
            key = (outcome.task, outcome.measure, name)
            row = rows.setdefault(key, {"task": key[0], "measure": key[1], "comparison": key[2]})
            interval = outcome.comparisons[name].interval
            row |= {outcome.size: interval.mean, f"{outcome.size}_low": interval.low}
            row |= {f"{outcome.size}_high": interval.high}
    return pd.DataFrame([rows[key] for key in sorted(rows)])


def label(comparison: str) -> str:
    """A comparison as readers see it, such as 2−1."""
    return comparison.replace("-", "−")


def arm_label(arm: str) -> str:
    """An arm with its number in the protocol."""
    return f"{NUMBERS[arm]} {arm}" if arm in NUMBERS else arm


def arm_order(arm: str) -> int:
    """The place of an arm in tables, which is its place in the protocol."""
    return list(NUMBERS).index(arm) if arm in NUMBERS else len(NUMBERS)
