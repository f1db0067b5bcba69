"""Families of models on a GPU in bfloat16: sampler and update against float32, no further off than transformers is."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl.policy.policy import load_policy
from qerl.rl.sequence_packing import Sample, logprobs_and_entropy, micro_batch
from qerl.rollout.eager import NativeSampler
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import EngineSettings
from tests.tiny import tiny_family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = torch.device("cuda")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
#: Shorter and longer than the windows of 24 tokens.
PROMPTS = [[5, 6, 7], [*range(2, 70)], [*range(10, 40)]]
PARAMS = SamplingParams(max_tokens=60, count=3, ignore_eos=True)


def forced(model, samples):
    """Log-probabilities of each completion's tokens, from one forward pass over it alone, in one row."""
    rows = []
    for s in samples:
        ids = torch.tensor([s.prompt + s.completion.token_ids], device=DEVICE)
        with torch.no_grad():
            logits = model(ids).logits[0, len(s.prompt) - 1 : -1].float()
        rows.append(torch.log_softmax(logits, -1).gather(-1, ids[0, len(s.prompt) :, None])[:, 0])
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mistral", "mistral-sliding", "phi3", "gemma3", "qwen3_5"])
def test_sampler_and_update_are_as_near_to_float32_as_transformers(tmp_path, name, dtype):
    window = {} if name in ("mistral", "qwen3_5") else {"sliding_window": 24}
    tiny_family(tmp_path, name, dtype=torch.bfloat16, **SHAPE, **window)
    policy = load_policy(tmp_path, None, dtype, DEVICE)
    sampler = make_sampler(policy, EngineSettings())
    assert type(sampler) is (EngineSampler if name == "mistral" else NativeSampler)
    drawn = sampler.generate(PROMPTS, PARAMS)
    samples = [Sample(p, c, 0.0, 0.0) for p, group in zip(PROMPTS, drawn, strict=True) for c in group]
    batch = micro_batch(samples, list(range(len(samples))), DEVICE)
    with torch.no_grad():
        packed = torch.cat(list(logprobs_and_entropy(policy, batch, 1.0)[0]))
    sampled = torch.tensor([x for s in samples for x in s.completion.logprobs], device=DEVICE)
    exact, stock = (
        forced(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=kind).to(DEVICE).eval(), samples)
        for kind in (torch.float32, getattr(torch, dtype))
    )
    limit = 1e-4 if dtype == "float32" else 1.25 * (stock - exact).square().mean().sqrt().item()
    for found in (sampled, packed):
        assert (found - exact).square().mean().sqrt().item() < limit
