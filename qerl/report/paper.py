"""The paper's numbers beside ours: results joined to the cells of its tables by their properties, and their layout.

A result is joined by its properties, never by an experiment's name. If several arms of a configuration fit a cell, the
first one is shown; `source` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from string import ascii_lowercase
from typing import Any

import numpy as np
import pandas as pd

from qerl.report.format import DIFFERENT_MACHINES, NOT_RUN, three_digits, training_label, weights_label
from qerl.results.paths import KEY, training_name, variant
from qerl.results.printed import FOLDER, MODELS, Asked, Cell, read_cells
from qerl.results.readers import StoredResults, paired_base
from qerl.results.schema import OK
from qerl.results.statistics import ENDS, Interval, Scores, average_interval, ratio_interval
from qerl.settings.run import RunSettings

#: The data sets of the paper's average (Table 2).
AVERAGED = ("math500", "aime24", "aime25", "amc23")
#: GSM8K is scored in three ways. The paper's scripts use two of them: lm-eval's task for bases, and for trained
#: policies the prompt of training, whose answers stand in tags that the task's strict match doesn't read. A printed
#: number is compared with the score of the same way; tables show all three for every row.
_GSM8K, _OWN_PROMPT = "gsm8k", "gsm8k-own-prompt"
READINGS = (f"{_GSM8K}/strict", f"{_GSM8K}/flexible", f"{_GSM8K}/own-prompt")
#: The part of captions that explains comparisons with the paper's speeds.
SPEED = (
    "The paper measured on one H100 of 80 GB: tokens/s and seconds are shown, but only ratios are compared. 95 % "
    "intervals of ratios: percentile bootstrap of the medians over the repeats"
)
#: Units of values that depend on the machine: ours and the paper's are shown, but not compared.
_OF_THE_MACHINE = ("tokens/s", "s")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One number of ours and its properties; a property that is None fits any cell.

    `measure` returns the number in the unit of the printed one.
    """

    metric: str
    model: str
    weights: str
    method: str | None = None
    noise: str | None = None
    rank: int | None = None
    setting: Mapping[str, str] | None = field(default_factory=dict)
    measure: Callable[[], Interval | str]
    seeds: int = 0
    source: str = ""
    status: str = OK


def ours(stored: StoredResults, cells: Sequence[Cell]) -> Iterator[Result]:
    """Our results of the cells' kinds."""
    kinds = {cell.kind for cell in cells}
    if "rollout" in kinds:
        yield from rollouts(stored.points("rollout"))
    if "step" in kinds:
        yield from steps(stored.points("step"))
    if "size" in kinds:
        yield from sizes(stored.quantization)
    if "run" in kinds:
        yield from _hyperparameters(stored, dict.fromkeys(cell.metric for cell in cells if cell.kind == "run"))
    scored = dict.fromkeys(cell.metric for cell in cells if cell.kind not in ("rollout", "step", "size", "run"))
    if scored:
        yield from _accuracies(stored)
    for _, run in stored.run_results:  # a failed one is a result without a number
        for metric in scored if run.status != OK else ():
            source = _source({"experiment": run.experiment, "arm": run.arm, "variant": variant(run.varied)})
            yield Result(metric=metric, measure=str, source=source, status=run.status, **identity(run.settings))


def identity(settings: RunSettings) -> dict[str, Any]:
    """The properties of a run, with the names and values of printed cells."""
    noise = settings.noise
    consistent = "-consistent" if noise.schedule != "off" and noise.mode == "consistent" else ""
    return {
        "model": settings.model,
        "weights": settings.base.weights_name,
        "method": settings.method,
        "noise": noise.schedule + consistent,
        "rank": settings.adapter.rank if settings.method == "lora" else None,
        "setting": {
            "data": settings.dataset,
            "lr": f"{settings.optimizer.learning_rate:g}",
            "sigma": f"{noise.sigma_start:g}",
        },
    }


# --- accuracies and hyper-parameters ---------------------------------------------------------------------------------


def _accuracies(stored: StoredResults) -> Iterator[Result]:
    """Accuracy on each data set and on average, and the difference from the untrained BF16 base, in percent."""
    arms: dict[tuple[str, ...], dict[str, pd.DataFrame]] = {}
    for column, suffix in (("correct", ""), ("flexible", "/flexible")):
        for place, matrix in stored.scores(column).items():
            arms.setdefault(place[:-1], {})[place[-1] + suffix] = matrix
    evaluations = stored.evaluations
    stock = set(evaluations.loc[evaluations["task"].notna(), "dataset"])
    named = [(dict(zip(KEY, arm, strict=True)), sets) for arm, sets in arms.items()]
    named = [(key, _with_readings(sets, _GSM8K in stock, key["training"] != "none")) for key, sets in named]
    bases = {key["model"]: sets for key, sets in named if (key["weights"], key["training"]) == ("bf16", "none")}
    runs = evaluations.groupby("eval")["run"].first()
    settings = {run.run: run.settings for _, run in stored.run_results}
    for key, sets in named:
        run = runs[next(iter(sets.values())).index[0]]
        untrained = {"model": key["model"], "weights": key["weights"], "method": "none", "noise": "off", "setting": {}}
        label = {**(identity(settings[run]) if run else untrained), "source": _source(key)}
        base = bases.get(key["model"], {}) if run or key["weights"] != "bf16" else {}
        for metric, measure, seeds in _measures(sets, base):
            yield Result(metric=metric, measure=measure, seeds=seeds if run else 0, **label)
        if READINGS[0] in sets and _GSM8K not in sets:
            for metric in (_GSM8K, f"{_GSM8K}/delta"):
                yield Result(metric=metric, measure=str, status=f"{_OWN_PROMPT} {NOT_RUN}", **label)


def _with_readings(sets: Mapping[str, pd.DataFrame], is_stock: bool, trained: bool) -> dict[str, pd.DataFrame]:
    """Scores by task, and on GSM8K also by reading; `is_stock`: with the harness's own prompt.

    `gsm8k` itself becomes the scores that are compared with the paper's number.
    """
    own = sets.get(_GSM8K)
    prompted = sets.get(_OWN_PROMPT, None if is_stock else own)
    readings = {READINGS[0]: own if is_stock else None, READINGS[2]: prompted, _GSM8K: prompted if trained else own}
    others = {name: scores for name, scores in sets.items() if name != _GSM8K}
    return others | {name: scores for name, scores in readings.items() if scores is not None}


def _source(key: Mapping[str, str]) -> str:
    parts = [key["experiment"], key["arm"], key["variant"]]
    return "/".join(filter(None, parts)) or f"untrained {key['weights']}"


def _measures(
    sets: Mapping[str, pd.DataFrame], base: Mapping[str, pd.DataFrame]
) -> Iterator[tuple[str, Callable[[], Interval], int]]:
    """Metric, its number in percent, and seeds; an accuracy is an average over one data set."""
    averages = {name: (name,) for name in sets} | ({"average": AVERAGED} if set(AVERAGED) <= sets.keys() else {})
    for metric, names in averages.items():
        scores = [sets[name].to_numpy() for name in names]
        yield metric, partial(_percent, scores), len(scores[0])
        if set(names) <= base.keys():
            arm = str(sets[names[0]].index[0])
            bases = [paired_base(arm, name, sets[name], base[name].mean(axis=0)) for name in names]
            yield f"{metric}/delta", partial(_percent, scores, bases), len(scores[0])


def _percent(scores: Sequence[Scores], bases: Sequence[Scores] | None = None) -> Interval:
    return Interval(*(100 * value for value in vars(average_interval(scores, bases)).values()))


def _hyperparameters(stored: StoredResults, metrics: Iterable[str]) -> Iterator[Result]:
    """The settings of the runs on the paper's models, for each key in `metrics`."""
    for _, run in stored.run_results:
        for metric in metrics if run.settings.model in MODELS else ():
            value: Any = run.settings
            for key in metric.split("."):
                value = getattr(value, key, None)
            if metric == "batch":
                value = run.settings.rollout.prompts * run.settings.rollout.group_size
            is_number = isinstance(value, (int, float))
            measure = partial(Interval, float(value), np.nan, np.nan) if is_number else partial(str, value)
            status = OK if value is not None else "no such setting"
            yield Result(metric=metric, measure=measure, source=run.run, status=status, **identity(run.settings))


# --- speeds and sizes ------------------------------------------------------------------------------------------------

#: Columns that two steps, or two rollouts, must share for their speeds to be compared.
STEP_SETTING = ("bench", "model", "prompts", "group_size", "gradient_checkpointing")
_ROLLOUT_SETTING = ("bench", "model", "sequences", "rank")
Point = dict[Any, Any]


def base_of(point: Point, points: Iterable[Point], setting: Sequence[str], **wanted: str) -> Point | None:
    """The point of the same setting with the wanted properties, if possible of the same rank. It may have failed."""
    same = point | wanted
    bases = [other for other in points if all(other[key] == same[key] for key in (*setting, *wanted))]
    return next((base for base in bases if base["rank"] == point["rank"]), next(iter(bases), None))


def step_base(point: Point, points: Iterable[Point]) -> Point | None:
    """The BF16 LoRA step with which a step is compared, or None."""
    return base_of(point, points, STEP_SETTING, weights="bf16", method="lora")


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
        measure = partial(_median, point["rollouts"])
        yield Result(metric="rollout_rate", measure=measure, status=point["status"], **label)
        for metric, weights in (("rollout_speedup", "bf16"), ("rollout_speedup_nf4", "nf4")):
            find = partial(base_of, point, setting=_ROLLOUT_SETTING, weights=weights)
            yield _quotient(metric, point, rows, find, weights.upper(), label)


def steps(points: pd.DataFrame) -> Iterator[Result]:
    """Seconds of a GRPO step, and the speed-up over BF16 LoRA (`step_base`)."""
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
        yield _quotient("step_speedup", point, rows, partial(step_base, point), "BF16 LoRA", label)


def _quotient(
    metric: str,
    point: Point,
    points: Sequence[Point],
    find: Callable[..., Point | None],
    name: str,
    label: dict[str, Any],
) -> Result:
    """The speed-up of a point over the base that `find` finds among points, or why there is none; `name` names it."""
    base, status = find(points=points), point["status"]
    if status == OK and base is None:
        elsewhere = [row | {"bench": point["bench"]} for row in points if row["machine"] != point["machine"]]
        status = DIFFERENT_MACHINES if find(points=elsewhere) else f"{name} {NOT_RUN}"
    elif status == OK and base is not None and base["status"] != OK:
        status = f"{name} {base['status']}"
    if status != OK or base is None:
        return Result(metric=metric, measure=str, status=status, **label)
    if point is base:
        return Result(metric=metric, measure=partial(Interval, 1.0, np.nan, np.nan), **label)
    pair = (base["samples"], point["samples"]) if metric == "step_speedup" else (point["rollouts"], base["rollouts"])
    return Result(metric=metric, measure=partial(ratio_interval, *pair), **label)


def _median(samples: Sequence[float]) -> Interval:
    return Interval(float(np.median(samples)), np.nan, np.nan)


def sizes(reports: pd.DataFrame, source: str = "quantize") -> Iterator[Result]:
    """Size of each base's weights in GB, from the column `size_bytes`."""
    for row in reports.to_dict("records"):
        measure = partial(Interval, row["size_bytes"] / 1e9, np.nan, np.nan)
        named = {"model": row["model"], "weights": row["weights"], "setting": None, "source": source}
        yield Result(metric="size", measure=measure, **named)


# --- beside the paper's ----------------------------------------------------------------------------------------------


def cells_of(*files: str, kinds: Sequence[str] = ()) -> list[Cell]:
    """The cells of these kinds, or of all, in some files, for the models of the first file."""
    cells = [cell for file in files for cell in read_cells(FOLDER / f"{file}.csv")]
    models = {cell.model for cell in cells if cell.table == files[0]}
    return [cell for cell in cells if cell.model in models and (not kinds or cell.kind in kinds)]


def fits(asked: Asked, result: Mapping[Any, Any]) -> bool:
    """Whether a mapping with the fields of `Result` matches a cell or a curve."""
    setting = result["setting"]
    same = all(
        getattr(asked, key) in ("", None) or result[key] is None or result[key] == getattr(asked, key)
        for key in ("model", "weights", "method", "noise", "rank")
    )
    return same and (setting is None or all(setting.get(key) == value for key, value in asked.setting.items()))


def beside(cells: Sequence[Cell], results: Iterable[Result]) -> pd.DataFrame:
    """One row per cell: printed, ours with its 95 % interval, the difference, seeds and the source of ours.

    `status` says why a cell has no number of ours. Values that depend on the machine have no difference.
    """
    by_metric: dict[str, list[Result]] = {}
    for result in results:
        by_metric.setdefault(result.metric, []).append(result)
    rows = []
    for cell in cells:
        found = _found(cell, by_metric.get(cell.metric, []))
        rows.append(
            {
                **{key: getattr(cell, key) for key in ("table", "model", "weights", "method", "noise", "rank")},
                "setting": "; ".join(f"{key}={value}" for key, value in cell.setting.items()),
                **{key: getattr(cell, key) for key in ("metric", "unit", "printed")},
                **dict.fromkeys((f"{name}{end}" for name in ("ours", "difference") for end in ENDS), np.nan),
                **{"seeds": np.nan, "source": "", **found},
                "inconsistent": cell.inconsistent,
                "note": "; ".join(filter(None, [cell.note, found.get("note", "")])),
            }
        )
    return pd.DataFrame(rows).astype({"rank": "Int64", "seeds": "Int64"})


def _found(cell: Cell, candidates: Sequence[Result]) -> dict[str, Any]:
    """Our number, its difference, seeds, source and status for a cell, and a remark."""
    fitting = [result for result in candidates if fits(cell, vars(result))]
    if not fitting:
        ranks = sorted({r.rank for r in candidates if r.rank and fits(replace(cell, rank=None), vars(r))})
        return {"status": f"{NOT_RUN} (rank {', '.join(map(str, ranks))} was)" if ranks else NOT_RUN}
    # An arm with a number comes before arms that failed.
    result = next((result for result in fitting if result.status == OK), fitting[0])
    found: dict[str, Any] = {"source": result.source, "status": result.status}
    if result.status != OK:
        return found
    failed = [other.status for other in fitting if other.source == result.source and other.status != OK]
    if failed and result.seeds:  # the number comes from the arm's other runs
        found["note"] = f"without {len(failed)} of our runs: {', '.join(dict.fromkeys(failed))}"
    number = result.measure()
    if isinstance(number, str):
        return found | {"ours": number}
    found |= number.columns("ours") | {"seeds": result.seeds or np.nan}
    try:
        printed = float(cell.printed)
    except ValueError:  # a word, or nothing
        return found
    if cell.unit not in _OF_THE_MACHINE:
        found |= Interval(*(end - printed for end in vars(number).values())).columns("difference")
    return found


# The layout of cells of `beside`: the paper's rows and columns, with ours and the difference below.
#
# A printed number that the paper contradicts elsewhere, or that needs a remark, has a footnote.

#: By table: the property that its columns distinguish besides the metric; all others distinguish rows.
_IN_COLUMNS = {"table3": "bs", "table5": "gc", "table6": "gc", "table7": "gc", "table8": "gc", "table9": "weights"}
#: Tables without columns for the differences from the untrained base.
_WITHOUT_DELTAS = ("table2",)
_METRICS = {
    "gsm8k": "GSM8K (%)",
    "gsm8k/delta": "Δ to BF16 base (points)",
    "gsm8k/strict": "strict (%)",
    "gsm8k/flexible": "flexible (%)",
    "gsm8k/own-prompt": "own prompt (%)",
    "math500": "MATH500 (%)",
    "aime24": "AIME24 (%)",
    "aime25": "AIME25 (%)",
    "amc23": "AMC23 (%)",
    "average": "average (%)",
    "size": "size (GB)",
    "rollout_rate": "tokens/s",
    "rollout_speedup": "rollout ratio to BF16",
    "rollout_speedup_nf4": "rollout ratio to NF4",
    "step_speedup": "step speed-up",
    "step_seconds": "s/step",
}
_TOLD = {"bs": "batch {}", "gc": "GC {}", "weights": "{} LoRA"}
_UNITS = {
    "%": lambda value: f"{value:.1f}",
    "points": lambda value: f"{value:+.1f}".replace("-", "−"),
    "ratio": lambda value: f"{value:.2f}×",
    "GB": lambda value: f"{value:.1f}",
    "tokens/s": lambda value: three_digits(value),
    "s": lambda value: three_digits(value),
    "": lambda value: f"{value:g}",
}


def measured(cell: dict[Any, Any]) -> bool:
    """Whether a cell has a result of ours, or a failed one. A size doesn't count, because many rows share it."""
    return cell["metric"] != "size" and not cell["status"].startswith(NOT_RUN)


def paper_shape(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of the paper's table, each as up to three lines (paper, ours, difference), and the footnotes."""
    cells = _folded(frame.to_dict("records"))
    in_columns = _IN_COLUMNS.get(cells[0]["table"], "")
    texts, footnotes = _texts(cells)
    order = sorted(cells, key=lambda cell: list(_METRICS).index(cell["metric"]))
    headings = list(dict.fromkeys(_heading(cell, in_columns) for cell in order))
    rows: dict[tuple[tuple[str, str], ...], dict[str, dict[str, str]]] = {}
    for cell, text in zip(cells, texts, strict=True):
        rows.setdefault(_row_key(cell, in_columns), {})[_heading(cell, in_columns)] = text
    lines = []
    for key, row in rows.items():
        seeds = ", ".join(sorted({text["seeds"] for text in row.values()} - {""}))
        for kind in ("paper", "ours", "difference"):
            shown = {heading: row[heading][kind] if heading in row else "" for heading in headings}
            if kind != "difference" or any(shown.values()):
                named = dict(key) if kind == "paper" else dict.fromkeys(dict(key), "")
                lines.append({**named, "": kind, **shown, "seeds": seeds if kind == "ours" else ""})
    table = pd.DataFrame(lines)
    constant = [name for name in ("model", "LoRA rank", "batch") if len({*table[name]} - {""}) < 2]
    return table.drop(columns=[*constant, *([] if any(table["seeds"]) else ["seeds"])]), footnotes


def flat(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """One row per cell: key, runs that it holds for, printed value, ours and the difference; and the footnotes."""
    cells = frame.to_dict("records")
    texts, footnotes = _texts(cells)
    lines = []
    for cell, text in zip(cells, texts, strict=True):
        training = [_training(cell)] if cell["method"] else ["AQN"] if cell["noise"] not in ("", "off") else []
        arm = " ".join([*([weights_label(cell["weights"])] if cell["weights"] else []), *training])
        scope = ", ".join([arm, *_pairs(cell["setting"]).values()]).strip(", ")
        shown = {kind: text[kind] for kind in ("paper", "ours", "difference")}
        lines.append({"key": cell["metric"], "applies to": scope, **shown})
    return pd.DataFrame(lines), footnotes


def _folded(cells: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """The cells without differences if the paper's table has none; their contradictions move to the value's cell."""
    if cells[0]["table"] not in _WITHOUT_DELTAS:
        return cells
    kept = {(_row_key(c, ""), c["metric"]): dict(c) for c in cells if not c["metric"].endswith("/delta")}
    for cell in cells:
        value, delta, _ = cell["metric"].partition("/delta")
        if delta and cell["inconsistent"]:
            printed = _UNITS["points"](float(cell["printed"]))
            remark = f"the difference printed beside it is {printed}; {cell['inconsistent']}"
            kept[_row_key(cell, ""), value]["inconsistent"] = remark
    return list(kept.values())


def _row_key(cell: dict[Any, Any], in_columns: str) -> tuple[tuple[str, str], ...]:
    settings = _pairs(cell["setting"])
    key = {
        "model": cell["model"],
        **({} if in_columns == "weights" else {"weights": weights_label(cell["weights"]), "training": _training(cell)}),
        "LoRA rank": "" if pd.isna(cell["rank"]) else f"{cell['rank']:.0f}",
        "batch": settings["bs"] if "bs" in settings and in_columns != "bs" else "",
    }
    return tuple(key.items())


def _heading(cell: dict[Any, Any], in_columns: str) -> str:
    parts = {**_pairs(cell["setting"]), "weights": weights_label(cell["weights"])}
    told = [_TOLD[in_columns].format(parts[in_columns])] if in_columns in parts else []
    return ", ".join([_METRICS[cell["metric"]], *told])


def _training(cell: dict[Any, Any]) -> str:
    return training_label(training_name(cell["method"], cell["noise"] or "off"))


def _pairs(setting: str) -> dict[str, str]:
    return dict(part.split("=") for part in setting.split("; ") if part)


def _texts(cells: list[dict[Any, Any]]) -> tuple[list[dict[str, str]], list[str]]:
    """The printed number of each cell with letters of remarks, ours, the difference and seeds; and the footnotes."""

    def remarks(cell: dict[Any, Any]) -> list[str]:
        contradiction = f"the paper contradicts itself: {cell['inconsistent']}" if cell["inconsistent"] else ""
        return [remark for remark in (contradiction, cell["note"]) if remark]

    letters = dict(zip(dict.fromkeys(one for cell in cells for one in remarks(cell)), ascii_lowercase, strict=False))
    texts = []
    for cell in cells:
        printed, change = cell["printed"], ""
        if printed and cell["unit"] in ("ratio", "points"):
            printed = f"{printed}×" if cell["unit"] == "ratio" else _UNITS["points"](float(printed))
        if marks := ", ".join(letters[remark] for remark in remarks(cell)):
            printed = f"{printed} ({marks})"
        if not pd.isna(cell["difference"]):
            digits = {"ratio": ".2f", "": "g"}.get(cell["unit"], ".1f")
            change = f"{cell['difference']:+{digits}}"
            change = change.removeprefix("+") if float(change) == 0 else change.replace("-", "−")
        seeds = "" if pd.isna(cell["seeds"]) else f"{cell['seeds']:.0f}"
        texts.append({"paper": printed, "ours": ours_text(cell), "difference": change, "seeds": seeds})
    return texts, [f"({letter}) {remark}." for remark, letter in letters.items()]


def ours_text(cell: Mapping[Any, Any]) -> str:
    """Our number in a cell's unit with its interval, or why there is none."""
    if cell["status"] != OK:
        return str(cell["status"])
    if isinstance(cell["ours"], str):
        return cell["ours"]
    # Where the paper ran out of memory, its cell has no unit, but ours may need one.
    text = _UNITS["ratio" if cell["metric"].endswith("_speedup") else cell["unit"]]
    ends = f" [{text(cell['ours_low'])}, {text(cell['ours_high'])}]" if not pd.isna(cell["ours_low"]) else ""
    return text(cell["ours"]) + ends
