"""Our speeds and sizes as results that stand beside the paper's: rollouts, GRPO steps, and the weights of bases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from qerl.report.pages import NOT_RUN
from qerl.report.paper import Result
from qerl.report.ratios import DIFFERENT_MACHINES
from qerl.report.tables import step_base
from qerl.results.intervals import Interval, ratio_interval
from qerl.results.schema.stored import OK


def rollouts(points: pd.DataFrame) -> Iterator[Result]:
    """Tokens/s, and the ratios to BF16 and NF4 at the same bench, model, sequences and rank."""
    rows = points.to_dict("records")
    for point in rows:
        label = {
            "model": point["model"],
            "weights": point["weights"],
            "method": "lora" if point["rank"] else "none",
            "rank": point["rank"],
            "setting": {"bs": str(point["sequences"])},
            "source": f"{point['bench']}/{point['weights']}",
        }
        yield Result(metric="rollout_rate", measure=partial(_median, point["samples"]), status=point["status"], **label)
        for metric, weights in (("rollout_speedup", "bf16"), ("rollout_speedup_nf4", "nf4")):
            base, elsewhere = (_rollout_base(point, some, weights) for some in (rows, _elsewhere(point, rows)))
            yield _quotient(metric, point, base, elsewhere, weights.upper(), label)


def _rollout_base(point: dict[Any, Any], rows: Iterable[dict[Any, Any]], weights: str) -> dict[Any, Any] | None:
    wanted = point | {"weights": weights}
    keys = ("bench", "model", "sequences", "rank", "weights")
    return next((row for row in rows if all(row[key] == wanted[key] for key in keys)), None)


def _elsewhere(point: dict[Any, Any], rows: Iterable[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """The rows of other machines, as if they were of the point's bench."""
    return [row | {"bench": point["bench"]} for row in rows if row["machine"] != point["machine"]]


def steps(points: pd.DataFrame) -> Iterator[Result]:
    """Seconds of a GRPO step, and the speed-up over BF16 LoRA (`qerl.report.tables.step_base`)."""
    rows = points.to_dict("records")
    for point in rows:
        label = {
            "model": point["model"],
            "weights": point["weights"],
            "method": point["method"],
            "rank": point["rank"],
            "setting": {"bs": str(point["sequences"]), "gc": "on" if point["gradient_checkpointing"] else "off"},
            "source": f"{point['bench']}/{point['arm']}",
        }
        yield Result(metric="step_seconds", measure=partial(_median, point["samples"]), status=point["status"], **label)
        base, elsewhere = (step_base(point, some) for some in (rows, _elsewhere(point, rows)))
        yield _quotient("step_speedup", point, base, elsewhere, "BF16 LoRA", label, of_seconds=True)


def _quotient(
    metric: str,
    point: dict[Any, Any],
    base: dict[Any, Any] | None,
    elsewhere: dict[Any, Any] | None,
    name: str,
    label: dict[str, Any],
    of_seconds: bool = False,
) -> Result:
    """The speed-up of a point over its base, which `name` names. Either may have failed; the base may be missing, or be
    of another machine (`elsewhere`).
    """
    if point["status"] != OK or base is None or base["status"] != OK:
        missing = f"{name} {base['status'] if base else NOT_RUN}" if base or elsewhere is None else DIFFERENT_MACHINES
        status = point["status"] if point["status"] != OK else missing
        return Result(metric=metric, measure=str, status=status, **label)
    if point is base:
        return Result(metric=metric, measure=partial(Interval, 1.0, np.nan, np.nan), **label)
    above, below = (base, point) if of_seconds else (point, base)
    return Result(metric=metric, measure=partial(ratio_interval, above["samples"], below["samples"]), **label)


def _median(samples: Sequence[float]) -> Interval:
    return Interval(float(np.median(samples)), np.nan, np.nan)


def sizes(reports: pd.DataFrame, source: str = "quantize") -> Iterator[Result]:
    """Size of each base's weights in GB, from the column `size_bytes`."""
    for row in reports.to_dict("records"):
        measure = partial(Interval, row["size_bytes"] / 1e9, np.nan, np.nan)
        yield Result(
            metric="size", model=row["model"], weights=row["weights"], setting=None, measure=measure, source=source
        )
