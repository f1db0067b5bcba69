"""Policies with random weights, which are never written to disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Tokenizer

from qerl.checkpoints.architectures import FUSED
from qerl.checkpoints.published import PUBLISHED
from qerl.formats.codecs import nvfp4_global_scale, quantize
from qerl.layers.packed_linear import PackedLinear
from qerl.policy.policy import Policy, add_adapter, use_own_modules
from qerl.random_models.checkpoint import model_config
from qerl.random_models.published import published_config, published_model
from qerl.random_models.weights import STD, fill_model, random_weight
from qerl.settings.training import LAYERS, AdapterSettings


def random_policy(
    size: str,
    weights: str,
    rank: int,
    device: torch.device,
    pack_delta_nets: bool = False,
    seed: int = 0,
    train_norms: bool = True,
) -> Policy:
    """A policy of a size with normal weights, bfloat16 or packed, and an adapter of `rank` whose B isn't zero."""
    torch.manual_seed(seed)
    if size in PUBLISHED:
        lm = published_model(published_config(size), weights, device, pack_delta_nets)
    else:
        lm = _qwen(size, weights, device)
    use_own_modules(lm)
    lm.requires_grad_(False)
    base = Policy(lm.eval(), Qwen2Tokenizer())
    return _adapted(base, rank, train_norms) if rank else base


def _adapted(base: Policy, rank: int, train_norms: bool) -> Policy:
    """The base with an adapter of `rank` whose B isn't zero, on all layers outside of experts.

    The base's modules become the policy's.
    """
    adapter = AdapterSettings(rank=rank, alpha=rank, train_norms=train_norms, targets=[*LAYERS])
    peft = add_adapter(base.lm, adapter)
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-3)
    return Policy(base.lm.eval(), base.tokenizer, peft)


@contextmanager
def with_random_adapter(base: Policy, rank: int, train_norms: bool = True) -> Iterator[Policy]:
    """A context in which the base has an adapter of `rank` (0: none); afterwards it is the base again."""
    if not rank:
        yield base
        return
    dtypes = {name: parameter.dtype for name, parameter in base.lm.named_parameters()}
    policy = _adapted(base, rank, train_norms)
    try:
        yield policy
    finally:
        assert policy.peft is not None
        policy.peft.unload()
        for name, parameter in base.lm.named_parameters():  # norms are those of the adapter, trained in float32
            parameter.data = parameter.requires_grad_(False).data.to(dtypes[name])


def _qwen(size: str, weights: str, device: torch.device) -> PreTrainedModel:
    lm = empty_model(size)
    for layer in lm.model.layers:
        for names in FUSED:
            _fill_fused(layer, names, weights, device)
    fill_model(lm, device)
    return lm


def empty_model(size: str) -> PreTrainedModel:
    """The bfloat16 model of a size of Qwen2.5 on the meta device, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**model_config(size, "bf16")), dtype=torch.bfloat16
        )


def _fill_fused(block: nn.Module, names: Sequence[str], weights: str, device: torch.device) -> None:
    """Give the layers `names`, which run fused, weights; packed ones share a global scale."""
    dense = [block.get_submodule(name) for name in names]
    tensors = [random_weight(layer.weight.shape, device) for layer in dense]  # type: ignore[union-attr, arg-type]
    scale = nvfp4_global_scale(*tensors) if weights == "nvfp4" else None
    for name, layer, tensor in zip(names, dense, tensors, strict=True):
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else random_weight(layer.bias.shape, device) * STD
        if weights == "bf16":
            layer.weight = nn.Parameter(tensor)
            layer.bias = None if bias is None else nn.Parameter(bias)
        else:
            packed = quantize(tensor, weights, global_scale=scale)
            block.set_submodule(name, PackedLinear.from_packed(packed, bias))
