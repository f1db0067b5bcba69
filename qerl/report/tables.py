"""The paper's tables: pure functions of tidy results (`qerl.results.readers`), with a row per arm, point or model.

Accuracies and differences are fractions, times seconds, sizes bytes; `qerl.report.format` turns them into text.
Values that weren't measured are empty, with the reason in `note` or `status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl.report.format import NOT_RUN, latex, page, present
from qerl.results.paths import KEY, weights_names
from qerl.results.schema import OK
from qerl.results.speeds import quartiles
from qerl.results.statistics import METHOD, Interval, Scores, accuracy_interval, difference_interval
from qerl.results.store import ResultError

QUARTILES = "Median [quartiles] of the repeats, all points measured in one process"

_ORDER = {
    "weights": weights_names(),
    "training": ["none", "full", "full+aqn", "lora", "lora+aqn"],
}
_CELL = [
    *(f"{measure}{end}" for measure in ("accuracy", "delta_bf16", "delta_format") for end in ("", "_low", "_high")),
    "seeds",
    "note",
]
_SETTING = ["bench", "model", "sequences", "completion_tokens"]
#: Columns that two steps must share for their times to be compared.
_STEP_SETTING = ["bench", "model", "prompts", "group_size", "gradient_checkpointing"]


# --- accuracy (paper Table 1 and 2) ----------------------------------------------------------------------------------


def accuracy_cells(evaluations: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row per (arm, data set): accuracy over the seeds, its differences from untrained bases, 95 % intervals.

    `delta_bf16` is to the untrained BF16 base, `delta_format` to the untrained base of the same weight format, both
    paired over problems. Raises ResultError where evaluations to be paired saw different problems.
    """
    scores = scores_by_arm(evaluations, samples)
    bases: dict[tuple[str, str, str], list[pd.DataFrame]] = {}
    for (model, *_, weights, training, dataset), matrix in scores.items():
        if training == "none":
            bases.setdefault((model, weights, dataset), []).append(matrix)
    means = {key: pd.concat(matrices).mean(axis=0) for key, matrices in bases.items()}
    return pd.DataFrame(
        [_cell(dict(zip([*KEY, "dataset"], key, strict=True)), matrix, means) for key, matrix in scores.items()]
    )


def accuracy(cells: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """A table as the paper's Table 1: one row per arm, and columns `<data set>/<measure>` from `accuracy_cells`.

    The notes of an arm name its failed runs. An arm whose runs all failed has a row too.
    """
    datasets = list(dict.fromkeys(cells["dataset"]))
    lost: dict[tuple[Any, ...], list[str]] = {}
    for run in runs[runs["status"] != OK].to_dict("records") if "status" in runs else ():  # none is stored
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


def scores_by_arm(evaluations: pd.DataFrame, samples: pd.DataFrame) -> dict[tuple[str, ...], pd.DataFrame]:
    """The share of right repeats, [evaluations, problems], by (*KEY, dataset)."""
    identities = evaluations[["eval", "dataset", "run", *KEY]]
    merged = samples.merge(identities, on=["eval", "dataset"], how="inner", validate="many_to_one")
    scores = {}
    for key, group in merged.groupby([*KEY, "dataset"], sort=False):
        matrix = group.pivot_table(index="eval", columns="problem", values="correct", aggfunc="mean")
        if matrix.isna().to_numpy().any():
            raise ResultError(
                f"the evaluations {', '.join(map(str, matrix.index))} saw different problems of {key[-1]}"
            )
        runs = group.groupby("eval")["run"].first()
        twice = runs[runs.ne("") & runs.duplicated()]
        if len(twice):
            raise ResultError(
                f"run {twice.iloc[0]!r} is evaluated twice on {key[-1]}: {', '.join(map(str, runs.index))}"
            )
        scores[tuple(map(str, key))] = matrix
    return scores


def _cell(
    identity: dict[str, str], scores: pd.DataFrame, bases: dict[tuple[str, str, str], pd.Series]
) -> dict[str, Any]:
    trained = identity["training"] != "none"
    cell: dict[str, Any] = {
        **identity,
        "seeds": len(scores) if trained else 0,
        "problems": scores.shape[1],
        **_columns("accuracy", accuracy_interval(scores.to_numpy())),
    }
    notes = []
    for measure, weights in (("delta_bf16", "bf16"), ("delta_format", identity["weights"])):
        base = bases.get((identity["model"], weights, identity["dataset"]))
        if base is None:
            notes.append(f"untrained {weights} base not run")
        elif trained or weights != identity["weights"]:
            arm = identity["arm"] or identity["weights"]
            paired = paired_base(arm, identity["dataset"], scores, base)
            cell |= _columns(measure, difference_interval(scores.to_numpy(), paired))
    return cell | {"note": "; ".join(dict.fromkeys(notes))}


def paired_base(arm: str, dataset: str, scores: pd.DataFrame, base: pd.Series) -> Scores:
    """The base's share of right answers per problem, in the order of an arm's `scores`."""
    if set(scores.columns) != set(base.index):
        raise ResultError(f"{arm} and its untrained base saw different problems of {dataset}")
    return base[scores.columns].to_numpy()


def _columns(measure: str, interval: Interval) -> dict[str, float]:
    return {measure: interval.mean, f"{measure}_low": interval.low, f"{measure}_high": interval.high}


# --- speed and memory (paper Table 3 and 9) --------------------------------------------------------------------------


def throughput(points: pd.DataFrame) -> pd.DataFrame:
    """The paper's Table 9: rollout tokens/s by weights and rank, and the ratio to BF16 at the same rank.

    Failed points keep their status; combinations of weights and rank without a point are `not run`.
    """
    rows = []
    for setting, group in points.groupby(_SETTING, sort=False):
        point_of = {(point["weights"], point["rank"]): point for point in group.to_dict("records")}
        for weights, rank in product(dict.fromkeys(group["weights"]), dict.fromkeys(group["rank"])):
            point = point_of.get((weights, rank), {"samples": [], "status": NOT_RUN})
            rows.append(
                {
                    **dict(zip(_SETTING, setting, strict=True)),
                    "weights": weights,
                    "rank": rank,
                    **quartiles("tokens_per_second", point["samples"]),
                    "ratio_bf16": _ratio(point, point_of.get(("bf16", rank))),
                    "repeats": len(point["samples"]),
                    **{column: point.get(column, np.nan) for column in ("weight_bytes", "peak_memory_bytes")},
                    "status": point["status"],
                }
            )
    return _sorted(pd.DataFrame(rows), [*_SETTING, "weights", "rank"])


def memory_speed(points: pd.DataFrame, reports: pd.DataFrame) -> pd.DataFrame:
    """The paper's Table 3: size, error, seconds per GRPO step, speed-up over BF16 LoRA (`step_base`), peak memory.

    reports: from `load_quantization`. `relative_error` is the mean over the types of layers. `speedup_base` names the
    arm with which a point is compared.
    """
    rows = points.to_dict("records")
    return pd.DataFrame([_step_row(point, step_base(point, rows), reports) for point in rows])


def step_base(point: dict[Any, Any], points: Sequence[dict[Any, Any]]) -> dict[Any, Any] | None:
    """The BF16 LoRA step with which a step is compared, or None. It may have failed.

    It has the same bench, model, prompts, group size and gradient checkpointing, and if possible the same rank.
    """
    keys = [*_STEP_SETTING, "weights", "method"]
    wanted = point | {"weights": "bf16", "method": "lora"}
    bases = [other for other in points if all(other[key] == wanted[key] for key in keys)]
    return next((base for base in bases if base["rank"] == point["rank"]), next(iter(bases), None))


def quantization(reports: pd.DataFrame) -> pd.DataFrame:
    """Bits per weight, size, and relative error by type of layer, for each quantized model."""
    first = ["model", "weights", "method", "bits_per_weight", "bits_per_weight_model", "size_bytes"]
    errors = [column for column in reports if str(column).endswith("/relative_error")]
    return _sorted(reports[[*first, *errors]], ["model", "weights"])


def _step_row(point: dict[Any, Any], base: dict[Any, Any] | None, reports: pd.DataFrame) -> dict[str, Any]:
    medians = {part: quartiles(part, point[part])[part] for part in ("rollout_seconds", "update_seconds")}
    matching = reports[(reports["model"] == point["model"]) & (reports["weights"] == point["weights"])]
    quantized, note = {"bits_per_weight": np.nan, "relative_error": np.nan}, ""
    if len(matching):
        error = matching.filter(like="/relative_error").iloc[0].mean()
        quantized = {"bits_per_weight": matching["bits_per_weight"].iloc[0], "relative_error": error}
    elif point["weights"] != "bf16":
        note = f"no quantization report of {point['model']}"
    base_name = "no BF16 LoRA" if base is None else base["arm"]
    if base is not None and base["status"] != OK:
        base_name += f" ({base['status']})"
    return {
        **{column: point[column] for column in (*_STEP_SETTING, "arm", "method", "weights", "rank", "weight_bytes")},
        **quantized,
        **quartiles("step_seconds", point["samples"]),
        **medians,
        "speedup": _ratio(base, point),
        "speedup_base": base_name,
        "repeats": len(point["samples"]),
        "peak_memory_bytes": point["peak_memory_bytes"],
        "status": point["status"],
        "note": note,
    }


def _ratio(above: dict[Any, Any] | None, below: dict[Any, Any] | None) -> float:
    """The ratio of two points' medians; NaN if one has no samples."""
    if not (above and below and above["samples"] and below["samples"]):
        return np.nan
    return float(np.median(above["samples"]) / np.median(below["samples"]))


def _sorted(frame: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    def rank(column: pd.Series) -> pd.Series:
        return column.map(_ORDER[str(column.name)].index) if column.name in _ORDER else column

    return frame.sort_values(by, key=rank, kind="stable", ignore_index=True)


# --- files -----------------------------------------------------------------------------------------------------------


def caption_text(title: str, records: pd.DataFrame) -> str:
    """The caption of a table of `records` (evaluations, points or reports): title, machine, seeds, method, commit."""
    parts = [title, machine_text(records)]
    if "run" in records:
        trained = records[records["run"] != ""]
        sizes = records[["dataset", "problems", "repeats"]].drop_duplicates().to_dict("records")
        parts.append(
            "Problems x repeats: " + ", ".join(f"{s['dataset']} {s['problems']} x {s['repeats']}" for s in sizes)
        )
        parts += [seeds_text(trained), METHOD]
    if "samples" in records:
        parts.append(QUARTILES)
    return ". ".join([*parts, commit_text(records)]) + "."


def machine_text(records: pd.DataFrame) -> str:
    """The machines on which numbers were measured, as text."""
    return "Machine: " + "; ".join(dict.fromkeys(records["machine"]))


def commit_text(records: pd.DataFrame) -> str:
    """The commits at which numbers were measured, as text."""
    return "Commit: " + ", ".join(dict.fromkeys(records["commit"]))


def seeds_text(trained: pd.DataFrame) -> str:
    """The number of runs per arm as text, from the columns `run` and `KEY`."""
    seeds = sorted(set(trained.groupby(KEY)["run"].nunique())) or [0]
    return f"Seeds per arm: {seeds[0]}" + (f" to {seeds[-1]}" if len(seeds) > 1 else "")


def write_table(
    frame: pd.DataFrame,
    stem: Path,
    caption: str,
    shown: pd.DataFrame | None = None,
    footnotes: Sequence[str] = (),
    parts: Mapping[str, pd.DataFrame] | None = None,
) -> None:
    """Write stem.csv with full precision; stem.md, stem.tex (booktabs) and stem.html with the caption for readers.

    shown: the table as text, by default `qerl.report.format.present` of the frame. parts: tables that the HTML page
    shows instead, by heading. stem.txt has only the caption, for the workflow's report.
    """
    shown = present(frame) if shown is None else shown
    stem.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(f"{stem}.csv", index=False)
    body = shown.map(lambda text: text.replace("|", "\\|")).to_markdown(index=False, disable_numparse=True)
    notes = "\n".join(f"- {note}" for note in footnotes)
    Path(f"{stem}.md").write_text("\n\n".join(filter(None, [body, caption, notes])) + "\n", encoding="utf-8")
    escaped = shown.map(latex).rename(columns=latex)
    latex_caption = latex(" ".join([caption, *footnotes]))
    table = escaped.to_latex(index=False, caption=latex_caption, label=f"tab:{stem.name}", position="tbp")
    Path(f"{stem}.tex").write_text(table, encoding="utf-8")
    Path(f"{stem}.html").write_text(page(parts or {"": shown}, caption, footnotes), encoding="utf-8")
    Path(f"{stem}.txt").write_text(caption + "\n", encoding="utf-8")
