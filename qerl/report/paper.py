"""The paper's numbers beside ours: results joined to printed cells by their properties, and their layout."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from string import ascii_lowercase
from typing import Any

import numpy as np
import pandas as pd

from qerl.report.format import DIFFERENT_MACHINES, NOT_RUN, three_digits, training_label, weights_label
from qerl.report.tables import paired_base, scores_by_arm, step_base
from qerl.results.paths import KEY, training_name, variant
from qerl.results.printed import MODELS, TABLES, Asked, Cell
from qerl.results.schema import OK, RunResult
from qerl.results.statistics import (
    Interval,
    Scores,
    accuracy_interval,
    average_interval,
    difference_interval,
    ratio_interval,
)
from qerl.settings.run import RunSettings

# The paper's numbers beside ours: results joined to printed cells by their properties, never by an experiment's name.
#
# If several arms of a configuration fit a cell, the first one is shown; `source` names it.

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


# --- ours ------------------------------------------------------------------------------------------------------------


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


def accuracies(
    evaluations: pd.DataFrame, samples: pd.DataFrame, settings: Mapping[str, RunSettings]
) -> Iterator[Result]:
    """Accuracy on each data set and on average, and the difference from the untrained BF16 base, in percent."""
    arms: dict[tuple[str, ...], dict[str, pd.DataFrame]] = {}
    for place, matrix in scores_by_arm(evaluations, samples).items():
        arms.setdefault(place[:-1], {})[place[-1]] = matrix
    flexible = samples.dropna(subset="flexible")
    for place, matrix in scores_by_arm(evaluations, flexible.assign(correct=flexible["flexible"])).items():
        arms[place[:-1]][f"{place[-1]}/flexible"] = matrix
    stock = set(evaluations.loc[evaluations["task"].notna(), "dataset"])
    named = [(dict(zip(KEY, arm, strict=True)), sets) for arm, sets in arms.items()]
    named = [(key, _with_readings(sets, stock, trained=key["training"] != "none")) for key, sets in named]
    bases = {key["model"]: sets for key, sets in named if (key["weights"], key["training"]) == ("bf16", "none")}
    runs = evaluations.groupby("eval")["run"].first()
    for key, sets in named:
        run = runs[next(iter(sets.values())).index[0]]
        untrained = {"model": key["model"], "weights": key["weights"], "method": "none", "noise": "off", "setting": {}}
        label = {**(identity(settings[run]) if run else untrained), "source": _source(key)}
        base = bases.get(key["model"]) if run or key["weights"] != "bf16" else None
        for metric, measure, seeds in _measures(sets, base):
            yield Result(metric=metric, measure=measure, seeds=seeds if run else 0, **label)
        if READINGS[0] in sets and _GSM8K not in sets:
            for metric in (_GSM8K, f"{_GSM8K}/delta"):
                yield Result(metric=metric, measure=str, status=f"{_OWN_PROMPT} {NOT_RUN}", **label)


def _with_readings(sets: Mapping[str, pd.DataFrame], stock: Container[str], trained: bool) -> dict[str, pd.DataFrame]:
    """Scores by task, and those of GSM8K also by reading; `stock` has the tasks with the harness's own prompt.

    `gsm8k` itself becomes the scores that are compared with the paper's number.
    """
    strict = sets.get(_GSM8K) if _GSM8K in stock else None
    prompted = sets.get(_OWN_PROMPT, None if _GSM8K in stock else sets.get(_GSM8K))
    readings = {READINGS[0]: strict, READINGS[2]: prompted, _GSM8K: prompted if trained else sets.get(_GSM8K)}
    others = {name: scores for name, scores in sets.items() if name != _GSM8K}
    return others | {name: scores for name, scores in readings.items() if scores is not None}


def _source(key: Mapping[str, str]) -> str:
    parts = [key["experiment"], key["arm"], key["variant"]]
    return "/".join(filter(None, parts)) or f"untrained {key['weights']}"


def _measures(
    sets: Mapping[str, pd.DataFrame], base: Mapping[str, pd.DataFrame] | None
) -> Iterator[tuple[str, Callable[[], Interval], int]]:
    scores = {name: frame.to_numpy() for name, frame in sets.items()}
    seeds = {name: len(matrix) for name, matrix in scores.items()}
    averaged = [name for name in AVERAGED if name in scores]
    whole = len(averaged) == len(AVERAGED)
    for name, matrix in scores.items():
        yield name, partial(_percent, accuracy_interval, matrix), seeds[name]
    if whole:
        yield "average", partial(_percent, average_interval, [scores[name] for name in averaged]), seeds[averaged[0]]
    if base is None:
        return
    means = {
        name: paired_base(str(sets[name].index[0]), name, sets[name], base[name].mean(axis=0))
        for name in scores
        if name in base
    }
    for name, mean in means.items():
        yield f"{name}/delta", partial(_percent, difference_interval, scores[name], mean), seeds[name]
    if whole and all(name in means for name in averaged):
        pairs: list[list[Scores]] = [[scores[name] for name in averaged], [means[name] for name in averaged]]
        yield "average/delta", partial(_percent, average_interval, *pairs), seeds[averaged[0]]


def _percent(interval: Callable[..., Interval], *scores: Any) -> Interval:
    fractions = interval(*scores)
    return Interval(100 * fractions.mean, 100 * fractions.low, 100 * fractions.high)


def failures(runs: Iterable[RunResult], cells: Iterable[Cell]) -> Iterator[Result]:
    """Failed runs as results without a number, one for each metric of `cells`."""
    metrics = list(dict.fromkeys(cell.metric for cell in cells))
    for run in runs:
        for metric in metrics if run.status != OK else []:
            source = _source({"experiment": run.experiment, "arm": run.arm, "variant": variant(run.varied)})
            yield Result(metric=metric, measure=str, source=source, status=run.status, **identity(run.settings))


def hyperparameters(settings: Mapping[str, RunSettings], cells: Iterable[Cell]) -> Iterator[Result]:
    """The settings of the runs on the paper's models, for each key in `cells`."""
    metrics = list(dict.fromkeys(cell.metric for cell in cells if cell.kind == "run"))
    for name, run in settings.items():
        for metric in metrics if run.model in MODELS else []:
            value: Any = run
            for key in metric.split("."):
                value = getattr(value, key, None)
            value = run.rollout.prompts * run.rollout.group_size if metric == "batch" else value
            is_number = isinstance(value, (int, float))
            measure = partial(Interval, float(value), np.nan, np.nan) if is_number else partial(str, value)
            status = OK if value is not None else "no such setting"
            yield Result(metric=metric, measure=measure, source=name, status=status, **identity(run))


# --- beside the paper's ----------------------------------------------------------------------------------------------


def fits(asked: Asked, result: Mapping[str, Any]) -> bool:
    """Whether a mapping with the fields of `Result` matches a cell or a curve."""
    setting = result["setting"]
    same = all(
        getattr(asked, key) in ("", None) or result[key] is None or result[key] == getattr(asked, key)
        for key in ("model", "weights", "method", "noise", "rank")
    )
    return same and (setting is None or all(setting.get(key) == value for key, value in asked.setting.items()))


def with_ratios(cells: Sequence[Cell]) -> list[Cell]:
    """Add the ratio of printed throughputs where the paper prints none: only ratios compare across machines."""
    rates = {_place(cell): cell for cell in cells if cell.metric == "rollout_rate"}
    printed = {_place(cell) for cell in cells if cell.metric == "rollout_speedup"}
    note = "quotient of the printed throughputs"
    extended = []
    for cell in cells:
        extended.append(cell)
        base = rates.get(_place(replace(cell, weights="bf16")))
        if cell.metric == "rollout_rate" and cell.weights != "bf16" and base and _place(cell) not in printed:
            ratio = f"{float(cell.printed) / float(base.printed):.2f}"
            blank = replace(cell, inconsistent="", note=note)
            extended.append(replace(blank, metric="rollout_speedup", printed=ratio, unit="ratio"))
    return extended


def with_readings(cells: Sequence[Cell]) -> list[Cell]:
    """Add cells without a printed number for each way to score GSM8K, after each of its accuracies in a table."""
    extended = []
    for cell in cells:
        extended.append(cell)
        if cell.metric == _GSM8K and cell.table in TABLES:
            blank = replace(cell, printed="", inconsistent="", note="")
            extended += [replace(blank, metric=reading) for reading in READINGS]
    return extended


def with_steps(cells: Sequence[Cell]) -> list[Cell]:
    """Add a cell without a printed number where the paper prints none, so that ours is shown.

    These are the seconds of each step and of its BF16 LoRA base, and the speed-up over that base.
    """
    places = {(cell.metric, _place(cell)) for cell in cells}
    extended = []
    for cell in cells:
        extended.append(cell)
        blank = replace(cell, printed="", inconsistent="", note="")
        asked = [
            *(replace(blank, weights=weights, metric="step_seconds", unit="s") for weights in ("bf16", cell.weights)),
            *([replace(blank, metric="step_speedup", unit="ratio")] if cell.weights != "bf16" else []),
        ]
        for one in asked if cell.kind == "step" else ():
            if (one.metric, _place(one)) not in places:
                places.add((one.metric, _place(one)))
                extended.append(one)
    return extended


def _place(cell: Cell) -> tuple[Any, ...]:
    return cell.model, cell.weights, cell.method, cell.rank, tuple(sorted(cell.setting.items()))


def beside(cells: Sequence[Cell], results: Iterable[Result]) -> pd.DataFrame:
    """One row per cell: printed, ours with its 95 % interval, the difference, seeds and the source of ours.

    `status` says why a cell has no number of ours. Values that depend on the machine have no difference.
    """
    by_metric: dict[str, list[Result]] = {}
    for result in results:
        by_metric.setdefault(result.metric, []).append(result)
    frame = pd.DataFrame([_row(cell, by_metric.get(cell.metric, [])) for cell in cells])
    return frame.astype({"rank": "Int64", "seeds": "Int64"})


def _row(cell: Cell, candidates: Sequence[Result]) -> dict[str, Any]:
    printed = {key: getattr(cell, key) for key in ("table", "model", "weights", "method", "noise", "rank")}
    row = {
        **printed,
        "setting": "; ".join(f"{key}={value}" for key, value in cell.setting.items()),
        "metric": cell.metric,
        "unit": cell.unit,
        "printed": cell.printed,
        **dict.fromkeys((f"{name}{end}" for name in _COMPARED for end in _ENDS), np.nan),
        "seeds": np.nan,
        "source": "",
    }
    fitting = [result for result in candidates if fits(cell, vars(result))]
    # An arm with a number comes before arms that failed.
    result = next((result for result in fitting if result.status == OK), next(iter(fitting), None))
    notes = [cell.note]
    if result is None:
        ranks = sorted({r.rank for r in candidates if r.rank and fits(replace(cell, rank=None), vars(r))})
        row["status"] = f"{NOT_RUN} (rank {', '.join(map(str, ranks))} was)" if ranks else NOT_RUN
    else:
        row |= {"source": result.source, "status": result.status}
        row |= _numbers(cell, result) if result.status == OK else {}
        failed = [other.status for other in fitting if other.source == result.source and other.status != OK]
        if failed and result.status == OK and result.seeds:  # the number comes from the arm's other runs
            notes.append(f"without {len(failed)} of our runs: {', '.join(dict.fromkeys(failed))}")
    return {**row, "inconsistent": cell.inconsistent, "note": "; ".join(filter(None, notes))}


_COMPARED, _ENDS = ("ours", "difference"), ("", "_low", "_high")


def _numbers(cell: Cell, result: Result) -> dict[str, Any]:
    ours = result.measure()
    seeds = {"seeds": result.seeds or np.nan}
    if isinstance(ours, str):
        return {"ours": ours}
    ends = ours.mean, ours.low, ours.high
    numbers: dict[str, Any] = dict(zip((f"ours{end}" for end in _ENDS), ends, strict=True)) | seeds
    try:
        printed = float(cell.printed)
    except ValueError:
        return numbers
    if cell.unit in _OF_THE_MACHINE:
        return numbers
    return numbers | {f"difference{end}": value - printed for end, value in zip(_ENDS, ends, strict=True)}


# The layout of cells of `beside`: the paper's rows and columns, with ours and the difference below.
#
# A printed number that the paper contradicts elsewhere, or that needs a remark, has a footnote.

#: By table: the properties that its columns distinguish besides the metric; all others distinguish rows.
_IN_COLUMNS = {
    "table3": ["bs"],
    "table5": ["gc"],
    "table6": ["gc"],
    "table7": ["gc"],
    "table8": ["gc"],
    "table9": ["weights"],
}
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
    in_columns = _IN_COLUMNS.get(cells[0]["table"], [])
    keys = {_row_key(cell, in_columns) for cell in cells}
    constant = [name for name in ("model", "LoRA rank", "batch") if len({dict(key)[name] for key in keys} - {""}) < 2]
    letters = _letters(cells)
    order = sorted(cells, key=lambda cell: list(_METRICS).index(cell["metric"]))
    headings = list(dict.fromkeys(_heading(cell, in_columns) for cell in order))
    rows: dict[tuple[tuple[str, str], ...], dict[str, dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault(_row_key(cell, in_columns), {})[_heading(cell, in_columns)] = cell
    lines = [line for key, row in rows.items() for line in _lines(dict(key), row, headings, letters)]
    shown = pd.DataFrame(lines)
    return shown.drop(columns=[*constant, *(["seeds"] if not any(shown["seeds"]) else [])]), _footnotes(letters)


def flat(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """One row per cell: key, runs that it holds for, printed value, ours and the difference; and the footnotes."""
    cells = frame.to_dict("records")
    letters = _letters(cells)
    lines = []
    for cell in cells:
        training = [training_label(training_name(cell["method"], cell["noise"] or "off"))] if cell["method"] else []
        noise = ["AQN"] if cell["noise"] not in ("", "off") and not training else []
        arm = " ".join([*([weights_label(cell["weights"])] if cell["weights"] else []), *training, *noise])
        texts = {"paper": _printed(cell, letters), "ours": ours_text(cell), "difference": _change(cell)}
        scope = ", ".join([arm, *_pairs(cell["setting"]).values()]).strip(", ")
        lines.append({"key": cell["metric"], "applies to": scope, **texts})
    return pd.DataFrame(lines), _footnotes(letters)


def _folded(cells: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """The cells without differences if the paper's table has none; their contradictions move to the value's cell."""
    if cells[0]["table"] not in _WITHOUT_DELTAS:
        return cells
    kept = [dict(cell) for cell in cells if not cell["metric"].endswith("/delta")]
    places = {(_row_key(cell, []), cell["metric"]): cell for cell in kept}
    for cell in cells:
        if cell["metric"].endswith("/delta") and cell["inconsistent"]:
            printed = _UNITS["points"](float(cell["printed"]))
            place = _row_key(cell, []), cell["metric"].removesuffix("/delta")
            places[place]["inconsistent"] = f"the difference printed beside it is {printed}; {cell['inconsistent']}"
    return kept


def _row_key(cell: dict[Any, Any], in_columns: list[str]) -> tuple[tuple[str, str], ...]:
    settings = _pairs(cell["setting"])
    training = training_label(training_name(cell["method"], cell["noise"] or "off"))
    key = {
        "model": cell["model"],
        **({} if "weights" in in_columns else {"weights": weights_label(cell["weights"]), "training": training}),
        "LoRA rank": "" if pd.isna(cell["rank"]) else f"{cell['rank']:.0f}",
        "batch": settings["bs"] if "bs" in settings and "bs" not in in_columns else "",
    }
    return tuple(key.items())


def _heading(cell: dict[Any, Any], in_columns: list[str]) -> str:
    parts = {**_pairs(cell["setting"]), "weights": weights_label(cell["weights"])}
    return ", ".join(
        [_METRICS[cell["metric"]], *(_TOLD[name].format(parts[name]) for name in in_columns if name in parts)]
    )


def _pairs(setting: str) -> dict[str, str]:
    return dict(part.split("=") for part in setting.split("; ") if part)


def _lines(
    key: dict[str, str], row: dict[str, dict[str, Any]], headings: list[str], letters: dict[str, str]
) -> list[dict[str, str]]:
    seeds = {f"{cell['seeds']:.0f}" for cell in row.values() if not pd.isna(cell["seeds"])}
    made: dict[str, Callable[[dict[str, Any]], str]] = {
        "paper": lambda cell: _printed(cell, letters),
        "ours": ours_text,
        "difference": _change,
    }
    texts = {kind: [make(row[name]) if name in row else "" for name in headings] for kind, make in made.items()}
    blank = dict.fromkeys(key, "")
    return [
        {
            **(key if kind == "paper" else blank),
            "": kind,
            **dict(zip(headings, cells, strict=True)),
            "seeds": ", ".join(sorted(seeds)) if kind == "ours" else "",
        }
        for kind, cells in texts.items()
        if kind != "difference" or any(cells)
    ]


def _printed(cell: dict[Any, Any], letters: dict[str, str]) -> str:
    text = cell["printed"]
    if text and cell["unit"] == "ratio":
        text += "×"
    if cell["unit"] == "points":
        text = _UNITS["points"](float(text))
    marks = ", ".join(letters[remark] for remark in _remarks(cell))
    return f"{text} ({marks})" if marks else text


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


def _change(cell: dict[Any, Any]) -> str:
    if pd.isna(cell["difference"]):
        return ""
    text = (
        f"{cell['difference']:+.{2 if cell['unit'] == 'ratio' else 1}f}" if cell["unit"] else f"{cell['difference']:+g}"
    )
    return text.removeprefix("+") if float(text) == 0 else text.replace("-", "−")


def _remarks(cell: dict[Any, Any]) -> list[str]:
    contradiction = f"the paper contradicts itself: {cell['inconsistent']}" if cell["inconsistent"] else ""
    return [remark for remark in (contradiction, cell["note"]) if remark]


def _letters(cells: list[dict[Any, Any]]) -> dict[str, str]:
    """A letter for each remark."""
    remarks = dict.fromkeys(remark for cell in cells for remark in _remarks(cell))
    return dict(zip(remarks, ascii_lowercase, strict=False))


def _footnotes(letters: dict[str, str]) -> list[str]:
    return [f"({letter}) {remark}." for remark, letter in letters.items()]


# Our speeds and sizes as results that stand beside the paper's: rollouts, GRPO steps, and the weights of bases.


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
        yield Result(
            metric="rollout_rate", measure=partial(_median, point["rollouts"]), status=point["status"], **label
        )
        for metric, weights in (("rollout_speedup", "bf16"), ("rollout_speedup_nf4", "nf4")):
            base, elsewhere = (_rollout_base(point, some, weights) for some in (rows, _elsewhere(point, rows)))
            yield _quotient(metric, point, base, elsewhere, weights.upper(), label, "rollouts")


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
        yield _quotient("step_speedup", point, base, elsewhere, "BF16 LoRA", label)


def _quotient(
    metric: str,
    point: dict[Any, Any],
    base: dict[Any, Any] | None,
    elsewhere: dict[Any, Any] | None,
    name: str,
    label: dict[str, Any],
    rates: str = "",
) -> Result:
    """The speed-up of a point over its base, which `name` names, by the column of `rates` or else by seconds.

    Either may have failed; the base may be missing, or be of another machine (`elsewhere`).
    """
    if point["status"] != OK or base is None or base["status"] != OK:
        missing = f"{name} {base['status'] if base else NOT_RUN}" if base or elsewhere is None else DIFFERENT_MACHINES
        status = point["status"] if point["status"] != OK else missing
        return Result(metric=metric, measure=str, status=status, **label)
    if point is base:
        return Result(metric=metric, measure=partial(Interval, 1.0, np.nan, np.nan), **label)
    above, below = (point[rates], base[rates]) if rates else (base["samples"], point["samples"])
    return Result(metric=metric, measure=partial(ratio_interval, above, below), **label)


def _median(samples: Sequence[float]) -> Interval:
    return Interval(float(np.median(samples)), np.nan, np.nan)


def sizes(reports: pd.DataFrame, source: str = "quantize") -> Iterator[Result]:
    """Size of each base's weights in GB, from the column `size_bytes`."""
    for row in reports.to_dict("records"):
        measure = partial(Interval, row["size_bytes"] / 1e9, np.nan, np.nan)
        yield Result(
            metric="size", model=row["model"], weights=row["weights"], setting=None, measure=measure, source=source
        )
