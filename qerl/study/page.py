"""The page of a study, made from its Parquet files alone, with its tables as CSV and its figures beside it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from qerl.host.provenance import write_text
from qerl.jobs import PageJob
from qerl.report.format import cell_text, percent, points
from qerl.results.paths import STUDY_FILES
from qerl.results.store import ResultError
from qerl.results.study_data import BASE, MAIN, Study, read_studies
from qerl.study import figures
from qerl.study.arms import (
    MOST_PAIRS,
    STEP_MEANS,
    arm_table,
    equal_rate_table,
    failed_runs,
    pass_curves,
    power_table,
    rate_table,
    run_table,
    used_rates,
)
from qerl.study.comparisons import (
    CEILING,
    LEAST,
    LEAST_AT_64,
    MOST,
    SCORE,
    TOLERANCE,
    Outcome,
    all_outcomes,
    arm_label,
    calibration_table,
    claim_table,
    comparison_table,
    decision_table,
    follower_table,
    label,
    pair_table,
    secondary_table,
    trend_table,
)
from qerl.study.outcomes import LEVEL, MISMATCH, NUMBERS, PRIMARY
from qerl.study.parts import Columns, Row, column, number, p_value, section, signed, table

#: The page, and the folder of its tables and figures beside it.
STUDY_PAGE = "exploration.md"
STUDY_PARTS = "exploration"

# Figures and tables beside the page.


def figure(name: str, caption: str) -> str:
    """A figure with its caption."""
    return f"![{caption}]({STUDY_PARTS}/{name}.png)\n\n{caption}."


def link(name: str, words: str) -> str:
    """A link to a table beside the page."""
    return f"[{words}]({STUDY_PARTS}/{name}.csv)"


# The sections of a study's page on what stands behind its results: rates, power, calibration, failures, data.


def rates_section(tried: pd.DataFrame, used: pd.DataFrame) -> str:
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


def power_section(frame: pd.DataFrame, compared: pd.DataFrame) -> str:
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


def calibration_section(frame: pd.DataFrame) -> str:
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


def failures_section(failed: pd.DataFrame, compared: pd.DataFrame) -> str:
    """The runs that failed."""
    title = "## Runs that failed"
    if not len(failed):
        return section(title, "No run failed.")
    unstable = sorted({name for names in compared["unstable"] for name in names.split(", ") if name})
    marked = f"Over one in six runs diverged of {', '.join(unstable)}: unstable at the rate." if unstable else ""
    columns = {name: column(name) for name in ("run", "status", "reason")}
    return section(title, "The pairs of these runs are left out.", marked, table(failed, columns))


def real_section(job: PageJob, spread: pd.DataFrame) -> str:
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


def data_section(study: Study, files: Sequence[Path]) -> str:
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


# The sections of a study's page with its results, as Markdown.

PROTOCOL = Path("docs/exploration-protocol.md")
_PIPELINE = (
    "> **This is a run of the pipeline, and no result about the question.** Its policies and runs are too small and "
    "too few. The page shows only that every table and figure can be made."
)
_LIMITS = "Policies of some million parameters aren't Qwen2.5-7B. A sentence holds for these policies and tasks."
_REAL = "The trend between sizes and the list of real models below say what would decide the question there."
_BY_PILOT = (
    "Each arm has the learning rate that the pilot chose for it by pass@1: the lowest within half a point of the best, "
    "by one run a base. A difference between arms with two rates is that of both, and may come from the rate alone, in "
    f"pass@k for larger k above all ({link('rates', 'scores at all tried rates')})."
)


def head_section(study: Study, job: PageJob) -> str:
    """The title, what the page is, and its limits."""
    protocol = os.path.relpath(PROTOCOL, job.out)
    runs = study.runs[study.runs["role"] == MAIN]
    counts = {"run": len(runs), "arm": runs["arm"].nunique(), "base": runs["model"].nunique()}
    count = ", ".join(f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items())
    return section(
        "# Does quantization noise teach anything?",
        "" if study.header.decides else _PIPELINE,
        f"This page compares arms by {count}. [The protocol]({protocol}) states what is compared, how, and what "
        "follows from which outcome. Its first version was committed before the runs. [Each change since]"
        f"({protocol}#changes-after-the-first-run) is listed there, with the runs that were replaced. The workflow "
        "makes this page from the stored data alone.",
        f"{_LIMITS} {_REAL}" if job.real else _LIMITS,
    )


def decisions_section(frame: pd.DataFrame) -> str:
    """The sentence that follows from each outcome."""
    columns: Columns = {
        "size": column("size"),
        "task": column("task"),
        "measure": column("measure"),
        "sentence by the protocol's rules": column("sentence"),
        "controls without their entropy": lambda row: row["astray"] and f"arms {row['astray']}",
        "runs of arm 11 equal to arm 2": lambda row: str(row["placebos"]) if row["placebos"] else "not run yet",
        "runs": lambda row: link(f"pairs-{row['experiment']}", "pairs"),
    }
    provisional = (
        "By the protocol nothing is compared before arm 11, whose noise is zero, repeats arm 2 to the bit. Where arm "
        "11 has not run yet, the sentence is provisional."
    )
    return section(
        "## What came out",
        table(frame, columns),
        f"{link('decisions', 'The table as CSV')}.",
        "" if frame["placebos"].all() else provisional,
    )


def comparisons_section(frame: pd.DataFrame, tried: pd.DataFrame) -> str:
    """The primary comparisons, with those of the mismatch; `tried` are the learning rates of the pilot."""
    names = "; ".join(f"{label(name)} is {arm} less {other}" for name, (arm, other) in PRIMARY.items())
    others = " and ".join(map(label, MISMATCH))
    lacking = [NUMBERS[arm] for name, (arm, _) in MISMATCH.items() if name not in set(frame["comparison"])]
    untried = f"Without runs of arms {' and '.join(lacking)}, they tell nothing yet. " if lacking else ""
    columns: Columns = {
        "size": column("size"),
        "task": column("task"),
        "measure": column("measure"),
        "comparison": lambda row: label(row["comparison"]),
        "difference (points)": number("difference", points),
        "p": number("p", p_value),
        "p, Holm": number("p_holm", p_value),
        "bases, pairs": lambda row: f"{row['bases']}, {row['pairs']}",
        "rates": column("rates"),
        "holds": _holds,
        "lost pairs": lambda row: str(row["lost_pairs"]) + (f", unstable: {row['unstable']}" * bool(row["unstable"])),
        "runs": lambda row: link(f"pairs-{row['experiment']}", "pairs"),
    }
    return section(
        "## Primary comparisons",
        f"{names}.",
        "Differences are paired by base, seed and problem. Brackets have 95 % intervals of the hierarchical bootstrap "
        "over bases, seeds and problems. p is two-sided, and corrected by Holm's method over the five comparisons of "
        f"an outcome. {others} belong to no family and tell a mismatch. {untried}The link of a row leads to its pairs, "
        f"and the names there to {link('runs', 'the runs with their stamps')}. "
        f"{link('comparisons', 'The table in full precision')}.",
        f"Intervals rest on {frame['bases'].max()} bases. Where these differ, intervals are too narrow and p values "
        "too small. The protocol has the simulated coverage.",
        _BY_PILOT if len(tried) else "",
        table(frame, columns),
        figure("forest", "Differences of the compared arms with 95 % intervals; the grey band is ±2 points"),
    )


def _holds(row: Row) -> str:
    if row["holds"] is None:
        return "–"
    below = row["p_holm"] < LEVEL and row["difference"] < 0
    said = "yes" if row["holds"] else "no, the opposite" if below else "no"
    return said + ("" if row["controlled"] else ", control off")


def followers_section(frame: pd.DataFrame) -> str:
    """Whether arms with a thermostat had the entropy that they follow."""
    if not len(frame):
        return ""
    columns: Columns = {
        "experiment": column("experiment"),
        "arm": lambda row: arm_label(row["arm"]),
        "follows arm": lambda row: arm_label(row["followed"]),
        "pairs": column("pairs"),
        "entropy of sampler": number("entropy"),
        "wanted": number("wanted"),
        "ratio (of single pairs)": lambda row: f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})",
        "temperatures": lambda row: f"{row['coldest']:.2f} to {row['hottest']:.2f}",
        "gain, steps averaged": lambda row: (
            f"{row['gain']:g}, " + (f"{row['average_steps']:g}" if row["average_steps"] else "–")
        ),
        "has the entropy": lambda row: "yes" if row["follows"] else "no",
    }
    return section(
        "### Do the controls of entropy have the entropy?",
        "Arms 3 and 9 tell exploration from entropy only if their samplers have the entropy of the arm that they "
        f"follow. The mean over steps and pairs of runs may differ by {TOLERANCE:.0%}. Where it differs more, the "
        "comparisons with the arm are shown, and support no sentence. "
        f"{link('followers', 'The table in full precision')}.",
        table(frame, columns),
    )


def equal_rates_section(frame: pd.DataFrame) -> str:
    """The primary comparisons at equal learning rates."""
    if not len(frame):
        return ""
    columns: Columns = {
        "pilot": column("pilot"),
        "measure": column("measure"),
        "comparison": lambda row: label(row["comparison"]),
        "difference (points)": number("difference", points),
        "p (uncorrected)": number("p", p_value),
        "pairs": column("pairs"),
    }
    return section(
        "### At equal learning rates",
        "The pilot tried the same rates in every arm, with one run a base. Here its runs are paired by base, rate and "
        "validation problem, and the rates count equally. This analysis was added after the main runs were seen. It "
        "tells what may come from two rates, and decides nothing. "
        f"{link('equal_rates', 'The table in full precision')}.",
        table(frame, columns),
    )


def claims_section(frame: pd.DataFrame) -> str:
    """The paper's claims beside the estimates."""

    def difference(row: Row) -> str:
        is_score = row["measure"] == SCORE
        return cell_text(row, "difference", points if is_score else signed) + (" points" if is_score else "")

    columns: Columns = {
        "claim of the paper": column("claim"),
        "printed, GSM8K (points)": lambda row: row["printed"] or "–",
        "measure": column("measure"),
        "size": column("size"),
        "task": column("task"),
        "estimate": difference,
        "p": lambda row: cell_text(row, "p", p_value) + ("" if row["corrected"] else " (uncorrected)"),
        "pairs": column("pairs"),
        "rates": column("rates"),
        "so the claim": column("says"),
    }
    return section(
        "## Claims of the paper",
        "Entropy (nats per token) and reward are means over all steps of a run. They are secondary: their p values are "
        "uncorrected, and they decide nothing. They depend on the learning rate, so an estimate with two rates doesn't "
        "isolate the noise. p of pass@1 is Holm's where the pair is a primary comparison. The "
        "printed numbers are differences of single runs in the paper's Table 1. "
        f"{link('claims', 'The table in full precision')}.",
        table(frame, columns),
    )


def arms_section(frame: pd.DataFrame, secondary: pd.DataFrame) -> str:
    """The secondary measures by arm."""
    measured = [name for name in ("distinct", *STEP_MEANS.values(), "largest sigma") if name in frame]
    passes = [name for name in frame if str(name).startswith("pass@")]
    columns: dict[str, Callable[[Row], str]] = {
        "arm": lambda row: arm_label(row["arm"]),
        "runs": lambda row: f"{row['runs']}" + (f", {row['failed']:.0f} failed" if row["failed"] else ""),
        **{f"{name} (%)": number(str(name), percent) for name in passes},
        **{name: number(name) for name in measured},
    }
    parts = []
    for (size, task), rows in frame.groupby(["size", "task"], sort=False):
        parts += [f"### {size}, {task}", table(rows, columns)]
    return section(
        "## Measures by arm",
        "Scores are of test problems after the last step, all others means over steps. Bases count equally. They "
        f"explain and decide nothing. {link('arms', 'The table in full precision')}.",
        *parts,
        figure(
            "entropy_reward",
            "Entropy against reward: a small dot for each run, a large one with its number for each arm",
        ),
        figure("reward", "Reward by step: the mean over the runs of each arm, smoothed"),
        figure("pass_at_k", "pass@k on test problems by arm; dotted: the untrained bases"),
        _secondary(secondary) if len(secondary) else "",
    )


def _secondary(frame: pd.DataFrame) -> str:
    columns: Columns = {
        "size": column("size"),
        "task": column("task"),
        "measure": column("measure"),
        "comparison": lambda row: f"{label(row['comparison'])}: {row['arm']} less {row['other']}",
        "difference (points)": number("difference", points),
        "p (uncorrected)": number("p", p_value),
        "pairs": column("pairs"),
    }
    return section(
        "### The other arms", "These comparisons are uncorrected. They decide nothing.", table(frame, columns)
    )


def trend_section(frame: pd.DataFrame, drawn: set[str]) -> str:
    """The comparisons by size."""
    title = "## Trend between the sizes"
    if "trend" not in drawn:
        return section(title, "There is one size, and so no trend.")
    sizes = [str(column).removesuffix("_low") for column in frame if str(column).endswith("_low")]
    columns: dict[str, Callable[[Row], str]] = {
        "task": column("task"),
        "measure": column("measure"),
        "comparison": lambda row: label(row["comparison"]),
        **{f"{size} (points)": number(size, points) for size in sizes},
    }
    picture = figure("trend", "Primary comparisons by size with 95 % intervals")
    return section(title, "The trend decides nothing.", table(frame, columns), picture)


# The page of a study, made from its Parquet files alone, with its tables as CSV and its figures beside it.


@dataclass(frozen=True)
class Tables:
    """All tables of a page, in full precision."""

    decisions: pd.DataFrame
    comparisons: pd.DataFrame
    followers: pd.DataFrame
    equal_rates: pd.DataFrame
    secondary: pd.DataFrame
    claims: pd.DataFrame
    arms: pd.DataFrame
    rates: pd.DataFrame
    used_rates: pd.DataFrame
    power: pd.DataFrame
    trend: pd.DataFrame
    curves: pd.DataFrame
    calibration: pd.DataFrame
    failed: pd.DataFrame
    runs: pd.DataFrame


def write_page(job: PageJob) -> None:
    """Write the page to `job.out`, and its tables and figures to a folder beside it."""
    study = read_studies(job.data)
    primary = all_outcomes(study)
    if not primary:
        folders = " and ".join(map(str, job.data))
        raise ResultError(
            f"the data in {folders} has no outcome of a main run on test problems, so there is nothing to compare"
        )
    tables = make_tables(study, primary)
    parts = job.out / STUDY_PARTS
    shutil.rmtree(parts, ignore_errors=True)
    _write_tables(tables, primary, parts)
    drawn = _draw(study, primary, tables, parts)
    write_text(job.out / STUDY_PAGE, _page(job, study, tables, drawn))


def make_tables(study: Study, primary: Sequence[Outcome]) -> Tables:
    """The tables of a study."""
    return Tables(
        decisions=decision_table(primary),
        comparisons=comparison_table(primary, study.runs),
        followers=follower_table(study),
        equal_rates=equal_rate_table(study),
        secondary=secondary_table(primary),
        claims=claim_table(study, primary),
        arms=arm_table(study),
        rates=rate_table(study),
        used_rates=used_rates(study),
        power=power_table(study),
        trend=trend_table(primary),
        curves=pass_curves(study),
        calibration=calibration_table(study),
        failed=failed_runs(study),
        runs=run_table(study),
    )


def _write_tables(tables: Tables, primary: Sequence[Outcome], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, frame in vars(tables).items():
        if len(frame):
            frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g")
    by_experiment: dict[str, list[pd.DataFrame]] = {}
    for outcome in primary:
        by_experiment.setdefault(outcome.experiment, []).append(pair_table(outcome))
    for experiment, frames in by_experiment.items():
        pd.concat(frames).to_csv(folder / f"pairs-{experiment}.csv", index=False, float_format="%.6g")


def _draw(study: Study, primary: Sequence[Outcome], tables: Tables, folder: Path) -> set[str]:
    """Draw the figures for which there are results; returns their names."""
    makers: dict[str, Callable[[Path], None]] = {
        "forest": lambda stem: figures.forest(primary, stem),
        "entropy_reward": lambda stem: figures.entropy_and_reward(study, stem),
        "reward": lambda stem: figures.rewards(study, stem),
        "pass_at_k": lambda stem: figures.pass_curves(tables.curves, stem),
    }
    if len(tables.rates):
        makers["learning_rates"] = lambda stem: figures.rates(tables.rates, stem)
    if len({outcome.size for outcome in primary}) > 1:
        makers["trend"] = lambda stem: figures.trend(primary, stem)
    for name, draw in makers.items():
        draw(folder / name)
    return set(makers)


def _page(job: PageJob, study: Study, tables: Tables, drawn: set[str]) -> str:
    """The page as Markdown."""
    data = [Path(os.path.relpath(part / name, job.out)) for part in job.data for name in STUDY_FILES]
    sections = [
        head_section(study, job),
        decisions_section(tables.decisions),
        comparisons_section(tables.comparisons, tables.rates),
        followers_section(tables.followers),
        equal_rates_section(tables.equal_rates),
        claims_section(tables.claims),
        arms_section(tables.arms, tables.secondary),
        rates_section(tables.rates, tables.used_rates),
        trend_section(tables.trend, drawn),
        power_section(tables.power, tables.comparisons),
        calibration_section(tables.calibration),
        failures_section(tables.failed, tables.comparisons),
        real_section(job, tables.power),
        data_section(study, data),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"
