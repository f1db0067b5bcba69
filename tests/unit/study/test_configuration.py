"""config/exploration.yaml and its small version against docs/exploration-protocol.md."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from qerl.formats.tiles import fits
from qerl.settings.base import read_yaml
from qerl.study.outcomes import MISMATCH, PRIMARY
from qerl.workflow.plan import plan_from
from qerl.workflow.stages import Jobs

ROOT = Path(__file__).parents[3]
PROTOCOL = (ROOT / "docs/exploration-protocol.md").read_text()
MAIN = ("countdown-3m", "comparisons-3m", "countdown-25m", "comparisons-25m")


@cache
def planned(name="exploration"):
    return plan_from(read_yaml(ROOT / f"config/{name}.yaml"), ROOT / "config/mini.yaml")


def runs(experiment, arm=None):
    return [run for run in planned().runs.values() if run.experiment == experiment and arm in (None, run.arm)]


def test_the_arms_are_those_of_the_protocol():
    named = re.findall(r"`([a-z0-9-]+)`", "".join(re.findall(r"^\| [0-9]+[ab]? \| (.*?) \|", PROTOCOL, re.MULTILINE)))
    assert {run.arm for run in runs("countdown-3m")} == set(named)
    compared = {arm for pair in [*PRIMARY.values(), *MISMATCH.values()] for arm in pair}
    for experiment in MAIN:
        assert compared <= {run.arm for run in runs(experiment)}


@pytest.mark.parametrize("experiment", MAIN)
def test_each_arm_has_at_least_ten_pairs_on_three_bases(experiment):
    pairs = {(run.settings.model, run.settings.seed) for run in runs(experiment, "bf16")}
    assert len(pairs) >= 10
    assert len({model for model, _ in pairs}) == 3
    for run in runs(experiment):
        assert (run.settings.model, run.settings.seed) in pairs


def test_arms_differ_in_nothing_but_what_makes_them_arms():
    """All runs of an experiment share problems, batch and steps."""
    for experiment in MAIN:
        shared = {(str(r.settings.rollout), r.settings.steps, r.settings.dataset) for r in runs(experiment)}
        assert len(shared) == 1


def test_the_pilot_sweeps_at_least_three_rates_on_seeds_that_no_main_run_has():
    swept = [run for run in planned().runs.values() if run.experiment.startswith("pilot-")]
    main = {run.settings.seed for experiment in MAIN for run in runs(experiment)}
    rates = Counter((r.experiment, r.arm, r.settings.model, r.settings.optimizer.learning_rate) for r in swept)
    assert set(rates.values()) == {1}
    assert all(len({key[-1] for key in rates if key[0] == name}) >= 3 for name, *_ in rates)
    assert not main & {run.settings.seed for run in swept}


def test_the_protocol_counts_the_runs():
    counts = Counter(run.experiment for run in planned().runs.values())
    by_size = [sum(n for name, n in counts.items() if name in kind) for kind in (MAIN[:2], MAIN[2:])]
    pilot = [
        sum(n for name, n in counts.items() if name.startswith("pilot") and size in name) for size in ("3m", "25m")
    ]
    said = re.search(r"are (\d+) of size 3m and (\d+) of size 25m; the pilot has (\d+) and (\d+)", PROTOCOL).groups()
    assert [*by_size, *pilot] == list(map(int, said))


def test_the_packed_products_serve_every_base():
    for model in planned().config.models.values():
        head = model.hidden_size // model.heads
        shapes = [
            (model.hidden_size + 2 * model.kv_heads * head, model.hidden_size),
            (model.hidden_size, model.hidden_size),
            (model.intermediate_size, model.hidden_size),
            (model.hidden_size, model.intermediate_size),
        ]
        assert fits("nvfp4", shapes)
        assert head == 64


def test_each_follower_follows_the_run_of_its_base_and_seed():
    for run in planned().runs.values():
        if run.settings.thermostat:
            followed = planned().followed(run)
            assert (followed.settings.model, followed.settings.seed) == (run.settings.model, run.settings.seed)


def test_the_small_version_has_the_primary_arms():
    small = planned("exploration-small")
    experiments = planned().config.experiments
    for experiment in small.config.experiments.values():
        arms = {arm: dict(experiments["countdown-3m"].arms[arm]) for arm in experiment.arms}
        for arm in arms.values():  # the pilot of 3m chose rates, which a smaller policy need not have
            assert list(arm.pop("optimizer")) == ["learning_rate"]
        assert experiment.arms == arms
        assert set(experiment.arms) == {arm for pair in PRIMARY.values() for arm in pair}
    jobs = Jobs(small)
    assert all(jobs.train(run).settings.steps <= 10 for run in small.runs)
