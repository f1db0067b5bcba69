"""The sections of a study's page on what stands behind its results: rates, power, calibration, failures, data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from qerl.jobs.study import PageJob
from qerl.report.exploration import MISMATCH, NUMBERS, PRIMARY
from qerl.report.formatting import percent, points
from qerl.report.study.arms import MOST_PAIRS
from qerl.report.study.calibration import CEILING, LEAST, LEAST_AT_64, MOST
from qerl.report.study.comparisons import arm_label
from qerl.report.study.parts import Columns, Row, column, figure, link, number, section, table
from qerl.results.schema.study import BASE
from qerl.results.study import Study


def rates(tried: pd.DataFrame, used: pd.DataFrame) -> str:
    """The learning rates of the pilot and of the main runs."""
    title = "## Learning rates"
    experiments = {str(name): column(str(name)) for name in used if name != "arm"}
    of_runs = table(used, {"arm": lambda row: arm_label(row["arm"]), **experiments})
    if not len(tried):
        return section(title, "There was no pilot. The rates are those of the configuration.", of_runs)
    chosen = tried[tried["chosen"]]
    columns: Columns = {
        "pilot": column("experiment"),
        "arm": lambda row: arm_label(row["arm"]),
        "chosen rate": lambda row: f"{row['rate']:g}" + (" (at the edge of those tried)" if row["edge"] else ""),
        "pass@1, validation (%)": number("value", percent),
        "bases": column("bases"),
    }
    return section(
        title,
        "The pilot chooses the lowest rate within half a point of the best mean pass@1 on validation problems. "
        f"{link('rates', 'All tried rates')}.",
        table(chosen, columns),
        figure("learning_rates", "pass@1 on validation problems by learning rate; a large dot is the chosen rate"),
        "Rates of the main runs:",
        of_runs,
    )


def power(frame: pd.DataFrame, compared: pd.DataFrame) -> str:
    """The spread of pairs and the number of pairs that it needs."""
    title = "## Power"
    counts = sorted({compared["pairs"].min(), compared["pairs"].max()})
    least = f"The number of pairs of a comparison above is {' to '.join(map(str, counts))}."
    if not len(frame):
        return section(title, f"{least} Without a pilot, nothing tells how many an effect of 2 points needs.")
    columns: Columns = {
        "pilot": column("pilot"),
        "spread of pairs (SD, points)": number("spread", percent),
        "pairs needed for 2 points": column("pairs"),
        f"effect found by {MOST_PAIRS} pairs (points)": number("found", percent),
        "intervals": lambda row: "too narrow, if the spread is that of bases" if row["too_narrow"] else "wide enough",
    }
    method = (
        "The spread is the largest of the primary comparisons in pass@1 of validation problems, at the chosen rates. "
        "Each base has one run in the pilot, so the spread is of three pairs, and has the differences of bases and of "
        f"seeds. Power is 80 % at the level of 5 %. {link('power', 'The table in full precision')}."
    )
    return section(title, f"{least} {method}", table(frame, columns))


def calibration(frame: pd.DataFrame) -> str:
    """Whether the conditions of the calibration hold."""
    if not len(frame):
        return ""
    ks = "/".join(map(str, sorted(set(frame["k"]))))
    columns: Columns = {
        "size": column("size"),
        "task": column("task"),
        "base": column("base"),
        "pass@1 before (%)": number("pass@1", percent),
        f"pass@{ks} before (%)": number("many", percent),
        "late rise (points)": number("rise", points),
        "best arm, pass@1 (%)": number("best", percent),
        "conditions": lambda row: "met" if row["met"] else "not met",
    }
    return section(
        "## Calibration",
        f"Before training, pass@1 on validation problems is to be {LEAST:.0%} to {MOST:.0%} and pass@64 at least "
        f"{LEAST_AT_64:.0%}. The share of right answers of arm 1 is to rise from the third to the last quarter of the "
        f"steps, here of its main runs. No arm is to be above {CEILING:.0%}. Bases whose untrained scores aren't "
        f"stored have no row. {link('calibration', 'The table in full precision')}.",
        table(frame, columns),
    )


def failures(failed: pd.DataFrame, compared: pd.DataFrame) -> str:
    """The runs that failed."""
    title = "## Runs that failed"
    if not len(failed):
        return section(title, "No run failed.")
    unstable = sorted({name for names in compared["unstable"] for name in names.split(", ") if name})
    marked = f"Over one in six runs diverged of {', '.join(unstable)}: unstable at the rate." if unstable else ""
    columns = {name: column(name) for name in ("run", "status", "reason")}
    return section(title, "The pairs of these runs are left out.", marked, table(failed, columns))


def real(job: PageJob, spread: pd.DataFrame) -> str:
    """The arms of real models that would decide the question, with their cost."""
    if not job.real:
        return ""
    counts = sorted({count for arm in job.real for count in arm.hours})
    columns: dict[str, Callable[[Row], str]] = {
        "experiment": column("experiment"),
        "arm": lambda row: f"{row['number']} {row['arm']}",
        "seeds now": column("seeds"),
        **{f"{n} seed{'s' * (n > 1)} (h)": _hours(n) for n in counts},
    }
    frame = pd.DataFrame([arm.model_dump() for arm in job.real])
    compared = {NUMBERS[arm] for pair in (*PRIMARY.values(), *MISMATCH.values()) for arm in pair}
    lacking = {
        str(name): sorted(compared - set(rows["number"])) for name, rows in frame.groupby("experiment", sort=False)
    }
    needed = f"By the spread found here, 2 points need {spread['pairs'].max()} pairs." if len(spread) else ""
    return section(
        "## What would decide it on real models",
        f"`{job.real_file}` has these arms. Hours are those of one {job.machine}, training and evaluation together, as "
        "`qerl plan` computes them: upper limits, and estimates after ~. The protocol asks for 12 to 21 pairs. "
        f"{needed}",
        table(frame, columns),
        "\n".join(f"* `{name}` lacks arms {', '.join(numbers)}." for name, numbers in lacking.items() if numbers),
        "A follower (arms 3 and 9) costs what the arm of its weights does, since a thermostat adds no token. Without "
        "arms 3 and 9, exploration can't be told from temperature.",
    )


def _hours(seeds: int) -> Callable[[Row], str]:
    return lambda row: str(row["hours"].get(seeds, "–"))


def data(study: Study, files: Sequence[Path]) -> str:
    """The files behind the numbers, and their stamps."""
    trained = study.runs[study.runs["role"] != BASE]
    stamps = trained.groupby(["commit", "machine"], sort=False).agg(
        runs=("run", "count"), first=("time", "min"), last=("time", "max")
    )
    header = study.header
    gathered = header.provenance
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(file.parent.name, []).append(f"[{file.name}]({file.as_posix()})")
    return section(
        "## The data behind the numbers",
        "The files of a folder have a row for each run, each step and each problem of an evaluation. "
        f"{link('runs', 'The table of runs')} has the stamp of each training and evaluation.",
        "\n".join(f"* {name}: {', '.join(links)}" for name, links in folders.items()),
        table(stamps.reset_index(), {name: column(name) for name in ("commit", "machine", "runs", "first", "last")}),
        f"The data of `{header.study}` was gathered at commit {gathered.columns['commit']}, {gathered.time}.",
    )
