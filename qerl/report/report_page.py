"""The report: one page that opens on the main table and its figures, and has everything else below."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.jobs.report import ReportJob
from qerl.provenance.files import write_text
from qerl.report import facts
from qerl.report.html import HtmlCell, HtmlTable, Link, rendered, table_of
from qerl.report.job import StoredResults, listed
from qerl.report.main_table import Samples, accuracy_ranges, main_table
from qerl.report.pages import fragment
from qerl.results.names import KEY
from qerl.results.paths import NARROW

#: Figures beside the main table.
_FIRST = 2


@dataclass(frozen=True)
class Shown:
    """A figure: its two layouts as data URIs, and its caption."""

    image: str
    narrow: str
    broad: bool
    alt: str
    caption: str


def write_report(job: ReportJob) -> None:
    """Write the report of a configuration's results."""
    files = listed(job.results)
    figures = [_figure(stem) for stem in _stems(job.figures)]
    first = figures[:_FIRST] if job.main else []
    values: dict[str, Any] = {
        "name": job.name,
        "title": f"Results of {job.name}",
        "samples": job.samples,
        "first_figures": first,
        "figures": figures[len(first) :],
        "tables": [fragment(page.read_text()) for page in _pages(job.tables)],
        "machine": table_of("Where and when the results were made", facts.stamps(files)),
        **_trained(job, files),
    }
    values["parts"] = _parts(values)
    write_text(job.out, rendered("report.j2", **values))


def _trained(job: ReportJob, files: Sequence[Path]) -> dict[str, Any]:
    """The parts on runs and evaluations, which are empty for results without any."""
    stored = StoredResults(files)
    runs = stored.run_results()
    points = pd.concat([stored.points("rollout"), stored.points("step")])
    failed = facts.missing(runs, points, job.omitted)
    parts: dict[str, Any] = dict.fromkeys(("main", "runs", "missing"))
    parts |= {"accuracy_ranges": [], "methods": []}
    if failed:
        parts["missing"] = table_of("Each with its reason", pd.DataFrame(failed, columns=["", "name", "reason"]))
    results = stored.evaluation_results() if job.main else []
    samples = Samples(job.samples, stored.evaluations() if job.main else pd.DataFrame())
    if runs:
        shared, arms = facts.settings(runs)
        parts["methods"] = [
            table_of("Settings by arm; all others are equal", arms),
            table_of("Settings of all runs; others have their defaults", shared),
        ]
        parts["runs"] = _linked(
            table_of("Runs and their cost", facts.run_costs(stored.runs(), stored.metrics())), samples
        )
    if job.main:
        table = _accuracy(job.main)
        parts["main"] = main_table("Accuracy by weight format and training", table, samples)
        parts["accuracy_ranges"] = list(accuracy_ranges(table, stored.evaluations()))
        parts["methods"] = [table_of("Evaluation", facts.scoring(results)), *parts["methods"]]
    parts["state"] = _state(len(runs), len(results), len(files), len(failed))
    return parts


def _accuracy(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file, dtype=dict.fromkeys(KEY, str))
    return table.fillna(dict.fromkeys(KEY, ""))


def _linked(table: HtmlTable, samples: Samples) -> HtmlTable:
    """The table with its first column leading to the samples of the run that it names."""
    blocks = [[[_to_samples(row[0], samples), *row[1:]] for row in body] for body in table.bodies]
    return replace(table, bodies=blocks)


def _to_samples(name: HtmlCell, samples: Samples) -> HtmlCell:
    return HtmlCell(tuple(Link(part.text, samples.address(part.text)) for part in name.texts))


def _state(runs: int, evaluations: int, files: int, missing: int) -> str:
    parts = [_count(runs, "run"), _count(evaluations, "evaluation"), _count(files, "result file")]
    done = ", ".join(part for part in parts if part)
    return f"{done}. " + (f"{missing} failed or were left out." if missing else "Nothing failed or was left out.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}" if number else ""


def _parts(values: dict[str, Any]) -> dict[str, str]:
    """The titles of the parts that the page has, by their anchor."""
    titles = {
        "missing": "What failed or was left out",
        "methods": "Methods",
        "runs": "Runs",
        "machine": "Machines and commits",
        "figures": "Further figures" if values["main"] else "Figures",
        "tables": "All tables",
    }
    shown = {"missing": values["missing"] is not None, "runs": values["runs"] is not None}
    return {id: title for id, title in titles.items() if shown.get(id, bool(values[id]))}


def _pages(tables: Sequence[Path]) -> list[Path]:
    """The pages of tables, those of folders in the order of their names."""
    return [page for path in tables for page in (sorted(path.glob("*.html")) if path.is_dir() else [path])]


def _stems(figures: Sequence[Path]) -> list[Path]:
    """Paths of figures without their endings, those of folders in the order of their names."""
    stems: list[Path] = []
    for path in figures:
        inner = sorted(path.glob(f"*{NARROW}")) if path.is_dir() else [Path(f"{path}{NARROW}")]
        stems += [file.with_name(file.name.removesuffix(NARROW)) for file in inner]
    return stems


def _figure(stem: Path) -> Shown:
    wide, narrow = (Path(f"{stem}{end}").read_text() for end in (".svg", NARROW))
    caption = Path(f"{stem}.txt")
    text = caption.read_text().strip() if caption.exists() else stem.name
    return Shown(_uri(wide), _uri(narrow), _width(wide) > _width(narrow), text.partition(". ")[0], text)


def _width(svg: str) -> float:
    """The width of a drawing in points."""
    return float(svg.partition(' width="')[2].partition("pt")[0])


def _uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
