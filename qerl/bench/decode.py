"""Decode speed of the native engine on random weights of Qwen2.5's shapes: tokens a second by rank and sequences.

Time for n + 1 tokens less time for one, so that prompts don't count, as the yardstick of vLLM has it. Weights never
touch the disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer

from qerl.bench.shapes import model_config
from qerl.config import AdapterSettings, NativeSettings
from qerl.measure import peak_memory_bytes, reset_peak_memory, seconds
from qerl.models.policy import Policy, lora_config, weight_bytes
from qerl.progress import track
from qerl.provenance import stamp, write_json
from qerl.quant.formats import nvfp4_global_scale, quantize
from qerl.quant.linear import PackedLinear
from qerl.rl.aqn import make_noisy
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams

_FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("self_attn", ("o_proj",)), ("mlp", ("gate_proj", "up_proj")),
          ("mlp", ("down_proj",)))  # fmt: skip
#: Of the weights: logits near those of a trained model, and hidden states that neither die nor explode.
_STD = 0.02
#: Timed runs of a point.
REPEATS = 3


def random_policy(
    size: str, weights: str, rank: int, device: torch.device, seed: int = 0, train_norms: bool = True
) -> Policy:
    """A policy of a shape with normal weights, bfloat16 or packed, and an adapter of `rank` whose B isn't zero."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**model_config(size, "bf16"))
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for layer in lm.model.layers:
        for owner, names in _FUSED:
            _fill_fused(layer.get_submodule(owner), names, weights, device)
    for module in lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(_random(parameter.shape, device), requires_grad=False))
    lm.model.rotary_emb = type(lm.model.rotary_emb)(config).to(device)
    lm.tie_weights()
    make_noisy(lm)
    lm.requires_grad_(False)
    tokenizer = Qwen2Tokenizer()
    if not rank:
        return Policy(lm.eval(), tokenizer)
    peft = get_peft_model(lm, lora_config(AdapterSettings(rank=rank, alpha=rank, train_norms=train_norms)))
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-3)
    return Policy(lm.eval(), tokenizer, peft)


def _random(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return (torch.randn(shape, device=device) * _STD).bfloat16()


def _fill_fused(owner: nn.Module, names: Sequence[str], weights: str, device: torch.device) -> None:
    """Give the layers `names`, which run fused, weights; packed ones share a global scale."""
    dense = [owner.get_submodule(name) for name in names]
    tensors = [_random(layer.weight.shape, device) for layer in dense]  # type: ignore[union-attr, arg-type]
    scale = nvfp4_global_scale(*tensors) if weights == "nvfp4" else None
    for name, layer, tensor in zip(names, dense, tensors, strict=True):
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else _random(layer.bias.shape, device) * _STD
        if weights == "bf16":
            layer.weight = nn.Parameter(tensor)
            layer.bias = None if bias is None else nn.Parameter(bias)
        else:
            packed = quantize(tensor, weights, global_scale=scale)
            setattr(owner, name, PackedLinear.from_packed(packed, bias))


def measure(policy: Policy, sequences: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Samples of tokens a second and seconds of the prompts, of `sequences` at once."""
    sampler = EngineSampler(policy, NativeSettings(), sequences)
    sampler.stops = frozenset()
    vocabulary = policy.lm.config.vocab_size

    def timed(count: int, round_: int) -> float:
        numbers = np.random.default_rng([sequences, round_]).integers(vocabulary, size=(sequences, prompt)).tolist()
        with seconds() as taken:
            sampler.generate(numbers, SamplingParams(max_tokens=count, seed=round_))
        return taken.value

    timed(tokens + 1, 0)
    prompts = min(timed(1, 100 + i) for i in range(2))
    samples = [timed(tokens + 1, 1 + i) - prompts for i in range(REPEATS)]
    sampler.release()
    return {
        "sequences": sequences,
        "samples": [sequences * tokens / taken for taken in samples],
        "step_ms": 1e3 * median(samples) / tokens,
        "prompt_seconds": prompts,
        "sampler": sampler.served,
    }


def sync_seconds(policy: Policy, count: int = 20) -> list[float]:
    """How long a sync takes, the first, which sets it up, not counted."""
    sampler = EngineSampler(policy, NativeSettings(), 1)
    taken = []
    for _ in range(count + 1):
        with seconds() as one:
            sampler.sync()
        taken.append(one.value)
    return taken[1:]


def main() -> None:
    """Time every combination and write the samples, after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default="7B")
    parser.add_argument("--weights", nargs="+", default=["nvfp4"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    points: list[dict[str, Any]] = []
    combinations = [(w, r) for w in arguments.weights for r in arguments.ranks]
    for weights, rank in track(combinations, len(combinations), "policies"):
        policy = random_policy(arguments.size, weights, rank, device)
        label = {"size": arguments.size, "weights": weights, "rank": rank, "weight_bytes": weight_bytes(policy)}
        syncs = sync_seconds(policy) if rank else []
        for sequences in arguments.sequences:
            reset_peak_memory()
            point = label | measure(policy, sequences, arguments.prompt, arguments.tokens) | {"sync_seconds": syncs}
            points.append(point | {"peak_memory_bytes": peak_memory_bytes()})
            print(f"{arguments.size} {weights} r{rank} {sequences}: {median(point['samples']):.1f} tok/s", flush=True)
            write_json(
                arguments.out,
                {"prompt": arguments.prompt, "tokens": arguments.tokens, "points": points, "provenance": stamp()},
            )
        del policy
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
