"""The report: one page that opens on the main table and its figures, and has everything else below."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    Link,
    cell_text,
    fragment,
    html_table,
    identifying,
    rendered,
    three_digits,
    training_label,
    weights_label,
)
from qerl.report.samples import steps_in
from qerl.results.paths import KEY, NARROW, RESULT, ROLLOUTS, VERDICT, variant
from qerl.results.readers import StoredResults, listed
from qerl.results.schema import OK, EvaluationResult, Head, RunResult, TaskScore, VerdictResult
from qerl.results.store import read

# How results were made, as tables of text: settings, evaluation, runs and their cost, failures, machines, commits.


def stamp_table(files: Sequence[Path]) -> pd.DataFrame:
    """The machines, commits and libraries with which result files were made, one row per combination."""
    rows = []
    for stamp in (read(Head, file).provenance for file in files if file.suffix == ".json"):
        if stamp is not None:
            libraries = ", ".join(f"{name} {version}" for name, version in stamp.versions.items())
            rows.append({**stamp.columns, "libraries": libraries, "time": stamp.time[:16].replace("T", " ")})
    columns = ["machine", "commit", "libraries"]
    groups = pd.DataFrame(rows, columns=[*columns, "time"]).groupby(columns, sort=False)["time"]
    shown = groups.agg(results="count", first="min", last="max").reset_index().astype(str)
    spans = shown["first"].where(shown["first"] == shown["last"], shown["first"] + " to " + shown["last"])
    return shown.assign(made=spans)[["machine", "commit", "results", "made", "libraries"]]


def missing_table(stored: StoredResults, omitted: Mapping[str, str]) -> pd.DataFrame:
    """What failed or was left out, with its reason."""
    rows = [("run", run.run, _joined(run.status, run.reason)) for _, run in stored.run_results if run.status != OK]
    for point in pd.concat([stored.points("rollout"), stored.points("step")]).to_dict("records"):
        if point["status"] != OK:
            name = f"{point['model']}, {point['weights']}, rank {point['rank']}"
            rows.append((f"bench {point['bench']}", name, point["status"]))
    for gate in (gate for file in stored.named(VERDICT) for gate in read(VerdictResult, file).gates):
        if gate.outcome != "pass":
            rows.append(("gate", gate.gate, _joined(gate.outcome, gate.detail)))
    rows += [("arm", name, reason) for name, reason in omitted.items()]
    return pd.DataFrame(rows, columns=["kind", "name", "reason"])


def _joined(status: str, reason: str) -> str:
    return f"{status}: {reason}" if reason else status


def settings_tables(runs: Sequence[RunResult]) -> dict[str, pd.DataFrame]:
    """The settings in which arms differ, one row per arm, and those that all runs share apart from defaults."""
    values = [dict(_flat(run.settings)) for run in runs]
    given = dict.fromkeys(key for run in runs for key in _given(run.settings) if key != "seed")
    differing = [key for key in given if len({flat.get(key) for flat in values}) > 1]
    arms: dict[tuple[str, ...], dict[str, str]] = {}
    for run, flat in zip(runs, values, strict=True):
        arm = {"experiment": run.experiment, "arm": run.arm, "grid": variant(run.varied)}
        arms.setdefault(tuple(arm.values()), arm | {key: flat.get(key, "") for key in differing})
    shared = [{"setting": key, "value": values[0][key]} for key in given if key not in differing]
    return {
        "Settings by arm; all others are equal": pd.DataFrame(list(arms.values())),
        "Settings of all runs; others have their defaults": pd.DataFrame(shared),
    }


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


def scoring_table(results: Iterable[EvaluationResult]) -> pd.DataFrame:
    """How each data set was scored, and what was seen of its completions; one row per data set."""
    tasks: dict[str, list[TaskScore]] = {}
    for result in results:
        for dataset, task in result.tasks.items():
            tasks.setdefault(dataset, []).append(task)
    rows = []
    for dataset, scores in tasks.items():
        task, drawn = scores[0], scores[0].sampling
        sampling = (
            f"temperature {drawn.temperature:g}, top_p {drawn.top_p:g}, at most {drawn.max_tokens} tokens"
            if drawn
            else ""
        )
        shares = {"answer readable": "extracted", "both graders agree": "agreement", "cut at the limit": "truncated"}
        rows.append(
            {
                "data set": dataset,
                "harness": f"{task.harness} {task.harness_version}".strip()
                + (f", task {task.task}" if task.task else ""),
                "problems": f"{task.problems:,}",
                "repeats": str(task.repeats),
                "sampling": sampling,
                **{f"{name} (%)": _mean([getattr(score, share) for score in scores]) for name, share in shares.items()},
            }
        )
    return pd.DataFrame(rows)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.1f}" if known else ""


def run_cost_table(stored: StoredResults, addresses: Mapping[str, str]) -> pd.DataFrame:
    """One row per run, whose name leads to its address: state, reward at its start and end, and cost."""
    metrics, rows = stored.metrics, []
    width = smoothing_window(metrics) if len(metrics) else 1
    rewards = {name: group.sort_values("step")["reward"] for name, group in metrics.groupby("run")}
    for run in stored.runs.to_dict("records"):
        done, reward = run["status"] == OK, rewards.get(run["run"])
        cost = {"minutes": run["seconds"] / 60, "rollout tokens/s": run["rollout_tokens_per_second"]} if done else {}
        shown = {MEASURES[name]: run[name] for name in ("step_seconds", "weight_bytes", "peak_memory_bytes") if done}
        rows.append(
            {
                "run": [Link(run["run"], addresses[run["run"]])],
                "state": "finished" if done else run["status"],
                "reward at the start": "" if reward is None else f"{reward.head(width).mean():.2f}",
                "at the end": "" if reward is None else f"{reward.tail(width).mean():.2f}",
                **{name: three_digits(value) for name, value in cost.items()},
                **{heading: text(value) if pd.notna(value) else "" for (heading, text), value in shown.items()},
            }
        )
    return pd.DataFrame(rows).fillna("")


# The main table of the report: accuracy by arm and data set, whose numbers lead to their samples.

#: The measures of each data set that the report begins with; its further tables have all.
_SHOWN = {"accuracy": "accuracy (%)", "delta_format": "gain (points)"}


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


def main_table(caption: str, table: pd.DataFrame, samples: Samples) -> dict[str, Any]:
    """The accuracy table (`tables.accuracy`) for people: for each arm and data set accuracy and gain over the base.

    Blocks of rows are the untrained bases and the experiments. An accuracy leads to the samples of its first seed, and
    each seed to its own.
    """
    datasets = [str(column).rpartition("/")[0] for column in table if str(column).endswith("/accuracy")]
    named = [key for key in identifying(table) if key not in ("weights", "training")]
    rows = []
    for row in table.to_dict("records"):
        untrained = row["training"] == "none"
        training = "untrained" if untrained else training_label(row["training"])
        cells: dict[tuple[str, str], str | list[Link]] = {("", key): f"{row[key]}" for key in named}
        cells["", "weights and training"] = f"{weights_label(row['weights'])} {training}"
        seeds: dict[str, str] = {}
        for dataset in datasets:
            addresses = samples.by_seed(row, dataset)
            seeds = addresses | seeds
            for measure, heading in _SHOWN.items():
                text = cell_text(row, f"{dataset}/{measure}", MEASURES[measure][1])
                cells[dataset, heading] = [Link(text, next(iter(addresses.values()), ""))]
        notes = dict.fromkeys(row[f"{dataset}/note"] for dataset in datasets)
        cells["", "seeds"] = [] if untrained else [Link(seed, seeds[seed]) for seed in sorted(seeds, key=int)]
        cells["", "note"] = "; ".join(note for note in notes if isinstance(note, str) and note)
        rows.append(cells)
    blocks = table["model"] + "/" + table["experiment"]
    return html_table(caption, pd.DataFrame(rows), blocks)


# The report: one page that opens on the main table and its figures, and has everything else below.

#: Figures beside the main table.
_FIRST = 2


# A page of its own: Snakemake's `--report` opens on a graph of the rules and can't be an input or output of the DAG.
# A figure is two drawings instead of one that a script redraws, so that an image needs no script.
def write_report(job: ReportJob) -> None:
    """Write the report of a configuration's results."""
    stored = StoredResults(listed(job.results))
    figures = [_figure(stem) for stem in _stems(job.figures)]
    first = figures[:_FIRST] if job.main else []
    samples = Samples(job.samples, stored.evaluations if job.main else pd.DataFrame())
    main, methods = None, {}
    if job.main:
        table = pd.read_csv(job.main, dtype=dict.fromkeys(KEY, str)).fillna(dict.fromkeys(KEY, ""))
        main = main_table("Accuracy by weight format and training", table, samples)
        methods["Evaluation"] = scoring_table(result for _, result in stored.evaluation_results)
    methods |= settings_tables([run for _, run in stored.run_results])
    missing, runs = missing_table(stored, job.omitted), run_cost_table(stored, _last_rollouts(stored, samples))
    pages = [page for path in job.tables for page in (sorted(path.glob("*.html")) if path.is_dir() else [path])]
    values: dict[str, Any] = {
        "name": job.name,
        "title": f"Results of {job.name}",
        "samples": job.samples,
        "main": main,
        "first_figures": first,
        "state": _state(stored, len(missing)),
        "missing": html_table("Each with its reason", missing) if len(missing) else None,
        "methods": [html_table(caption, shown) for caption, shown in methods.items() if len(shown)],
        "runs": html_table("Runs and their cost", runs) if len(runs) else None,
        "machine": html_table("Where and when the results were made", stamp_table(stored.paths)),
        "figures": figures[len(first) :],
        "tables": [fragment(page.read_text(encoding="utf-8")) for page in pages],
    }
    made = {
        "missing": "What failed or was left out",
        "methods": "Methods",
        "runs": "Runs",
        "machine": "Machines and commits",
    }
    # Without a main table the figures and tables are what people look for, and come first.
    shown = (
        {"figures": "Further figures", "tables": "All tables"} if main else {"figures": "Figures", "tables": "Tables"}
    )
    titles = {**made, **shown} if main else {**shown, **made}
    parts = {id: title for id, title in titles.items() if values[id]}
    write_text(job.out, rendered("report.j2", **values, parts=parts))


def _last_rollouts(stored: StoredResults, samples: Samples) -> dict[str, str]:
    """The address of each run's last stored rollout, or of its other samples if none is stored."""
    last = {run.run: [view.step for view in steps_in(path.parent / ROLLOUTS)][-1:] for path, run in stored.run_results}
    return {run: samples.address(run, *step) for run, step in last.items()}


def _state(stored: StoredResults, missing: int) -> str:
    runs, evaluations = len(stored.run_results), len(stored.named(RESULT))
    counts = {"run": runs, "evaluation": evaluations, "result file": len(stored.paths)}
    done = ", ".join(f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items() if count)
    if not runs:
        return f"{done}. Tables say why a point has no number."
    return f"{done}. " + (f"{missing} failed or were left out." if missing else "Nothing failed or was left out.")


def _stems(figures: Sequence[Path]) -> list[Path]:
    """Paths of figures without their endings, those of folders in the order of their names."""
    stems: list[Path] = []
    for path in figures:
        inner = sorted(path.glob(f"*{NARROW}")) if path.is_dir() else [Path(f"{path}{NARROW}")]
        stems += [file.with_name(file.name.removesuffix(NARROW)) for file in inner]
    return stems


def _figure(stem: Path) -> dict[str, Any]:
    """A figure: its two layouts as data URIs, and its caption."""
    wide, narrow = (Path(f"{stem}{end}").read_text(encoding="utf-8") for end in (".svg", NARROW))
    width, of_narrow = (float(svg.partition(' width="')[2].partition("pt")[0]) for svg in (wide, narrow))  # points
    image, other = (f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}" for svg in (wide, narrow))
    caption = Path(f"{stem}.txt")
    text = caption.read_text(encoding="utf-8").strip() if caption.exists() else stem.name
    return {
        "image": image,
        "narrow": other,
        "broad": width > of_narrow,
        "alt": text.partition(". ")[0],
        "caption": text,
    }
