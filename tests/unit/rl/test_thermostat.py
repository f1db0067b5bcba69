"""The temperature servo, against temperatures found by bisection."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq

from qerl.rl.thermostat import Thermostat, followed_entropies
from qerl.settings.base import ConfigError
from qerl.settings.training import ThermostatSettings

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
    rows = followed([wanted] * 30)
    assert rows[0]["temperature"] == 1
    assert rows[-1]["temperature"] == pytest.approx(expected, rel=1e-3)
    assert rows[-1]["entropy/sampler"] == pytest.approx(wanted, rel=1e-3)


def test_it_follows_a_falling_entropy_while_the_policy_sharpens():
    target = np.linspace(2.0, 1.0, 60)
    rows = followed(target, 60, lambda step: LOGITS * (1 + step / 60))
    missed = [abs(row["entropy/sampler"] - wanted) for row, wanted in zip(rows[10:], target[10:], strict=True)]
    assert max(missed) < 0.08


def test_the_temperature_stays_within_its_limits():
    assert followed([9.0] * 30, highest=1.5)[-1]["temperature"] == 1.5
    assert followed([0.0] * 30, lowest=0.8)[-1]["temperature"] == 0.8


def test_one_step_corrects_by_the_power_of_the_ratio():
    rows = [{"temperature": 0.9, "entropy/sampler": 1.0}]
    settings = ThermostatSettings(arm="a", gain=0.5)
    assert Thermostat(settings, 1.0, [1.0, 1.44]).temperature(rows) == pytest.approx(0.9 * math.sqrt(1.44))


def test_a_series_that_is_too_short_is_an_error(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("")
    with pytest.raises(ConfigError, match="0 steps"):
        followed_entropies(file, 3)


@pytest.mark.parametrize(
    "given", [{}, {"arm": "a", "metrics": "m.jsonl"}, {"arm": "a", "lowest": 2, "highest": 1}, {"arm": "a", "gain": 0}]
)
def test_impossible_settings_are_refused(given):
    with pytest.raises(ValueError, match=r"thermostat|gain"):
        ThermostatSettings(**given)
