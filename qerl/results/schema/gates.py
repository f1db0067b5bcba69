"""Schemas of the regression gates' files: single measurements, all measurements together, and the verdict."""

from __future__ import annotations

from typing import Literal

from qerl.results.schema.stored import Provenance, Stored

#: The checks of gates (docs/gates.md): a number or a ratio's interval against a bound; or a number, accuracies,
#: completions or a series of numbers against the baseline's.
Check = Literal["at-most", "at-least", "ratio-at-most", "growth", "paired", "same", "golden"]
Outcome = Literal["pass", "fail", "no baseline"]


class NumericsResult(Stored):
    """gates/numerics.json: errors of codecs and graders, by name."""

    values: dict[str, float]
    provenance: Provenance


class SpeedPairs(Stored):
    """Seconds per token of this code and of the baseline's, in pairs that were measured one after the other."""

    now: list[float]
    baseline: list[float]


class SpeedResult(Stored):
    """gates/speed.json, by workload; it has no samples without a baseline."""

    baseline: str | None
    samples: dict[str, SpeedPairs]
    provenance: Provenance


class GateMeasurements(Stored):
    """gates/measured.json: the metrics of one run of the workload, by name, with their stamp."""

    key: str
    """Key of the workload (`qerl.gates.measured.workload_key`)."""
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


class Verdict(Stored):
    """The verdict of a gate. Numbers are in the metric's unit. `limit` is the number that `now` was compared with.

    Stored verdicts have a check `drop`, which became `paired`.
    """

    gate: str
    metric: str
    check: Check | Literal["drop"]
    outcome: Outcome
    now: float | None = None
    low: float | None = None
    high: float | None = None
    baseline: float | None = None
    limit: float | None = None
    detail: str = ""
    why: str


class VerdictResult(Stored):
    """gates/verdict.json: the worst outcome, and each gate's; a test states the `defect` that it planted."""

    defect: str | None = None
    outcome: Outcome
    key: str
    baseline: str | None
    gates: list[Verdict]
    provenance: Provenance
