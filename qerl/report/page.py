"""The report: one page that opens on the main table and its figures, and has everything else below."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd

from qerl.host.provenance import write_text
from qerl.report.figures import CURVES, smoothing_window
from qerl.report.format import (
    MEASURES,
    Link,
    cell_text,
    fragment,
    html_table,
    identifying,
    percent,
    points,
    rendered,
    three_digits,
    training_label,
    weights_label,
)
from qerl.report.samples import steps_in
from qerl.report.tables import trained_differences
from qerl.report_jobs import ReportJob
from qerl.results import paths
from qerl.results.printed import CURVE_FIGURES
from qerl.results.readers import StoredResults, listed
from qerl.results.schema import OK, EvaluationResult, Head, RunResult, TaskScore, VerdictResult, read
from qerl.settings.workflow import flat

#: Makes the address of samples from the parts of their place.
Addresses = Callable[..., str]

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


def missing_table(stored: StoredResults) -> pd.DataFrame:
    """What failed, with its reason."""
    rows = [("run", run.run, _joined(run.status, run.reason)) for _, run in stored.run_results if run.status != OK]
    for point in pd.concat([stored.points("rollout"), stored.points("step")]).to_dict("records"):
        if point["status"] != OK:
            name = f"{point['model']}, {point['weights']}, rank {point['rank']}"
            rows.append((f"bench {point['bench']}", name, point["status"]))
    for gate in (gate for file in stored.named(paths.VERDICT) for gate in read(VerdictResult, file).gates):
        if gate.outcome != "pass":
            rows.append(("gate", gate.gate, _joined(gate.outcome, gate.detail)))
    return pd.DataFrame(rows, columns=["kind", "name", "reason"])


def _joined(status: str, reason: str) -> str:
    return f"{status}: {reason}" if reason else status


def settings_tables(runs: Sequence[RunResult]) -> dict[str, pd.DataFrame]:
    """The settings in which arms differ, one row per arm, and those that all runs share apart from defaults."""
    values = [{key: _text(one) for key, one in flat(run.settings.model_dump(mode="json")).items()} for run in runs]
    given = dict.fromkeys(key for run in runs for key in flat(run.settings.model_dump(exclude_defaults=True)))
    differing = {key for key in given if key != "seed" and len({of_run.get(key) for of_run in values}) > 1}
    arms = []
    for run, of_run in zip(runs, values, strict=True):
        arm = {"experiment": run.experiment, "arm": run.arm, "grid": paths.variant(run.varied)}
        arms.append(arm | {key: of_run.get(key, "") for key in given if key in differing})
    shared = [{"setting": key, "value": values[0][key]} for key in given if key not in differing | {"seed"}]
    return {
        "Settings by arm; all others are equal": pd.DataFrame(arms).drop_duplicates(),
        "Settings of all runs; others have their defaults": pd.DataFrame(shared),
    }


def _text(value: Any) -> str:
    """A value of a setting as text."""
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case list() | tuple():
            return ", ".join(map(_text, value))
    return str(value)


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


def run_cost_table(stored: StoredResults, address: Addresses, root: Path) -> pd.DataFrame:
    """One row per run: state, reward at its start and end, cost, and its files below the folder `root`.

    Its name leads to the `address` of its last stored rollout, or of its other samples if none is stored.
    """
    metrics, rows = stored.metrics, []
    width = smoothing_window(metrics) if len(metrics) else 1
    rewards = {name: group.sort_values("step")["reward"] for name, group in metrics.groupby("run")}
    for (file, _), run in zip(stored.run_results, stored.runs.to_dict("records"), strict=True):
        step = [view.step for view in steps_in(file.parent / paths.ROLLOUTS)][-1:]
        done, reward = run["status"] == OK, rewards.get(run["run"])
        cost = {"minutes": run["seconds"] / 60, "rollout tokens/s": run["rollout_tokens_per_second"]} if done else {}
        shown = {MEASURES[name]: run[name] for name in ("step_seconds", "weight_bytes", "peak_memory_bytes") if done}
        rows.append(
            {
                "run": [Link(run["run"], address(run["run"], *step))],
                "state": "finished" if done else run["status"],
                "reward at the start": "" if reward is None else f"{reward.head(width).mean():.2f}",
                "at the end": "" if reward is None else f"{reward.tail(width).mean():.2f}",
                **{name: three_digits(value) for name, value in cost.items()},
                **{heading: text(value) if pd.notna(value) else "" for (heading, text), value in shown.items()},
                "files": _links(
                    {
                        "settings": file,
                        "steps": file.with_name(paths.METRICS),
                        "log": root / paths.LOGS / paths.TRAIN / f"{run['run']}.log",
                    },
                    root,
                ),
            }
        )
    return pd.DataFrame(rows).fillna("")


def _links(files: Mapping[str, Path], root: Path) -> list[Link]:
    """Links to the files that exist below the folder of the page, `root`, so that page and files move together."""
    there = {name: file.resolve() for name, file in files.items() if file.is_file()}
    home = root.resolve()
    return [Link(name, quote(str(file.relative_to(home)))) for name, file in there.items() if file.is_relative_to(home)]


# The main table of the report: accuracy by arm and data set, whose numbers lead to their samples.

#: The measures of each data set that the report begins with; its further tables have all.
_SHOWN = {"accuracy": "accuracy (%)", "delta_format": "gain (points)"}


def main_table(
    caption: str, table: pd.DataFrame, evaluations: pd.DataFrame, differences: pd.DataFrame, address: Addresses
) -> dict[str, Any]:
    """The accuracy table (`tables.accuracy`) for people: for each arm and data set accuracy and gain over the base.

    Blocks of rows are the untrained bases, the experiments, and the `differences` of `tables.trained_differences`. An
    accuracy leads to the `address` of the samples of its first seed, and each seed to its own.
    """
    datasets = [str(column).rpartition("/")[0] for column in table if str(column).endswith("/accuracy")]
    named = [key for key in identifying(table) if key not in ("weights", "training")]
    links: dict[Any, dict[int, str]] = {}  # of an arm on a data set, by seed; -1 of an untrained base
    for row in evaluations.fillna({"seed": -1}).to_dict("records"):
        of_arm = links.setdefault((*(row[key] for key in paths.KEY), row["dataset"]), {})
        of_arm.setdefault(int(row["seed"]), address(row["eval"], row["dataset"]))
    rows = []
    for row in table.to_dict("records"):
        untrained = row["training"] == "none"
        cells: dict[tuple[str, str], str | list[Link]] = {("", key): f"{row[key]}" for key in named}
        cells["", "weights and training"] = f"{weights_label(row['weights'])} untrained" if untrained else _label(row)
        seeds: dict[int, str] = {}
        for dataset in datasets:
            of_arm = links.get((*(row[key] for key in paths.KEY), dataset), {})
            seeds = of_arm | seeds
            for measure, heading in _SHOWN.items():
                text = cell_text(row, f"{dataset}/{measure}", MEASURES[measure][1])
                cells[dataset, heading] = [Link(text, next(iter(of_arm.values()), ""))]
        notes = dict.fromkeys(row[f"{dataset}/note"] for dataset in datasets)
        cells["", "seeds"] = [] if untrained else [Link(str(seed), seeds[seed]) for seed in sorted(seeds)]
        cells["", "note"] = "; ".join(note for note in notes if isinstance(note, str) and note)
        rows.append(cells)
    blocks = [*(table["model"] + "/" + table["experiment"])]
    for _, of_pair in differences.groupby(paths.KEY, sort=False) if len(differences) else ():
        pair = of_pair.to_dict("records")
        cells = {("", key): f"{pair[0][key]}" for key in named}
        cells["", "weights and training"] = " − ".join(map(_label, (pair[0], pair[0]["base"])))
        for one in pair:
            cells[one["dataset"], _SHOWN["delta_format"]] = cell_text(one, "difference", points)
        rows.append(cells)
        blocks.append("differences")
    return html_table(caption, pd.DataFrame(rows, columns=[*rows[0]]).fillna(""), pd.Series(blocks))


def _label(arm: Mapping[Any, Any]) -> str:
    return f"{weights_label(arm['weights'])} {training_label(arm['training'])}"


def sentences(evaluations: pd.DataFrame, table: pd.DataFrame, differences: pd.DataFrame) -> list[str]:
    """What the main table says of NVFP4 on its first data set, or of its first pair of arms without NVFP4."""
    if not len(differences):
        return []
    first = differences[differences["dataset"] == evaluations["dataset"].iloc[0]]
    pairs = [pair for pair in first.to_dict("records") if pair["weights"] == "nvfp4"] or first.to_dict("records")[:1]
    row_of = {tuple(row[key] for key in paths.KEY): row for row in table.to_dict("records")}

    def score(arm: Mapping[Any, Any]) -> str:
        text = cell_text(row_of[tuple(arm[key] for key in paths.KEY)], f"{arm['dataset']}/accuracy", percent)
        return f"{_label(arm)} solves {text.replace(' [', ' % [')}"

    said = []
    for pair in pairs:
        contains = "contains 0" if pair["difference_low"] <= 0 <= pair["difference_high"] else "excludes 0"
        between = cell_text(pair, "difference", points).replace(" [", " points [")
        said.append(
            f"On {pair['dataset']}, {score(pair)} and {score(pair['base'])}: "
            f"a difference of {between}, whose interval {contains}."
        )
    return said


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

    def address(*place: str) -> str:
        """The address of the samples of a run, or of an evaluation and one of its data sets; empty without a page."""
        return f"{job.samples}#{'/'.join(map(quote, place))}" if job.samples else ""

    main, methods, said = None, {}, []
    if job.main:
        table = pd.read_csv(job.main, dtype=dict.fromkeys(paths.KEY, str)).fillna(dict.fromkeys(paths.KEY, ""))
        differences = trained_differences(stored)
        main = main_table("Accuracy by weight format and training", table, stored.evaluations, differences, address)
        said = sentences(stored.evaluations, table, differences)
        methods["Evaluation"] = scoring_table(result for _, result in stored.evaluation_results)
    methods |= settings_tables([run for _, run in stored.run_results])
    missing, runs = missing_table(stored), run_cost_table(stored, address, job.out.parent)
    pages = [page for path in job.tables for page in (sorted(path.glob("*.html")) if path.is_dir() else [path])]
    values: dict[str, Any] = {
        "name": job.name,
        "title": f"Results of {job.name}",
        "samples": job.samples,
        "main": main,
        "first_figures": first,
        "sentences": said,
        "made": _made(stored),
        "state": _state(stored, len(missing)),
        "missing": html_table("Each with its reason", missing) if len(missing) else None,
        "methods": [html_table(caption, shown) for caption, shown in methods.items() if len(shown)],
        "runs": html_table("Runs and their cost", runs) if len(runs) else None,
        "machine": html_table("Where and when the results were made", stamp_table(stored.paths)),
        "figures": figures[len(first) :],
        "tables": [(fragment(page.read_text(encoding="utf-8")), _downloads(page, job.out.parent)) for page in pages],
    }
    made = {
        "missing": "What failed",
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


def _made(stored: StoredResults) -> str:
    """Models, days, machines, commits and hours of training, in a line; empty without runs."""
    if not stored.run_results:
        return ""
    runs = stored.runs
    days = sorted({run.provenance.time[:10] for _, run in stored.run_results})
    hours = runs["seconds"].sum() / 3600 if "seconds" in runs else 0.0
    named = [
        ", ".join(dict.fromkeys(map(paths.without_folders, runs[name]))) for name in ("model", "machine", "commit")
    ]
    when = " to ".join(dict.fromkeys([days[0], days[-1]]))
    return f"{named[0]}; {three_digits(hours)} hours of training on {named[1]}, {when}, commit {named[2]}."


def _downloads(page: Path, root: Path) -> list[Link]:
    """Links to the files of a table in other formats."""
    return _links({end: page.with_suffix(f".{end}") for end in ("csv", "md", "tex")}, root)


def _state(stored: StoredResults, missing: int) -> str:
    runs, evaluations = len(stored.run_results), len(stored.named(paths.RESULT))
    counts = {"run": runs, "evaluation": evaluations, "result file": len(stored.paths)}
    done = ", ".join(f"{count:,} {what}{'s' * (count != 1)}" for what, count in counts.items() if count)
    if not runs:
        return f"{done}. Tables say why a point has no number."
    return f"{done}. " + (f"{missing} failed." if missing else "Nothing failed.")


def _stems(figures: Sequence[Path]) -> list[Path]:
    """Paths of figures without their endings; figures of a folder are in the order of their names."""
    stems: list[Path] = []
    for path in figures:
        inner = sorted(path.glob(f"*{paths.NARROW}")) if path.is_dir() else [Path(f"{path}{paths.NARROW}")]
        stems += [file.with_name(file.name.removesuffix(paths.NARROW)) for file in inner]
    return stems


def _figure(stem: Path) -> dict[str, Any]:
    """A figure: its two layouts as data URIs, its caption, and whether it has curves of training."""
    wide, narrow = (Path(f"{stem}{end}").read_text(encoding="utf-8") for end in (".svg", paths.NARROW))
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
        "of_runs": stem.name in {*CURVES, *CURVE_FIGURES, "noise"},
    }
