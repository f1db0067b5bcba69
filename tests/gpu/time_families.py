"""Decode speed on models of other families than Qwen2.5, with random weights of their published shapes.

    python -m tests.gpu.time_families OUT --models phi-4-mini,gemma-3-1b --engine native

It writes a file with a stamp for each model to the folder OUT, anew after each number of sequences. Models have LoRA
r16 on all layers that can have it, and prompts of 128 tokens or `--prompt`. `--engine vllm` times stock vLLM on the
same shape. `--step` times GRPO steps instead, of 16 prompts x 8 completions of 1,024 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Tokenizer

from qerl.bench.ceilings import gpu_state
from qerl.bench.decode.points import Draw, timed
from qerl.bench.grpo_step.step import run_settings, steps_with
from qerl.bench.stock_vllm import description
from qerl.formats.codecs import quantize
from qerl.host.progress import log
from qerl.jobs.shapes import GrpoStep, Work
from qerl.layers.empty_model import empty_model
from qerl.layers.experts import Float32Router
from qerl.layers.packed_linear import PackedLinear
from qerl.layers.structure import Structure, structure_of
from qerl.policy.policy import Policy, use_own_modules
from qerl.random_models.policy import adapted, fill_model, random_weight
from qerl.results.files import write
from qerl.results.schema.speed import EngineStepSettings, FamilyDecodeResult, FamilyStepResult, GpuStates
from qerl.results.schema.stored import Provenance
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.models import WeightFormat
from qerl.settings.rollout import Kernels, NativeSettings
from tests.families import FAMILIES, LEFT_OUT
from tests.gpu import family_on_vllm

DEVICE = torch.device("cuda")
RANK = 16
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN3_5_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}


def _shape(
    hidden: int, layers: int, heads: int, kv: int, intermediate: int | object, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        **others,
    }


#: A key of FAMILIES and the values of config.json.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Positions of Phi-4-mini's scaled frequencies take as long as any.
    "phi-4-mini": (
        "phi3",
        _shape(
            3072, 32, 24, 8, 8192, 200064, sliding_window=262144, tie_word_embeddings=True,
            rope_parameters={**_DEFAULT_ROPE, "partial_rotary_factor": 0.75},
        ),
    ),
    "phi-4": (
        "phi3", _shape(5120, 40, 40, 10, 17920, 100352, sliding_window=None, rope_parameters=_DEFAULT_ROPE)
    ),
    "mistral-7b": ("mistral-sliding", _shape(4096, 32, 32, 8, 14336, 32000, sliding_window=4096, head_dim=128)),
    "gemma-3-1b": (
        "gemma3",
        _shape(
            1152, 26, 4, 1, 6912, 262144, head_dim=256, query_pre_attn_scalar=256, sliding_window=512,
            layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)],
        ),
    ),
    "gemma-3-12b": (  # the text model's shape
        "gemma3",
        _shape(
            3840, 48, 16, 8, 15360, 262208, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024,
            layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(48)],
        ),
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _shape(
            2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, norm_topk_prob=True, rope_parameters={**_DEFAULT_ROPE, "rope_theta": 1e6},
        ),
    ),
    # The published files have MXFP4 experts, which `--weights mxfp4` gives, and the rest in bfloat16.
    "gpt-oss-20b": (
        "gpt_oss",
        _shape(
            2880, 24, 64, 8, 2880, 201088, head_dim=64, sliding_window=128, num_local_experts=32, num_experts_per_tok=4,
            rope_parameters={**FAMILIES["gpt_oss"].values["rope_parameters"], "original_max_position_embeddings": 4096},
            max_position_embeddings=131072,
        ),
    ),
    "qwen3.5-27b": (  # the text model's shape, which Qwen3.6-27B has, too
        "qwen3_5",
        _shape(
            5120, 64, 24, 4, 17408, 248320, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
            linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=262144,
            layer_types=["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(64)],
            rope_parameters=_QWEN3_5_ROPE,
        ),
    ),
    "qwen3.5-35b-a3b": (  # and Qwen3.6-35B-A3B's
        "qwen3_5_moe",
        _shape(
            2048, 40, 16, 2, LEFT_OUT, 248320, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
            linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=262144,
            num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512,
            layer_types=["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(40)],
            rope_parameters=_QWEN3_5_ROPE,
        ),
    ),
}  # fmt: skip
#: Families whose files have packed experts alone.
_EXPERTS_ALONE = ("gpt_oss",)


def random_family(
    family: str, shape: dict[str, Any], weights: str, train_norms: bool = True, experts: bool = False
) -> Policy:
    """A policy of a family's shape with random weights, bfloat16 or packed, and an adapter on all layers outside of
    experts, or with `experts` on these, too.
    """
    torch.manual_seed(0)
    config = FAMILIES[family].config(**shape)
    structure = structure_of(config)
    if structure.experts:
        lm = random_mixture(config, structure, weights, family in _EXPERTS_ALONE)
    else:
        with torch.device(DEVICE):
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for name in structure.packed_layers() if weights != "bf16" else ():
            lm.set_submodule(name, PackedLinear.from_packed(quantize(lm.get_parameter(f"{name}.weight").data, weights)))
    use_own_modules(lm)
    lm.requires_grad_(False)
    return adapted(Policy(lm.eval(), Qwen2Tokenizer()), RANK, train_norms, experts)


def random_mixture(config: PreTrainedConfig, structure: Structure, weights: str, experts_alone: bool) -> Any:
    """A mixture whose experts are packed one by one, as a dense copy of all wouldn't fit."""
    lm = empty_model(config, torch.bfloat16)
    for name in structure.packed_layers() if weights != "bf16" else ():
        layer: Any = lm.get_submodule(name)
        if ".experts." in name or not experts_alone:
            bias = None if layer.bias is None else torch.zeros(layer.out_features, dtype=torch.bfloat16, device=DEVICE)
            packed = quantize(random_weight((layer.out_features, layer.in_features), DEVICE), weights)
            made = PackedLinear.from_packed(packed, bias)
            made.keepable = ".experts." not in name
            lm.set_submodule(name, made)
    fill_model(lm, DEVICE)
    for module in lm.modules():
        if isinstance(module, Float32Router):
            module.float()
    return lm


def time_step(model: str, weights: WeightFormat, kernels: Kernels, recompute: bool, experts: bool) -> FamilyStepResult:
    """Two GRPO steps after a warm-up, and their memory."""
    work = Work(
        size=model, weights=weights, prompts=16, group=8, prompt_tokens=128, completion_tokens=1024, rank=RANK,
        equal_groups=0.0, repeats=2,
    )  # fmt: skip
    asked = GrpoStep(
        kernels=kernels, recompute=recompute or "auto", micro_batch_tokens=16384, kv_cache_gib=None, sleep=True,
        memory_gb=None,
    )  # fmt: skip
    policy = random_family(*MODELS[model], weights, train_norms=False, experts=experts)
    with TemporaryDirectory() as folder:
        sampler, steps, memory, _ = steps_with(policy, work, run_settings(work, asked), Path(folder))
    return FamilyStepResult(
        bench="family_step",
        model=model,
        **work.model_dump(include={"weights", "rank", "prompts", "group", "prompt_tokens", "completion_tokens"}),
        settings=EngineStepSettings(**asked.model_dump()),
        experts=experts,
        sampler=sampler,
        steps=tuple(steps),
        memory=memory,
        provenance=Provenance.of_now(),
    )


def native(model: str, weights: WeightFormat, settings: NativeSettings, experts: bool) -> Callable[[int], Engine]:
    """Takes a number of sequences, and starts this project's engine for so many."""
    policy, vocabulary = random_family(*MODELS[model], weights, experts=experts), MODELS[model][1]["vocab_size"]
    held = sum(buffer.nbytes for buffer in policy.lm.buffers()) + sum(p.nbytes for p in policy.lm.parameters())

    def start(count: int) -> Engine:
        sampler = EngineSampler(policy, settings, count)

        def draw(prompts: list[list[int]], most: int, seed: int) -> int:
            prompts = [[token % vocabulary for token in prompt] for prompt in prompts]
            groups = sampler.generate(prompts, SamplingParams(max_tokens=most, seed=seed, ignore_eos=True))
            return sum(len(completion.token_ids) for group in groups for completion in group)

        return Engine(draw, sampler.served, held, sampler.release)

    return start


def stock(model: str, weights: WeightFormat, counts: Sequence[int], folder: Path) -> Callable[[int], Engine]:
    """Takes a number of sequences, and returns vLLM, which serves all `counts`."""
    family, shape = MODELS[model]
    config = FAMILIES[family].config(**shape)
    draw = family_on_vllm.start(folder, config, structure_of(config), weights, RANK, counts)
    vocabulary = shape["vocab_size"]

    def of_vocabulary(prompts: list[list[int]], most: int, seed: int) -> int:
        return draw([[token % vocabulary for token in prompt] for prompt in prompts], most, seed)

    return lambda _: Engine(of_vocabulary, description(weights), 0, lambda: None)


@dataclass(frozen=True)
class Engine:
    """What draws tokens, its description, the bytes of its weights, 0 if unknown, and what frees its cache."""

    draw: Draw
    served: str
    weight_bytes: int
    release: Callable[[], None]


def main(
    out: Path,
    models: Annotated[str, typer.Option(help="Keys of MODELS, with commas.")] = ",".join(MODELS),
    sequences: Annotated[str, typer.Option(help="Numbers of sequences, with commas.")] = "1,8,32,128",
    engine: Annotated[str, typer.Option(help="native or vllm; vllm takes one model a call.")] = "native",
    tokens: int = 256,
    weights: str = "nvfp4",
    kernels: str = "auto",
    kv_cache_dtype: str = "auto",
    prompt: int = 128,
    step: Annotated[bool, typer.Option(help="Time GRPO steps in place of decoding.")] = False,
    recompute: Annotated[bool, typer.Option(help="Recompute all activations of updates.")] = False,
    experts: Annotated[bool, typer.Option(help="Adapters on the experts of mixtures, too.")] = False,
) -> None:
    """Time each model at each number of sequences, as `qerl.bench.decode` does, or its GRPO step."""
    settings = NativeSettings.model_validate({"kv_cache_gib": 8, "kernels": kernels, "kv_cache_dtype": kv_cache_dtype})
    format_: Any = weights
    others = [kernels] * (kernels != "auto") + ["experts"] * experts + [kv_cache_dtype] * (kv_cache_dtype != "auto")
    for model in models.split(","):
        name = "-".join([model, weights, f"r{RANK}", *others])
        if step:
            found = time_step(model, format_, settings.kernels, recompute, experts)
            write(out / f"step-{name}{'-recompute' * recompute}.json", found)
            continue
        counts, points = [*map(int, sequences.split(","))], []
        with TemporaryDirectory() as folder:
            if engine == "vllm":
                start = stock(model, format_, counts, Path(folder))
            else:
                start = native(model, format_, settings, experts)
            for count in counts:
                before, served = gpu_state(), start(count)
                timing = timed(served.draw, count, prompt, tokens)
                points.append(timing.point(count, served.served, served.weight_bytes, None))
                served.release()
                result = FamilyDecodeResult(
                    bench="family_decode", engine=engine, model=model, weights=format_, rank=RANK,
                    kernels=settings.kernels, kv_cache_dtype=kv_cache_dtype, experts=experts, prompt=prompt,
                    tokens=tokens, gpu=GpuStates(before=before, after=gpu_state()), points=points,
                    provenance=Provenance.of_now(),
                )  # fmt: skip
                write(out / f"decode-{engine}-{name}-{prompt}x{tokens}.json", result)
                log.info("%s, %d sequences: %.1f tokens a second", name, count, median(timing.samples))


if __name__ == "__main__":
    typer.run(main)
