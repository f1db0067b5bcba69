"""Joint updates: each run of a cohort gets the gradients that it has alone, whatever the rows of the others hold."""

from functools import partial

import pytest
import torch

from qerl.rl.joint import JointPasses
from qerl.rl.passes import PassGraphs
from qerl.rl.update import DivergedError
from tests.unit.rl import tiny_trainer
from tests.unit.rl.joint_runs import Runs, assert_close
from tests.unit.rl.test_passes import attention  # noqa: F401 - a fixture
from tests.unit.rl.tiny_trainer import batch

#: Runs that differ in all that runs of a joint update may differ in: ranks, losses, temperatures, updates a rollout.
RUNS = [
    {"adapter": {"rank": 4}},
    {"adapter": {"rank": 1, "alpha": 16}, "loss": {"name": "dapo", "updates_per_rollout": 3}},
    {"adapter": {"rank": 7, "alpha": 3}, "loss": {"kl": 0.1, "entropy": 0.1, "mask_truncated": True}, "hot": 1.4},
    {"adapter": {"rank": 4}, "loss": {"name": "gspo", "silent_sample": 1, "correction": "token-truncate"}},
]
#: Their rollouts: of other numbers of completions and lengths, and one without a gradient.
BATCHES = [batch(0), batch(1, longest=3), batch(2, tiny_trainer.MIXED[:2]), batch(3, longest=12)]


@pytest.mark.parametrize("limit", [60, 16384])
def test_each_run_gets_the_gradients_and_metrics_that_it_has_alone(checkpoints, limit):
    alone, joint = (Runs.tiny(checkpoints, RUNS, joint, micro_batch_tokens=limit) for joint in (False, True))
    for step in (1, 2):
        expected, found = (runs.update(step, BATCHES) for runs in (alone, joint))
        for metrics, other in zip(found, expected, strict=True):
            assert metrics == pytest.approx(other, rel=1e-5, abs=1e-9)
        for grads, other in zip(joint.gradients(), alone.gradients(), strict=True):
            assert_close(grads, other, 1e-9 if step == 1 else 1e-6)


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of runs of the forward passes, which the fixture records."""
    found, go_forward = [], JointPasses._go_forward

    def counting(self, asked, runs):
        states = go_forward(self, asked, runs)
        found.append(len(states))
        return states

    monkeypatch.setattr(JointPasses, "_go_forward", counting)
    return found


def test_runs_share_passes_while_their_rows_have_room(checkpoints, sizes):
    samples = [batch(0), batch(1), batch(2)]
    Runs.tiny(checkpoints, RUNS[:1] * 3, micro_batch_tokens=16384).update(1, samples)
    # Samples of the completions without a gradient, and those with one.
    assert sizes == [3, 3]
    del sizes[:]
    Runs.tiny(checkpoints, RUNS[:1] * 3, micro_batch_tokens=130).update(1, samples)
    assert sizes == [3, 2, 1]


@pytest.mark.parametrize("value", [torch.nan, 1e30])
def test_what_is_not_finite_in_one_run_reaches_no_other(checkpoints, value):
    """Its weights aren't finite, or they are and its numbers overflow; the others end their update as without it."""
    joint, other = (Runs.tiny(checkpoints, RUNS, double=False) for _ in range(2))
    expected = other.update(1, BATCHES)
    with torch.no_grad():
        for _, parameter in joint.updaters[1].policy.trainable():
            parameter.fill_(value)
    works = [partial(one.update, 1, samples) for one, samples in zip(joint.updaters, BATCHES, strict=True)]
    found = joint.do(works)
    assert isinstance(found[1], DivergedError)
    for run in (0, 2, 3):
        assert found[run] == pytest.approx(expected[run], rel=1e-4, abs=1e-6)
        assert_close(joint.gradients()[run], other.gradients()[run], 1e-4)


def test_the_others_go_on_without_a_run_that_fails_between_its_passes(checkpoints, monkeypatch):
    joint, other = (Runs.tiny(checkpoints, RUNS) for _ in range(2))
    expected = other.update(1, BATCHES)
    failing = joint.updaters[2]
    monkeypatch.setattr(failing, "_loss_mask", lambda _: 1 / 0)
    found = joint.do([partial(one.update, 1, samples) for one, samples in zip(joint.updaters, BATCHES, strict=True)])
    assert isinstance(found[2], ZeroDivisionError)
    for run in (0, 1, 3):
        assert found[run] == pytest.approx(expected[run], rel=1e-6, abs=1e-9)
        assert_close(joint.gradients()[run], other.gradients()[run], 1e-9)


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize(("limit", "most"), [(16384, 4), (512, 2)])
def test_graphs_have_a_segment_of_each_run(checkpoints, sizes, limit, most):
    """A run without a request, as in another run's second update, has one of padding, which adds no gradient."""
    alone, joint = (
        Runs.tiny(checkpoints, RUNS, joint, double=False, micro_batch_tokens=limit) for joint in (False, True)
    )
    captured = []
    record = lambda work: captured.append(work) or work() or work  # noqa: E731
    for one in joint.updaters:
        one.graphs = PassGraphs(one.policy, None, record)
    joint.passes.graphs = PassGraphs(joint.updaters[0].policy, None, record)
    for step in (1, 2, 3):
        expected, found = (runs.update(step, BATCHES) for runs in (alone, joint))
        for metrics, other in zip(found, expected, strict=True):
            assert metrics == pytest.approx(other, rel=1e-3, abs=1e-5)
        for grads, other in zip(joint.gradients(), alone.gradients(), strict=True):
            assert_close(grads, other, 1e-4)
    assert max(sizes) == most
    assert captured
