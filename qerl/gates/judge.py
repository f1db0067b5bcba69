"""From a gate, what was measured and a baseline to a verdict.

| check | fails if |
|---|---|
| `at-most`, `at-least` | the number lies beyond `limit` |
| `ratio-at-most` | the whole 95 % interval of the ratio of times lies above `limit` |
| `growth` | the number is more than `limit` above the baseline's |
| `drop` | the accuracy is below the baseline's by more than runs of other seeds differ, at the confidence `limit` |
| `golden` | the series differs from the baseline's; elsewhere than on its machine class and versions: by more than the
share `limit` in the first steps |

All are one-sided, but for `golden`. What has nothing to be compared with has no baseline, which is never a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy import stats

from qerl.gates.baselines import Baseline
from qerl.gates.measured import Measured
from qerl.gates.rows import Check, Gate
from qerl.report.intervals import difference_interval, paired_ratio_interval

Outcome = Literal["pass", "fail", "no baseline"]

#: Fewer reruns than these tell too little about how far runs differ.
LEAST_RERUNS = 5
#: Steps that a series of another machine is compared over: later on, rounding has led to other completions.
EARLY_STEPS = 2


class Verdict(BaseModel):
    """What a gate says. Numbers are in the metric's unit; `limit` is the number that `now` was compared with."""

    model_config = ConfigDict(frozen=True)

    gate: str
    metric: str
    check: Check
    outcome: Outcome
    now: float | None = None
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    limit: float | None = None
    detail: str = ""
    why: str


@dataclass(frozen=True)
class Baselines:
    """`own`: of this class of machines and this workload; `other`: of the workload, on any machine."""

    own: Baseline | None
    other: Baseline | None


def judge(gate: Gate, measured: Measured, baselines: Baselines) -> Verdict:
    """The verdict of one gate. A metric that wasn't measured fails, whatever its check."""
    told = {"gate": gate.gate, "metric": gate.metric, "check": gate.check, "why": gate.why}
    if gate.metric not in _measured_for(gate.check, measured):
        without = gate.metric.endswith("-to-baseline") and measured.compared_with is None
        outcome = _no_baseline() if without else {"outcome": "fail", "detail": "nothing was measured under this name"}
        return Verdict(**told, **outcome)  # type: ignore[arg-type]
    return Verdict(**told, **_CHECKS[gate.check](gate, measured, baselines))  # type: ignore[arg-type]


def overall(verdicts: list[Verdict]) -> Outcome:
    """The worst of all."""
    outcomes = {verdict.outcome for verdict in verdicts}
    return "fail" if "fail" in outcomes else "no baseline" if "no baseline" in outcomes else "pass"


Finding = dict[str, object]


def _measured_for(check: Check, measured: Measured) -> Mapping[str, object]:
    kinds: dict[Check, Mapping[str, object]] = {
        "ratio-at-most": measured.ratios,
        "drop": measured.answers,
        "golden": measured.series,
    }
    return kinds.get(check, measured.values)


def _outcome(passes: bool) -> Outcome:
    return "pass" if passes else "fail"


def _no_baseline(detail: str = "no baseline of this machine and workload") -> Finding:
    return {"outcome": "no baseline", "detail": f"{detail}; `qerl gate accept` makes one"}


def _at_most(gate: Gate, measured: Measured, _: Baselines) -> Finding:
    now = measured.values[gate.metric]
    return {"outcome": _outcome(now <= gate.limit), "now": now, "limit": gate.limit}


def _at_least(gate: Gate, measured: Measured, _: Baselines) -> Finding:
    now = measured.values[gate.metric]
    return {"outcome": _outcome(now >= gate.limit), "now": now, "limit": gate.limit}


def _ratio_at_most(gate: Gate, measured: Measured, _: Baselines) -> Finding:
    ratio = paired_ratio_interval(*measured.ratios[gate.metric])
    found = {"now": ratio.mean, "low": ratio.low, "high": ratio.high, "limit": gate.limit}
    return {"outcome": _outcome(ratio.low <= gate.limit), **found}


def _growth(gate: Gate, measured: Measured, baselines: Baselines) -> Finding:
    now = measured.values[gate.metric]
    before = baselines.own.measured.values.get(gate.metric) if baselines.own else None
    if before is None:
        return {**_no_baseline(), "now": now}
    limit = before + gate.limit
    return {"outcome": _outcome(now <= limit), "now": now, "baseline": before, "limit": limit}


def _drop(gate: Gate, measured: Measured, baselines: Baselines) -> Finding:
    now = measured.answers[gate.metric]
    own = baselines.own
    before = own.measured.answers.get(gate.metric) if own else None
    reruns = own.spread.get(gate.metric, []) if own else []
    accuracy = float(np.mean(list(now.values())))
    if before is None or len(reruns) < LEAST_RERUNS:
        return {**_no_baseline(f"a baseline needs {LEAST_RERUNS} reruns" if before else "no baseline"), "now": accuracy}
    if now.keys() != before.keys():
        return {"outcome": "fail", "now": accuracy, "detail": "other problems were asked than in the baseline"}
    earlier = float(np.mean(list(before.values())))
    limit = earlier - largest_chance_drop(reruns, gate.limit)
    difference = difference_interval(_by_problem(now)[None], _by_problem(before))
    return {
        "outcome": _outcome(accuracy >= limit),
        "now": accuracy,
        "low": earlier + difference.low,
        "high": earlier + difference.high,
        "baseline": earlier,
        "limit": limit,
        "detail": flips(before, now),
    }


def largest_chance_drop(reruns: list[float], confidence: float) -> float:
    """By how much one run falls short of another by chance, at a one-sided confidence.

    reruns: accuracies of n runs. Student's t with n - 1 degrees of freedom, times their standard deviation, times
    sqrt(2) because both runs vary.
    """
    return float(stats.t.ppf(confidence, len(reruns) - 1) * np.std(reruns, ddof=1) * math.sqrt(2))


def _by_problem(answers: Mapping[str, int]) -> np.ndarray:
    """The share of right completions of each problem, in the problems' order."""
    problems: dict[str, list[int]] = {}
    for name in sorted(answers):
        problems.setdefault(name.rpartition(" ")[0], []).append(answers[name])
    return np.array([np.mean(right) for right in problems.values()])


def flips(before: Mapping[str, int], now: Mapping[str, int], shown: int = 8) -> str:
    """The completions that were right and are wrong, and the reverse."""
    lost = [name for name in before if before[name] > now[name]]
    won = [name for name in before if before[name] < now[name]]
    if not lost and not won:
        return "no completion flipped"
    named = ", ".join(lost[:shown]) + (", ..." if len(lost) > shown else "")
    return f"{len(lost)} completions lost, {len(won)} won" + (f"; lost: {named}" if lost else "")


def _golden(gate: Gate, measured: Measured, baselines: Baselines) -> Finding:
    now = measured.series[gate.metric]
    same = (
        baselines.own is not None and baselines.own.measured.provenance["versions"] == measured.provenance["versions"]
    )
    baseline = baselines.own if same else baselines.other
    before = baseline.measured.series.get(gate.metric) if baseline else None
    if before is None:
        return _no_baseline()
    if same:
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


_CHECKS: dict[Check, Callable[[Gate, Measured, Baselines], Finding]] = {
    "at-most": _at_most,
    "at-least": _at_least,
    "ratio-at-most": _ratio_at_most,
    "growth": _growth,
    "drop": _drop,
    "golden": _golden,
}
