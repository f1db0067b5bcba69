import pytest
import torch

from qerl.policy.policy import load_policy
from qerl.rl.divergence import kl_per_token
from qerl.rollout.eager import NativeSampler
from qerl.rollout.sampler import SamplingParams

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def policies(checkpoints):
    return {weights: load_policy(checkpoints / weights, None, "float32") for weights in ("bf16", "nvfp4")}


def logprobs(policy, prompt, completion, temperature):
    """The log-probabilities by transformers' own forward pass."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logits = policy.lm(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_it_is_k3_of_the_two_policies(policies, temperature):
    params = SamplingParams(max_tokens=8, count=3, temperature=temperature, seed=4)
    drawn = NativeSampler(policies["bf16"]).generate(PROMPTS, params)
    terms = []
    with torch.no_grad():
        for prompt, group in zip(PROMPTS, drawn, strict=True):
            for one in group:
                ratio = logprobs(policies["nvfp4"], prompt, one, temperature) - torch.tensor(one.logprobs)
                terms.append(torch.expm1(ratio) - ratio)
    expected = torch.cat(terms).mean().item()
    assert expected > 1e-6
    assert kl_per_token(policies["nvfp4"], PROMPTS, drawn, temperature, 30) == pytest.approx(expected, rel=1e-3)
    assert kl_per_token(policies["bf16"], PROMPTS, drawn, temperature) < 1e-9
