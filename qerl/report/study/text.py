"""The sections of a study's page with its results, as Markdown."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from qerl.jobs.study import PageJob
from qerl.report.exploration import LEVEL, MISMATCH, NUMBERS, PRIMARY
from qerl.report.formatting import cell_text, percent, points
from qerl.report.study.arms import STEP_MEANS
from qerl.report.study.claims import SCORE
from qerl.report.study.comparisons import arm_label, label
from qerl.report.study.followers import TOLERANCE
from qerl.report.study.parts import (
    Columns,
    Row,
    column,
    figure,
    link,
    number,
    p_value,
    section,
    signed,
    table,
)
from qerl.results.schema.study import MAIN
from qerl.results.study import Study

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


def head(study: Study, job: PageJob) -> str:
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


def decisions(frame: pd.DataFrame) -> str:
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


def comparisons(frame: pd.DataFrame, tried: pd.DataFrame) -> str:
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


def followers(frame: pd.DataFrame) -> str:
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


def equal_rates(frame: pd.DataFrame) -> str:
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


def claims(frame: pd.DataFrame) -> str:
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


def arms(frame: pd.DataFrame, secondary: pd.DataFrame) -> str:
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


def trend(frame: pd.DataFrame, drawn: set[str]) -> str:
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
