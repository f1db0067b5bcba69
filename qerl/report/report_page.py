"""The report: one page that opens on the main table and its figures, and has everything else below."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
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
from qerl.report.samples import steps_in
from qerl.results.files import read
from qerl.results.names import KEY
from qerl.results.paths import NARROW, RESULT, ROLLOUTS, RUN, VERDICT
from qerl.results.schema.gates import VerdictResult

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
    stored = StoredResults(files)
    evaluations = stored.evaluations() if job.main else pd.DataFrame()
    samples = Samples(job.samples, evaluations)
    failed = _failed(stored, files, job.omitted)
    values: dict[str, Any] = {
        "name": job.name,
        "title": f"Results of {job.name}",
        "samples": job.samples,
        "accuracy_ranges": [],
        "main": None,
        **(_main(job.main, evaluations, samples) if job.main else {}),
        "first_figures": first,
        "state": _state(stored, files, len(failed)),
        "missing": table_of("Each with its reason", failed) if len(failed) else None,
        "methods": [*([_evaluation(stored)] if job.main else []), *_settings(stored)],
        "runs": _runs(stored, _last_rollouts(files, samples)),
        "machine": table_of("Where and when the results were made", facts.stamps(files)),
        "figures": figures[len(first) :],
        "tables": [fragment(page.read_text(encoding="utf-8")) for page in _pages(job.tables)],
    }
    write_text(job.out, rendered("report.j2", **values, parts=_parts(values)))


def _main(file: Path, evaluations: pd.DataFrame, samples: Samples) -> dict[str, Any]:
    table = _accuracy(file)
    return {
        "accuracy_ranges": list(accuracy_ranges(table, evaluations)),
        "main": main_table("Accuracy by weight format and training", table, samples),
    }


def _failed(stored: StoredResults, files: Sequence[Path], omitted: Mapping[str, str]) -> pd.DataFrame:
    points = pd.concat([stored.points("rollout"), stored.points("step")])
    gates = [gate for file in files if file.name == VERDICT for gate in read(VerdictResult, file).gates]
    return facts.missing(stored.run_results(), points, gates, omitted)


def _evaluation(stored: StoredResults) -> HtmlTable:
    return table_of("Evaluation", facts.scoring(stored.evaluation_results()))


def _settings(stored: StoredResults) -> list[HtmlTable]:
    """The settings of the runs; none without runs."""
    shared, arms = facts.settings(stored.run_results())
    captions = {
        "Settings by arm; all others are equal": arms,
        "Settings of all runs; others have their defaults": shared,
    }
    return [table_of(caption, shown) for caption, shown in captions.items() if len(shown)]


def _runs(stored: StoredResults, addresses: Mapping[str, str]) -> HtmlTable | None:
    """The runs with their cost, whose names lead to `addresses`."""
    runs = stored.runs()
    costs = facts.run_costs(runs, stored.metrics())
    return _linked(table_of("Runs and their cost", costs), addresses) if len(runs) else None


def _last_rollouts(files: Sequence[Path], samples: Samples) -> dict[str, str]:
    """The address of each run's last stored rollout, or of its other samples if none is stored."""
    folders = [file.parent for file in files if file.name == RUN]
    last = {folder.name: [view.step for view in steps_in(folder / ROLLOUTS)][-1:] for folder in folders}
    return {run: samples.address(run, *step) for run, step in last.items()}


def _accuracy(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file, dtype=dict.fromkeys(KEY, str))
    return table.fillna(dict.fromkeys(KEY, ""))


def _linked(table: HtmlTable, addresses: Mapping[str, str]) -> HtmlTable:
    """The table whose first column leads to the addresses of what it names."""
    blocks = [[[_to_address(row[0], addresses), *row[1:]] for row in body] for body in table.bodies]
    return replace(table, bodies=blocks)


def _to_address(name: HtmlCell, addresses: Mapping[str, str]) -> HtmlCell:
    return HtmlCell(tuple(Link(part.text, addresses[part.text]) for part in name.texts))


def _state(stored: StoredResults, files: Sequence[Path], missing: int) -> str:
    runs, evaluations = len(stored.runs()), sum(file.name == RESULT for file in files)
    parts = [_count(runs, "run"), _count(evaluations, "evaluation"), _count(len(files), "result file")]
    done = ", ".join(part for part in parts if part)
    if not runs:
        return f"{done}. Tables say why a point has no number."
    return f"{done}. " + (f"{missing} failed or were left out." if missing else "Nothing failed or was left out.")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}" if number else ""


def _parts(values: dict[str, Any]) -> dict[str, str]:
    """The titles of the parts that the page has, by their anchor, in the page's order.

    Without a main table the figures and tables are what people look for, and come first.
    """
    further = values["main"] is not None
    shown = {"figures": "Further figures" if further else "Figures", "tables": "All tables" if further else "Tables"}
    made = {
        "missing": "What failed or was left out",
        "methods": "Methods",
        "runs": "Runs",
        "machine": "Machines and commits",
    }
    titles = {**made, **shown} if further else {**shown, **made}
    return {id: title for id, title in titles.items() if values[id]}


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
    wide, narrow = (Path(f"{stem}{end}").read_text(encoding="utf-8") for end in (".svg", NARROW))
    caption = Path(f"{stem}.txt")
    text = caption.read_text(encoding="utf-8").strip() if caption.exists() else stem.name
    return Shown(_uri(wide), _uri(narrow), _width(wide) > _width(narrow), text.partition(". ")[0], text)


def _width(svg: str) -> float:
    """The width of a drawing in points."""
    return float(svg.partition(' width="')[2].partition("pt")[0])


def _uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}"
