"""Whether a study's bases and runs meet the conditions of the protocol's calibration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from qerl.report.study.comparisons import PRIMARY_KS, tested
from qerl.results.outcomes import outcomes, scores
from qerl.results.schema.study import BASE
from qerl.results.study import Study

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
