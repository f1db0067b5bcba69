"""The verdict of config/exploration.yaml by the rules of docs/exploration-protocol.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pandas as pd

from qerl.results.outcomes import differences
from qerl.results.paired import PairedDifference, holm, paired_difference

#: Primary comparisons: an arm less another one. The numbers of the protocol's arms stand beside them.
PRIMARY: dict[str, tuple[str, str]] = {
    "2-1": ("nvfp4", "bf16"),
    "2-3": ("nvfp4", "bf16-thermostat"),
    "5-2": ("nvfp4-aqn", "nvfp4"),
    "5-9": ("nvfp4-aqn", "nvfp4-thermostat"),
    "8-1": ("bf16-aqn", "bf16"),
}
#: Comparisons that tell a gain of noise from a correction of its mismatch.
MISMATCH: dict[str, tuple[str, str]] = {
    "6-2": ("nvfp4-aqn-truncated", "nvfp4"),
    "7-2": ("nvfp4-aqn-consistent", "nvfp4"),
}
#: Smallest effect of interest, as a fraction.
SMALLEST_EFFECT = 0.02
LEVEL = 0.05

Verdict = Literal["exploration", "recovers what quantization lost", "mismatch", "none", "undecided"]


def compared(frame: pd.DataFrame) -> tuple[dict[str, PairedDifference], dict[str, float]]:
    """The comparisons of one outcome, and the p values of the primary ones after Holm's correction.

    `frame` has one experiment, data set and k (`qerl.results.outcomes.outcomes`). Comparisons of arms that it lacks are
    left out.
    """
    arms = set(frame["arm"])
    present = {name: pair for name, pair in {**PRIMARY, **MISMATCH}.items() if arms.issuperset(pair)}
    comparisons = {name: paired_difference(differences(frame, *pair)) for name, pair in present.items()}
    return comparisons, holm({name: comparisons[name].p for name in PRIMARY if name in comparisons})


def verdicts(comparisons: Mapping[str, PairedDifference], adjusted: Mapping[str, float]) -> list[Verdict]:
    """The sentences that hold on one outcome, by the comparisons and their p values after Holm's correction.

    `comparisons` has the primary ones, and those of `MISMATCH` where they were run.
    """

    def above(name: str) -> bool:
        return comparisons[name].interval.mean > 0 and adjusted[name] < LEVEL

    holding: list[Verdict] = []
    if above("2-3") and above("5-9"):
        holding.append("exploration")
    if above("5-2") and not above("8-1"):
        holding.append("recovers what quantization lost")
    if above("5-2") and any(_gain_is_gone(comparisons, name) for name in MISMATCH):
        holding.append("mismatch")
    if all(_is_nothing(comparisons[name]) for name in PRIMARY):
        holding.append("none")
    return holding or ["undecided"]


def _gain_is_gone(comparisons: Mapping[str, PairedDifference], name: str) -> bool:
    """Whether the arm without mismatch lies no higher than the smallest effect above the arm without noise."""
    return name in comparisons and comparisons[name].interval.high < SMALLEST_EFFECT


def _is_nothing(difference: PairedDifference) -> bool:
    return difference.interval.low > -SMALLEST_EFFECT and difference.interval.high < SMALLEST_EFFECT
