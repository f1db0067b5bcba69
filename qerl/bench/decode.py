"""Decode speed of the native engine on random weights of Qwen2.5's shapes: tokens a second by sequences.

    python -m qerl.bench.decode OUT.json --size 7B --weights nvfp4 --rank 16 --sequences 1 --sequences 32

`qerl.bench.decode_points` says how it is timed and what is written. Weights never touch the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Tokenizer

from qerl.bench.decode_points import PROMPT, SEQUENCES, TOKENS, DecodePoints, Job, Measure, timed
from qerl.bench.grpo_step_work import shape_name
from qerl.bench.shapes import model_config
from qerl.bench.sizes import FUSED
from qerl.config import AdapterSettings, NativeSettings
from qerl.measure import seconds
from qerl.models.policy import Policy, choose_device, lora_config, use_own_modules, weight_bytes
from qerl.progress import configure_logging
from qerl.quant.formats import PACKED_FORMATS, nvfp4_global_scale, quantize
from qerl.quant.linear import PackedLinear
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams

#: Of the weights: logits near those of a trained model, and hidden states that neither die nor explode.
_STD = 0.02
#: No bound on the KV cache: where memory has no room for all sequences, the point is out of memory. With a bound some
#: would wait for others, and the point be one of fewer sequences.
_SETTINGS = NativeSettings(kv_cache_gib=2.0**20)
WEIGHTS = ("bf16", *PACKED_FORMATS)


def random_policy(
    size: str, weights: str, rank: int, device: torch.device, seed: int = 0, train_norms: bool = True
) -> Policy:
    """A policy of a shape with normal weights, bfloat16 or packed, and an adapter of `rank` whose B isn't zero."""
    torch.manual_seed(seed)
    lm = empty_model(size)
    for layer in lm.model.layers:
        for names in FUSED:
            _fill_fused(layer, names, weights, device)
    fill_model(lm, device)
    use_own_modules(lm)
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


def empty_model(size: str) -> PreTrainedModel:
    """The bfloat16 model of a shape on the device meta: it holds no weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**model_config(size, "bf16")), dtype=torch.bfloat16
        )


def fill_model(lm: PreTrainedModel, device: torch.device) -> None:
    """Give `lm` frozen random weights where it still has none."""
    for module in lm.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(random_weight(parameter.shape, device), requires_grad=False))
    lm.model.rotary_emb = type(lm.model.rotary_emb)(lm.config).to(device)
    lm.tie_weights()


def random_weight(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Normal bfloat16 values; a vector, which is a norm's weight, has ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return (torch.randn(shape, device=device) * _STD).bfloat16()


def _fill_fused(block: nn.Module, names: Sequence[str], weights: str, device: torch.device) -> None:
    """Give the layers `names`, which run fused, weights; packed ones share a global scale."""
    dense = [block.get_submodule(name) for name in names]
    tensors = [random_weight(layer.weight.shape, device) for layer in dense]  # type: ignore[union-attr, arg-type]
    scale = nvfp4_global_scale(*tensors) if weights == "nvfp4" else None
    for name, layer, tensor in zip(names, dense, tensors, strict=True):
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else random_weight(layer.bias.shape, device) * _STD
        if weights == "bf16":
            layer.weight = nn.Parameter(tensor)
            layer.bias = None if bias is None else nn.Parameter(bias)
        else:
            packed = quantize(tensor, weights, global_scale=scale)
            block.set_submodule(name, PackedLinear.from_packed(packed, bias))


def measure(policy: Policy, sequences: int, prompt: int, tokens: int) -> dict[str, Any]:
    """Figures of a point: `timed`, who samples, and bytes of the weights as they are held then."""
    sampler = EngineSampler(policy, _SETTINGS, sequences)

    def draw(prompts: list[list[int]], count: int, seed: int) -> int:
        groups = sampler.generate(prompts, SamplingParams(max_tokens=count, seed=seed, ignore_eos=True))
        return sum(len(completion.token_ids) for group in groups for completion in group)

    figures = timed(draw, sequences, prompt, tokens)
    sampler.release()
    return figures | {"sampler": sampler.served, "weight_bytes": weight_bytes(policy)}


def sync_seconds(policy: Policy, count: int = 20) -> list[float]:
    """How long a sync takes, the first, which sets it up, not counted."""
    sampler = EngineSampler(policy, NativeSettings(), 1)
    taken = []
    for _ in range(count + 1):
        with seconds() as one:
            sampler.sync()
        taken.append(one.value)
    return taken[1:]


def check_weights(weights: str) -> None:
    """BadParameter for what isn't one of `WEIGHTS`."""
    if weights not in WEIGHTS:
        raise typer.BadParameter(f"weights are one of {', '.join(WEIGHTS)}, not {weights}")


def main(
    out: Path,
    size: str = "7B",
    weights: str = "nvfp4",
    rank: int = 16,
    sequences: Annotated[list[int] | None, typer.Option()] = None,
    prompt: int = PROMPT,
    tokens: int = TOKENS,
) -> None:
    """Measure each of `sequences` (1 to 256 by default) that OUT hasn't, and write it after each.

    `weights`: bf16, nf4, mxfp4 or nvfp4; rank 0: no adapter.
    """
    check_weights(weights)
    size = shape_name(size)
    points = DecodePoints(out, Job("native", size, weights, rank, prompt, tokens))

    def load() -> Measure:
        policy = random_policy(size, weights, rank, choose_device())
        points.note(sync_seconds=sync_seconds(policy) if rank else [])
        return lambda count: measure(policy, count, prompt, tokens)

    points.run(sequences or SEQUENCES, load)


if __name__ == "__main__":
    configure_logging()
    typer.run(main)
