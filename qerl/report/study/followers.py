"""Whether the runs with a thermostat had the entropy that they follow: only then do they control for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pandas as pd

from qerl.results.schema.stored import OK
from qerl.results.schema.study import MAIN
from qerl.results.study import Study

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
