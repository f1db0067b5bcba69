"""The verdict of a gate: its rows, the collected measurements, and their comparison with a baseline."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from qerl.gates.baselines import any_baseline, own_baseline
from qerl.jobs import VerdictJob
from qerl.report.format import page
from qerl.results.paths import (
    MEASURED,
    METRICS,
    NUMERICS,
    PROFILE,
    RESULT,
    RUN,
    SAMPLES,
    SPEED,
    STORED,
    VERDICT,
    VERDICT_TABLE,
)
from qerl.results.schema import (
    Baseline,
    Check,
    EvaluationResult,
    GateMeasurements,
    NumericsResult,
    Outcome,
    RunResult,
    SampleRow,
    SpeedResult,
    StepMetrics,
    StoredPolicyResult,
    Verdict,
    VerdictResult,
)
from qerl.results.speeds import RolloutBenchResult
from qerl.results.statistics import paired_ratio_interval
from qerl.results.store import read, read_rows, write
from qerl.settings.base import ConfigError, Settings, parse
from qerl.settings.workflow import GateSettings

# The gates as data: rows of a tab-separated file.

COLUMNS = ("gate", "metric", "check", "limit", "why")


class Gate(Settings):
    """One gate; the meaning and unit of `limit` depend on `check` (docs/gates.md)."""

    gate: Annotated[str, Field(min_length=1)]
    metric: Annotated[str, Field(min_length=1)]
    check: Check
    limit: float
    why: Annotated[str, Field(min_length=1)]


def read_gates(file: Path) -> list[Gate]:
    """The rows of a file of gates. A `ConfigError` names an invalid line."""
    if not file.is_file():
        raise ConfigError(f"file of gates {file} doesn't exist")
    with file.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", strict=True)
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise ConfigError(f"{file} must begin with the columns {', '.join(COLUMNS)}, separated by tabs")
        gates = [_gate(row, f"{file}, line {rows.line_num}") for row in rows]
    names = [gate.gate for gate in gates]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{file} has two gates called {twice[0]!r}; rename one")
    return gates


def _gate(row: dict[str, str], where: str) -> Gate:
    if None in row or None in row.values():
        raise ConfigError(f"{where}: a row has {len(COLUMNS)} columns, separated by tabs")
    return parse(Gate, row, where)


# The metrics that gates judge, collected from the stored results of one configuration.

#: Columns of metrics.jsonl that are equal, bit for bit, in two runs of the same code on the same machine.
GOLDEN = ("loss", "reward", "grad_norm")


def collect(key: str, files: Sequence[Path]) -> GateMeasurements:
    """The metrics of result files, whose kinds follow from the names and folders that the workflow gives them."""
    [bench] = [read(RolloutBenchResult, file) for file in files if file.parent.name == PROFILE]
    [numerics] = [read(NumericsResult, file) for file in files if file.name == NUMERICS]
    [speed] = [read(SpeedResult, file) for file in files if file.name == SPEED]
    values, series = dict(numerics.values), dict[str, list[float]]()
    for file in files:
        if file.name == RUN:
            run, steps = read(RunResult, file), list(read_rows(StepMetrics, file.with_name(METRICS)))
            values |= _of_run(run, steps)
            series |= {f"{column}/{_name(run)}": [getattr(step, column) for step in steps] for column in GOLDEN}
    evaluations = [file for file in files if file.name == RESULT]
    stored = [file for file in evaluations if file.parent.parent.name == STORED]
    # Seconds per token, each paired with those of bf16, or of the baseline's code, that were measured next to them.
    points = {(point.weights, point.rank): [1 / rate for rate in point.samples] for point in bench.points}
    ratios = {
        f"{weights}-to-bf16/rank={rank}": (seconds, points["bf16", rank])
        for (weights, rank), seconds in points.items()
        if weights != "bf16"
    }
    ratios |= {f"{workload}-to-baseline": (pairs.now, pairs.baseline) for workload, pairs in speed.samples.items()}
    trained = {file: read(EvaluationResult, file) for file in evaluations if file not in stored}
    return GateMeasurements(
        key=key,
        values=values | {f"evaluation-noise/{_name(result)}": result.noise_norm for result in trained.values()},
        series=series,
        accuracies=_accuracies(trained),
        completions={f"{STORED}/{read(StoredPolicyResult, file).stored}": _completions(file) for file in stored},
        ratios=ratios,
        compared_with=speed.baseline,
        provenance=speed.provenance,
    )


def _name(result: RunResult | EvaluationResult) -> str:
    """The arm with the varied keys of the grid, such as "nvfp4-lora" or "nvfp4-lora/seed=1"."""
    varied = [f"{key}={value}" for key, value in result.varied.items()]
    return "/".join([str(result.arm), *(varied if varied != ["seed=0"] else [])])


def _of_run(run: RunResult, steps: Sequence[StepMetrics]) -> Iterator[tuple[str, float]]:
    """Peak memory in MB, and the KL between sampler and trainer: the largest without noise, the smallest with it."""
    quiet = [step.mismatch_kl for step in steps if not step.noise_sigma]
    noisy = [step.mismatch_kl for step in steps if step.noise_sigma]
    if run.summary and run.summary.peak_memory_bytes:
        yield f"memory/{_name(run)}", run.summary.peak_memory_bytes / 1e6
    if quiet:
        yield f"mismatch/{_name(run)}", max(quiet)
    if noisy:
        yield f"noise/{_name(run)}", min(noisy)


def _accuracies(trained: Mapping[Path, EvaluationResult]) -> dict[str, dict[str, float]]:
    """The accuracies of every arm's runs."""
    accuracies: dict[str, dict[str, float]] = {}
    for file, result in trained.items():
        right = [row.correct for row in _samples(file)]
        varied = ", ".join(f"{key}={value}" for key, value in result.varied.items())
        accuracies.setdefault(f"accuracy/{result.arm}", {})[varied] = sum(right) / len(right)
    return accuracies


def _completions(file: Path) -> dict[str, str]:
    completions = {}
    for row in _samples(file):
        digest = hashlib.sha256(row.completion.encode(errors="surrogatepass")).hexdigest()[:8]
        completions[f"{row.dataset} {row.problem} {row.repeat}"] = f"{digest} {row.correct}"
    return completions


def _samples(file: Path) -> Iterator[SampleRow]:
    """The completions beside a result.json."""
    return read_rows(SampleRow, file.with_name(SAMPLES))


# The verdict of a gate, from the measurements and a baseline.
#
# | check | fails if |
# |---|---|
# | `at-most`, `at-least` | the number is beyond `limit` |
# | `ratio-at-most` | the whole 95 % interval of the ratio of times is above `limit` |
# | `growth` | the number is more than `limit` above the baseline's |
# | `paired` | the runs' mean accuracy differs by more than `limit` from that of the baseline's runs with the same
# seeds |
# | `same` | a completion of a stored policy, or its verdict, isn't the baseline's; elsewhere than on its machine class
# and versions: of more than the share `limit` |
# | `golden` | the series differs from the baseline's; elsewhere than on its machine class and versions: by more than
# the share `limit` in the first steps |
#
# The last three are two-sided, the others one-sided. Without a number to compare with, the verdict is "no baseline",
# which is never a pass.

#: The first steps, which are comparable with another machine's; later, rounding has led to other completions.
EARLY_STEPS = 2


@dataclass(frozen=True)
class Baselines:
    """The baselines of this workload: `same_machine` of this machine class, `other` of any machine."""

    same_machine: Baseline | None
    other: Baseline | None

    def any_of(self, metric: str, kind: str) -> Any:
        """A metric of the baseline of this machine class, or else of any machine; None without a baseline."""
        baseline = self.same_machine or self.other
        return getattr(baseline.measured, kind).get(metric) if baseline else None

    def same_versions(self, measured: GateMeasurements) -> bool:
        """Whether the baseline of this machine class exists and has the same versions of all libraries."""
        return (
            self.same_machine is not None
            and self.same_machine.measured.provenance.versions == measured.provenance.versions
        )


def judge(gate: Gate, measured: GateMeasurements, baselines: Baselines) -> Verdict:
    """The verdict of one gate. A gate whose metric wasn't measured fails, for every check."""
    identity = {"gate": gate.gate, "metric": gate.metric, "check": gate.check, "why": gate.why}
    if gate.metric not in _measured_for(gate.check, measured):
        without = gate.metric.endswith("-to-baseline") and measured.compared_with is None
        outcome = _no_baseline() if without else {"outcome": "fail", "detail": "nothing was measured under this name"}
        return Verdict(**identity, **outcome)  # type: ignore[arg-type]
    return Verdict(**identity, **_CHECKS[gate.check](gate, measured, baselines))  # type: ignore[arg-type]


def overall(verdicts: list[Verdict]) -> Outcome:
    """The worst of all outcomes."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return "fail" if "fail" in outcomes else "no baseline" if "no baseline" in outcomes else "pass"


Finding = dict[str, object]


def _measured_for(check: Check, measured: GateMeasurements) -> Mapping[str, object]:
    kinds: dict[Check, Mapping[str, object]] = {
        "ratio-at-most": measured.ratios,
        "paired": measured.accuracies,
        "same": measured.completions,
        "golden": measured.series,
    }
    return kinds.get(check, measured.values)


def _outcome(passes: bool) -> Outcome:
    return "pass" if passes else "fail"


def _no_baseline(detail: str = "no baseline of this machine and workload") -> Finding:
    return {"outcome": "no baseline", "detail": f"{detail}; `qerl gate accept` makes one"}


def _bounded(gate: Gate, measured: GateMeasurements, _: Baselines) -> Finding:
    now = measured.values[gate.metric]
    passes = now <= gate.limit if gate.check == "at-most" else now >= gate.limit
    return {"outcome": _outcome(passes), "now": now, "limit": gate.limit}


def _ratio_at_most(gate: Gate, measured: GateMeasurements, _: Baselines) -> Finding:
    ratio = paired_ratio_interval(*measured.ratios[gate.metric])
    numbers = {"now": ratio.mean, "low": ratio.low, "high": ratio.high, "limit": gate.limit}
    return {"outcome": _outcome(ratio.low <= gate.limit), **numbers}


def _growth(gate: Gate, measured: GateMeasurements, baselines: Baselines) -> Finding:
    now = measured.values[gate.metric]
    before = baselines.same_machine.measured.values.get(gate.metric) if baselines.same_machine else None
    if before is None:
        return {**_no_baseline(), "now": now}
    limit = before + gate.limit
    return {"outcome": _outcome(now <= limit), "now": now, "baseline": before, "limit": limit}


# The limit of accuracy comes from reruns with other seeds, since the interval of one evaluation omits the variation
# of training. Such a gate detects a broken trainer or grader; the golden series detects small losses, which can't
# occur without a change of numbers.
def _paired(gate: Gate, measured: GateMeasurements, baselines: Baselines) -> Finding:
    now = measured.accuracies[gate.metric]
    mean = float(np.mean(list(now.values())))
    before = baselines.any_of(gate.metric, "accuracies")
    if before is None:
        return {**_no_baseline(), "now": mean}
    if now.keys() != before.keys():
        return {"outcome": "fail", "now": mean, "detail": "other runs were evaluated than in the baseline"}
    differences = [now[run] - before[run] for run in before]
    earlier, difference = float(np.mean(list(before.values()))), float(np.mean(differences))
    # If no completion changed, the difference is exactly 0. It is bounded on both sides, because a lenient grader or a
    # leak of test problems raises accuracy.
    return {
        "outcome": _outcome(abs(difference) <= gate.limit),
        "now": mean,
        "baseline": earlier,
        "limit": earlier + (gate.limit if difference > 0 else -gate.limit),
        "detail": "in points: " + ", ".join(f"{100 * one:+.1f}" for one in differences),
    }


def _same(gate: Gate, measured: GateMeasurements, baselines: Baselines) -> Finding:
    now = measured.completions[gate.metric]
    before = baselines.any_of(gate.metric, "completions")
    if before is None:
        return _no_baseline()
    if now.keys() != before.keys():
        return {"outcome": "fail", "detail": "other problems were asked than in the baseline"}
    share = sum(now[name] != before[name] for name in before) / len(before)
    limit = 0.0 if baselines.same_versions(measured) else gate.limit
    return {"outcome": _outcome(share <= limit), "now": share, "limit": limit, "detail": _flips(before, now)}


def _flips(before: Mapping[str, str], now: Mapping[str, str], shown: int = 4) -> str:
    """A text on the completions that differ, those that became wrong, and those that became right."""
    differing = [name for name in before if before[name] != now[name]]
    if not differing:
        return "equal to the bit"
    lost = [name for name in differing if before[name][-1] > now[name][-1]]
    won = [name for name in differing if before[name][-1] < now[name][-1]]
    named = ", ".join(differing[:shown]) + (", ..." if len(differing) > shown else "")
    return f"{len(differing)} of {len(before)} completions differ, {len(lost)} lost, {len(won)} won: {named}"


def _golden(gate: Gate, measured: GateMeasurements, baselines: Baselines) -> Finding:
    now = measured.series[gate.metric]
    before = baselines.any_of(gate.metric, "series")
    if before is None:
        return _no_baseline()
    if baselines.same_versions(measured):
        return {"outcome": _outcome(now == before), "limit": 0.0, "detail": _first_difference(before, now)}
    early = zip(before[:EARLY_STEPS], now[:EARLY_STEPS], strict=True)
    worst = max(abs(b - a) / max(abs(a), 1e-12) for a, b in early)
    detail = f"another machine or other versions than the baseline's: the first {EARLY_STEPS} steps alone"
    return {"outcome": _outcome(worst <= gate.limit), "now": worst, "limit": gate.limit, "detail": detail}


def _first_difference(before: list[float], now: list[float]) -> str:
    if len(before) != len(now):
        return f"{len(now)} steps, and {len(before)} in the baseline"
    differing = (step for step, pair in enumerate(zip(before, now, strict=True), start=1) if pair[0] != pair[1])
    step = next(differing, None)
    return "equal to the bit" if step is None else f"step {step}: {now[step - 1]!r}, and {before[step - 1]!r} before"


_CHECKS: dict[Check, Callable[[Gate, GateMeasurements, Baselines], Finding]] = {
    "at-most": _bounded,
    "at-least": _bounded,
    "ratio-at-most": _ratio_at_most,
    "growth": _growth,
    "paired": _paired,
    "same": _same,
    "golden": _golden,
}


# Verdicts, which the workflow computes from results and commands show.

_CAPTION = (
    "Regression gates. Each has its baseline, the present measurement and the limit; docs/gates.md explains the checks"
)


def judge_results(job: VerdictJob) -> None:
    """Judge all gates by the results of the workflow's rules."""
    write_verdict(job.settings, collect(job.key, job.results), job.out)


def write_verdict(settings: GateSettings, measured: GateMeasurements, out: Path) -> None:
    """Judge all gates; folder `out` gets measured.json, verdict.json and the table in verdict.html."""
    baseline = own_baseline(settings.baselines, measured.provenance.machine, measured.key)
    baselines = Baselines(baseline, baseline or any_baseline(settings.baselines, measured.key))
    verdicts = [judge(gate, measured, baselines) for gate in read_gates(settings.file)]
    write(out / MEASURED, measured)
    stamp = ". ".join(f"{name.capitalize()}: {text}" for name, text in measured.provenance.columns.items())
    (out / VERDICT_TABLE).write_text(page({"": verdict_table(verdicts)}, f"{_CAPTION}. {stamp}."), encoding="utf-8")
    result = VerdictResult(
        outcome=overall(verdicts),
        key=measured.key,
        baseline=baseline.commit if baseline else None,
        gates=verdicts,
        provenance=measured.provenance,
    )
    write(out / VERDICT, result)


# --- for people ------------------------------------------------------------------------------------------------------


def read_verdicts(file: Path) -> list[Verdict]:
    """The verdicts in a verdict.json."""
    if not file.is_file():
        raise ConfigError(f"{file} doesn't exist; run `snakemake --configfile config/ci.yaml` first")
    return read(VerdictResult, file).gates


def verdict_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row per gate, with gates that don't pass first."""
    order = {"fail": 0, "no baseline": 1, "pass": 2}

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    rows = [
        {
            "gate": verdict.gate,
            "outcome": verdict.outcome if verdict.outcome == "pass" else verdict.outcome.upper(),
            "baseline": number(verdict.baseline),
            "now": number(verdict.now)
            + ("" if verdict.low is None else f" [{number(verdict.low)}, {number(verdict.high)}]"),
            "limit": number(verdict.limit),
            "detail": verdict.detail,
            "why": verdict.why,
        }
        for verdict in sorted(verdicts, key=lambda verdict: order[verdict.outcome])
    ]
    return pd.DataFrame(rows)


def sentence(verdicts: Sequence[Verdict]) -> str:
    """The numbers of gates that fail, have no baseline, and pass, as text."""
    counts = pd.Series([verdict.outcome for verdict in verdicts]).value_counts()
    return ", ".join(f"{counts.get(outcome, 0)} {outcome}" for outcome in ("fail", "no baseline", "pass"))
