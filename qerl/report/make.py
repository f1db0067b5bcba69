"""The table and figure jobs, which read stored results by path, and the captions of what they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from qerl.jobs import FigureJob, TableJob
from qerl.report import paper, tables
from qerl.report.format import by_dataset, present
from qerl.results import printed, readers
from qerl.results.paths import PROFILE, REPORT, RESULT, RUN
from qerl.results.printed import Cell
from qerl.results.schema import EvaluationResult, RunResult
from qerl.results.speeds import Kind, load
from qerl.results.statistics import METHOD
from qerl.results.store import read
from qerl.settings.run import RunSettings

# What each table and figure shows, and how to read it. Machine, seeds and commit are added from the results.

#: Captions of tables; the first sentence is the title.
TABLES = {
    "accuracy": "Accuracy by weight format and training (the paper's Tables 1 and 2). Differences are in points: to "
    "the untrained BF16 base, and to the untrained base of the same weight format. A row of one seed leaves the "
    "variation between seeds out",
    "memory_speed": "Size, error, time of a GRPO step and memory (the paper's Table 3). The speed-up is the ratio of "
    "median step times to BF16 LoRA. Weights in memory are counted as they are stored: dense weights in the "
    "configuration's dtype, adapters in float32",
    "throughput": "Rollout throughput by weight format and LoRA rank (the paper's Table 9). It is in completion "
    "tokens per second, and the ratio is to BF16 at the same rank. A failed point shows its error",
    "quantization": "Size and relative error by weight format. Bits per weight include scales, for quantized layers "
    "and for the whole model; errors are of the weights, by type of layer",
    "drift": "Drift of KL(sampler || trainer) over the steps of each run, in nats per token (k3 estimator). First and "
    "last are the means of the first and the last 100 steps, or of half of a shorter run's. The slope is per 1,000 "
    "steps. 95 % intervals are Student's t of the means of consecutive blocks: 20 of a run, 10 of a window. A run has "
    "no drift if its KL rises by no more than the first window's over all steps, at the upper end of the slope's "
    "interval. Else it drifts if the lower end is above 0",
}
_BESIDE = (
    "Results stand beside the paper's by model, weights, training, noise, rank and setting. A cell without a number of "
    "ours says why, and footnotes say how the paper contradicts its own numbers"
)

_CURVE = "mean over the seeds, with a band from the lowest to the highest, smoothed as the axis label says"
_FIGURES = {
    "accuracy": "Accuracy by arm with 95 % intervals, beside the untrained base of the same weights (diamond) and the "
    "untrained BF16 base (dashed line).",
    "completion_length": f"Tokens per completion, and the share of completions cut at the limit, by step: {_CURVE}.",
    "drift": f"KL(sampler || trainer) in nats per token, by step: {_CURVE}. Sampler and trainer have the same weights, "
    "so without noise it shows how differently their kernels round.",
    "entropy": f"Entropy of the policy in nats per token, by step: {_CURVE}. The paper claims that quantization noise "
    "raises the entropy (section 3.2, Figures 4 and 5).",
    "noise": "Adaptive Quantization Noise by step (paper section 3.3, Equation 8): the standard deviation that the "
    "schedule sets, and the norm of the drawn noise, not smoothed. The first stage has no noise.",
    "reward": f"Training reward by step: {_CURVE}. Compare the paper's Figures 7 and 8.",
    "throughput": "Rollout throughput by LoRA rank and weights: medians with quartiles. The number on a bar is its "
    "ratio to BF16 at the same rank.",
    printed.SCHEDULES: "The paper's Figure 15: standard deviation of the noise by stage, as implemented here. The "
    "exponential schedule is Equation 8, whose last stage stops short of the end value; the paper gives no formula for "
    "the others. It states two start values; both are shown.",
}


def caption_of_table(name: str) -> str:
    """The caption of a table, without a full stop at its end."""
    return TABLES[name] if name in TABLES else f"{printed.TABLES[name]}. {_BESIDE}"


def caption_of_figure(name: str) -> str:
    """The caption of a figure."""
    if name in _FIGURES:
        return _FIGURES[name]
    title = f"The paper's {name.replace('figure', 'Figure ')}:"
    if name in printed.BARS:
        return (
            f"{title} its bars (pale) beside ours with 95 % intervals. The paper measured on one H100, so speeds are "
            "ratios: to BF16 at the same batch and rank, or to NF4."
        )
    return (
        f"{title} mean and range over our seeds, smoothed as the axis label says. Dashed curves are the paper's, read "
        f"from its plots to about 0.02 (qerl/results/paper/{printed.CURVES}). The paper's accuracy reward stands "
        "beside the share of right answers; the paper doesn't print the values of its rewards."
    )


# The table and figure jobs: they read stored results by path.

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
        if "rollout" in kinds:
            yield from paper.rollouts(self.points("rollout"))
        if "step" in kinds:
            yield from paper.steps(self.points("step"))
        if "size" in kinds:
            yield from paper.sizes(self.quantization())
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
        frames = [self.runs(), self.evaluations(), self.points("rollout"), self.points("step"), self.quantization()]
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

    def points(self, bench: str) -> pd.DataFrame:
        """The points of all benches of one kind."""
        files = [path for path in self._paths if path.parent.name == PROFILE]
        chosen = [path for path in files if read(Kind, path).of_bench == bench]
        return load(chosen, bench) if chosen else pd.DataFrame()


# Jobs read the list of results from a file: with 1,000 runs the paths are longer than a shell command may be (128
# KiB).
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
        from qerl.report.drift import drift  # scipy, a second of CPU time, which other tables are spared

        caption = f"{caption_of_table('drift')}. {_stamp(stored.runs(), stored.runs())}."
        return tables.write_table(drift(stored.metrics()), out / "drift", caption)
    # Each with the records from which it is made.
    makers: dict[str, tuple[Callable[[], pd.DataFrame], Callable[[pd.DataFrame], pd.DataFrame]]] = {
        "accuracy": (stored.evaluations, lambda _: tables.accuracy(stored.accuracy_cells(), stored.runs())),
        "memory_speed": (lambda: stored.points("step"), lambda p: tables.memory_speed(p, stored.quantization())),
        "throughput": (lambda: stored.points("rollout"), tables.throughput),
        "quantization": (stored.quantization, tables.quantization),
    }
    records_of, make = makers[name]
    records = records_of()
    frame = make(records)
    parts = None
    if name == "accuracy":
        parts = {f"Accuracy on {dataset}": present(rows) for dataset, rows in by_dataset(frame).items()}
    tables.write_table(frame, out / name, tables.caption_text(caption_of_table(name), records), parts=parts)


def _make_paper_table(name: str, stored: StoredResults, out: Path) -> None:
    frame = stored.beside(name)
    shown, footnotes = paper.flat(frame) if name == "table4" else paper.paper_shape(frame)
    units = set(frame["unit"])
    methods = [METHOD] * ("%" in units) + [paper.SPEED] * ("ratio" in units)
    methods += [_SCORED] * bool(set(frame["metric"]) & set(paper.READINGS))
    methods += ["A difference is ours minus the printed number, with the interval of ours"] * bool(methods)
    caption = ". ".join([caption_of_table(name), *methods, _stamp(stored.stamps(), stored.runs())]) + "."
    tables.write_table(frame, out / name, caption, shown, footnotes)


def _stamp(records: pd.DataFrame, runs: pd.DataFrame) -> str:
    seeds = [tables.seeds_text(runs)] if len(runs) else []
    return ". ".join([tables.machine_text(records), *seeds, tables.commit_text(records)])


def make_figure(name: str, paths: Sequence[Path], out: Path) -> None:
    """Write `out`/name.svg, .narrow.svg and .png, and the caption in .txt."""
    stored = StoredResults(paths)
    out.mkdir(parents=True, exist_ok=True)
    _draw(name, stored, out / name)
    (out / f"{name}.txt").write_text(f"{caption_of_figure(name)} {figure_stamp(name, stored)}\n", encoding="utf-8")


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
    from qerl.report import figures

    if name in printed.BARS:
        return figures.bars_beside(stored.beside(*printed.BARS[name]), stem)
    if name in printed.CURVE_FIGURES:
        return figures.curves_beside(printed.CURVE_FIGURES[name], *stored.curves(name), stem)
    makers: dict[str, Callable[[], None]] = {
        printed.SCHEDULES: lambda: figures.schedules(stem),
        "accuracy": lambda: figures.accuracy(stored.accuracy_cells(), stem),
        "throughput": lambda: figures.throughput(tables.throughput(stored.points("rollout")), stem),
        "reward": lambda: figures.reward(stored.metrics(), stem),
        "entropy": lambda: figures.entropy(stored.metrics(), stem),
        "completion_length": lambda: figures.completion_length(stored.metrics(), stem),
        "drift": lambda: figures.drift(stored.metrics(), stem),
        "noise": lambda: figures.noise(stored.metrics(), stem),
    }
    makers[name]()
