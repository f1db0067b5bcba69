"""Updaters of several tiny runs, alone or joint."""

import threading
from functools import partial

import torch

from qerl.models.policy import with_adapters
from qerl.rl.cohort import Meeting
from qerl.rl.joint import JointPasses, JointUpdate
from qerl.rl.parallel import Processes
from qerl.rl.update import Updater
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.unit.rl import tiny_trainer
from tests.unit.rl.tiny_trainer import CPU


def settings_of(run, **changes):
    sampling = {"max_tokens": 60, "temperature": run.get("hot", 1.0)}
    rollout = {**tiny_trainer.UPDATE["rollout"], "sampling": sampling}
    own = {key: value for key, value in run.items() if key != "hot"}
    return parse(RunSettings, {**tiny_trainer.UPDATE, **own, "rollout": rollout, "joint_updates": True, **changes}, "t")


def policies_of(checkpoints, settings, double):
    """Policies on one base. Their adapters, norms and noise have moved: an adapter of B = 0 has no gradient of A."""
    adapters = [(one.adapter, one.seed) for one in settings]
    policies = list(with_adapters(checkpoints / settings[0].weights, adapters, settings[0].dtype, CPU))
    for one, policy in zip(settings, policies, strict=True):
        numbers = torch.Generator().manual_seed(one.seed)
        with torch.no_grad():
            for _, parameter in policy.trainable():
                parameter += 0.05 * torch.randn(parameter.shape, generator=numbers)
            for name, noise in policy.lm.named_buffers():
                if name.endswith("noise"):
                    noise += 0.1 * torch.randn(noise.shape, generator=numbers)
        if double:
            policy.lm.double()
    return policies


class Runs:
    """The updaters of runs, alone or joint; joint ones share a base."""

    def __init__(self, settings, policies, joint):
        self.meeting, self.passes = None, JointPasses(policies, settings[0]) if joint else None
        ask = lambda number: lambda request: self.meeting.ask(number, request)  # noqa: E731
        self.updaters = [
            Updater(one, policy, Processes(), JointUpdate(number, self.passes, ask(number)) if joint else None)
            for number, (one, policy) in enumerate(zip(settings, policies, strict=True))
        ]

    @classmethod
    def tiny(cls, checkpoints, runs, joint=True, double=True, **changes):
        """Runs of a tiny policy, which alone have a base each."""
        settings = [settings_of(run, seed=number, **changes) for number, run in enumerate(runs)]
        groups = [settings] if joint else [[one] for one in settings]
        return cls(settings, [policy for each in groups for policy in policies_of(checkpoints, each, double)], joint)

    def do(self, works):
        """What each work returns or raises, in the turns of a cohort."""
        self.meeting, found = Meeting(len(works), lambda _: None, self.passes), [None] * len(works)

        def work(run):
            self.meeting.begin(run)
            try:
                found[run] = works[run]()
            except Exception as error:  # noqa: BLE001 - returned
                found[run] = error
            finally:
                self.meeting.leave()

        threads = [threading.Thread(target=work, args=(run,)) for run in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(500)
        return found

    def update(self, step, batches):
        """The metrics of an update of each run."""
        found = self.do(
            [partial(one.update, step, samples) for one, samples in zip(self.updaters, batches, strict=True)]
        )
        for error in found:
            if isinstance(error, Exception):
                raise error
        return found

    def gradients(self):
        return [
            {name: None if p.grad is None else p.grad.clone() for name, p in one.policy.trainable()}
            for one in self.updaters
        ]


def assert_close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None
        else:  # noise is float32, and so norms' weights and gradients are, before they are added
            bound = max(1e-5, tolerance) if "norm" in name else tolerance
            assert (found[name] - grad).norm() <= bound * grad.norm() + 1e-12, name
