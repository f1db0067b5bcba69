"""A sampling temperature that follows the token entropy of another run, step by step.

It tells entropy from what raises it: a run without noise that samples at the entropy of a run with noise.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from pathlib import Path

from qerl.results.files import read_rows
from qerl.results.paths import POLICY
from qerl.results.schema.training import StepMetrics
from qerl.rl.failures import FollowedRunError, failed
from qerl.settings.base import ConfigError
from qerl.settings.training import ThermostatSettings

#: An entropy below counts as this one, in nats: its logarithm says nothing.
_LEAST_ENTROPY = 1e-3


def followed_entropies(metrics: Path, steps: int) -> list[float]:
    """The sampler's entropy at each step of the run to follow, from its metrics.jsonl.

    Raises FollowedRunError if the run.json beside it says that the run failed.
    """
    if status := failed(metrics.parent / POLICY):
        raise FollowedRunError(
            f"{metrics.parent}, the run to follow, is {status}; delete both runs' folders to try again"
        )
    rows = list(read_rows(StepMetrics, metrics))
    entropies = [row.entropy_sampler for row in rows if row.entropy_sampler is not None]
    if len(rows) < steps or len(entropies) < len(rows):
        raise ConfigError(
            f"{metrics} has the sampler's entropy of {len(entropies)} steps, and a thermostat needs that of all {steps}"
        )
    return entropies


class Thermostat:
    """Chooses the temperature of each step by the entropies of the steps before, so it needs no state of its own."""

    def __init__(self, settings: ThermostatSettings, start: float, entropies: Sequence[float]) -> None:
        self.settings = settings
        self.start = start
        self.entropies = entropies

    def temperature(self, rows: Sequence[dict[str, float]]) -> float:
        """The temperature of the step after `rows`: log T rises by `gain` times the logarithm of the missing factor.

        The factor is the ratio of the weighted means of both entropies over the same steps, and counts as e at most.
        Both runs have the same problems at a step, and entropies of single steps differ far more by their problems.
        """
        if not rows:
            return self.start
        wanted = self._recent_mean(self.entropies[: len(rows)])
        reached = self._recent_mean([row["entropy/sampler"] for row in rows])
        missing = math.log(max(wanted, _LEAST_ENTROPY) / max(reached, _LEAST_ENTROPY))
        moved = rows[-1]["temperature"] * math.exp(self.settings.gain * min(max(missing, -1.0), 1.0))
        return min(max(moved, self.settings.lowest), self.settings.highest)

    def _recent_mean(self, values: Sequence[float]) -> float:
        """The mean of `values`, each with 1 − 1 / `average_steps` of the weight of the one after it."""
        kept = 1 - 1 / self.settings.average_steps
        weights = [kept**age for age in range(len(values) - 1, -1, -1)]
        return sum(map(operator.mul, weights, values)) / sum(weights)
