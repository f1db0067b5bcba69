"""The primary comparisons at equal learning rates, from the pilot, which tried the same rates in every arm."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import pandas as pd

from qerl.report.exploration import PRIMARY
from qerl.report.study.arms import pilots
from qerl.report.study.comparisons import primary_ks
from qerl.results.outcomes import differences
from qerl.results.paired import paired_difference
from qerl.results.study import Study


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
