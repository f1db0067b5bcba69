"""Schemas of the regression gates' files: their own measurements, all measurements together, and the verdict."""

from __future__ import annotations

from typing import Literal

from qerl.results.schema.stored import Provenance, Stored

#: What a gate compares (docs/gates.md): a number with a bound, a ratio's interval with a bound, a number with the
#: baseline's, accuracies, completions or a series of numbers with the baseline's.
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
    """gates/speed.json: by workload; without a baseline there are no samples."""

    baseline: str | None
    samples: dict[str, SpeedPairs]
    provenance: Provenance


class GateMeasurements(Stored):
    """gates/measured.json: the metrics of one run of the workload, by name, and where they come from."""

    key: str
    """Key of the workload (`qerl.gates.measured.workload_key`)."""
    values: dict[str, float]
    series: dict[str, list[float]]
    """One number a step."""
    accuracies: dict[str, dict[str, float]]
    """Share of right completions of each trained policy, by what its run has of its own (the seed)."""
    completions: dict[str, dict[str, str]]
    """For each completion of each stored policy, a hash of its text and whether it was right."""
    ratios: dict[str, tuple[list[float], list[float]]]
    """Speed: seconds of what is judged and of what it is compared with, pairs taken one after the other."""
    compared_with: str | None
    """The commit that `ratios` are to, where they are to a baseline's code; none without a baseline."""
    provenance: Provenance


class Baseline(Stored):
    """config/gates/baselines/<machine>.json, the reference of later runs.

    Runs are compared with it to the bit on machines of its class, within bounds on others.
    """

    measured: GateMeasurements

    @property
    def commit(self) -> str:
        """The code that was measured. `qerl gate accept` refuses measurements of code without a commit."""
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
    """gates/verdict.json: the worst of all outcomes, and each gate's; a test names the `defect` it planted."""

    defect: str | None = None
    outcome: Outcome
    key: str
    baseline: str | None
    gates: list[Verdict]
    provenance: Provenance
