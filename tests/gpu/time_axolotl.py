"""Updates of LoRA on NVFP4 weights by Axolotl's kernels, with random weights of Qwen2's shapes.

    python -m tests.gpu.time_axolotl OUT.json --size 7B --rank 16

It needs axolotl 0.21 and torchao 0.18, whose weight-only NVFP4 unpacks a layer before its product. Axolotl's kernels of
q, k, v and o and of the MLP are on, and activations are recomputed. All completions have one length, so that no token
is padding. The loss is their mean negative log-probability, whose passes are those of a policy gradient without a
reference policy or a correction; logits are made for two completions at a time.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from axolotl.monkeypatch.lora_kernels import apply_lora_kernel_patches, patch_self_attn_lora
from axolotl.utils.dict import DictDefault
from peft import LoraConfig, get_peft_model
from rich import print
from torch import Tensor, nn
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM

from qerl.host.provenance import stamp, write_json
from qerl.models.policy import choose_device
from qerl.models.random import random_config

PACKAGES = "axolotl", "torchao", "torch", "transformers", "peft", "triton"
#: Completions whose logits are there at the same time.
_LOGITS = 2


def model_of(size: str, rank: int, device: torch.device) -> nn.Module:
    """The policy in training mode, with packed projections and Axolotl's kernels."""
    config = random_config(size)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    quantize_(model.model, NVFP4WeightOnlyConfig())  # all layers but lm_head
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    adapted = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        kernels = {"lora_mlp_kernel": True, "lora_qkv_kernel": True, "lora_o_kernel": True}
        asked = DictDefault({"base_model": folder, "adapter": "lora", "lora_r": rank, "lora_dropout": 0.0, **kernels})
        patch_self_attn_lora(asked)
        return apply_lora_kernel_patches(adapted, asked).train()


def loss_of(model: Any, ids: Tensor, prompt: int, completions: int) -> Tensor:
    """The mean negative log-probability of the completions of ids [n, L], as its share of `completions`."""
    states = model.base_model.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
    loss = states.new_zeros(())
    for hidden, part in zip(states.split(_LOGITS), ids[:, prompt:].split(_LOGITS), strict=True):
        logits = model.base_model.model.lm_head(hidden).float()
        drawn = torch.log_softmax(logits, -1).gather(-1, part[..., None])
        loss = loss - drawn.mean() * len(part) / completions
    return loss


def main(
    out: Path,
    size: Annotated[str, typer.Option()] = "7B",
    rank: Annotated[int, typer.Option()] = 16,
    completions: Annotated[int, typer.Option()] = 128,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 1024,
    micro_batch: Annotated[int, typer.Option(help="Completions of a micro-batch.")] = 16,
    repeats: Annotated[int, typer.Option(help="Timed updates, after one that isn't timed.")] = 2,
) -> None:
    """Time the updates, and write seconds and the most memory that PyTorch allocated."""
    device = choose_device()
    accelerator = device.type == "cuda"
    model = model_of(size, rank, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=accelerator)
    ids = torch.randint(1000, 100000, (completions, prompt + tokens), device=device)
    seconds = []
    for _ in range(1 + repeats):
        if accelerator:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()  # the dense weights were there before
        begun = time.perf_counter()
        for batch in ids.split(micro_batch):
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, batch, prompt, completions)
            loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        print(f"{seconds[-1]:.2f} s")
    work = {"completions": completions, "prompt": prompt, "tokens": tokens, "micro_batch": micro_batch}
    peak = torch.cuda.max_memory_allocated() if accelerator else None
    packages = {name: version(name) for name in PACKAGES}
    found = {"size": size, "rank": rank, **work, "seconds": seconds[1:], "peak": peak}
    write_json(out, {**found, "packages": packages, "provenance": stamp()})


if __name__ == "__main__":
    typer.run(main)
