"""Numbers, names and ratios as text for readers, and tables as HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from qerl.results.paths import KEY
from qerl.results.schema import OK
from qerl.results.statistics import ratio_interval

# Numbers and names as text for readers; all units, digits and headings are defined here.
#
# A column is named `<measure>` or `<group>/<measure>`. Columns `<measure>_low` and `_high` (interval) or `_p25` and
# `_p75` (quartiles) are merged into its cell.

_ENDS = (("_low", "_high"), ("_p25", "_p75"))
_LATEX = str.maketrans(
    {character: "\\" + character for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"Δ": r"$\Delta$", "×": r"$\times$", "−": "$-$", "–": "--"}
)
_TRAINING = {"none": "–", "full": "Full", "lora": "LoRA"}


def percent(value: float) -> str:
    """A fraction in percent, such as 61.2."""
    return f"{100 * value:.1f}"


def points(value: float) -> str:
    """A difference of fractions in points, such as +1.5."""
    text = f"{100 * value:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def three_digits(value: float) -> str:
    """Three significant digits, never in powers of ten: 1,234 or 12.3 or 0.0123."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def _power_of_ten(value: float) -> str:
    return f"{value:.1e}".replace("-", "−")


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value else "–"


def times(value: float) -> str:
    """A ratio as text, such as 1.27×."""
    return f"{value:.2f}×"


def weights_label(weights: str) -> str:
    """The label of weights: BF16, NF4, MXFP4, NVFP4 or NVFP4-AWQ."""
    return weights.upper()


def training_label(training: str) -> str:
    """The label of training in the paper's tables: –, Full, LoRA or LoRA + AQN."""
    method, plus, _ = training.partition("+")
    return _TRAINING[method] + (" + AQN" if plus else "")


def gpu_label(machine: str) -> str:
    """A machine's GPUs in short, such as H200 of `1x NVIDIA H200`."""
    return re.sub(r"\b1x |NVIDIA ", "", machine)


def with_gpus(table: pd.DataFrame, records: pd.DataFrame) -> pd.DataFrame:
    """The table with a column GPU instead of `machine`, or with neither if the records in it are of one machine."""
    if records["machine"].nunique() < 2:
        return table.drop(columns="machine")
    return table.assign(machine=table["machine"].map(gpu_label)).rename(columns={"machine": "GPU"})


def latex(text: str) -> str:
    """The text with LaTeX's reserved characters escaped."""
    return text.translate(_LATEX)


#: Heading and formatter of each measure; other columns are shown unchanged.
MEASURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "weights": ("weights", weights_label),
    "training": ("training", training_label),
    "method": ("method", str),
    "accuracy": ("accuracy (%)", percent),
    "delta_bf16": ("Δ to BF16 base (points)", points),
    "delta_format": ("Δ to same format's base (points)", points),
    "seeds": ("seeds", _count),
    "problems": ("problems", _count),
    "rank": ("LoRA rank", lambda rank: f"{rank:.0f}" if rank else "no LoRA"),
    "prompts": ("prompts", _count),
    "group_size": ("group size", _count),
    "gradient_checkpointing": ("gradient checkpointing", lambda on: {True: "on", False: "off"}.get(on, on)),
    "sequences": ("sequences", _count),
    "completion_tokens": ("tokens", _count),
    "repeats": ("repeats", _count),
    "tokens_per_second": ("tokens/s", three_digits),
    "ratio_bf16": ("ratio to BF16", times),
    "weight_bytes": ("weights in memory", _bytes),
    "size_bytes": ("size", _bytes),
    "peak_memory_bytes": ("peak memory", _bytes),
    "bits_per_weight": ("bits/weight", lambda bits: f"{bits:.2f}"),
    "bits_per_weight_model": ("bits/weight, whole model", lambda bits: f"{bits:.2f}"),
    "relative_error": ("relative error (%)", lambda error: f"{100 * error:.2f}"),
    "seconds": ("time (s)", three_digits),
    "ready_seconds": ("start-up (s)", three_digits),
    "first_seconds": ("first rollout (s)", three_digits),
    "step_seconds": ("s/step", three_digits),
    "rollout_seconds": ("s/rollout", three_digits),
    "update_seconds": ("s/update", three_digits),
    "sync_seconds": ("s/sync", three_digits),
    "entropy_first": ("entropy, first steps (nats/token)", three_digits),
    "entropy_last": ("entropy, last steps", three_digits),
    "kl_first": ("KL, first steps (nats/token)", _power_of_ten),
    "kl_last": ("KL, last steps", _power_of_ten),
    "kl_change": ("change", _power_of_ten),
    "kl_slope": ("slope per 1,000 steps", _power_of_ten),
    "gb": ("(GB)", three_digits),
    "speedup": ("speed-up", times),
    "speedup_base": ("compared with", str),
}


def present(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text, with headings and units, intervals in their cell, and no empty columns."""
    shown: dict[str, list[str]] = {}
    for column in frame.columns:
        if any(column.endswith(end) and column.removesuffix(end) in frame for ends in _ENDS for end in ends):
            continue
        group, _, measure = column.rpartition("/")
        heading, text = MEASURES.get(measure, (measure, str))
        cells = [cell_text(row, column, text) for row in frame.to_dict("records")]
        if any(cells):
            shown[f"{group} {heading}".strip()] = cells
    return pd.DataFrame(shown)


def cell_text(row: dict[Any, Any], column: str, text: Callable[[Any], str]) -> str:
    """A value of a row as text, with its interval or quartiles if the row has them. A missing value is empty."""
    if pd.isna(row[column]) or row[column] == "":
        return ""
    for low, high in _ENDS:
        if column + low in row and not pd.isna(row[column + low]):
            return f"{text(row[column])} [{text(row[column + low])}, {text(row[column + high])}]"
    return text(row[column])


# HTML of tables: headings with scopes, aligned numbers, and intervals set apart from them; cells may be links.

#: The templates and the style beside this module, of which the version of the code (`qerl.host.provenance`)
#: knows by their names alone; other templates include the first.
_FILES = ("table.j2", "tables.j2", "report.j2", "style.css")
#: A number with an optional sign and unit.
_NUMBER = re.compile(r"([+−-]?[\d,]+(\.\d+)?(e[+-]?\d+)?( ?(%|×|kB|MB|GB|B))?)")
_WITH_INTERVAL = re.compile(r"(.+?) (\[.*\])")
#: The characters beyond which a cell is long.
_LONG = 30
#: The least number of rows for which a column of equal cells is shown once.
_REPEATED = 3


@dataclass(frozen=True)
class Link:
    """A text that leads to an address; without an address it is plain."""

    text: str
    address: str = ""


@dataclass(frozen=True)
class HtmlCell:
    """A cell: its texts, and the interval beside them."""

    texts: tuple[Link, ...] = ()
    interval: str = ""

    @property
    def is_long(self) -> bool:
        """Whether a narrow column would make the cell many lines high."""
        return sum(len(part.text) for part in self.texts) > _LONG


@dataclass(frozen=True)
class Column:
    """A column; the cells of one that `names` are the headings of their rows."""

    heading: str
    numeric: bool = False
    names: bool = False


@dataclass(frozen=True)
class HtmlTable:
    """A table. `groups` are (heading, number of columns) above the columns; `bodies` are blocks of rows.

    `constant` has what is equal in all rows, by heading.
    """

    caption: str
    columns: Sequence[Column]
    bodies: Sequence[Sequence[Sequence[HtmlCell]]]
    groups: Sequence[tuple[str, int]] = ()
    constant: dict[str, str] = field(default_factory=dict)

    @property
    def interval_widths(self) -> list[int]:
        """The most characters of an interval in each column; numbers align if all intervals are as wide."""
        rows = [row for body in self.bodies for row in body]
        return [max((len(row[place].interval) for row in rows), default=0) for place in range(len(self.columns))]


def cell(text: str, address: str = "") -> HtmlCell:
    """A cell of a text such as `85.3 [81.6, 88.7]`, which may lead to an address."""
    split = _WITH_INTERVAL.fullmatch(text)
    value, interval = split.groups() if split else (text, "")
    return HtmlCell((Link(value, address),) if value else (), interval)


def table_of(caption: str, shown: pd.DataFrame) -> HtmlTable:
    """The table of a frame of text. Equal columns are shown once, and the columns before the first number name rows."""
    constant = _constant(shown)
    varied = shown.drop(columns=[name for name in shown if name in constant or not any(shown[name])])
    numeric = [_is_numeric(list(varied[name])) for name in varied]
    first = numeric.index(True) if True in numeric else 1
    columns = [
        Column(str(name), number, place < first)
        for place, (name, number) in enumerate(zip(varied, numeric, strict=True))
    ]
    rows = [[cell(text) for text in row] for row in varied.itertuples(index=False)]
    return HtmlTable(caption, columns, [rows], constant=constant)


def _constant(shown: pd.DataFrame) -> dict[str, str]:
    if len(shown) < _REPEATED:
        return {}
    equal = {str(name): shown[name].iloc[0] for name in shown if shown[name].nunique() == 1 and shown[name].iloc[0]}
    hoisted = {name: text for name, text in equal.items() if name and "[" not in text}
    return hoisted if shown.shape[1] - len(hoisted) > 1 else {}


def _is_numeric(texts: Sequence[str]) -> bool:
    values = [(_WITH_INTERVAL.fullmatch(text) or [text, text])[1] for text in texts if text and text != "–"]
    return (
        any(_NUMBER.fullmatch(value) for value in values)
        and sum(_NUMBER.fullmatch(value) is None for value in values) <= len(values) / 2
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def rendered(template: str, **values: Any) -> str:
    """The text of a template, with the style of all pages as `style`."""
    style = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
    return _environment().get_template(template).render(style=style, **values)


# Tables as HTML pages, which the report contains, with only the columns that a reader needs.

#: The note of an arm without a score on a data set.
NOT_RUN = "not run"


def by_dataset(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The accuracy table (`tables.accuracy`) by data set, with only the identifying columns that differ."""
    names = dict.fromkeys(column.rpartition("/")[0] for column in map(str, table.columns) if "/" in column)
    return {name: _of_dataset(_scored_on(name, table), name) for name in names}


def _scored_on(dataset: str, table: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of experiments without any score on the data set, which their `tasks` lack."""
    experiments = table["experiment"].fillna("")
    lacks = table[f"{dataset}/note"].eq(NOT_RUN).groupby(experiments).transform("all")
    return table[~lacks | experiments.eq("")]  # bases have no experiment


def identifying(table: pd.DataFrame) -> list[str]:
    """Weights, training, and the other identifying columns of the accuracy table that its rows differ in."""
    named = table[KEY].replace("", None)  # an empty key doesn't apply, such as the experiment of a base
    kept = [key for key in KEY if key in ("weights", "training") or named[key].nunique() > 1]
    if "arm" in kept and not table[kept].drop(columns="arm").duplicated().any():
        kept.remove("arm")
    return kept


def _of_dataset(table: pd.DataFrame, dataset: str) -> pd.DataFrame:
    measures = [column for column in map(str, table.columns) if column.startswith(f"{dataset}/")]
    return table[identifying(table) + measures].rename(columns=lambda column: column.removeprefix(f"{dataset}/"))


def page(tables: Mapping[str, pd.DataFrame], caption: str, footnotes: Sequence[str] = ()) -> str:
    """A page with tables of text by heading, and the caption below.

    An empty heading becomes the caption's first sentence. The report shows the page's `fragment`.
    """
    title = caption.partition(". ")[0]
    shown = [table_of(heading or title, table) for heading, table in tables.items()]
    return rendered("tables.j2", title=title, tables=shown, caption=caption, footnotes=footnotes)


def fragment(page: str) -> str:
    """The tables of a page, with their caption."""
    return page.partition("<main>")[2].partition("</main>")[0]


# Ratios of points of the speed grid: the quotient of their medians, or the reason why there is none.

Row = dict[Any, Any]

NOT_MEASURED = "–"
DIFFERENT_MACHINES = "different machines"


def ratio(above: Row | None, below: Row | None) -> tuple[float | str, float, float]:
    """The ratio of two points' medians (None: not measured) and its interval, or the reason why there is none."""
    if above is None or below is None:
        return NOT_MEASURED, np.nan, np.nan
    for point in (above, below):
        if point["status"] != OK:
            return f"{point['engine']} {weights_label(point['weights'])}: {point['status']}", np.nan, np.nan
    if above["machine"] != below["machine"]:
        return DIFFERENT_MACHINES, np.nan, np.nan
    interval = ratio_interval(above["samples"], below["samples"])
    return interval.mean, interval.low, interval.high


def faster(points: Sequence[Row | None]) -> Row | None:
    """The fastest point that didn't fail. None if some point wasn't measured, because it may be faster."""
    measured = [point for point in points if point is not None]
    if len(measured) < len(points):
        return None
    done = (point for point in measured if point["status"] == OK)
    return max(done, key=lambda point: float(point["tokens_per_second"]), default=measured[0])


def stated(name: str, points: Iterable[Row | None]) -> str:
    """What the measured points have in a column of their stamp, such as `machine`, as text."""
    return ", ".join(dict.fromkeys(str(point[name]) for point in points if point is not None))
