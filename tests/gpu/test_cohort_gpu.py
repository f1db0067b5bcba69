"""Several runs on one base in one engine on a GPU: each run's log-probabilities are those of its policy."""

import numpy as np
import pytest
import torch

from qerl.kernels import reference, triton
from qerl.kernels.state import DecodeState, SamplingState
from qerl.models.policy import with_adapters
from qerl.rl.noise import Noise
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import Request, SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.gpu.backends import kernels_of, with_portable
from tests.gpu.exact import differences, k3
from tests.tiny import random_checkpoint

CUDA = torch.device("cuda")
PROMPTS = [list(range(5, 40)), [8, 9], list(range(100, 117)) * 20]

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(scope="module", params=with_portable("bf16", "nvfp4"))
def policies(request, tmp_path_factory):
    """Runs of different ranks, of which one adapts few layers, with their noise."""
    folder = tmp_path_factory.mktemp(request.param) / "m"
    with kernels_of(request.param) as weights:
        random_checkpoint(folder, "small", weights)
        adapters = [
            (AdapterSettings(rank=8), 0),
            (AdapterSettings(rank=40), 1),
            (AdapterSettings(rank=16, targets=["q_proj", "down_proj"]), 2),
        ]
        made = with_adapters(folder, adapters, "bfloat16", torch.device("cuda", 0))
        for number, policy in enumerate(made):
            torch.manual_seed(number)
            for _, parameter in policy.trainable():
                parameter.data += 0.02 * torch.randn_like(parameter)
            policy.lm.generation_config.eos_token_id = []
        yield made


@pytest.mark.parametrize("count", [1, 3, 8, 40])
def test_logprobs_are_those_of_each_runs_policy(policies, count):
    sampler = EngineSampler(policies[0], NativeSettings(), 512, policies[1:])
    noises = [
        Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.1), seed)
        for seed, policy in enumerate(policies)
    ]
    for noise in noises:
        noise.set(1, 4)
    try:
        params = [
            SamplingParams(max_tokens=length, count=count, seed=length, ignore_eos=True) for length in (60, 30, 90)
        ]
        drawn = sampler.generate_all([Request(PROMPTS, each) for each in params])
        for policy, groups in zip(policies, drawn, strict=True):
            difference = differences(policy, PROMPTS, groups)
            assert np.abs(difference).max() <= 0.03
            assert k3(difference) <= 1e-4
    finally:
        for noise in noises:
            noise.clear()


@pytest.mark.parametrize("truncated", [False, True])
def test_draws_of_runs(truncated):
    """Temperature, truncation and seed are those of a sequence's run."""
    parameters = [(0.7, 3, 0.9, 0), (1.3, 8, 1.0, 5), (0.0, 3, 1.0, 0)]
    logits = torch.randn(6, 300, device=CUDA)

    def state_of(run):
        state, sampling = DecodeState.empty(6, 4, 1, CUDA), SamplingState.empty(CUDA, 3 if run is None else 1)
        state.position[:6], state.limit[:] = 5, 4
        state.sequence[:6] = torch.arange(6, device=CUDA)
        for number, (temperature, seed, top_p, top_k) in enumerate(parameters):
            if run in (None, number):
                values = {"temperature": temperature, "seed": seed, "top_p": top_p, "top_k": top_k}
                sampling.set(**values, stops=(), run=number if run is None else 0)
        if run is None:
            state.run[:6] = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32, device=CUDA)
        return state, sampling

    rows = torch.arange(6, dtype=torch.int32, device=CUDA)
    for function in (triton.draw, reference.draw):
        together, sampling = state_of(None)
        function(logits, rows, together, sampling, truncated)
        for run in range(3):
            alone, own = state_of(run)
            reference.draw(logits, rows, alone, own, truncated)
            places = [run, run + 3]
            assert together.tokens[places, 0].tolist() == alone.tokens[places, 0].tolist()
            torch.testing.assert_close(together.logprobs[places, 0], alone.logprobs[places, 0])
