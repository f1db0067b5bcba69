"""The comparisons of a study's arms: estimates, intervals, decisions, calibration, and the paper's claims."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import pandas as pd

from qerl.results import printed
from qerl.results.printed import Cell
from qerl.results.schema import DIVERGED, OK
from qerl.results.store import ResultError
from qerl.results.study_data import BASE, MAIN, Study
from qerl.study.outcomes import (
    LEVEL,
    MISMATCH,
    NUMBERS,
    PRIMARY,
    SECONDARY,
    SENTENCES,
    SMALLEST_EFFECT,
    PairedDifference,
    by_run,
    compared,
    differences,
    holds,
    is_controlled,
    is_nothing,
    means,
    outcomes,
    paired_difference,
    scores,
    verdicts,
)

# Whether the runs with a thermostat had the entropy that they follow: only then do they control for it.

#: A follower's mean entropy may differ from the followed arm's by this share of it.
TOLERANCE = 0.1
_ENTROPY = "entropy/sampler"


def follower_table(study: Study) -> pd.DataFrame:
    """One row per experiment and arm with a thermostat; empty without one.

    `entropy` and `wanted` are means over the steps of all pairs of runs, in nats per token. `lowest` and `highest` are
    the extreme ratios of both in a pair. `average_steps` is 0 in runs made before that setting.
    `follows` says whether the ratio of the means is within `TOLERANCE` of 1.
    """
    runs = study.runs[(study.runs["role"] == MAIN) & (study.runs["status"] == OK)]
    of_run = study.steps.groupby("run").agg(
        entropy=(_ENTROPY, "mean"), coldest=("temperature", "min"), hottest=("temperature", "max")
    )
    measured = runs.merge(of_run, on="run")
    followed = measured["settings"].map(_followed)
    groups = measured[followed != ""].groupby(["experiment", "arm"], sort=False)
    return pd.DataFrame(row for _, rows in groups for row in _row(measured, rows))


def astray(followers: pd.DataFrame, experiment: str) -> set[str]:
    """The arms of an experiment whose runs didn't have the entropy that they follow."""
    if not len(followers):
        return set()
    return set(followers.loc[(followers["experiment"] == experiment) & ~followers["follows"], "arm"])


def _thermostat(settings: str) -> dict[str, Any]:
    return json.loads(settings).get("thermostat") or {}


def _followed(settings: str) -> str:
    return _thermostat(settings).get("arm") or ""


def _row(measured: pd.DataFrame, rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The row of an experiment's arm, whose runs are `rows`; none without a pair."""
    first = rows.iloc[0]
    thermostat = _thermostat(first["settings"])
    experiment, other = first["experiment"], _followed(first["settings"])
    of_other = measured[(measured["experiment"] == experiment) & (measured["arm"] == other)]
    pairs = rows.merge(of_other, on=["model", "seed"], suffixes=("", "_followed"))
    if pairs.empty:
        return
    entropy, wanted = pairs["entropy"].mean(), pairs["entropy_followed"].mean()
    ratios = pairs["entropy"] / pairs["entropy_followed"]
    yield {
        "size": first["size"],
        "experiment": experiment,
        "arm": first["arm"],
        "followed": other,
        "pairs": len(pairs),
        "entropy": entropy,
        "wanted": wanted,
        "ratio": entropy / wanted,
        "lowest": ratios.min(),
        "highest": ratios.max(),
        "coldest": pairs["coldest"].min(),
        "hottest": pairs["hottest"].max(),
        "gain": thermostat["gain"],
        "average_steps": thermostat.get("average_steps", 0),
        "follows": bool(abs(entropy / wanted - 1) <= TOLERANCE),
    }


# The comparisons of a study's arms: estimates, intervals, decisions, the pairs behind them, and the trend by size.

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
    #: `qerl.study.outcomes.outcomes` of the main runs.
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


# Whether a study's bases and runs meet the conditions of the protocol's calibration.

#: The untrained bases' least and most pass@1, and their least pass@64, on validation problems.
LEAST, MOST, LEAST_AT_64 = 0.10, 0.30, 0.60
#: The ceiling of a trained arm's pass@1.
CEILING = 0.90


def calibration_table(study: Study) -> pd.DataFrame:
    """One row per experiment, task and base: the untrained base's scores as fractions, and the runs' conditions.

    `rise` is the mean share of right answers of arm 1 in the last quarter of the steps less that in the third quarter.
    `best` is the largest mean pass@1 of an arm of this base on test problems. Bases without an evaluation on validation
    problems are left out.
    """
    return pd.DataFrame([row for one in tested(study) for row in _rows(study, *one)])


def _rows(study: Study, experiment: str, task: str, counts: pd.DataFrame) -> Iterator[dict[str, Any]]:
    runs = study.runs[study.runs["experiment"] == experiment]
    trained = outcomes(runs, counts, 1)
    untrained = study.runs[(study.runs["role"] == BASE) & (study.runs["weights"] == "bf16")]
    asked = study.outcomes[(study.outcomes["task"] == task) & (study.outcomes["split"] == "validation")]
    for model in dict.fromkeys(runs["model"]):
        of_base = asked[asked["run"].isin(untrained.loc[untrained["model"] == model, "run"])]
        if not len(of_base):
            continue
        many = min(PRIMARY_KS[-1], int(of_base["drawn"].min()))
        single, several = (float(scores(of_base, k).mean()) for k in (1, many))
        rise = _rise(study, runs[(runs["model"] == model) & (runs["arm"] == "bf16")]["run"])
        best = float(trained[trained["model"] == model].groupby("arm")["value"].mean().max())
        met = LEAST <= single <= MOST and several >= LEAST_AT_64 and rise > 0 and best <= CEILING
        row = {"size": runs["size"].iloc[0], "task": task, "base": model, "pass@1": single, "many": several}
        yield {**row, "k": many, "rise": rise, "best": best, "met": met}


def _rise(study: Study, runs: pd.Series) -> float:
    steps = study.steps[study.steps["run"].isin(runs)]
    half, quarter = steps["step"].max() / 2, 3 * steps["step"].max() / 4
    late = steps["step"] > quarter
    third = (steps["step"] > half) & ~late
    return float(steps.loc[late, "reward/correct"].mean() - steps.loc[third, "reward/correct"].mean())


# The paper's claims about noise, each beside this study's estimate and the sentence that follows.

#: The measure of a claim about scores; others are metrics of steps.
SCORE = "pass@1"
#: Traits of the paper's rows by arm: weights and noise. The learning rates of its rows are those of arm 14.
_PRINTED = {"bf16": ("bf16", "off"), "nvfp4": ("nvfp4", "off"), "nvfp4-aqn": ("nvfp4", "exponential")}
_PRINTED |= {"paper-bf16": ("bf16", "off"), "paper-nvfp4-aqn": ("nvfp4", "exponential")}
#: Entropy and reward depend on the rate, which the pilot chose by pass@1. A difference at two rates isn't the noise's.
_TWO_RATES = "open: two rates"
#: A difference from an arm that should have had another entropy isn't that of exploration.
_ASTRAY = "open: the control's entropy is off"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper: an arm exceeds another one in a measure."""

    text: str
    arm: str
    other: str
    measure: str


CLAIMS = (
    Claim("Rounding to 4 bits raises the entropy", "nvfp4", "bf16", "entropy"),
    Claim("NVFP4 earns more reward than BF16", "nvfp4", "bf16", "reward"),
    Claim("NVFP4 ends above BF16", "nvfp4", "bf16", SCORE),
    Claim("AQN raises the entropy of what is sampled", "nvfp4-aqn", "nvfp4", "entropy/sampler"),
    Claim("AQN adds reward", "nvfp4-aqn", "nvfp4", "reward"),
    Claim("AQN ends above NVFP4 without it", "nvfp4-aqn", "nvfp4", SCORE),
    Claim("At the paper's two rates, NVFP4 with AQN ends above BF16", "paper-nvfp4-aqn", "paper-bf16", SCORE),
    Claim("The gain of NVFP4 is exploration, more than its entropy", "nvfp4", "bf16-thermostat", SCORE),
    Claim("The gain of AQN is exploration, more than its entropy", "nvfp4-aqn", "nvfp4-thermostat", SCORE),
)


def claim_table(study: Study, primary: Sequence[Outcome]) -> pd.DataFrame:
    """One row per claim, size and task. Differences of scores are fractions, of entropies nats per token."""
    cells = printed.read_cells(printed.FOLDER / "table1.csv")
    rows = [
        {"claim": claim.text, "printed": printed_difference(claim, cells), "measure": claim.measure, **row}
        for claim in CLAIMS
        for outcome in primary
        if outcome.k == 1
        for row in _estimate(study, outcome, claim)
    ]
    return pd.DataFrame(rows)


def printed_difference(claim: Claim, cells: Sequence[Cell]) -> str:
    """The difference of the paper's printed accuracies on GSM8K (Table 1, points), by model; empty if it has none."""
    if claim.measure != SCORE or not {claim.arm, claim.other} <= _PRINTED.keys():
        return ""
    scores = {
        (cell.model, cell.weights, cell.noise): float(cell.printed)
        for cell in cells
        if cell.metric == "gsm8k" and cell.method == "lora"
    }
    models = dict.fromkeys(model for model, *_ in scores)
    pairs = {
        model: scores[model, *_PRINTED[claim.arm]] - scores[model, *_PRINTED[claim.other]]
        for model in models
        if {(model, *_PRINTED[claim.arm]), (model, *_PRINTED[claim.other])} <= scores.keys()
    }
    return ", ".join(f"{model.rpartition('-')[2].upper()}: {value:+.1f}" for model, value in pairs.items())


def _estimate(study: Study, outcome: Outcome, claim: Claim) -> Iterator[dict[str, Any]]:
    """The estimate of a claim on one outcome; none if a pair of its arms was not run."""
    name = next((name for name, pair in PRIMARY.items() if pair == (claim.arm, claim.other)), "")
    runs = study.runs[study.runs["experiment"] == outcome.experiment]
    if claim.measure == SCORE and name in outcome.comparisons:
        difference, p = outcome.comparisons[name], outcome.adjusted[name]
    else:
        frame = outcome.frame if claim.measure == SCORE else means(runs, study.steps, claim.measure)
        pairs = differences(frame.dropna(subset="value"), claim.arm, claim.other)
        if not pairs:
            return
        difference, name = paired_difference(pairs), ""
        p = difference.p
    ends = (difference.interval.low, difference.interval.high)
    if claim.measure != SCORE and difference.pairs < 2:
        ends, p = (nan, nan), nan  # one number has no spread
    is_score, rates = claim.measure == SCORE, rates_of(runs, claim.arm, claim.other)
    says = sentence(difference, p, is_score)
    if "," in rates:
        says = f"{says}, at two rates" if is_score else _TWO_RATES
    yield {
        "size": outcome.size,
        "task": outcome.task,
        "comparison": f"{claim.arm} − {claim.other}",
        "difference": difference.interval.mean,
        "difference_low": ends[0],
        "difference_high": ends[1],
        "p": p,
        "corrected": bool(name),
        "pairs": difference.pairs,
        "rates": rates,
        "says": says if not name or is_controlled(name, outcome.astray) else _ASTRAY,
    }


def sentence(difference: PairedDifference, p: float, is_score: bool) -> str:
    """What an estimate says of a claim that a difference is above 0."""
    if difference.interval.mean > 0 and p < LEVEL:
        below = is_score and is_nothing(difference)
        return f"holds here, by under {100 * SMALLEST_EFFECT:.0f} points" if below else "holds here"
    if difference.interval.mean < 0 and p < LEVEL:
        return "the opposite holds here"
    if is_score and is_nothing(difference):
        return f"no difference of {100 * SMALLEST_EFFECT:.0f} points here"
    return "open"
