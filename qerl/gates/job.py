"""Verdicts, which the workflow computes from results and commands show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qerl.gates.baselines import any_baseline, own_baseline
from qerl.gates.judge import Baselines, judge, overall
from qerl.gates.measured import collect
from qerl.gates.rows import read_gates
from qerl.jobs.gates import VerdictJob
from qerl.report.pages import page
from qerl.results.files import read, write
from qerl.results.paths import MEASURED, VERDICT, VERDICT_TABLE
from qerl.results.schema.gates import GateMeasurements, Verdict, VerdictResult
from qerl.settings.base import ConfigError
from qerl.settings.benches import GateSettings

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
    rows = [
        {
            "gate": verdict.gate,
            "outcome": verdict.outcome if verdict.outcome == "pass" else verdict.outcome.upper(),
            "baseline": _number(verdict.baseline),
            "now": _number(verdict.now) + _interval(verdict),
            "limit": _number(verdict.limit),
            "detail": verdict.detail,
            "why": verdict.why,
        }
        for verdict in sorted(verdicts, key=lambda verdict: order[verdict.outcome])
    ]
    return pd.DataFrame(rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _interval(verdict: Verdict) -> str:
    return "" if verdict.low is None else f" [{_number(verdict.low)}, {_number(verdict.high)}]"


def sentence(verdicts: Sequence[Verdict]) -> str:
    """The numbers of gates that fail, have no baseline, and pass, as text."""
    counts = pd.Series([verdict.outcome for verdict in verdicts]).value_counts()
    return ", ".join(f"{counts.get(outcome, 0)} {outcome}" for outcome in ("fail", "no baseline", "pass"))
