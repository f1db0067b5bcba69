"""Decode speed of transformers' `generate` with PEFT, and with bitsandbytes for NF4, as QLoRA users run it.

NF4 is used without double quantization, which is faster, and computes in bfloat16. The adapter, also bfloat16, is on
all seven projections. Weights are random and never written to disk: bitsandbytes quantizes each layer as it is
created.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from qerl.bench.timing import DecodePoints, Engine, Start, nbytes
from qerl.jobs import PointJob
from qerl.models.policy import choose_device
from qerl.models.random import END, END_OF_TEXT, IDS, fill_model, random_config, random_weight
from qerl.models.structure import empty_model
from qerl.settings.run import AdapterSettings
from qerl.settings.workloads import Decoding


def random_model(size: str, weights: str, rank: int, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model of a known shape with random weights, bf16 or nf4, and an adapter of `rank` (0: none)."""
    torch.manual_seed(seed)
    lm: PreTrainedModel = empty_model(random_config(size), torch.bfloat16)
    if weights == "nf4":
        _fill_nf4(lm, device)
    fill_model(lm, device)
    if rank:
        targets = list(AdapterSettings().targets)
        get_peft_model(lm, LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, task_type="CAUSAL_LM"))
        for name, parameter in lm.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(lm.dtype)
    return lm.eval().requires_grad_(False)


def _fill_nf4(lm: PreTrainedModel, device: torch.device) -> None:
    """Replace linear layers by those of bitsandbytes, as transformers does, and quantize random weights one by one."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=False,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quantizer = AutoHfQuantizer.from_config(config)
    quantizer.preprocess_model(lm, device_map=None)
    for layer in _nf4_layers(lm):
        dense = random_weight((layer.out_features, layer.in_features), device)
        weight: Any = bitsandbytes.nn.Params4bit(dense, compress_statistics=False, quant_type="nf4", module=layer)
        layer.weight = weight.to(device)
    quantizer.postprocess_model(lm)


def _nf4_layers(lm: nn.Module) -> list[Any]:
    return [layer for layer in lm.modules() if isinstance(layer, bitsandbytes.nn.Linear4bit)]


def weight_bytes(lm: nn.Module) -> int:
    """Bytes of all weights in memory, NF4's scales and the adapter included."""
    scales = [layer.weight.quant_state.absmax for layer in _nf4_layers(lm)]
    return nbytes([*lm.parameters(), *lm.buffers(), *scales])


def engine_of(lm: PreTrainedModel, weights: str) -> Engine:
    """The engine, which is the same for all numbers of sequences."""

    def draw(prompts: list[list[int]], count: int, seed: int) -> int:
        torch.manual_seed(seed)
        ids = torch.tensor(prompts, device=lm.device)
        mask = torch.ones_like(ids)
        # At temperature 1; the end of text can't be drawn before the last token.
        limits = {"max_new_tokens": count, "min_new_tokens": count, "eos_token_id": IDS[END]}
        free = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": IDS[END_OF_TEXT]}
        drawn = lm.generate(ids, attention_mask=mask, generation_config=GenerationConfig(**limits, **free))  # type: ignore[operator]
        return drawn[:, ids.shape[1] :].numel()

    sampler = f"transformers {transformers.__version__}"
    if weights == "nf4":
        sampler += f", bitsandbytes {bitsandbytes.__version__}"
    return Engine(draw, sampler, lambda: weight_bytes(lm))


def measure_points(job: PointJob[Decoding, int]) -> None:
    """Measure the points that the job's files lack, and write a file after each."""
    for part in job.parts:
        work = part.work

        def load(work: Decoding = work) -> Start:
            engine = engine_of(random_model(work.size, work.weights, work.rank, choose_device()), work.weights)
            return lambda _: engine

        DecodePoints(job.out / part.file, work).run(part.points, load)
