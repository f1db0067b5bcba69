"""The temperature servo, against temperatures found by bisection."""

import numpy as np
import pytest
from scipy.optimize import brentq

from qerl.rl.train import Thermostat
from qerl.settings.run import ThermostatSettings

LOGITS = np.random.default_rng(3).normal(scale=2.5, size=50)


def entropy(temperature, logits=LOGITS):
    p = np.exp(logits / temperature - (logits / temperature).max())
    p /= p.sum()
    return float(-(p * np.log(p)).sum())


def followed(target, steps=30, logits=lambda step: LOGITS, **changes):
    """The temperatures and entropies of a policy whose logits each step are given."""
    settings = ThermostatSettings(metrics="m.jsonl", **changes)
    thermostat = Thermostat(settings, 1.0, target)
    rows = []
    for step in range(steps):
        temperature = thermostat.temperature(rows)
        rows.append({"temperature": temperature, "entropy/sampler": entropy(temperature, logits(step))})
    return rows


@pytest.mark.parametrize("wanted", [1.0, 1.9, 3.0])
def test_it_reaches_the_temperature_of_the_wanted_entropy(wanted):
    expected = brentq(lambda temperature: entropy(temperature) - wanted, 0.25, 4)
    rows = followed([wanted] * 60, 60)
    assert rows[0]["temperature"] == 1
    assert rows[-1]["temperature"] == pytest.approx(expected, rel=1e-3)
    assert rows[-1]["entropy/sampler"] == pytest.approx(wanted, rel=1e-3)


def test_it_follows_a_falling_entropy_while_the_policy_sharpens():
    """The followed run is the same sharpening policy at a temperature of 1.5."""
    target = [entropy(1.5, LOGITS * (1 + step / 60)) for step in range(60)]
    rows = followed(target, 60, lambda step: LOGITS * (1 + step / 60))
    missed = [abs(row["entropy/sampler"] - wanted) for row, wanted in zip(rows[20:], target[20:], strict=True)]
    assert target[0] > 1.5 * target[-1]
    assert max(missed) < 0.08
    assert rows[-1]["temperature"] == pytest.approx(1.5, rel=0.01)


def test_the_temperature_stays_within_its_limits():
    assert followed([9.0] * 30, highest=1.5)[-1]["temperature"] == 1.5
    assert followed([0.0] * 30, lowest=0.8)[-1]["temperature"] == 0.8


def test_the_ratio_is_that_of_weighted_means_over_the_same_steps():
    reached, wanted = [0.2, 0.5, 0.1], [0.4, 0.3, 0.15, 7.0]
    rows = [{"temperature": 1.3, "entropy/sampler": value} for value in reached]
    settings = ThermostatSettings(arm="a", gain=0.2, average_steps=4)
    weights = np.array([0.75**2, 0.75, 1])
    expected = 1.3 * (weights @ wanted[:3] / (weights @ reached)) ** 0.2
    assert Thermostat(settings, 1.0, wanted).temperature(rows) == pytest.approx(expected)


@pytest.mark.parametrize("sharper", [0.9, 1.0, 1.15])
def test_a_policy_that_is_nearly_sure_has_the_wanted_mean_although_single_steps_vary_manifold(sharper):
    """Entropies vary by problems, of which both runs have the same at a step, and by draws (SD of 0.5 and 0.6 in log).

    Entropy explodes above a temperature of 1.3, so one that follows single steps drifts to where completions are noise.
    """
    generator = np.random.default_rng(5)
    sure, open_ = np.concatenate([[12.0], np.zeros(500)]), np.array([1.0, 0.0])

    def mean_entropy(temperature, scale=1.0):
        return (29 * entropy(temperature, scale * sure) + entropy(temperature, scale * open_)) / 30

    assert mean_entropy(1.5) > 10 * mean_entropy(1) > 20 * mean_entropy(0.5)
    for _ in range(5):
        by_problem, own, other = generator.normal(scale=[[0.5], [0.6], [0.6]], size=(3, 400))
        wanted = mean_entropy(1) * np.exp(by_problem + other)
        thermostat, rows = Thermostat(ThermostatSettings(arm="a"), 1.0, wanted), []
        for step in range(400):
            temperature = thermostat.temperature(rows)
            reached = mean_entropy(temperature, sharper) * np.exp(by_problem[step] + own[step])
            rows.append({"temperature": temperature, "entropy/sampler": reached})
        assert np.mean([row["entropy/sampler"] for row in rows]) == pytest.approx(np.mean(wanted), rel=0.1)


@pytest.mark.parametrize(
    "given", [{}, {"arm": "a", "metrics": "m.jsonl"}, {"arm": "a", "lowest": 2, "highest": 1}, {"arm": "a", "gain": 0}]
)
def test_impossible_settings_are_refused(given):
    with pytest.raises(ValueError, match=r"thermostat|gain"):
        ThermostatSettings(**given)
