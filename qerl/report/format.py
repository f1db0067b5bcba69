"""Numbers, names and captions as text for readers, and tables as files, as HTML and on a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qerl.host.console import VisibleConsole
from qerl.results.paths import FIGURES, KEY, REPORT_PAGE, SAMPLES_PAGE, STUDY, STUDY_PAGE, TABLES
from qerl.results.schema import ResultError
from qerl.results.statistics import METHOD

# Numbers and names as text for readers; all units, digits and headings are defined here.
#
# A column is named `<measure>` or `<group>/<measure>`. Columns `<measure>_low` and `_high` (interval) or `_p25` and
# `_p75` (quartiles) are merged into its cell.

_ENDS = (("_low", "_high"), ("_p25", "_p75"))
#: LaTeX's reserved characters, escaped, and signs that its fonts lack.
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


# Captions and files of tables.

#: The notes of an arm without a score on a data set, and of a ratio of points of two machines.
NOT_RUN, DIFFERENT_MACHINES = "not run", "different machines"


def caption_text(title: str, records: pd.DataFrame) -> str:
    """The caption of a table of evaluations, runs, points or reports: title, machine, seeds, method and commit."""
    sizes, methods = [], []
    if "dataset" in records:
        rows = records[["dataset", "problems", "repeats"]].drop_duplicates().itertuples(index=False)
        sizes = ["Problems x repeats: " + ", ".join(f"{name} {count} x {each}" for name, count, each in rows)]
        methods = [METHOD]
    if "samples" in records:
        methods = ["Median [quartiles] of the repeats, all points measured in one process"]
    return f"{title}. " + stamp_text(records, records if "run" in records else records[:0], sizes, methods)


def stamp_text(
    records: pd.DataFrame, runs: pd.DataFrame, sizes: Sequence[str] = (), methods: Sequence[str] = ()
) -> str:
    """Machine, seeds per arm if there are runs, and commit, as text, with `sizes` and `methods` in their places.

    `run` is empty for untrained bases.
    """
    seeds = []
    if len(runs):
        counts = sorted(set(runs[runs["run"] != ""].groupby(KEY)["run"].nunique())) or [0]
        seeds = [f"Seeds per arm: {counts[0]}" + (f" to {counts[-1]}" if len(counts) > 1 else "")]
    machines, commits = ("; ".join(dict.fromkeys(records["machine"])), ", ".join(dict.fromkeys(records["commit"])))
    return ". ".join([f"Machine: {machines}", *sizes, *seeds, *methods, f"Commit: {commits}"]) + "."


def write_table(
    frame: pd.DataFrame,
    stem: Path,
    caption: str,
    shown: pd.DataFrame | None = None,
    footnotes: Sequence[str] = (),
    parts: Mapping[str, pd.DataFrame] | None = None,
) -> None:
    """Write stem.csv with full precision; stem.md, stem.tex (booktabs) and stem.html with the caption for readers.

    shown: the table as text, by default `present` of the frame. parts: tables that the HTML page shows instead, by
    heading. stem.txt has only the caption, for the workflow's report.
    """
    shown = present(frame) if shown is None else shown
    stem.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(f"{stem}.csv", index=False)
    body = shown.map(lambda text: text.replace("|", "\\|")).to_markdown(index=False, disable_numparse=True)
    notes = "\n".join(f"- {note}" for note in footnotes)
    latex_caption = " ".join([caption, *footnotes]).translate(_LATEX)
    escaped = shown.map(lambda text: text.translate(_LATEX)).rename(columns=lambda name: name.translate(_LATEX))
    texts = {
        "md": "\n\n".join(filter(None, [body, caption, notes])) + "\n",
        "tex": escaped.to_latex(index=False, caption=latex_caption, label=f"tab:{stem.name}", position="tbp"),
        "html": page(parts or {"": shown}, caption, footnotes),
        "txt": caption + "\n",
    }
    for end, text in texts.items():
        Path(f"{stem}.{end}").write_text(text, encoding="utf-8")


# HTML of tables: headings with scopes, aligned numbers, and intervals set apart from them; cells may be links.

#: The templates and the style beside this module, which the version of the code (`qerl.host.provenance`) knows by their
#: names alone; other templates include the first.
_FILES = ("table.j2", "tables.j2", "report.j2", "style.css")
#: A number with an optional sign and unit.
_NUMBER = re.compile(r"([+−-]?[\d,]+(\.\d+)?(e[+-]?\d+)?( ?(%|×|kB|MB|GB|B))?)")
_WITH_INTERVAL = re.compile(r"(.+?) (\[.*\])")
#: The characters beyond which a cell is long: a narrow column would make it many lines high.
_LONG = 30
#: The least number of rows for which a column of equal cells is shown once.
_REPEATED = 3


class Link(NamedTuple):
    """A text that leads to an address; without an address it is plain."""

    text: str
    address: str = ""


def html_table(caption: str, shown: pd.DataFrame, blocks: pd.Series | None = None) -> dict[str, Any]:
    """The values of the template table.j2 for a frame whose cells are texts, or lists of links.

    A column may be a pair of its group and its heading. Equal columns are shown once, empty ones not at all, and the
    columns before the first of numbers name the rows. `blocks` tells the blocks of rows apart.
    """
    texts = shown.map(lambda cell: cell if isinstance(cell, str) else "".join(link.text for link in cell))
    constant = _constant(shown, texts)
    places = [n for n, name in enumerate(shown) if name not in constant and texts.iloc[:, n].any()]
    pairs = [name if isinstance(name, tuple) else ("", str(name)) for name in shown.columns[places]]
    rows = [[_cell(cell) for cell in row] for row in shown.iloc[:, places].itertuples(index=False)]
    numeric = [_is_numeric(list(texts.iloc[:, place])) for place in places]
    first = numeric.index(True) if True in numeric else 1
    columns = [
        {
            "heading": heading,
            "numeric": numeric[place],
            "names": place < first,
            "width": max(len(row[place]["interval"]) for row in rows),  # numbers align if all intervals are as wide
        }
        for place, (_, heading) in enumerate(pairs)
    ]
    groups = [(group, len([*same])) for group, same in groupby(group for group, _ in pairs)]
    of_row = list(blocks) if blocks is not None else [0] * len(rows)
    return {
        "caption": caption,
        "constant": constant,
        "groups": groups if any(group for group, _ in groups) else [],
        "columns": columns,
        "bodies": [
            [row for row, own in zip(rows, of_row, strict=True) if own == block] for block in dict.fromkeys(of_row)
        ],
    }


def _cell(cell: str | Sequence[Link]) -> dict[str, Any]:
    """The links of a cell such as `85.3 [81.6, 88.7]`, and its interval."""
    links, interval = [Link(cell)] if isinstance(cell, str) else [*cell], ""
    if len(links) == 1 and (split := _WITH_INTERVAL.fullmatch(links[0].text)):
        links, interval = [Link(split[1], links[0].address)], split[2]
    links = [link for link in links if link.text]
    return {"links": links, "interval": interval, "long": sum(len(link.text) for link in links) > _LONG}


def _constant(shown: pd.DataFrame, texts: pd.DataFrame) -> dict[str, str]:
    """The text of each column of equal texts, by heading; none of the last column that is left, and of links."""
    named = [name for name in shown if isinstance(name, str) and name]
    plain = [name for name in named if shown[name].map(lambda cell: isinstance(cell, str)).all()]
    equal = {name: texts[name].iloc[0] for name in plain if len(shown) >= _REPEATED and texts[name].nunique() == 1}
    hoisted = {name: text for name, text in equal.items() if text and "[" not in text}
    return hoisted if shown.shape[1] - len(hoisted) > 1 else {}


def _is_numeric(texts: Sequence[str]) -> bool:
    values = [(_WITH_INTERVAL.fullmatch(text) or [text, text])[1] for text in texts if text and text != "–"]
    numbers = sum(_NUMBER.fullmatch(value) is not None for value in values)
    return numbers > 0 and 2 * numbers >= len(values)


def rendered(template: str, **values: Any) -> str:
    """The text of a template, with the style of all pages as `style`."""
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (folder / "style.css").read_text(encoding="utf-8")
    return environment.get_template(template).render(style=style, **values)


def page(tables: Mapping[str, pd.DataFrame], caption: str, footnotes: Sequence[str] = ()) -> str:
    """A page with tables of text by heading, and the caption below.

    An empty heading becomes the caption's first sentence. The report shows the page's `fragment`.
    """
    title = caption.partition(". ")[0]
    shown = [html_table(heading or title, table) for heading, table in tables.items()]
    return rendered("tables.j2", title=title, tables=shown, caption=caption, footnotes=footnotes)


def fragment(page: str) -> str:
    """The tables of a page, with their caption."""
    return page.partition("<main>")[2].partition("</main>")[0]


# The accuracy table by data set, with only the columns that a reader needs.


def by_dataset(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The accuracy table (`tables.accuracy`) by data set, with only the identifying columns that differ.

    Experiments without any score on a data set, which their `tasks` lack, are left out there; bases have no experiment.
    """
    experiments, shown = table["experiment"].fillna(""), {}
    for dataset in dict.fromkeys(column.rpartition("/")[0] for column in map(str, table.columns) if "/" in column):
        lacks = table[f"{dataset}/note"].eq(NOT_RUN).groupby(experiments).transform("all")
        rows = table[~lacks | experiments.eq("")]
        measures = rows.filter(regex=f"^{re.escape(dataset)}/").rename(columns=lambda name: name.rpartition("/")[2])
        shown[dataset] = pd.concat([rows[identifying(rows)], measures], axis=1)
    return shown


def identifying(table: pd.DataFrame) -> list[str]:
    """Weights, training, and the other identifying columns of the accuracy table that its rows differ in."""
    named = table[KEY].replace("", None)  # an empty key doesn't apply, such as the experiment of a base
    kept = [key for key in KEY if key in ("weights", "training") or named[key].nunique() > 1]
    if "arm" in kept and not table[kept].drop(columns="arm").duplicated().any():
        kept.remove("arm")
    return kept


# Tables on a terminal, and the summary of a finished workflow: the main table, and the paths of all results.

#: Characters per line if the output is not a terminal, such as a log.
WIDTH = 120


def rich_table(title: str, frame: pd.DataFrame) -> Table:
    """A table for a terminal, formatted by `present`."""
    shown = present(frame)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in shown:
        table.add_column(Text(str(column)), overflow="fold")
    for row in shown.itertuples(index=False):
        table.add_row(*(Text(cell) for cell in row))
    return table


def fitting(table: Table, screen: Console) -> Table | Text:
    """The table, with less space where that lets it fit, or a line for each cell if its longest words don't fit."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    lines, words = (
        [max((cell_len(part) for cell in cells for part in split(cell)), default=0) for cells in columns]
        for split in (str.splitlines, str.split)
    )
    for padding in (1, 0):
        table.padding = (0, padding)
        wide = screen.options.update(width=10_000)  # more characters than any table has in a line
        room = screen.width - (screen.measure(table, options=wide).maximum - sum(lines))
        if room < sum(words):
            continue
        while sum(lines) > room:  # each column has its longest line, less what the others need: no word is broken
            widest = max(range(len(lines)), key=lambda place: lines[place] - words[place])
            lines[widest] -= 1
        for column, width in zip(table.columns, lines, strict=True):
            column.width = width
        return table
    names, *rows = zip(*columns, strict=True)
    blocks = ["".join(f"{name}: {cell}\n" for name, cell in zip(names, row, strict=True)) for row in rows]
    return Text("\n".join([f"{table.title or ''}\n", *blocks]))


def print_summary(root: Path, console: Console | None = None) -> None:
    """Print the accuracy table of a folder of results, if it has one, and the paths of all that people read."""
    console = console or VisibleConsole(width=None if Console().is_terminal else WIDTH)
    if not (root / REPORT_PAGE).exists():
        raise ResultError(f"{root / REPORT_PAGE} doesn't exist; run the workflow to its end first")
    if (file := root / TABLES / "accuracy.csv").exists():
        for dataset, rows in by_dataset(pd.read_csv(file)).items():
            console.print(fitting(rich_table(f"{root.name}: accuracy on {dataset}", rows), console))
    paths = {
        "tables (.csv, .tex and .html beside them)": sorted((root / TABLES).rglob("*.md")),
        "figures (.svg beside them)": sorted((root / FIGURES).rglob("*.png")),
        "study, in Markdown": sorted((root / STUDY).glob(f"*/{STUDY_PAGE}")),
        "report, for a browser": [root / REPORT_PAGE],
        "samples, for a browser": [page for page in [root / SAMPLES_PAGE] if page.exists()],
    }
    for kind, files in paths.items():
        if files:
            console.print(Text(f"{kind}:", style="bold"))
        for path in files:
            console.print(Text(f"  {path}"), soft_wrap=True)
