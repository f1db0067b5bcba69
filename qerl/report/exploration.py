"""The verdict of config/exploration.yaml by the rules of docs/exploration-protocol.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
#: Comparisons of the other arms, each with the arm that it varies. They explain and decide nothing.
SECONDARY: dict[str, tuple[str, str]] = {
    "4-1": ("bf16-random", "bf16"),
    "2-4": ("nvfp4", "bf16-random"),
    "6-5": ("nvfp4-aqn-truncated", "nvfp4-aqn"),
    "7-5": ("nvfp4-aqn-consistent", "nvfp4-aqn"),
    "10a-5": ("nvfp4-aqn-completion", "nvfp4-aqn"),
    "10b-5": ("nvfp4-aqn-mlp", "nvfp4-aqn"),
    "12-1": ("mxfp4", "bf16"),
    "13-1": ("nf4", "bf16"),
}
#: The protocol's number of each arm.
NUMBERS: dict[str, str] = {
    "bf16": "1",
    "nvfp4": "2",
    "bf16-thermostat": "3",
    "bf16-random": "4",
    "nvfp4-aqn": "5",
    "nvfp4-aqn-truncated": "6",
    "nvfp4-aqn-consistent": "7",
    "bf16-aqn": "8",
    "nvfp4-thermostat": "9",
    "nvfp4-aqn-completion": "10a",
    "nvfp4-aqn-mlp": "10b",
    "nvfp4-placebo": "11",
    "mxfp4": "12",
    "nf4": "13",
    "paper-bf16": "14",
    "paper-nvfp4-aqn": "14",
}
#: Smallest effect of interest, as a fraction.
SMALLEST_EFFECT = 0.02
LEVEL = 0.05

Verdict = Literal["exploration", "recovers what quantization lost", "mismatch", "none", "undecided", "incomplete"]
#: The sentence that follows from each verdict.
SENTENCES: dict[Verdict, str] = {
    "exploration": "Exploration stands: the noise teaches more than a temperature that raises entropy as much",
    "recovers what quantization lost": "It recovers what quantization lost: noise helps quantized weights alone",
    "mismatch": "Mismatch: with the mismatch of sampler and trainer corrected, the gain is gone",
    "none": "None: all five differences lie within ±2 points",
    "undecided": "Undecided: no rule of the protocol applies",
    "incomplete": "Incomplete: a primary comparison has no pair of runs yet",
}


def compared(frame: pd.DataFrame) -> tuple[dict[str, PairedDifference], dict[str, float]]:
    """The comparisons of one outcome, and the p values of the primary ones after Holm's correction.

    `frame` has one experiment, data set and k (`qerl.results.outcomes.outcomes`). Comparisons of arms that it lacks are
    left out. The family is always of five, and a missing comparison counts with a p value of 1.
    """
    pairs_of = {name: differences(frame, *pair) for name, pair in {**PRIMARY, **MISMATCH}.items()}
    comparisons = {name: paired_difference(pairs) for name, pairs in pairs_of.items() if pairs}
    adjusted = holm({name: comparisons[name].p if name in comparisons else 1.0 for name in PRIMARY})
    return comparisons, {name: p for name, p in adjusted.items() if name in comparisons}


def verdicts(
    comparisons: Mapping[str, PairedDifference], adjusted: Mapping[str, float], astray: Collection[str] = ()
) -> list[Verdict]:
    """The sentences that hold on one outcome, by the comparisons and their p values after Holm's correction.

    `comparisons` has the primary ones, and those of `MISMATCH` where they were run. Without a primary one the outcome
    is incomplete. A comparison with an arm of `astray`, which didn't have the entropy that it follows, supports no
    sentence.
    """
    if not comparisons.keys() >= PRIMARY.keys():
        return ["incomplete"]

    def above(name: str) -> bool:
        return holds(comparisons[name], adjusted[name]) and is_controlled(name, astray)

    holding: list[Verdict] = []
    if above("2-3") and above("5-9"):
        holding.append("exploration")
    if above("5-2") and not above("8-1"):
        holding.append("recovers what quantization lost")
    if above("5-2") and any(_gain_is_gone(comparisons, name) for name in MISMATCH):
        holding.append("mismatch")
    if all(is_nothing(comparisons[name]) and is_controlled(name, astray) for name in PRIMARY):
        holding.append("none")
    return holding or ["undecided"]


def is_controlled(name: str, astray: Collection[str]) -> bool:
    """Whether no arm of a comparison is among `astray`."""
    return not set(PRIMARY[name]) & set(astray)


def holds(difference: PairedDifference, adjusted: float) -> bool:
    """Whether a comparison holds: its estimate is above 0, and its p value after correction is below the level."""
    return difference.interval.mean > 0 and adjusted < LEVEL


def _gain_is_gone(comparisons: Mapping[str, PairedDifference], name: str) -> bool:
    """Whether the arm without mismatch lies no higher than the smallest effect above the arm without noise."""
    return name in comparisons and comparisons[name].interval.high < SMALLEST_EFFECT


def is_nothing(difference: PairedDifference) -> bool:
    """Whether an interval lies within the smallest effect of interest."""
    return difference.interval.low > -SMALLEST_EFFECT and difference.interval.high < SMALLEST_EFFECT
