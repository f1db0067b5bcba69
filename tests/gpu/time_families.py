"""Speed of options of the engine that the speed grid doesn't have, on published shapes with random weights.

    python -m tests.gpu.time_families OUT --models qwen3-30b-a3b --experts
    python -m tests.gpu.time_families OUT --models phi-4-mini --kv-cache-dtype fp8

These are adapters on experts, and a KV cache in FP8. All else is timed by `config/families.yaml`. The script writes a
file with a stamp for each model to the folder OUT, anew after each number of sequences. Models have LoRA r16, and
prompts of 128 tokens or `--prompt`. `--step` times GRPO steps, of 16 prompts x 8 completions of 1,024 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from qerl.bench.ceilings import gpu_state
from qerl.bench.decode.points import timed
from qerl.bench.grpo_step.step import run_settings, steps_with
from qerl.checkpoints.published import vocabulary
from qerl.host.progress import log
from qerl.jobs.shapes import GrpoStep, Work
from qerl.policy.policy import Policy, weight_bytes
from qerl.random_models.policy import adapted, random_policy
from qerl.results.files import write
from qerl.results.schema.families import FamilyDecodeResult, FamilyStepResult
from qerl.results.schema.speed import DecodePoint, EngineStepSettings, GpuStates
from qerl.results.schema.stored import Provenance
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.models import WeightFormat
from qerl.settings.rollout import Kernels, NativeSettings

DEVICE = torch.device("cuda")
RANK = 16


def policy_of(model: str, weights: str, train_norms: bool, experts: bool) -> Policy:
    """A policy of a published shape with random weights and an adapter, with `experts` on these, too."""
    return adapted(random_policy(model, weights, 0, DEVICE), RANK, train_norms, experts)


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
    policy = policy_of(model, weights, train_norms=False, experts=experts)
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


def decode_points(
    model: str, weights: str, settings: NativeSettings, counts: Sequence[int], prompt: int, tokens: int, experts: bool
) -> Iterator[DecodePoint]:
    """The points of these numbers of sequences."""
    policy = policy_of(model, weights, train_norms=True, experts=experts)
    for count in counts:
        sampler = EngineSampler(policy, settings, count)

        def draw(prompts: list[list[int]], most: int, seed: int, sampler: EngineSampler = sampler) -> int:
            groups = sampler.generate(prompts, SamplingParams(max_tokens=most, seed=seed, ignore_eos=True))
            return sum(len(completion.token_ids) for group in groups for completion in group)

        timing = timed(draw, count, prompt, tokens, vocabulary(model))
        yield timing.point(count, sampler.served, weight_bytes(policy), None)
        sampler.release()


def main(
    out: Path,
    models: Annotated[str, typer.Option(help="Keys of PUBLISHED, with commas.")],
    sequences: Annotated[str, typer.Option(help="Numbers of sequences, with commas.")] = "1,8,32,128",
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
        before, points = gpu_state(), []
        for point in decode_points(
            model, format_, settings, [*map(int, sequences.split(","))], prompt, tokens, experts
        ):
            points.append(point)
            result = FamilyDecodeResult(
                bench="family_decode", engine="native", model=model, weights=format_, rank=RANK,
                kernels=settings.kernels, kv_cache_dtype=kv_cache_dtype, experts=experts, prompt=prompt,
                tokens=tokens, gpu=GpuStates(before=before, after=gpu_state()), points=points,
                provenance=Provenance.of_now(),
            )  # fmt: skip
            write(out / f"decode-native-{name}-{prompt}x{tokens}.json", result)
            log.info("%s, %d sequences: %.1f tokens a second", name, point.sequences, median(point.samples))


if __name__ == "__main__":
    typer.run(main)
