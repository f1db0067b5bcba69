"""Draws of the eager sampler, its noise and its refusals; test_engine.py compares both samplers with Hugging Face."""

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.noise import Noise
from qerl.rollout.eager import EagerSampler, draw
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import NotFiniteError, SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings, NoiseSettings
from tests.conftest import in_nightly
from tests.tiny import tiny_qwen2

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [5, 6, 8, 9]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("scale", [0.0, 0.2, 3.0, 30.0], ids=["all equal", "flat", "peaked", "certain"])
@pytest.mark.parametrize("top_k", [0, 5, 100])
def test_draws_by_top_p_are_those_of_the_whole_sorted_vocabulary(scale, top_k):
    torch.manual_seed(0)
    logits = (torch.randn(64, 300) * scale).round(decimals=1 if scale == 3 else 6)  # with equal values among the first
    uniform = torch.rand(64, dtype=torch.float64)
    params = SamplingParams(1, 0.6, 0.95, top_k=top_k)
    expected = []
    for row, number in zip(torch.log_softmax(logits / 0.6, -1).double().exp().numpy(), uniform.tolist(), strict=True):
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(row[order]) - row[order]
        first = np.arange(300) < (top_k or 300)
        chosen = first & (before < 0.95 * (row[order][first].sum() if top_k else 1))
        mass = np.cumsum(row[order] * chosen)
        expected.append(order[np.searchsorted(mass, number * mass[-1], side="right")])
    assert draw(logits, uniform, params)[0].tolist() == expected


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 0.5), (3, 0.8), (4, 0.9), (9, 0.35), (100, 0.7)])
def test_top_k_comes_before_top_p_as_in_transformers(top_k, top_p):
    logits = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])).repeat(1, 40) / 2
    logits -= torch.arange(200) / 500  # without equal values
    kept = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, logits)).isfinite()
    uniform = (torch.arange(10000, dtype=torch.float64) + 0.5) / 10000  # so close that each token with a mass is drawn
    assert torch.softmax(logits[0], -1)[kept[0]].min() > 1e-4
    tokens, _ = draw(logits.expand(10000, -1), uniform, SamplingParams(1, top_p=top_p, top_k=top_k))
    assert torch.equal(torch.bincount(tokens, minlength=200) > 0, kept[0])


def test_logprobs_of_truncated_draws_are_those_of_the_whole_distribution():
    logits = torch.log(torch.tensor([[0.6, 0.4]]))
    _, logprob = draw(logits, torch.tensor([0.99], dtype=torch.float64), SamplingParams(1, top_p=0.5))
    assert logprob.exp().item() == pytest.approx(0.6)


@pytest.mark.parametrize("weights", ["bf16", "nvfp4", *in_nightly("nf4", "mxfp4")])
def test_aqn_reaches_the_sampler_of_any_format_and_never_accumulates(checkpoint, tmp_path, weights):
    """Upstream's noise looks for another class of norm than the sampler has, and never fires; if it did, it would add
    up in the norms that nothing writes anew.
    """
    base = checkpoint if weights == "bf16" else tmp_path / weights
    if weights != "bf16":
        quantize_checkpoint(checkpoint, base, weights)
    policy = with_adapter(base, AdapterSettings(rank=4), "float32", seed=0, device=CPU)
    noise = Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=0.05), seed=0)
    sampler, params = EagerSampler(policy), SamplingParams(max_tokens=6, seed=1, temperature=0)
    state = {name: tensor.clone() for name, tensor in policy.lm.state_dict().items()}
    clean = sampler.generate(PROMPTS, params)
    for step in range(1, 9):
        with noise.at(step, 8) as report:
            noisy = sampler.generate(PROMPTS, params)
        assert report.norm > 0
        assert noisy[0][0].logprobs != clean[0][0].logprobs
    assert sampler.generate(PROMPTS, params) == clean
    after = policy.lm.state_dict()
    assert all(torch.equal(state[name].view(torch.uint8), after[name].view(torch.uint8)) for name in state)


@pytest.mark.parametrize("sampler", [EagerSampler, lambda policy: EngineSampler(policy, NativeSettings())])
@pytest.mark.parametrize(("layer", "number"), [("model.layers.1.mlp.down_proj", torch.nan), ("lm_head", torch.inf)])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_logprobs_that_are_nan_are_refused(tmp_path, sampler, layer, number, top_p):
    policy = load_policy(tiny_qwen2(tmp_path / "dense", tie_word_embeddings=False), None, "float32", CPU)
    policy.lm.get_submodule(layer).weight.data[..., :5] = number
    with pytest.raises(NotFiniteError, match=r"not finite.*lower optimizer\.learning_rate"):
        sampler(policy).generate(PROMPTS, SamplingParams(max_tokens=4, count=2, top_p=top_p))
