"""The tables of a configuration, each by its specification: an arm, point, model or run a row.

Accuracies and differences are fractions, times seconds, sizes bytes; `qerl.report.format` turns them into text.
Values that weren't measured are empty, with the reason in `note` or `status`. The paper's tables have its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from qerl.report import paper
from qerl.report.format import NOT_RUN, by_dataset, caption_text, present, stamp_text, write_table
from qerl.report.paper import STEP_SETTING, Point, step_base
from qerl.report_jobs import TableJob
from qerl.results import printed
from qerl.results.paths import KEY, weights_names
from qerl.results.readers import StoredResults, listed, paired_base
from qerl.results.schema import OK, ResultError
from qerl.results.speeds import quartiles
from qerl.results.statistics import (
    ENDS,
    LEVEL,
    METHOD,
    Interval,
    accuracy_interval,
    average_interval,
    difference_interval,
)
from qerl.settings.workflow import DRIFT_BLOCKS

_ORDER = {
    "weights": weights_names(),
    "training": ["none", "full", "full+aqn", "lora", "lora+aqn"],
}


def _sorted(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    def rank(column: pd.Series) -> pd.Series:
        return column.map(_ORDER[str(column.name)].index) if column.name in _ORDER else column

    return frame.sort_values(by, key=rank, kind="stable", ignore_index=True)


# --- accuracy (paper Table 1 and 2) ----------------------------------------------------------------------------------

_CELL = [*(f"{name}{end}" for name in ("accuracy", "delta_bf16", "delta_format") for end in ENDS), "seeds", "note"]


def accuracy_cells(stored: StoredResults) -> pd.DataFrame:
    """One row per (arm, data set): accuracy over the seeds, its differences from untrained bases, 95 % intervals.

    `delta_bf16` is to the untrained BF16 base, `delta_format` to the untrained base of the same weight format, both
    paired over problems. Raises ResultError where evaluations to be paired saw different problems.
    """
    arms = [(dict(zip([*KEY, "dataset"], key, strict=True)), matrix) for key, matrix in stored.scores().items()]
    bases: dict[tuple[str, str, str], list[pd.DataFrame]] = {}
    for arm, matrix in arms:
        if arm["training"] == "none":
            bases.setdefault((arm["model"], arm["weights"], arm["dataset"]), []).append(matrix)
    rows = []
    for arm, matrix in arms:
        scores, trained, notes = matrix.to_numpy(), arm["training"] != "none", []
        row: dict[str, Any] = {**arm, "seeds": len(scores) if trained else 0, "problems": scores.shape[1]}
        row |= accuracy_interval(scores).columns("accuracy")
        for measure, weights in (("delta_bf16", "bf16"), ("delta_format", arm["weights"])):
            matrices = bases.get((arm["model"], weights, arm["dataset"]))
            if matrices is None:
                notes.append(f"untrained {weights} base not run")
            elif trained or weights != arm["weights"]:
                base = pd.concat(matrices).mean(axis=0)
                paired = paired_base(arm["arm"] or arm["weights"], arm["dataset"], matrix, base)
                row |= difference_interval(scores, paired).columns(measure)
        rows.append(row | {"note": "; ".join(dict.fromkeys(notes))})
    return pd.DataFrame(rows)


def accuracy(stored: StoredResults) -> pd.DataFrame:
    """A table as the paper's Table 1: one row per arm, and columns `<data set>/<measure>` from `accuracy_cells`.

    The notes of an arm name its failed runs. An arm whose runs all failed has a row too.
    """
    cells, runs = accuracy_cells(stored), stored.runs
    datasets = list(dict.fromkeys(cells["dataset"]))
    lost: dict[tuple[Any, ...], list[str]] = {}
    for run in runs[runs["status"] != OK].to_dict("records"):
        lost.setdefault(tuple(run[key] for key in KEY), []).append(f"seed {run['seed']}: {run['status']}")
    failed = {key: "; ".join(notes) for key, notes in lost.items()}
    arms = {key: arm.to_dict("records") for key, arm in cells.groupby(KEY, sort=False)}
    rows = []
    for key in {**arms, **failed}:
        cell_of = {cell["dataset"]: cell for cell in arms.get(key, [])}
        row = dict(zip(KEY, key, strict=True))
        for dataset in datasets:
            cell = cell_of.get(dataset, {"note": "" if key in failed else NOT_RUN})
            noted = cell | {"note": "; ".join(filter(None, [cell["note"], failed.get(key, "")]))}
            row |= {f"{dataset}/{measure}": noted.get(measure, np.nan) for measure in _CELL}
        rows.append(row)
    return _sorted(pd.DataFrame(rows), ["model", "experiment", "training", "weights"])


def trained_differences(stored: StoredResults) -> pd.DataFrame:
    """One row per (arm, data set) of trained arms: how its accuracy differs from the arm without its rounding or noise.

    An arm with noise is compared with the same weights without it, another one with BF16, in training and grid alike.
    `base` is the arm that it is compared with; the `difference` is paired over their common `seeds` and over problems.
    """
    seed_of: dict[str, int] = dict(stored.evaluations[["eval", "seed"]].itertuples(index=False))
    trained = {key: matrix.rename(index=seed_of) for key, matrix in stored.scores().items() if key[-2] != "none"}
    arms = [(dict(zip([*KEY, "dataset"], key, strict=True)), matrix) for key, matrix in trained.items()]
    rows = []
    for arm, matrix in arms:
        plain, noise, _ = arm["training"].partition("+")
        like = arm | ({"training": plain} if noise else {"weights": "bf16"})
        found = [one for one in arms if {**one[0], "arm": ""} == {**like, "arm": ""}]
        if like == arm or len(found) != 1:
            continue
        base, scores = found[0]
        seeds = sorted({*matrix.index} & {*scores.index})
        if not seeds or {*matrix.columns} != {*scores.columns}:
            continue
        gains = matrix.loc[seeds].to_numpy(), scores.loc[seeds, matrix.columns].to_numpy()
        interval = average_interval([gains[0]], [gains[1]])
        rows.append({**arm, "base": base, "seeds": len(seeds), **interval.columns("difference")})
    return pd.DataFrame(rows)


# --- speed and memory (paper Table 3 and 9) --------------------------------------------------------------------------


def throughput(points: pd.DataFrame) -> pd.DataFrame:
    """The paper's Table 9: rollout tokens/s by weights and rank, and the ratio to BF16 at the same rank.

    Failed points keep their status; combinations of weights and rank without a point are `not run`.
    """
    shared = ["bench", "model", "sequences", "completion_tokens"]
    rows = []
    for setting, group in points.groupby(shared, sort=False):
        point_of = {(point["weights"], point["rank"]): point for point in group.to_dict("records")}
        for weights, rank in product(dict.fromkeys(group["weights"]), dict.fromkeys(group["rank"])):
            point = point_of.get((weights, rank), {"samples": [], "status": NOT_RUN})
            rows.append(
                {
                    **dict(zip(shared, setting, strict=True)),
                    "weights": weights,
                    "rank": rank,
                    **quartiles("tokens_per_second", point["samples"]),
                    "ratio_bf16": _ratio(point, point_of.get(("bf16", rank))),
                    "repeats": len(point["samples"]),
                    **{column: point.get(column, np.nan) for column in ("weight_bytes", "peak_memory_bytes")},
                    "status": point["status"],
                }
            )
    return _sorted(pd.DataFrame(rows), [*shared, "weights", "rank"])


def memory_speed(points: pd.DataFrame, reports: pd.DataFrame) -> pd.DataFrame:
    """The paper's Table 3: size, error, seconds per GRPO step, speed-up over BF16 LoRA, peak memory.

    `relative_error` is the mean over the types of layers. `speedup_base` names the arm with which a point is compared.
    """
    points_, rows = points.to_dict("records"), []
    for point in points_:
        base, note = step_base(point, points_), ""
        matching = reports[(reports["model"] == point["model"]) & (reports["weights"] == point["weights"])]
        quantized = {"bits_per_weight": np.nan, "relative_error": np.nan}
        if len(matching):
            error = matching.filter(like="/relative_error").iloc[0].mean()
            quantized = {"bits_per_weight": matching["bits_per_weight"].iloc[0], "relative_error": error}
        elif point["weights"] != "bf16":
            note = f"no quantization report of {point['model']}"
        failed = "" if base is None or base["status"] == OK else f" ({base['status']})"
        rows.append(
            {
                **{name: point[name] for name in (*STEP_SETTING, "arm", "method", "weights", "rank", "weight_bytes")},
                **quantized,
                **quartiles("step_seconds", point["samples"]),
                **{part: quartiles(part, point[part])[part] for part in ("rollout_seconds", "update_seconds")},
                "speedup": _ratio(base, point),
                "speedup_base": "no BF16 LoRA" if base is None else base["arm"] + failed,
                "repeats": len(point["samples"]),
                "peak_memory_bytes": point["peak_memory_bytes"],
                "status": point["status"],
                "note": note,
            }
        )
    return pd.DataFrame(rows)


def _ratio(above: Point | None, below: Point | None) -> float:
    """The ratio of two points' medians; NaN if one has no samples."""
    if not (above and below and above["samples"] and below["samples"]):
        return np.nan
    return float(np.median(above["samples"]) / np.median(below["samples"]))


def quantization(reports: pd.DataFrame) -> pd.DataFrame:
    """Bits per weight, size, and relative error by type of layer, for each quantized model."""
    first = ["model", "weights", "method", "bits_per_weight", "bits_per_weight_model", "size_bytes"]
    errors = [column for column in reports if str(column).endswith("/relative_error")]
    return _sorted(reports[[*first, *errors]], ["model", "weights"])


# --- drift: whether KL(sampler || trainer) grows over a run's steps --------------------------------------------------
#
# Steps of a run aren't independent, so intervals come from the means of consecutive blocks of steps, which nearly are.

#: The most steps of the first and of the last window, which are cut into half as many blocks as the run.
WINDOW = 100
Values = npt.NDArray[np.floating[Any]]


def drift(metrics: pd.DataFrame) -> pd.DataFrame:
    """One row per run: KL and entropy in the first and the last window, their change, the slope, and the verdict.

    `metrics` has one row per step. Raises ResultError for a run with fewer steps than blocks.
    """
    rows = []
    for key, run in metrics.groupby(["run", *KEY, "seed"], sort=False):
        ordered = run.sort_values("step")
        kl, entropy = (ordered[name].to_numpy(float) for name in ("mismatch/kl", "entropy"))
        if len(kl) < DRIFT_BLOCKS:
            raise ResultError(f"run {key[0]!r} has {len(kl)} steps; its drift needs at least {DRIFT_BLOCKS}")
        window = min(WINDOW, len(kl) // 2)
        slope = slope_per_step(kl)
        rows.append(
            {
                **dict(zip([*KEY, "seed"], key[1:], strict=True)),
                "steps": len(kl),
                "entropy_first": entropy[:window].mean(),
                "entropy_last": entropy[-window:].mean(),
                "kl_first": kl[:window].mean(),
                "kl_last": kl[-window:].mean(),
                **change(kl[:window], kl[-window:]).columns("kl_change"),
                **slope.columns("kl_slope", 1000),
                "verdict": verdict(kl[:window].mean(), slope, len(kl)),
            }
        )
    return pd.DataFrame(rows)


def slope_per_step(values: Values) -> Interval:
    """The least-squares slope of a run's values [steps], with Student's t interval from the means of its blocks."""
    from scipy import stats  # a second of CPU time, which other tables are spared

    blocks = np.array_split(values, DRIFT_BLOCKS)
    ends = np.cumsum([len(block) for block in blocks])
    middles = [end - (len(block) + 1) / 2 for end, block in zip(ends, blocks, strict=True)]
    (slope, _), covariance = np.polyfit(middles, _means(blocks), 1, cov=True)
    half = stats.t.ppf((1 + LEVEL) / 2, DRIFT_BLOCKS - 2) * np.sqrt(covariance[0, 0])
    return Interval(float(slope), float(slope - half), float(slope + half))


def change(first: Values, last: Values) -> Interval:
    """The last window's mean value less the first window's, with Welch's interval of their blocks."""
    from scipy import stats

    before, after = (_means(np.array_split(values, DRIFT_BLOCKS // 2)) for values in (first, last))
    interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval(LEVEL)
    return Interval(float(np.mean(after) - np.mean(before)), float(interval.low), float(interval.high))


def verdict(first: float, slope: Interval, steps: int) -> Literal["no drift", "drift", "undecided"]:
    """What a run shows, by the interval of its slope and the KL of its first window.

    A run has no drift if its KL rises by no more than the KL of the first window over all steps, at the upper end of
    the interval. Else it drifts if the lower end is above 0.
    """
    if slope.high * steps <= first:
        return "no drift"
    return "drift" if slope.low > 0 else "undecided"


def _means(blocks: Sequence[Values]) -> list[float]:
    return [float(block.mean()) for block in blocks]


# --- the tables, each by its specification ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table: its caption, whose first sentence is the title, the records from which it is made, and its rows."""

    caption: str
    records: Callable[[StoredResults], pd.DataFrame]
    rows: Callable[[StoredResults], pd.DataFrame]


#: The tables of a configuration besides the paper's. Machine, seeds and commit of the records are added to a caption.
TABLES = {
    "accuracy": Table(
        "Accuracy by weight format and training (the paper's Tables 1 and 2). Differences are in points: to the "
        "untrained BF16 base, and to the untrained base of the same weight format. A row of one seed leaves the "
        "variation between seeds out",
        lambda stored: stored.evaluations,
        accuracy,
    ),
    "memory_speed": Table(
        "Size, error, time of a GRPO step and memory (the paper's Table 3). The speed-up is the ratio of median step "
        "times to BF16 LoRA. Weights in memory are counted as they are stored: dense weights in the configuration's "
        "dtype, adapters in float32",
        lambda stored: stored.points("step"),
        lambda stored: memory_speed(stored.points("step"), stored.quantization),
    ),
    "throughput": Table(
        "Rollout throughput by weight format and LoRA rank (the paper's Table 9). It is in completion tokens per "
        "second, and the ratio is to BF16 at the same rank. A failed point shows its error",
        lambda stored: stored.points("rollout"),
        lambda stored: throughput(stored.points("rollout")),
    ),
    "quantization": Table(
        "Size and relative error by weight format. Bits per weight include scales, for quantized layers and for the "
        "whole model; errors are of the weights, by type of layer",
        lambda stored: stored.quantization,
        lambda stored: quantization(stored.quantization),
    ),
    "drift": Table(
        "Drift of KL(sampler || trainer) over the steps of each run, in nats per token (k3 estimator). First and last "
        "are the means of the first and the last 100 steps, or of half of a shorter run's. The slope is per 1,000 "
        "steps. 95 % intervals are Student's t of the means of consecutive blocks: 20 of a run, 10 of a window. A run "
        "has no drift if its KL rises by no more than the first window's over all steps, at the upper end of the "
        "slope's interval. Else it drifts if the lower end is above 0",
        lambda stored: stored.runs,
        lambda stored: drift(stored.metrics),
    ),
}
_BESIDE = (
    "Results stand beside the paper's by model, weights, training, noise, rank and setting. A cell without a number of "
    "ours says why, and footnotes say how the paper contradicts its own numbers"
)
_SCORED = (
    "GSM8K (%) is the score of the paper's scripts: for bases the strict match of lm-eval's stock task, for trained "
    "policies the answer between tags at the prompt of training. A Δ thus compares two prompts, as the paper's does. "
    "For every row, strict and flexible are the stock task's matches, and own prompt is the score at the prompt of "
    "training"
)


def make_table(job: TableJob) -> None:
    """Write name.csv, .md, .tex and .html to the folder `job.out`, and the caption in name.txt."""
    stored, out = StoredResults(listed(job.results)), job.out / job.name
    if job.name in printed.TABLES:
        return _make_paper_table(job.name, stored, out)
    table = TABLES[job.name]
    frame, parts = table.rows(stored), None
    if job.name == "accuracy":
        parts = {f"Accuracy on {dataset}": present(rows) for dataset, rows in by_dataset(frame).items()}
    write_table(frame, out, caption_text(table.caption, table.records(stored)), parts=parts)


def _make_paper_table(name: str, stored: StoredResults, out: Path) -> None:
    cells = paper.cells_of(name)
    frame = paper.beside(cells, paper.ours(stored, cells))
    shown, footnotes = paper.flat(frame) if name == "table4" else paper.paper_shape(frame)
    units = set(frame["unit"])
    methods = [METHOD] * ("%" in units) + [paper.SPEED] * ("ratio" in units)
    methods += [_SCORED] * bool(set(frame["metric"]) & set(paper.READINGS))
    methods += ["A difference is ours minus the printed number, with the interval of ours"] * bool(methods)
    caption = ". ".join([printed.TABLES[name], _BESIDE, *methods, stamp_text(stored.stamps, stored.runs)])
    write_table(frame, out, caption, shown, footnotes)
