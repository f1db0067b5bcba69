"""Measures of a study's arms, and the primary comparisons at equal learning rates."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pandas as pd

from qerl.results.schema import OK
from qerl.results.statistics import KS
from qerl.results.study_data import BASE, MAIN, PILOT, Study
from qerl.study.comparisons import PRIMARY_KS, arm_order, primary_ks, tested
from qerl.study.outcomes import (
    LEVEL,
    NUMBERS,
    PRIMARY,
    SMALLEST_EFFECT,
    chosen_rates,
    differences,
    effect_found,
    means,
    outcomes,
    paired_difference,
    paired_spread,
    pairs_needed,
    rate_scores,
    scores,
)

# Measures of a study's arms: scores, secondary measures, learning rates of the pilot, and runs with their stamps.

#: Secondary measures that are means over the steps of a run, by their names in tables.
STEP_MEANS = {
    "reward": "reward",
    "entropy": "entropy",
    "entropy/sampler": "entropy of sampler",
    "mixed": "mixed groups",
    "mismatch/kl": "KL",
    "ess/tokens": "ESS of tokens",
    "ess/sequences": "ESS of sequences",
    "clip_ratio/low": "clipped low",
    "clip_ratio/high": "clipped high",
}
#: The most pairs of a comparison, by the protocol.
MOST_PAIRS = 21


def with_mixed(steps: pd.DataFrame) -> pd.DataFrame:
    """Steps with the share of groups that have mixed rewards."""
    return steps.assign(mixed=1 - steps["reward/equal_groups"])


def equal_bases(frame: pd.DataFrame) -> pd.Series:
    """The mean of `value` of each arm, in which each run of a base, and then each base, counts equally."""
    of_runs = frame.groupby(["arm", "model", "run"])["value"].mean()
    return of_runs.groupby(["arm", "model"]).mean().groupby("arm").mean()


def arm_table(study: Study) -> pd.DataFrame:
    """One row per experiment, task and arm: runs, scores on test problems, and the means of secondary measures.

    Scores are fractions, entropies and KL in nats per token.
    """
    steps = with_mixed(study.steps)
    return pd.concat([_arms(study, steps, *one) for one in tested(study)], ignore_index=True)


def _arms(study: Study, steps: pd.DataFrame, experiment: str, task: str, counts: pd.DataFrame) -> pd.DataFrame:
    runs = study.runs[study.runs["experiment"] == experiment]
    ended, arms = runs["status"] == OK, runs.groupby("arm")["run"].count()
    columns: dict[str, pd.Series] = {"runs": arms, "failed": runs[~ended].groupby("arm")["run"].count()}
    for k in _ks(counts):
        columns[f"pass@{k}"] = equal_bases(outcomes(runs, counts, k))
    if counts["distinct"].notna().any():
        ways = counts[["run", "distinct"]].rename(columns={"distinct": "value"})
        columns["distinct"] = equal_bases(runs.merge(ways, on="run"))
    for metric, name in STEP_MEANS.items():
        columns[name] = equal_bases(means(runs, steps, metric))
    sigma = steps.groupby("run")["noise/sigma"].max().rename("value")
    columns["largest sigma"] = equal_bases(runs[ended].merge(sigma, on="run"))
    frame = pd.DataFrame(columns).fillna({"failed": 0})
    frame = frame.loc[sorted(frame.index, key=arm_order)].rename_axis("arm").reset_index()
    frame.insert(0, "number", frame["arm"].map(NUMBERS))
    identity = {"size": runs["size"].iloc[0], "task": task, "experiment": experiment}
    return frame.assign(**identity)[[*identity, *frame.columns]]


def _ks(counts: pd.DataFrame) -> list[int]:
    drawn = int(counts["drawn"].min())
    return sorted({min(k, drawn) for k in KS})


def pass_curves(study: Study) -> pd.DataFrame:
    """pass@k of each experiment, task and arm for k = 1, 2, 4 to the number of completions.

    The arm "untrained" is the mean of the bases in bf16 that the experiment's runs train.
    """
    return pd.concat([_curves(study, *one) for one in tested(study)], ignore_index=True)


def _curves(study: Study, experiment: str, task: str, counts: pd.DataFrame) -> pd.DataFrame:
    runs = study.runs[study.runs["experiment"] == experiment]
    untrained = study.runs[(study.runs["role"] == BASE) & (study.runs["weights"] == "bf16")]
    bases = untrained[untrained["model"].isin(runs["model"])].assign(arm="untrained", seed=0, rate=0.0)
    asked = study.outcomes[(study.outcomes["task"] == task) & (study.outcomes["split"] == "test")]
    both = pd.concat([runs, bases])
    of_both = asked[asked["run"].isin(both["run"])]
    drawn = int(counts["drawn"].min())
    ks = [2**power for power in range(drawn.bit_length()) if 2**power <= drawn]
    parts = [
        equal_bases(outcomes(both, of_both, k)).reset_index().assign(k=k, experiment=experiment, task=task) for k in ks
    ]
    return pd.concat(parts)


# --- the pilot -------------------------------------------------------------------------------------------------------


def pilots(study: Study, k: int = 1) -> Iterator[tuple[str, pd.DataFrame]]:
    """Each pilot experiment with its pass@k on validation problems; with fewer completions, their number replaces k."""
    runs = study.runs[study.runs["role"] == PILOT]
    asked = study.outcomes[study.outcomes["split"] == "validation"]
    for experiment, of_one in runs.groupby("experiment", sort=False):
        counts = asked[asked["run"].isin(of_one["run"])]
        if len(counts):
            yield str(experiment), outcomes(of_one, counts, min(k, int(counts["drawn"].min())))


def rate_table(study: Study) -> pd.DataFrame:
    """One row per pilot, arm and rate: mean pass@1 on validation problems, whether it is chosen, and at the edge.

    `widest` is the mean of pass@k with the protocol's larger k. Empty without a pilot.
    """
    parts = [_rates(frame) for _, frame in pilots(study)]
    if not parts:
        return pd.DataFrame()
    widest = pd.concat([rate_scores(frame) for _, frame in pilots(study, max(PRIMARY_KS))])
    key = ["experiment", "arm", "rate"]
    return pd.concat(parts).merge(widest.rename(columns={"value": "widest"})[[*key, "widest"]], on=key)


def _rates(frame: pd.DataFrame) -> pd.DataFrame:
    chosen = chosen_rates(frame)
    tried = rate_scores(frame)
    taken = [chosen[key] for key in zip(tried["experiment"], tried["arm"], strict=True)]
    tried["chosen"] = tried["rate"] == taken
    rates = tried.groupby("arm")["rate"]
    at_edge = (tried["rate"] == rates.transform("min")) | (tried["rate"] == rates.transform("max"))
    tried["edge"] = tried["chosen"] & at_edge
    tried.insert(0, "size", frame["size"].iloc[0])
    return tried.sort_values("arm", key=lambda arms: arms.map(arm_order), kind="stable")


def used_rates(study: Study) -> pd.DataFrame:
    """The learning rates of the main runs: one row per arm, one column per experiment."""
    runs = study.runs[study.runs["role"] == MAIN].sort_values("arm", key=lambda arms: arms.map(arm_order))
    rates = runs.groupby(["arm", "experiment"], sort=False)["rate"]
    texts = rates.agg(lambda values: ", ".join(f"{value:g}" for value in sorted(set(values))))
    return texts.unstack("experiment", fill_value="–").reset_index()


def power_table(study: Study) -> pd.DataFrame:
    """One row per pilot: the largest spread of paired differences in pass@1, and the number of pairs that it needs.

    `found` is the effect that the protocol's most pairs find, as a fraction. Pairs are those at the chosen rates, on
    validation problems. Empty without a pilot.
    """
    rows = [_power(experiment, frame) for experiment, frame in pilots(study)]
    return pd.DataFrame([row for row in rows if row])


def _power(experiment: str, frame: pd.DataFrame) -> dict[str, Any]:
    chosen = chosen_rates(frame)
    taken = [chosen[key] for key in zip(frame["experiment"], frame["arm"], strict=True)]
    pairs = (differences(frame[frame["rate"] == taken], *pair) for pair in PRIMARY.values())
    spreads = [paired_spread(of_pair) for of_pair in pairs if sum(map(len, of_pair.values())) > 1]
    spread = max(spreads, default=0.0)
    if not spread:
        return {}
    return {
        "pilot": experiment,
        "size": frame["size"].iloc[0],
        "spread": spread,
        "pairs": pairs_needed(spread, SMALLEST_EFFECT, LEVEL),
        "found": effect_found(spread, MOST_PAIRS, LEVEL),
        "too_narrow": spread > SMALLEST_EFFECT,
    }


# --- runs ------------------------------------------------------------------------------------------------------------


def run_table(study: Study) -> pd.DataFrame:
    """One row per run, with its scores, its means over steps, and the stamps of training and evaluation."""
    frame = study.runs.drop(columns=["settings", "versions"])
    scored = study.outcomes[study.outcomes["split"].isin(["test", "validation"])]
    for (task, split), counts in scored.groupby(["task", "split"], sort=False):
        for k in _ks(counts):
            name = f"{task}/{split}/pass@{k}"
            frame = frame.merge(_per_run(counts, k, name), on="run", how="left")
    of_steps = study.steps.groupby("run")[["reward", "entropy"]].mean().add_prefix("mean ").reset_index()
    return frame.merge(of_steps, on="run", how="left")


def _per_run(counts: pd.DataFrame, k: int, name: str) -> pd.DataFrame:
    return scores(counts, k).groupby(counts["run"]).mean().rename(name).reset_index()


def failed_runs(study: Study) -> pd.DataFrame:
    """The runs that failed, with the reason."""
    failed = study.runs[(study.runs["status"] != OK) & (study.runs["role"] != BASE)]
    return failed[["run", "status", "reason"]].reset_index(drop=True)


# The primary comparisons at equal learning rates, from the pilot, which tried the same rates in every arm.


def equal_rate_table(study: Study) -> pd.DataFrame:
    """One row per pilot, primary comparison and k, with the difference of pass@k on validation problems, as a fraction.

    A pair is two runs of one base at one rate. Empty without a pilot that tried a rate in both arms of a comparison.
    """
    counts = study.outcomes[study.outcomes["split"] == "validation"]
    ks = primary_ks(counts) if len(counts) else []
    rows = [row for k in ks for experiment, frame in pilots(study, k) for row in _rows(experiment, k, frame)]
    rows.sort(key=itemgetter("pilot"))
    return pd.DataFrame(rows)


def _rows(experiment: str, k: int, frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    # Each base has one run of an arm at a rate, so a rate stands for the seed by which runs are paired.
    by_rate = frame.assign(seed=frame["rate"].rank(method="dense").astype(int))
    for name, (arm, other) in PRIMARY.items():
        if pairs := differences(by_rate, arm, other):
            difference = paired_difference(pairs)
            yield {
                "pilot": experiment,
                "measure": f"pass@{k}",
                "comparison": name,
                "difference": difference.interval.mean,
                "difference_low": difference.interval.low,
                "difference_high": difference.interval.high,
                "p": difference.p,
                "pairs": difference.pairs,
            }
