"""What the workflow's rules and `qerl gate` call: measure, judge, show, accept."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from qerl.gates.baselines import any_baseline, machine_class, own_baseline, write_baseline
from qerl.gates.judge import Baselines, judge, overall
from qerl.gates.measured import Measured
from qerl.gates.rows import read_gates
from qerl.host.progress import log
from qerl.plan import Plan
from qerl.provenance.files import write_json
from qerl.provenance.stamp import stamp
from qerl.results.schema.gates import Verdict
from qerl.settings.base import ConfigError
from qerl.settings.benches import GateSettings

MEASURED = "measured.json"
VERDICT = "verdict.json"


def measure_speed(checkpoint: Path, baselines: Path, key: str, rounds: int, out: Path) -> None:
    """Time this code in turn with the baseline's; without a baseline `out` says so and has no samples."""
    from qerl.gates.speed import compare

    stamped = stamp()
    own = own_baseline(baselines, stamped["machine"], key)
    if own is None:
        log.warning("no baseline of %s for this workload: nothing to compare with", machine_class(stamped["machine"]))
    found = compare(own.commit, checkpoint, rounds, Path("work/gates")) if own else {}
    write_json(out, {"baseline": None, "samples": {}, **found, "provenance": stamped})


def write_verdict(settings: GateSettings, measured: Measured, out: Path) -> None:
    """Judge all gates; folder `out` gets measured.json, verdict.json and the table in verdict.md."""
    own = own_baseline(settings.baselines, measured.provenance["machine"], measured.key)
    baselines = Baselines(own, own or any_baseline(settings.baselines, measured.key))
    verdicts = [judge(gate, measured, baselines) for gate in read_gates(settings.file)]
    write_json(out / MEASURED, measured.model_dump(mode="json"))
    told = {
        "outcome": overall(verdicts),
        "key": measured.key,
        "baseline": own.commit if own else None,
        "gates": [verdict.model_dump(mode="json") for verdict in verdicts],
        "provenance": measured.provenance,
    }
    (out / "verdict.md").write_text(verdict_table(verdicts).to_markdown(index=False) + "\n")
    write_json(out / VERDICT, told)


# --- for people ------------------------------------------------------------------------------------------------------


def read_verdicts(file: Path) -> list[Verdict]:
    """The verdicts in a verdict.json."""
    if not file.is_file():
        raise ConfigError(f"{file} doesn't exist; run `snakemake --configfile config/ci.yaml` first")
    return [Verdict.model_validate(row) for row in json.loads(file.read_text())["gates"]]


def verdict_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """A row a gate, what doesn't pass first."""
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
    """How many gates pass, fail and have no baseline."""
    counts = pd.Series([verdict.outcome for verdict in verdicts]).value_counts()
    return ", ".join(f"{counts.get(outcome, 0)} {outcome}" for outcome in ("fail", "no baseline", "pass"))


# --- baselines -------------------------------------------------------------------------------------------------------


def accept(plan: Plan) -> Path:
    """Make what was measured last the baseline of its class of machines, in a git commit of its own."""
    settings = plan.config.gates
    if settings is None:
        raise ConfigError(f"configuration {plan.config.name} has no `gates`; give config/ci.yaml")
    folder = Path(plan.folder)
    file = folder / "gates" / MEASURED
    if not file.is_file():
        raise ConfigError(f"{file} doesn't exist; run the gates first: make gate")
    measured = Measured.model_validate_json(file.read_bytes())
    if measured.provenance["dirty"] or not measured.provenance["commit"]:
        raise ConfigError("what was measured isn't committed, so no later run could be compared with it; commit first")
    _check_nothing_staged()
    written = write_baseline(settings.baselines, measured)
    _git("add", str(written))
    _git("commit", "--quiet", "--message", f"Baseline {written.stem}: {measured.provenance['commit'][:12]}")
    return written


def _check_nothing_staged() -> None:
    if subprocess.run(["git", "diff", "--cached", "--quiet"], check=False).returncode:
        raise ConfigError("other changes are staged, and a baseline moves in a commit of its own; commit them first")


def _git(*arguments: str) -> None:
    answer = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        raise ConfigError(f"git {arguments[0]} failed: {answer.stderr.strip()}")
