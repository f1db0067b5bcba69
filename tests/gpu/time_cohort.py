"""Steps of runs one after another and side by side, whose updates follow one another either way.

    python -m tests.gpu.time_cohort --size 3m       # the policies of config/dose.yaml, 3m and 25m, in NVFP4
    python -m tests.gpu.time_cohort --size 7B --rank 32 --prompt 256 --tokens 2048 --median 300 --updates 1

One engine draws completions of mixed lengths for one run after another (`rollouts`), then completions of the same
lengths for all runs together (`rollout`), from which each run learns; half of the groups have no gradient. The result,
printed and written to `--out`, has medians. Factors are medians of the rounds' ratios: of rollouts, and of steps.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer

from qerl.bench.workloads import lognormal_lengths
from qerl.host.gpus import peak_memory_bytes, reset_peak_memory, seconds
from qerl.host.provenance import stamp, write_json
from qerl.models.policy import Policy, choose_device, load_policy
from qerl.models.quantize import quantize_checkpoint
from qerl.models.random import random_policy, with_random_adapters
from qerl.rl.packing import Sample
from qerl.rl.parallel import Processes
from qerl.rl.update import Updater
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import Request, SamplingParams
from qerl.settings.base import parse
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings, RunSettings
from tests.tiny import tiny_qwen2

#: The shapes of small policies: hidden size, size of the MLP, layers, heads.
SMALL = {"tiny": (64, 128, 2, 4), "3m": (256, 768, 4, 4), "25m": (512, 1536, 8, 8)}


def base_of(size: str, weights: str, folder: Path) -> Policy:
    """The base with random weights."""
    if size not in SMALL:
        return random_policy(Base(size, weights), 0, choose_device())  # type: ignore[arg-type]
    names = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
    shape = dict(zip(names, SMALL[size], strict=True))
    tiny_qwen2(folder / "bf16", **shape, num_key_value_heads=2, vocab_size=512)
    if weights != "bf16":
        quantize_checkpoint(folder / "bf16", folder / weights, weights)  # type: ignore[arg-type]
    return load_policy(folder / weights, None, "bfloat16")


def requests_of(
    number: int, numbers: np.random.Generator, lengths: list[list[list[int]]], prompt: int
) -> list[Request]:
    """A request of each run for completions of its lengths, with new prompts."""
    return [
        Request(
            numbers.integers(10, 100, size=(len(own), prompt)).tolist(),
            SamplingParams(
                max(map(max, own)), count=len(own[0]), seed=number * len(lengths) + run, ignore_eos=True,
                lengths=tuple(map(tuple, own)),
            ),
        )
        for run, own in enumerate(lengths)
    ]  # fmt: skip


def main(
    size: str = "3m", weights: str = "nvfp4", runs: int = 4, rank: int = 16, prompts: int = 16, group: int = 8,
    prompt: int = 40, tokens: int = 64, updates: int = 4, rounds: int = 6, micro_batch_tokens: int = 16384,
    kv_cache_gib: float = 8.0, recompute: bool = False, median_tokens: Annotated[int, typer.Option("--median")] = 0,
    memory_gb: float = 0.0, warmup: int = 2, out: Path | None = None,
) -> None:  # fmt: skip
    """Time all in turn; the rounds of `warmup`, which compile and capture, don't count.

    Completions have a median of `median_tokens`, a third of `tokens` by default. `memory_gb` limits PyTorch's memory.
    """
    if memory_gb:
        torch.cuda.set_per_process_memory_fraction(memory_gb * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    about = {
        "model": "random", "dataset": "random", "weights": weights, "adapter": {"rank": rank, "alpha": rank},
        "rollout": {"prompts": prompts, "group_size": group, "sampling": {"max_tokens": tokens}},
        "loss": {"updates_per_rollout": updates}, "micro_batch_tokens": micro_batch_tokens,
        "gradient_checkpointing": "auto" if recompute else False,
    }  # fmt: skip
    settings = [parse(RunSettings, {**about, "seed": run, "steps": 1000}, "timing") for run in range(runs)]
    with TemporaryDirectory() as folder:
        base = base_of(size, weights, Path(folder))
    with with_random_adapters(base, rank, runs) as policies:
        updaters = [Updater(own, policy, Processes()) for own, policy in zip(settings, policies, strict=True)]
        taken: dict[str, list[float]] = {"rollouts": [], "rollout": [], "update": []}
        peak = 0.0
        numbers = np.random.default_rng(0)
        # The same in all rounds, so that graphs of few sizes are captured, as in many steps of a run.
        lengths = [
            lognormal_lengths(numbers, median_tokens or tokens // 3, 0.8, tokens, (prompts, group)) for _ in range(runs)
        ]
        engine, sequences = NativeSettings(kv_cache_gib=kv_cache_gib), prompts * group
        # A base has one engine at a time, so that the runs one after another draw first.
        sampler = EngineSampler(policies[0], engine, sequences)
        for number in range(1, rounds + warmup + 1):
            with seconds() as rollouts:
                for request in requests_of(number, numbers, lengths, prompt):
                    sampler.generate_all([request])
            if number > warmup:
                taken["rollouts"].append(rollouts.value)
        sampler.release()
        sampler = EngineSampler(policies[0], engine, runs * sequences, policies[1:])
        for number in range(1, rounds + warmup + 1):
            requests = requests_of(number, numbers, lengths, prompt)
            with seconds() as rollout:
                drawn = sampler.generate_all(requests)
            batches = []
            for run in range(runs):
                advantages = numbers.normal(size=(prompts, group)) * (np.arange(prompts) % 2)[:, None]
                batches.append(
                    [
                        Sample(requests[run].prompts[place], completion, 0.0, float(advantages[place, i]))
                        for place, completions in enumerate(drawn[run])  # type: ignore[arg-type]
                        for i, completion in enumerate(completions)
                    ]
                )
            reset_peak_memory()
            with seconds() as update:
                for updater, samples in zip(updaters, batches, strict=True):
                    updater.update(number, samples)
            peak = max(peak, peak_memory_bytes())
            spent = {"rollout": rollout.value, "update": update.value}
            print(number, {name: round(value, 4) for name, value in spent.items()}, flush=True)
            if number > warmup:
                for name, value in spent.items():
                    taken[name].append(value)
    medians = {f"{name}_seconds": median(values) for name, values in taken.items()}
    rows = [dict(zip(taken, values, strict=True)) for values in zip(*taken.values(), strict=True)]
    row = {
        "size": size, "weights": weights, "runs": runs, "rank": rank, "sequences": prompts * group, "prompt": prompt,
        "tokens": tokens, "median": median_tokens or tokens // 3, "updates": updates, "recompute": recompute,
        "memory_gb": memory_gb or None, **medians,
        "rollout_factor": median(one["rollouts"] / one["rollout"] for one in rows),
        "step_factor": median((one["rollouts"] + one["update"]) / (one["rollout"] + one["update"]) for one in rows),
        "peak_gb": peak / 1e9,
        "graphs": updaters[0].graphs is not None,
        "stamp": stamp(0),
    }  # fmt: skip
    if out:
        write_json(out, row)
    print(json.dumps(row))


if __name__ == "__main__":
    typer.run(main)
