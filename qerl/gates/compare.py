"""The verdict of a gate: its rows, the collected measurements, baselines, and the comparison with one."""

from __future__ import annotations

import csv
import hashlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import pandas as pd
from pydantic import Field, model_validator

from qerl.report.format import page
from qerl.report_jobs import VerdictJob
from qerl.results import paths
from qerl.results.schema import (
    OK,
    Check,
    EvaluationResult,
    Machine,
    Outcome,
    Provenance,
    ResultError,
    RunResult,
    Sample,
    SampleRow,
    StepMetrics,
    Stored,
    StoredPolicyResult,
    Verdict,
    VerdictResult,
    read,
    read_rows,
    read_steps,
    write,
)
from qerl.results.speeds import RolloutBenchResult
from qerl.results.statistics import paired_ratio_interval
from qerl.settings.base import ConfigError, Settings, parse
from qerl.settings.workflow import Config, GateSettings

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
    gates: dict[str, Gate] = {}
    with file.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines, delimiter="\t", strict=True)
        try:
            numbered = [(rows.line_num, row) for row in rows]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}, after line {rows.line_num}: this is no table in UTF-8: {error}") from None
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ConfigError(f"{file} must begin with the columns {', '.join(COLUMNS)}, separated by tabs")
    for line, row in numbered:
        where = f"{file}, line {line}"
        if None in row or None in row.values():
            raise ConfigError(f"{where}: a row has {len(COLUMNS)} columns, separated by tabs")
        gate = parse(Gate, row, where)
        if gate.gate in gates:
            raise ConfigError(f"{file} has two gates called {gate.gate!r}; rename one")
        gates[gate.gate] = gate
    if not gates:
        raise ConfigError(f"{file} has no gate, and without one all would pass; add rows")
    return list(gates.values())


# Schemas of the files of measurements: single ones, and all together.


class NumericsResult(Stored):
    """gates/numerics.json: errors of codecs and graders, by name."""

    values: dict[str, float]
    provenance: Provenance


class SpeedPairs(Stored):
    """Seconds per token of this code and of the baseline's, in pairs that were measured one after the other."""

    now: list[Sample]
    baseline: list[Sample]

    @model_validator(mode="after")
    def _are_pairs(self) -> Self:
        if len(self.now) != len(self.baseline):
            raise ValueError(f"times come in pairs, not {len(self.now)} and {len(self.baseline)}")
        return self


class SpeedResult(Stored):
    """gates/speed.json, by workload; it has no samples without a baseline."""

    baseline: str | None
    samples: dict[str, SpeedPairs]
    provenance: Provenance


class GateMeasurements(Stored):
    """gates/measured.json: the metrics of one run of the workload, by name, with their stamp."""

    key: str
    """Key of the workload (`qerl.report_jobs.workload_key`)."""
    values: dict[str, float]
    series: dict[str, list[float]]
    """One number per step."""
    accuracies: dict[str, dict[str, float]]
    """Share of right completions of each arm's trained policies, by the run's seed."""
    completions: dict[str, dict[str, str]]
    """For each completion of each stored policy, a hash of its text and whether it was right."""
    ratios: dict[str, tuple[list[float], list[float]]]
    """Seconds of the judged workload and of the one it is compared with, in pairs of consecutive measurements."""
    compared_with: str | None
    """The commit of the baseline's code in `ratios`; None without a baseline."""
    provenance: Provenance


class Baseline(Stored):
    """config/gates/baselines/<machine>.json, with which later runs are compared.

    Runs on machines of its class must agree bit for bit, others within bounds.
    """

    measured: GateMeasurements

    @property
    def commit(self) -> str:
        """The commit of the measured code. `qerl gate accept` refuses measurements of code without a commit."""
        assert self.measured.provenance.commit is not None
        return self.measured.provenance.commit


# The metrics that gates judge, collected from the stored results of one configuration. What failed has none, so that
# its gates fail.

#: Columns of metrics.jsonl that are equal, bit for bit, in two runs of the same code on the same machine.
GOLDEN = ("loss", "reward", "grad_norm")


def collect(key: str, files: Sequence[Path]) -> GateMeasurements:
    """The metrics of result files, whose kinds follow from the names and folders that the workflow gives them."""
    [bench] = [read(RolloutBenchResult, file) for file in files if file.parent.name == paths.PROFILE]
    [numerics] = [read(NumericsResult, file) for file in files if file.name == paths.NUMERICS]
    [speed] = [read(SpeedResult, file) for file in files if file.name == paths.SPEED]
    values, series = dict(numerics.values), dict[str, list[float]]()
    for file in files:
        if file.name == paths.RUN and (run := read(RunResult, file)).status == OK:
            steps = read_steps(file, run)
            values |= _of_run(run, steps)
            series |= {f"{column}/{_name(run)}": [getattr(step, column) for step in steps] for column in GOLDEN}
    accuracies: dict[str, dict[str, float]] = {}
    completions: dict[str, dict[str, str]] = {}
    for file in (file for file in files if file.name == paths.RESULT):
        rows = list(read_rows(SampleRow, file.with_name(paths.SAMPLES)))
        if file.parent.parent.name == paths.STORED:
            completions[f"{paths.STORED}/{read(StoredPolicyResult, file).stored}"] = dict(map(_completion, rows))
            continue
        trained = read(EvaluationResult, file)
        if trained.status != OK:
            continue
        varied = ", ".join(f"{key}={value}" for key, value in trained.varied.items())
        accuracy = sum(row.correct for row in rows) / len(rows)
        accuracies.setdefault(f"accuracy/{trained.arm}", {})[varied] = accuracy
        values[f"evaluation-noise/{_name(trained)}"] = trained.noise_norm
    # Seconds per token, each paired with the seconds of bf16 or of the baseline's code that were measured next to it.
    measured = (point for point in bench.points if point.status == OK)
    points = {(point.weights, point.rank): [1 / rate for rate in point.samples] for point in measured}
    ratios = {
        f"{weights}-to-bf16/rank={rank}": (seconds, points["bf16", rank])
        for (weights, rank), seconds in points.items()
        if weights != "bf16" and ("bf16", rank) in points
    }
    ratios |= {f"{workload}-to-baseline": (pairs.now, pairs.baseline) for workload, pairs in speed.samples.items()}
    return GateMeasurements(
        key=key,
        values=values,
        series=series,
        accuracies=accuracies,
        completions=completions,
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
        yield f"mismatch/{_name(run)}", float(np.max(quiet))  # NaN if one is, unlike `max`
    if noisy:
        yield f"noise/{_name(run)}", float(np.min(noisy))


def _completion(row: SampleRow) -> tuple[str, str]:
    """The name of a completion, and a hash of its text with its verdict."""
    digest = hashlib.sha256(row.completion.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{row.dataset} {row.problem} {row.repeat}", f"{digest} {row.correct}"


# Baselines: one file per machine class, with the accepted measurements of that class.


def machine_class(machine: Machine) -> str:
    """The machine class, a name for machines with comparable measurements: the GPUs, or else the CPU and its cores."""
    return re.sub(r"[^a-z0-9]+", "-", machine.label.lower()).strip("-")


def read_baseline(file: Path) -> Baseline:
    """Read a baseline. Raises `ConfigError` with one sentence if the file isn't a valid baseline."""
    try:
        return read(Baseline, file)
    except ResultError as error:
        raise ConfigError(f"{error}; restore it from git") from None


def find_baseline(folder: Path, key: str, machine: Machine | None = None) -> Baseline | None:
    """The baseline of a workload and of a machine's class; without a machine the first of any class.

    Another machine's serves for numbers that differ between machines only by rounding.
    """
    files = folder.glob(f"{machine_class(machine) if machine else '*'}.json")
    return next((found for file in sorted(files) if (found := read_baseline(file)).measured.key == key), None)


def write_baseline(folder: Path, measured: GateMeasurements) -> Path:
    """Write the baseline of the measuring machine's class, and return its file."""
    file = folder / f"{machine_class(measured.provenance.machine)}.json"
    write(file, Baseline(measured=measured))
    return file


def accept(config: Config, folder: Path) -> Path:
    """Make the measurements in `folder` the baseline of their machine class, in a git commit of its own."""
    if config.gates is None:
        raise ConfigError(f"configuration {config.name} has no `gates`; use config/ci.yaml")
    file = folder / paths.MEASURED
    if not file.is_file():
        raise ConfigError(f"{file} doesn't exist; run the gates first: make gate")
    measured = read(GateMeasurements, file)
    commit = measured.provenance.commit
    if measured.provenance.dirty or not commit:
        raise ConfigError("the measured code isn't committed, so no later run could be compared with it; commit first")
    if subprocess.run(["git", "diff", "--cached", "--quiet"], check=False).returncode:
        raise ConfigError("other changes are staged, and a baseline moves in a commit of its own; commit them first")
    written = write_baseline(config.gates.baselines, measured)
    message = f"Baseline {written.stem}: {commit[:12]}"
    for arguments in (["add", str(written)], ["commit", "--quiet", "--message", message]):
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        if answer.returncode:
            raise ConfigError(f"git {arguments[0]} failed: {answer.stderr.strip()}")
    return written


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
#: The kinds of metrics that checks judge (`GateMeasurements`); the others judge numbers.
_KINDS: dict[Check, str] = {
    "ratio-at-most": "ratios",
    "paired": "accuracies",
    "same": "completions",
    "golden": "series",
}


def judge(gate: Gate, measured: GateMeasurements, own: Baseline | None, other: Baseline | None) -> Verdict:
    """The verdict of one gate. A gate whose metric wasn't measured fails, for every check.

    `own` is the baseline of this machine class. Without one, `other` is used, which is of any machine class.
    """
    kind, metric = _KINDS.get(gate.check, "values"), gate.metric
    now = getattr(measured, kind).get(metric)
    compares = gate.check in ("growth", "paired", "same", "golden")
    baseline = own if own or gate.check == "growth" else other
    before = getattr(baseline.measured, kind).get(metric) if baseline and compares else None
    without_speed = metric.endswith("-to-baseline") and measured.compared_with is None
    if now is None and not without_speed:
        found: dict[str, Any] = {"outcome": "fail", "detail": "nothing was measured under this name"}
    elif now is None or (compares and before is None):
        detail = "no baseline of this machine and workload; `qerl gate accept` makes one"
        found = {"outcome": "no baseline", "detail": detail, "now": now if kind == "values" else None}
    elif gate.check == "ratio-at-most":
        ratio = paired_ratio_interval(*now)
        found = {"outcome": ratio.low <= gate.limit, "now": ratio.mean, "low": ratio.low, "high": ratio.high}
    elif compares:
        same_versions = own is not None and own.measured.provenance.versions == measured.provenance.versions
        found = _COMPARISONS[gate.check](before, now, gate.limit, same_versions)
    else:
        found = {"outcome": now <= gate.limit if gate.check == "at-most" else now >= gate.limit, "now": now}
    if isinstance(passes := found["outcome"], (bool, np.bool_)):
        found = {"limit": gate.limit, **found, "outcome": "pass" if passes else "fail"}
    return Verdict(gate=gate.gate, metric=metric, check=gate.check, why=gate.why, **found)


def overall(verdicts: Sequence[Verdict]) -> Outcome:
    """The worst of all outcomes."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return "fail" if "fail" in outcomes else "no baseline" if "no baseline" in outcomes else "pass"


def _growth(before: float, now: float, limit: float, _: bool) -> dict[str, Any]:
    return {"outcome": now <= before + limit, "now": now, "baseline": before, "limit": before + limit}


# The limit of accuracy comes from reruns with other seeds, since the interval of one evaluation omits the variation
# of training. Such a gate detects a broken trainer or grader; the golden series detects small losses, which can't
# occur without a change of numbers.
def _paired(before: Mapping[str, float], now: Mapping[str, float], limit: float, _: bool) -> dict[str, Any]:
    mean, earlier = (float(np.mean(list(accuracies.values()))) for accuracies in (now, before))
    if now.keys() != before.keys():
        return {"outcome": False, "now": mean, "detail": "other runs were evaluated than in the baseline"}
    differences = [now[run] - before[run] for run in before]
    difference = float(np.mean(differences))
    # If no completion changed, the difference is exactly 0. It is bounded on both sides, because a lenient grader or a
    # leak of test problems raises accuracy.
    return {
        "outcome": abs(difference) <= limit,
        "now": mean,
        "baseline": earlier,
        "limit": earlier + (limit if difference > 0 else -limit),
        "detail": "in points: " + ", ".join(f"{100 * one:+.1f}" for one in differences),
    }


def _same(before: Mapping[str, str], now: Mapping[str, str], limit: float, same_versions: bool) -> dict[str, Any]:
    if now.keys() != before.keys():
        return {"outcome": False, "detail": "other problems were asked than in the baseline"}
    differing = [name for name in before if before[name] != now[name]]
    share, limit = len(differing) / len(before), 0.0 if same_versions else limit
    detail = "equal to the bit"
    if differing:
        lost = sum(before[name][-1] > now[name][-1] for name in differing)
        won = sum(before[name][-1] < now[name][-1] for name in differing)
        named = ", ".join(differing[:4]) + (", ..." if len(differing) > 4 else "")
        detail = f"{len(differing)} of {len(before)} completions differ, {lost} lost, {won} won: {named}"
    return {"outcome": share <= limit, "now": share, "limit": limit, "detail": detail}


def _golden(before: Sequence[float], now: Sequence[float], limit: float, same_versions: bool) -> dict[str, Any]:
    if not same_versions:
        early = zip(before[:EARLY_STEPS], now[:EARLY_STEPS], strict=True)
        worst = float(np.max([abs(b - a) / max(abs(a), 1e-12) for a, b in early]))
        detail = f"another machine or other versions than the baseline's: the first {EARLY_STEPS} steps alone"
        return {"outcome": worst <= limit, "now": worst, "detail": detail}
    if len(before) != len(now):
        detail = f"{len(now)} steps, and {len(before)} in the baseline"
    elif now == before:
        detail = "equal to the bit"
    else:
        step = next(index for index, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
        detail = f"step {step + 1}: {now[step]!r}, and {before[step]!r} before"
    return {"outcome": now == before, "limit": 0.0, "detail": detail}


_COMPARISONS: dict[Check, Callable[[Any, Any, float, bool], dict[str, Any]]] = {
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
    own = find_baseline(settings.baselines, measured.key, measured.provenance.machine)
    other = own or find_baseline(settings.baselines, measured.key)
    verdicts = [judge(gate, measured, own, other) for gate in read_gates(settings.file)]
    write(out / paths.MEASURED, measured)
    stamp = ". ".join(f"{name.capitalize()}: {text}" for name, text in measured.provenance.columns.items())
    (out / paths.VERDICT_TABLE).write_text(
        page({"": verdict_table(verdicts)}, f"{_CAPTION}. {stamp}."), encoding="utf-8"
    )
    result = VerdictResult(
        outcome=overall(verdicts),
        key=measured.key,
        baseline=own.commit if own else None,
        gates=verdicts,
        provenance=measured.provenance,
    )
    write(out / paths.VERDICT, result)


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
    outcomes = [verdict.outcome for verdict in verdicts]
    return ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in ("fail", "no baseline", "pass"))
