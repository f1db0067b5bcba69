"""The verdict of a gate, from the measurements and a baseline.

| check | fails if |
|---|---|
| `at-most`, `at-least` | the number is beyond `limit` |
| `ratio-at-most` | the whole 95 % interval of the ratio of times is above `limit` |
| `growth` | the number is more than `limit` above the baseline's |
| `paired` | the runs' mean accuracy differs by more than `limit` from that of the baseline's runs with the same seeds |
| `same` | a completion of a stored policy, or its verdict, isn't the baseline's; elsewhere than on its machine class
and versions: of more than the share `limit` |
| `golden` | the series differs from the baseline's; elsewhere than on its machine class and versions: by more than the
share `limit` in the first steps |

The last three are two-sided, the others one-sided. Without a number to compare with, the verdict is "no baseline",
which is never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qerl.gates.rows import Gate
from qerl.results.intervals import paired_ratio_interval
from qerl.results.schema.gates import Baseline, Check, GateMeasurements, Outcome, Verdict

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


def _at_most(gate: Gate, measured: GateMeasurements, _: Baselines) -> Finding:
    now = measured.values[gate.metric]
    return {"outcome": _outcome(now <= gate.limit), "now": now, "limit": gate.limit}


def _at_least(gate: Gate, measured: GateMeasurements, _: Baselines) -> Finding:
    now = measured.values[gate.metric]
    return {"outcome": _outcome(now >= gate.limit), "now": now, "limit": gate.limit}


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
    "at-most": _at_most,
    "at-least": _at_least,
    "ratio-at-most": _ratio_at_most,
    "growth": _growth,
    "paired": _paired,
    "same": _same,
    "golden": _golden,
}
