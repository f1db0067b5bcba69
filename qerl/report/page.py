"""The report: one page that opens on the main table and its figures, and has everything else below."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from pydantic import BaseModel

from qerl.host.provenance import write_text
from qerl.jobs import ReportJob
from qerl.report.figures import smoothing_window
from qerl.report.format import (
    MEASURES,
    Column,
    HtmlCell,
    HtmlTable,
    Link,
    cell,
    cell_text,
    fragment,
    identifying,
    rendered,
    table_of,
    three_digits,
    training_label,
    weights_label,
)
from qerl.report.make import StoredResults, listed
from qerl.report.samples import steps_in
from qerl.results.paths import KEY, NARROW, RESULT, ROLLOUTS, RUN, VERDICT, variant
from qerl.results.readers import schema_of
from qerl.results.schema import OK, EvaluationResult, Provenance, RunResult, TaskScore, Verdict, VerdictResult
from qerl.results.store import read
from qerl.settings.run import SamplingSettings

# How results were made, as tables of text: settings, evaluation, runs and their cost, failures, machines, commits.

#: The setting in which the runs of an arm differ.
_SEED = "seed"


def stamp_table(files: Sequence[Path]) -> pd.DataFrame:
    """The machines, commits and libraries with which result files were made, one row per combination."""
    rows = []
    for file in files:
        schema = schema_of(file)
        if schema is None or "provenance" not in schema.model_fields:
            continue
        provenance: Provenance = read(schema, file).provenance  # type: ignore[attr-defined]
        libraries = ", ".join(f"{name} {version}" for name, version in provenance.versions.items())
        rows.append({**provenance.columns, "libraries": libraries, "time": provenance.time})
    made = pd.DataFrame(rows, columns=["machine", "commit", "libraries", "time"])
    groups = made.groupby(["machine", "commit", "libraries"], sort=False)["time"]
    return pd.DataFrame(
        [
            {"machine": machine, "commit": commit, "results": str(len(times)), "made": _span(times), "libraries": names}
            for (machine, commit, names), times in groups
        ]
    )


def _span(times: pd.Series) -> str:
    first, last = times.min()[:16].replace("T", " "), times.max()[:16].replace("T", " ")
    return first if first == last else f"{first} to {last}"


def missing_table(
    runs: Mapping[str, RunResult], points: pd.DataFrame, gates: Sequence[Verdict], omitted: Mapping[str, str]
) -> pd.DataFrame:
    """What failed or was left out, with its reason; `points` are those of all benches."""
    failed = [("run", name, _joined(run.status, run.reason)) for name, run in runs.items() if run.status != OK]
    wrong = points[points["status"] != OK].to_dict("records") if len(points) else []
    named = [
        (f"bench {point['bench']}", f"{point['model']}, {point['weights']}, rank {point['rank']}", point["status"])
        for point in wrong
    ]
    unmet = [("gate", gate.gate, _joined(gate.outcome, gate.detail)) for gate in gates if gate.outcome != "pass"]
    rows = [*failed, *named, *unmet, *(("arm", name, reason) for name, reason in omitted.items())]
    return pd.DataFrame(rows, columns=["kind", "name", "reason"])


def _joined(status: str, reason: str) -> str:
    return f"{status}: {reason}" if reason else status


# --- settings ---------------------------------------------------------------------------------------------------------


def settings_table(runs: Mapping[str, RunResult]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The settings apart from defaults that all runs share, and those in which arms differ, one row per arm.

    Both are empty without runs.
    """
    values = {name: dict(_flat(run.settings)) for name, run in runs.items()}
    given = dict.fromkeys(key for run in runs.values() for key in _given(run.settings) if key != _SEED)
    differing = [key for key in given if len({flat.get(key) for flat in values.values()}) > 1]
    first = next(iter(values.values()), {})
    shared = pd.DataFrame(
        [{"setting": key, "value": first[key]} for key in given if key not in differing], columns=["setting", "value"]
    )
    arms: dict[tuple[str, ...], dict[str, str]] = {}
    for name, run in runs.items():
        arm = {"experiment": run.experiment, "arm": run.arm, "grid": variant(run.varied)}
        arms.setdefault(tuple(arm.values()), arm | {key: values[name].get(key, "") for key in differing})
    return shared, pd.DataFrame(list(arms.values()))


def _flat(settings: BaseModel, before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _text(value)


def _given(settings: BaseModel, before: str = "") -> Iterator[str]:
    """The keys whose value isn't their default."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from _given(value, f"{before}{name}.")
        elif value != field.default:
            yield f"{before}{name}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return json.dumps(value) if isinstance(value, dict) else "none" if value is None else str(value)


# --- evaluation and runs ----------------------------------------------------------------------------------------------


def scoring_table(results: Sequence[EvaluationResult]) -> pd.DataFrame:
    """How each data set was scored, and what was seen of its completions; one row per data set."""
    tasks: dict[str, list[TaskScore]] = {}
    for result in results:
        for dataset, task in result.tasks.items():
            tasks.setdefault(dataset, []).append(task)
    return pd.DataFrame([_scored(dataset, scores) for dataset, scores in tasks.items()])


def _scored(dataset: str, scores: Sequence[TaskScore]) -> dict[str, str]:
    task = scores[0]
    return {
        "data set": dataset,
        "harness": f"{task.harness} {task.harness_version}".strip() + (f", task {task.task}" if task.task else ""),
        "problems": f"{task.problems:,}",
        "repeats": str(task.repeats),
        "sampling": _drawn(task.sampling) if task.sampling else "",
        "answer readable (%)": _mean(score.extracted for score in scores),
        "both graders agree (%)": _mean(score.agreement for score in scores),
        "cut at the limit (%)": _mean(score.truncated for score in scores),
    }


def _drawn(sampling: SamplingSettings) -> str:
    return f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most {sampling.max_tokens} tokens"


def _mean(values: Iterator[int | float | None] | Collection[int | float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.1f}" if known else ""


def run_cost_table(runs: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """One row per run: its state, the reward at its start and end, and its cost. `run` has the run's name."""
    width = smoothing_window(metrics) if len(metrics) else 1
    rewards = {name: group.sort_values("step")["reward"] for name, group in metrics.groupby("run")}
    return pd.DataFrame([_run_row(run, rewards.get(run["run"]), width) for run in runs.to_dict("records")])


def _run_row(run: Mapping[Any, Any], rewards: pd.Series | None, width: int) -> dict[str, str]:
    done = run["status"] == OK
    cost = {
        "minutes": run["seconds"] / 60,
        "rollout tokens/s": run["rollout_tokens_per_second"],
    }
    measures = {name: run[name] for name in ("step_seconds", "weight_bytes", "peak_memory_bytes")}
    return {
        "run": run["run"],
        "state": "finished" if done else run["status"],
        "reward at the start": "" if rewards is None else f"{rewards.head(width).mean():.2f}",
        "at the end": "" if rewards is None else f"{rewards.tail(width).mean():.2f}",
        **{name: three_digits(value) if done else "" for name, value in cost.items()},
        **{MEASURES[name][0]: MEASURES[name][1](value) if pd.notna(value) else "" for name, value in measures.items()},
    }


# The main table of the report: accuracy by arm and data set, whose numbers lead to their samples.

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
    groups = [("", len(named) + 1), *((name, len(_SHOWN)) for name in datasets)]

    def cells(row: dict[Any, Any]) -> Iterator[HtmlCell]:
        untrained = row["training"] == _UNTRAINED
        yield from (cell(f"{row[key]}") for key in named)
        training = "untrained" if untrained else training_label(row["training"])
        yield cell(f"{weights_label(row['weights'])} {training}")
        seeds: dict[str, str] = {}
        for dataset in datasets:
            addresses = samples.by_seed(row, dataset)
            seeds = addresses | seeds
            for measure in _SHOWN:
                text = cell_text(row, f"{dataset}/{measure}", MEASURES[measure][1])
                yield cell(text, next(iter(addresses.values()), ""))
        if trained:
            yield HtmlCell(() if untrained else tuple(Link(seed, seeds[seed]) for seed in sorted(seeds, key=int)))
        if notes:
            yield cell(_notes(row, datasets))

    return HtmlTable(
        caption,
        columns,
        bodies=[
            [list(cells(row)) for row in block.to_dict("records")]
            for _, block in table.groupby(["model", "experiment"], sort=False)
        ],
        groups=groups + [("", trained + notes)] * bool(trained + notes),
    )


def accuracy_ranges(table: pd.DataFrame, evaluations: pd.DataFrame) -> Iterator[AccuracyRange]:
    """For each model and data set the lowest and highest accuracy of untrained bases and of trained policies."""
    several = table["model"].nunique() > 1
    sizes = {(row["model"], row["dataset"]): row for row in evaluations.to_dict("records")}
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


def _notes(row: Mapping[Any, Any], datasets: list[str]) -> str:
    notes = [row[f"{dataset}/note"] for dataset in datasets]
    return "; ".join(dict.fromkeys(note for note in notes if isinstance(note, str) and note))


# The report: one page that opens on the main table and its figures, and has everything else below.

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


# A page of its own: Snakemake's `--report` opens on a graph of the rules and can't be an input or output of the DAG.
# A figure is two drawings instead of one that a script redraws, so that an image needs no script.
def write_report(job: ReportJob) -> None:
    """Write the report of a configuration's results."""
    files = listed(job.results)
    stored = StoredResults(files)
    figures = [_figure(stem) for stem in _stems(job.figures)]
    first = figures[:_FIRST] if job.main else []
    evaluations = stored.evaluations() if job.main else pd.DataFrame()
    samples = Samples(job.samples, evaluations)
    main, ranges = None, []
    if job.main:
        table = pd.read_csv(job.main, dtype=dict.fromkeys(KEY, str)).fillna(dict.fromkeys(KEY, ""))
        ranges = list(accuracy_ranges(table, evaluations))
        main = main_table("Accuracy by weight format and training", table, samples)
    points = pd.concat([stored.points("rollout"), stored.points("step")])
    gates = [gate for file in files if file.name == VERDICT for gate in read(VerdictResult, file).gates]
    missing = missing_table(stored.run_results(), points, gates, job.omitted)
    scoring = [table_of("Evaluation", scoring_table(stored.evaluation_results()))] if job.main else []
    pages = [page for path in job.tables for page in (sorted(path.glob("*.html")) if path.is_dir() else [path])]
    values: dict[str, Any] = {
        "name": job.name,
        "title": f"Results of {job.name}",
        "samples": job.samples,
        "accuracy_ranges": ranges,
        "main": main,
        "first_figures": first,
        "state": _state(stored, files, len(missing)),
        "missing": table_of("Each with its reason", missing) if len(missing) else None,
        "methods": [*scoring, *_settings(stored)],
        "runs": _runs(stored, _last_rollouts(files, samples)),
        "machine": table_of("Where and when the results were made", stamp_table(files)),
        "figures": figures[len(first) :],
        "tables": [fragment(page.read_text(encoding="utf-8")) for page in pages],
    }
    write_text(job.out, rendered("report.j2", **values, parts=_parts(values)))


def _settings(stored: StoredResults) -> list[HtmlTable]:
    """The settings of the runs; none without runs."""
    shared, arms = settings_table(stored.run_results())
    captions = {
        "Settings by arm; all others are equal": arms,
        "Settings of all runs; others have their defaults": shared,
    }
    return [table_of(caption, shown) for caption, shown in captions.items() if len(shown)]


def _runs(stored: StoredResults, addresses: Mapping[str, str]) -> HtmlTable | None:
    """The runs with their cost, whose names lead to `addresses`."""
    runs = stored.runs()
    if runs.empty:
        return None
    table = table_of("Runs and their cost", run_cost_table(runs, stored.metrics()))
    [rows] = table.bodies
    names = [HtmlCell(tuple(Link(part.text, addresses[part.text]) for part in row[0].texts)) for row in rows]
    return replace(table, bodies=[[[name, *row[1:]] for name, row in zip(names, rows, strict=True)]])


def _last_rollouts(files: Sequence[Path], samples: Samples) -> dict[str, str]:
    """The address of each run's last stored rollout, or of its other samples if none is stored."""
    folders = [file.parent for file in files if file.name == RUN]
    last = {folder.name: [view.step for view in steps_in(folder / ROLLOUTS)][-1:] for folder in folders}
    return {run: samples.address(run, *step) for run, step in last.items()}


def _state(stored: StoredResults, files: Sequence[Path], missing: int) -> str:
    runs, evaluations = len(stored.runs()), sum(file.name == RESULT for file in files)
    counts = {"run": runs, "evaluation": evaluations, "result file": len(files)}
    done = ", ".join(f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items() if count)
    if not runs:
        return f"{done}. Tables say why a point has no number."
    return f"{done}. " + (f"{missing} failed or were left out." if missing else "Nothing failed or was left out.")


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


def _stems(figures: Sequence[Path]) -> list[Path]:
    """Paths of figures without their endings, those of folders in the order of their names."""
    stems: list[Path] = []
    for path in figures:
        inner = sorted(path.glob(f"*{NARROW}")) if path.is_dir() else [Path(f"{path}{NARROW}")]
        stems += [file.with_name(file.name.removesuffix(NARROW)) for file in inner]
    return stems


def _figure(stem: Path) -> Shown:
    wide, narrow = (Path(f"{stem}{end}").read_text(encoding="utf-8") for end in (".svg", NARROW))
    width, of_narrow = (float(svg.partition(' width="')[2].partition("pt")[0]) for svg in (wide, narrow))  # points
    image, other = (f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}" for svg in (wide, narrow))
    caption = Path(f"{stem}.txt")
    text = caption.read_text(encoding="utf-8").strip() if caption.exists() else stem.name
    return Shown(image, other, width > of_narrow, text.partition(". ")[0], text)
