"""The decision rules of docs/exploration-protocol.md, case by case."""

import pytest

from qerl.results.statistics import Interval
from qerl.study.outcomes import MISMATCH, PRIMARY, PairedDifference, verdicts


def case(width=0.015, astray=(), **means):
    """Differences in points, by name with `_` for `-` and a leading `d`; p is small where the interval excludes 0."""
    named = {name: means.get("d" + name.replace("-", "_"), 0.0) / 100 for name in [*PRIMARY, *MISMATCH]}
    comparisons = {
        name: PairedDifference(Interval(mean, mean - width, mean + width), 0.5, 3, 12) for name, mean in named.items()
    }
    return verdicts(comparisons, {name: 0.01 if abs(mean) > width else 0.5 for name, mean in named.items()}, astray)


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ({}, ["none"]),
        ({"d2_1": 4}, ["undecided"]),
        ({"d2_3": 4, "d5_9": 4}, ["exploration"]),
        ({"d2_3": 4, "d5_9": -4}, ["undecided"]),
        ({"d5_2": 4, "d6_2": 4, "d7_2": 4}, ["recovers what quantization lost"]),
        ({"d5_2": 4, "d8_1": 4, "d6_2": 4, "d7_2": 4}, ["undecided"]),
        ({"d5_2": 4, "d8_1": 4, "d6_2": 4, "d7_2": 0}, ["mismatch"]),
        ({"d5_2": 4, "d6_2": 0, "d7_2": 4}, ["recovers what quantization lost", "mismatch"]),
        ({"d5_2": 1}, ["undecided"]),
        ({"d5_2": -4}, ["undecided"]),
    ],
)
def test_each_outcome_has_its_sentence(means, expected):
    assert case(**means) == expected


def test_wide_intervals_decide_nothing():
    assert case(width=0.03) == ["undecided"]


@pytest.mark.parametrize("arm", ["bf16-thermostat", "nvfp4-thermostat"])
def test_a_control_without_the_entropy_supports_no_sentence(arm):
    assert case(astray={arm}, d2_3=4, d5_9=4) == case(astray={arm}) == ["undecided"]
    assert case(astray={arm}, d5_2=4, d6_2=4, d7_2=4) == ["recovers what quantization lost"]
