"""The main table of the report: accuracy by arm and data set, whose numbers lead to their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pandas as pd

from qerl.report.formatting import MEASURES, cell_text, training_label, weights_label
from qerl.report.html import Column, HtmlCell, HtmlTable, Link, cell
from qerl.report.pages import identifying
from qerl.results.names import KEY

#: The measures of each data set that the report begins with; its further tables have all.
_SHOWN = ("accuracy", "delta_format")
_HEADINGS = {"accuracy": "accuracy (%)", "delta_format": "gain (points)"}
_UNTRAINED = "none"


@dataclass(frozen=True)
class AccuracyRange:
    """The accuracies on a data set in %, before and after training, over all arms of a model."""

    about: str
    before: str
    after: str
    detail: str


class Samples:
    """Addresses of samples on the page that shows them; empty without such a page."""

    def __init__(self, page: str, evaluations: pd.DataFrame) -> None:
        self._page = page
        self._of: dict[tuple[str, ...], dict[str, str]] = {}
        for row in evaluations.to_dict("records"):
            seed = "" if pd.isna(row["seed"]) else f"{row['seed']:.0f}"
            self._of.setdefault((*(row[key] for key in KEY), row["dataset"]), {})[seed] = row["eval"]

    def address(self, *place: str) -> str:
        """The address of the samples of a run, or of an evaluation and one of its data sets."""
        return f"{self._page}#{'/'.join(map(quote, place))}" if self._page else ""

    def by_seed(self, row: Mapping[Any, Any], dataset: str) -> dict[str, str]:
        """The address of an arm's samples by seed; untrained bases have one, by the empty text."""
        by_seed = self._of.get((*(row[key] for key in KEY), dataset), {})
        return {seed: self.address(id, dataset) for seed, id in by_seed.items()}


def datasets_of(table: pd.DataFrame) -> list[str]:
    """The data sets of the accuracy table (`qerl.report.tables.accuracy`)."""
    return [str(column).rpartition("/")[0] for column in table if str(column).endswith("/accuracy")]


def main_table(caption: str, table: pd.DataFrame, samples: Samples) -> HtmlTable:
    """The accuracy table for people: an arm a row, and for each data set accuracy and gain over the untrained base.

    Blocks of rows are the untrained bases and the experiments. An accuracy leads to the samples of its first seed, and
    each seed to its own.
    """
    datasets = datasets_of(table)
    named = [key for key in identifying(table) if key not in ("weights", "training")]
    notes = any(_notes(row, datasets) for row in table.to_dict("records"))
    trained = bool((table["training"] != _UNTRAINED).any())
    columns = [
        *(Column(key, names=True) for key in named),
        Column("weights and training", names=True),
        *(Column(_HEADINGS[measure], numeric=True) for _ in datasets for measure in _SHOWN),
        *[Column("seeds", numeric=True)] * trained,
        *[Column("note")] * notes,
    ]
    blocks = table.groupby(["model", "experiment"], sort=False)
    return HtmlTable(
        caption,
        columns,
        bodies=[
            [[*_row(row, named, datasets, samples, trained), *_noted(row, datasets, notes)] for row in _rows(block)]
            for _, block in blocks
        ],
        groups=[
            ("", len(named) + 1),
            *((name, len(_SHOWN)) for name in datasets),
            *[("", trained + notes)] * bool(trained + notes),
        ],
    )


def accuracy_ranges(table: pd.DataFrame, evaluations: pd.DataFrame) -> Iterator[AccuracyRange]:
    """For each model and data set the lowest and highest accuracy of untrained bases and of trained policies."""
    several = table["model"].nunique() > 1
    sizes = {(row["model"], row["dataset"]): row for row in _rows(evaluations)}
    for model in dict.fromkeys(table["model"]):
        rows = table[table["model"] == model]
        for dataset in datasets_of(table):
            scores = rows.set_index("training")[f"{dataset}/accuracy"].dropna()
            if scores.empty:
                continue
            size = sizes[model, dataset]
            yield AccuracyRange(
                about=f"{model}, {dataset}" if several else dataset,
                before=_range(scores[scores.index == _UNTRAINED]),
                after=_range(scores[scores.index != _UNTRAINED]),
                detail=f"{size['problems']} problems × {size['repeats']}",
            )


def _range(scores: pd.Series) -> str:
    low, high = f"{100 * scores.min():.0f}", f"{100 * scores.max():.0f}"
    return "" if scores.empty else low if low == high else f"{low}–{high}"


def _rows(table: pd.DataFrame) -> list[dict[Any, Any]]:
    return table.to_dict("records")


def _row(row: dict[Any, Any], named: list[str], datasets: list[str], samples: Samples, trained: bool) -> list[HtmlCell]:
    untrained = row["training"] == _UNTRAINED
    training = "untrained" if untrained else training_label(row["training"])
    cells = [cell(f"{row[key]}") for key in named]
    cells.append(cell(f"{weights_label(row['weights'])} {training}"))
    for dataset in datasets:
        addresses = samples.by_seed(row, dataset)
        for measure in _SHOWN:
            text = cell_text(row, f"{dataset}/{measure}", MEASURES[measure][1])
            cells.append(cell(text, next(iter(addresses.values()), "")))
    if trained:
        cells.append(HtmlCell(() if untrained else tuple(_seeds(row, datasets, samples))))
    return cells


def _seeds(row: dict[Any, Any], datasets: list[str], samples: Samples) -> Iterator[Link]:
    addresses: dict[str, str] = {}
    for dataset in datasets:
        addresses = samples.by_seed(row, dataset) | addresses
    yield from (Link(seed, addresses[seed]) for seed in sorted(addresses, key=int))


def _notes(row: Mapping[Any, Any], datasets: list[str]) -> str:
    notes = [row[f"{dataset}/note"] for dataset in datasets]
    return "; ".join(dict.fromkeys(note for note in notes if isinstance(note, str) and note))


def _noted(row: Mapping[Any, Any], datasets: list[str], notes: bool) -> list[HtmlCell]:
    return [cell(_notes(row, datasets))] * notes
