"""Updates whose passes are CUDA graphs, against updates whose passes are launched kernel by kernel."""

from contextlib import nullcontext
from functools import partial
from itertools import combinations

import pytest
import torch

from qerl.models.random import random_policy
from qerl.rl.noise import Noise
from qerl.rl.packing import logprobs_and_entropy, micro_batch
from qerl.rl.parallel import Processes
from qerl.rl.passes import PassGraphs
from qerl.rl.update import Updater
from qerl.rollout.engine import EngineSampler
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings, NoiseSettings, RunSettings
from tests.gpu.backends import kernels_of, with_portable
from tests.unit.rl.test_passes import batch

DEVICE = torch.device("cuda")


def updater(weights, graphs) -> Updater:
    policy = random_policy(Base("small", weights), 16, DEVICE)
    if weights != "bf16":
        EngineSampler(policy, NativeSettings(), 1)  # moves the weights
    about = {"model": "m", "dataset": "d", "steps": 20, "dtype": "bfloat16", "adapter": {"rank": 16}}
    about["rollout"] = {"prompts": 4, "group_size": 4, "sampling": {"max_tokens": 60}}
    about["loss"] = {"updates_per_rollout": 3, "silent_sample": 1}
    about["optimizer"] = {"name": "adamw", "learning_rate": 1e-4, "max_grad_norm": 1e9}
    made = Updater(RunSettings.model_validate(about), policy, Processes())
    if not graphs:
        made.graphs = None
    return made


def gradient(made):
    return torch.cat([p.grad.double().flatten() for _, p in made.policy.trainable()])


@pytest.mark.parametrize("name", with_portable("bf16", "nvfp4", "mxfp4"))
def test_gradients_and_metrics_are_those_without_graphs(name):
    """Rows are longer with graphs, so products may round otherwise; each rollout has another size of row."""
    with kernels_of(name) as weights:
        plain, fast = updater(weights, False), updater(weights, True)
        assert isinstance(fast.graphs, PassGraphs)
        # Norms and entropies of the first update, and gradients of the last, each on the same parameters.
        for step in range(1, 5):
            for (_, a), (_, b) in zip(plain.policy.trainable(), fast.policy.trainable(), strict=True):
                b.data.copy_(a.data)
            expected, found = (one.update(step, batch(step)) for one in (plain, fast))
            for metric in ("entropy", "mismatch/kl", "grad_norm", "ess/tokens"):
                assert found[metric] == pytest.approx(expected[metric], rel=0.02, abs=1e-4), metric
            a, b = gradient(plain), gradient(fast)
            assert torch.cosine_similarity(a, b, dim=0) > 0.999
            assert abs(a.norm() / b.norm() - 1) < 0.02


def test_a_replay_reads_adapters_norms_and_noise_as_they_are():
    """Log-probabilities as the policy is, with noise, and after a change of all trained tensors."""
    made = updater("bf16", True)
    drawn = batch(0)
    row = micro_batch(drawn, list(range(len(drawn))), DEVICE)
    noise = Noise(made.policy.lm, NoiseSettings(schedule="constant", sigma_start=0.3, mode="consistent"), seed=0)

    def read(passes):
        with torch.no_grad(), made._casts.unchanged():
            return passes(row, 1.0)[0]

    states = []
    for _ in range(2):
        for scheduled in (False, True):
            with noise.at(1, 20) if scheduled else nullcontext():
                expected, found = (
                    read(partial(logprobs_and_entropy, made.policy)),
                    read(made.graphs.logprobs_and_entropy),
                )
            torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
            states.append(found)
        with torch.no_grad():
            for name, parameter in made.policy.trainable():
                parameter.mul_(1.5 if "norm" in name else 30)
    for a, b in combinations(states, 2):
        assert (a - b).abs().max() > 0.05


def test_the_same_update_twice_gives_the_same_bits():
    results = []
    for _ in range(2):
        made = updater("nvfp4", True)
        rows = [made.update(step, batch(step)) for step in range(1, 4)]
        results.append((rows, torch.cat([p.detach().flatten() for _, p in made.policy.trainable()])))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
