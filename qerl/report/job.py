"""The table and figure jobs: they read stored results by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.jobs.report import FigureJob, TableJob
from qerl.report import captions, layout, paper, paper_speeds, tables
from qerl.report.formatting import present
from qerl.report.pages import by_dataset
from qerl.results import printed, readers
from qerl.results.files import read
from qerl.results.intervals import METHOD
from qerl.results.paths import PROFILE, REPORT, RESULT, RUN
from qerl.results.printed import Cell
from qerl.results.schema.evaluation import EvaluationResult
from qerl.results.schema.profile import ProfileKind
from qerl.results.schema.training import RunResult
from qerl.settings.run import RunSettings

_SCORED = (
    "GSM8K (%) is the score of the paper's scripts: for bases the strict match of lm-eval's stock task, for trained "
    "policies the answer between tags at the prompt of training. A Δ thus compares two prompts, as the paper's does. "
    "For every row, strict and flexible are the stock task's matches, and own prompt is the score at the prompt of "
    "training"
)


class StoredResults:
    """Stored results by kind, recognized by the file names that the workflow gives them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def _named(self, name: str) -> list[Path]:
        return [path for path in self._paths if path.name == name]

    def runs(self) -> pd.DataFrame:
        """See `readers.load_runs`."""
        return readers.load_runs(self._named(RUN))

    def run_results(self) -> dict[str, RunResult]:
        """Each run with all settings, by its name."""
        return readers.read_runs(self._named(RUN))

    def evaluation_results(self) -> list[EvaluationResult]:
        """The results of all evaluations."""
        return [read(EvaluationResult, path) for path in self._named(RESULT)]

    def metrics(self) -> pd.DataFrame:
        """See `readers.load_metrics`."""
        return readers.load_metrics(self._named(RUN))

    def settings(self) -> dict[str, RunSettings]:
        """The settings of each run, by its name."""
        return {name: run.settings for name, run in self.run_results().items()}

    def printed(self, name: str) -> Path:
        """A file of config/paper."""
        return next(path for path in self._paths if path.parts[-2:] == (printed.FOLDER.name, name))

    def beside(self, *files: str) -> pd.DataFrame:
        """Printed numbers of these files beside ours (`paper.beside`), for the models of the first file."""
        cells = [cell for file in files for cell in printed.read_cells(self.printed(f"{file}.csv"))]
        models = {cell.model for cell in cells if cell.table == files[0]}
        cells = paper.with_readings(paper.with_ratios([cell for cell in cells if cell.model in models]))
        return paper.beside(cells, self._ours(cells))

    def _ours(self, cells: Sequence[Cell]) -> Iterator[paper.Result]:
        """Our results of the cells' kinds."""
        kinds = {cell.kind for cell in cells}
        speed = {"rollout": paper_speeds.rollouts, "step": paper_speeds.steps}
        for kind in speed.keys() & kinds:
            yield from speed[kind](self.points(kind))
        if "size" in kinds:
            yield from paper_speeds.sizes(self.quantization())
        if "run" in kinds:
            yield from paper.hyperparameters(self.settings(), cells)
        scored = [cell for cell in cells if cell.kind not in ("rollout", "step", "size", "run")]
        if scored:
            samples = readers.load_samples(self._named(RESULT))
            yield from paper.accuracies(self.evaluations(), samples, self.settings())
            yield from paper.failures(self.run_results().values(), scored)

    def curves(self, figure: str) -> tuple[pd.DataFrame, dict[str, dict[str, Any]], pd.DataFrame]:
        """Metrics, the identity of each run, and the points read off the paper's figure."""
        identities = {name: paper.identity(settings) for name, settings in self.settings().items()}
        points = pd.read_csv(self.printed(printed.CURVES))
        return self.metrics(), identities, points[points["figure"] == figure]

    def stamps(self) -> pd.DataFrame:
        """Machine and commit of every result."""
        frames = [self.runs(), self.evaluations(), *map(self.points, ("rollout", "step")), self.quantization()]
        return pd.concat([frame[["machine", "commit"]] for frame in frames if "machine" in frame])

    def evaluations(self) -> pd.DataFrame:
        """See `readers.load_evaluations`."""
        return readers.load_evaluations(self._named(RESULT), self.runs())

    def accuracy_cells(self) -> pd.DataFrame:
        """See `tables.accuracy_cells`."""
        return tables.accuracy_cells(self.evaluations(), readers.load_samples(self._named(RESULT)))

    def quantization(self) -> pd.DataFrame:
        """See `readers.load_quantization`."""
        return readers.load_quantization(self._named(REPORT))

    def points(self, kind: str) -> pd.DataFrame:
        """The points of all benches of one kind."""
        files = [path for path in self._paths if path.parent.name == PROFILE]
        chosen = [path for path in files if read(ProfileKind, path).kind == kind]
        return readers.load_benches(chosen, kind)  # type: ignore[arg-type]


def write_table(job: TableJob) -> None:
    """Make one table."""
    make_table(job.name, listed(job.results), job.out)


def write_figure(job: FigureJob) -> None:
    """Make one figure."""
    make_figure(job.name, listed(job.results), job.out)


def listed(file: Path) -> list[Path]:
    """The paths that a file lists, one a line."""
    return [Path(line) for line in file.read_text(encoding="utf-8").splitlines()]


def make_table(name: str, paths: Sequence[Path], out: Path) -> None:
    """Write `out`/name.csv, .md, .tex and .html, and the caption in .txt."""
    stored = StoredResults(paths)
    if name in printed.TABLES:
        return _make_paper_table(name, stored, out)
    if name == "drift":
        return _make_drift_table(stored, out)
    makers: dict[str, Callable[[], tuple[pd.DataFrame, pd.DataFrame]]] = {
        "accuracy": lambda: (tables.accuracy(stored.accuracy_cells(), stored.runs()), stored.evaluations()),
        "memory_speed": lambda: _with_records(
            lambda points: tables.memory_speed(points, stored.quantization()), stored.points("step")
        ),
        "throughput": lambda: _with_records(tables.throughput, stored.points("rollout")),
        "quantization": lambda: _with_records(tables.quantization, stored.quantization()),
    }
    frame, records = makers[name]()
    parts = None
    if name == "accuracy":
        parts = {f"Accuracy on {dataset}": present(rows) for dataset, rows in by_dataset(frame).items()}
    tables.write_table(frame, out / name, tables.caption_text(captions.of_table(name), records), parts=parts)


def _make_drift_table(stored: StoredResults, out: Path) -> None:
    from qerl.report.drift import drift  # scipy, a second of CPU time, which other tables are spared

    caption = ". ".join([captions.of_table("drift"), _stamp(stored.runs(), stored.runs())]) + "."
    tables.write_table(drift(stored.metrics()), out / "drift", caption)


def _make_paper_table(name: str, stored: StoredResults, out: Path) -> None:
    frame = stored.beside(name)
    shown, footnotes = layout.flat(frame) if name == "table4" else layout.paper_shape(frame)
    tables.write_table(frame, out / name, _paper_caption(name, frame, stored), shown, footnotes)


def _paper_caption(name: str, frame: pd.DataFrame, stored: StoredResults) -> str:
    units = set(frame["unit"])
    methods = [METHOD] * ("%" in units) + [paper.SPEED] * ("ratio" in units)
    methods += [_SCORED] * bool(set(frame["metric"]) & set(paper.READINGS))
    methods += ["A difference is ours minus the printed number, with the interval of ours"] * bool(methods)
    return ". ".join([captions.of_table(name), *methods, _stamp(stored.stamps(), stored.runs())]) + "."


def _stamp(records: pd.DataFrame, runs: pd.DataFrame) -> str:
    seeds = [tables.seeds_text(runs)] if len(runs) else []
    return ". ".join([tables.machine_text(records), *seeds, tables.commit_text(records)])


def _with_records(
    make: Callable[[pd.DataFrame], pd.DataFrame], records: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    return make(records), records


def make_figure(name: str, paths: Sequence[Path], out: Path) -> None:
    """Write `out`/name.svg, .narrow.svg and .png, and the caption in .txt."""
    stored = StoredResults(paths)
    out.mkdir(parents=True, exist_ok=True)
    _draw(name, stored, out / name)
    (out / f"{name}.txt").write_text(f"{captions.of_figure(name)} {figure_stamp(name, stored)}\n", encoding="utf-8")


def figure_stamp(name: str, stored: StoredResults) -> str:
    """The machine, seeds and commit of a figure's numbers."""
    if name == printed.SCHEDULES:
        return "Drawn from the formulas; nothing is measured."
    runs = stored.runs()
    if name == "throughput":
        return _stamp(stored.points("rollout"), runs[:0]) + "."
    if name == "accuracy":
        return _stamp(stored.evaluations(), runs) + "."
    beside = name in printed.BARS or name in printed.CURVE_FIGURES
    return _stamp(stored.stamps() if beside else runs, runs) + "."


def _draw(name: str, stored: StoredResults, stem: Path) -> None:
    from qerl.report import figures, paper_figures

    if name in printed.BARS:
        return paper_figures.bars_beside(stored.beside(*printed.BARS[name]), stem)
    if name in printed.CURVE_FIGURES:
        return paper_figures.curves_beside(printed.CURVE_FIGURES[name], *stored.curves(name), stem)
    makers: dict[str, Callable[[], None]] = {
        printed.SCHEDULES: lambda: paper_figures.schedules(stem),
        "accuracy": lambda: figures.accuracy(stored.accuracy_cells(), stem),
        "throughput": lambda: figures.throughput(tables.throughput(stored.points("rollout")), stem),
        "reward": lambda: figures.reward(stored.metrics(), stem),
        "entropy": lambda: figures.entropy(stored.metrics(), stem),
        "completion_length": lambda: figures.completion_length(stored.metrics(), stem),
        "drift": lambda: figures.drift(stored.metrics(), stem),
        "noise": lambda: figures.noise(stored.metrics(), stem),
    }
    makers[name]()
