"""Figures of an update: how they add up, and the metrics made of them."""

from dataclasses import fields

import pytest

from qerl.rl.update_stats import UpdateStats

NAMES = [field.name for field in fields(UpdateStats)]


class TwoProcesses:
    """Another process has twice this one's sums, and a largest ratio of 5."""

    def sum(self, values):
        return [3 * value for value in values]

    def max(self, value):
        return max(value, 5.0)


def numbered(start=1.0):
    return UpdateStats(**{name: start + place for place, name in enumerate(NAMES)})


def test_every_figure_adds_up_and_the_largest_ratio_is_a_maximum():
    stats = UpdateStats()
    stats += numbered()
    stats += numbered(0.5)
    for place, name in enumerate(NAMES):
        expected = 1 + place if name == "max_ratio" else 1.5 + 2 * place
        assert getattr(stats, name) == expected, name


def test_figures_of_processes_add_up_like_those_of_micro_batches():
    total = UpdateStats(loss=1.0, tokens=2.0, max_ratio=1.5).over(TwoProcesses())
    assert total == UpdateStats(loss=3.0, tokens=6.0, max_ratio=5.0)


def test_metrics_are_means_over_tokens_ratios_and_updates():
    stats = UpdateStats(
        loss=0.5,
        tokens=10,
        entropy=20,
        mismatch_kl=1,
        reference_kl=3,
        ratios=40,
        clipped_low=4,
        clipped_high=8,
        value_loss=6,
        value_clipped=1,
    )
    assert stats.metrics() == {
        "loss": 0.5,
        "entropy": 2.0,
        "mismatch/kl": 0.1,
        "reference/kl": pytest.approx(0.3),
        "clip_ratio/low": 0.1,
        "clip_ratio/high": 0.2,
    }
    assert stats.value_metrics(2) == {"value/loss": 3.0, "value/clipped": 0.5}
    assert UpdateStats(tokens=1).metrics()["clip_ratio/low"] == 0.0  # all completions masked: no ratio counts
