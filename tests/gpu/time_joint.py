"""Steps of runs side by side, whose updates follow one another or are joint (`joint_updates`), in turns.

    python -m tests.gpu.time_joint --size 3m       # the policies of config/dose.yaml, 3m and 25m, in NVFP4
    python -m tests.gpu.time_joint --size 7B --rank 32 --prompts 4 --group 8 --prompt 200 --tokens 512 --updates 1

Both have the same adapters at first and update on the same completions, of mixed lengths, which one engine draws for
all runs; half of the groups have no gradient. A line of JSON has the medians. `update_factor` is of the pairs of a
round, and `grad_norm_difference` is the largest relative difference of the first update's gradient norms.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
import typer

from qerl.bench.workloads import lognormal_lengths
from qerl.host.gpus import peak_memory_bytes, reset_peak_memory, seconds
from qerl.models.policy import Policy, choose_device, load_policy
from qerl.models.quantize import quantize_checkpoint
from qerl.models.random import random_policy, with_random_adapters
from qerl.rl.packing import Sample
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import Request, SamplingParams
from qerl.settings.base import parse
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings, RunSettings
from tests.tiny import tiny_qwen2
from tests.unit.rl.joint_runs import Runs

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


def main(
    size: str = "3m", weights: str = "nvfp4", runs: int = 4, rank: int = 16, prompts: int = 16, group: int = 8,
    prompt: int = 40, tokens: int = 64, updates: int = 4, rounds: int = 6, micro_batch_tokens: int = 16384,
    kv_cache_gib: float = 8.0, recompute: bool = False,
) -> None:  # fmt: skip
    """Time both in turn; the first two rounds, which compile and capture, don't count."""
    about = {
        "model": "random", "dataset": "random", "weights": weights, "adapter": {"rank": rank, "alpha": rank},
        "rollout": {"prompts": prompts, "group_size": group, "sampling": {"max_tokens": tokens}},
        "loss": {"updates_per_rollout": updates}, "micro_batch_tokens": micro_batch_tokens,
        "gradient_checkpointing": "auto" if recompute else False,
    }  # fmt: skip
    settings = [parse(RunSettings, {**about, "seed": run, "steps": 1000}, "timing") for run in range(runs)]
    with TemporaryDirectory() as folder:
        base = base_of(size, weights, Path(folder))
    with with_random_adapters(base, rank, 2 * runs) as policies:
        alone, joint = policies[:runs], policies[runs:]
        for one, other in zip(alone, joint, strict=True):
            for (_, source), (_, target) in zip(one.trainable(), other.trainable(), strict=True):
                target.data.copy_(source.data)
        sampler = EngineSampler(alone[0], NativeSettings(kv_cache_gib=kv_cache_gib), runs * prompts * group, alone[1:])
        separate, together = Runs(settings, alone, False), Runs(settings, joint, True)
        taken: dict[str, list[float]] = {"rollout": [], "separate": [], "joint": []}
        peaks, difference = {"separate": 0.0, "joint": 0.0}, 0.0
        numbers = np.random.default_rng(0)
        # The same in all rounds, so that graphs of few sizes are captured, as in many steps of a run.
        lengths = [lognormal_lengths(numbers, tokens // 3, 0.7, tokens, (prompts, group)) for _ in range(runs)]
        for number in range(1, rounds + 3):
            ids = numbers.integers(10, 100, size=(runs, prompts, prompt)).tolist()
            requests = [
                Request(
                    ids[run],
                    SamplingParams(
                        tokens, count=group, seed=number * runs + run, ignore_eos=True,
                        lengths=tuple(map(tuple, np.asarray(lengths[run]).tolist())),
                    ),
                )
                for run in range(runs)
            ]  # fmt: skip
            with seconds() as rollout:
                drawn = sampler.generate_all(requests)
            batches = []
            for run in range(runs):
                advantages = numbers.normal(size=(prompts, group)) * (np.arange(prompts) % 2)[:, None]
                batches.append(
                    [
                        Sample(ids[run][place], completion, 0.0, float(advantages[place, i]))
                        for place, completions in enumerate(drawn[run])  # type: ignore[arg-type]
                        for i, completion in enumerate(completions)
                    ]
                )
            spent, norms = {"rollout": rollout.value}, []
            for name, updaters in (("separate", separate), ("joint", together)):
                reset_peak_memory()
                with seconds() as update:
                    metrics = updaters.update(number, batches)
                peaks[name] = max(peaks[name], peak_memory_bytes())
                spent[name] = update.value
                norms.append([one["grad_norm"] for one in metrics])
            if number == 1:
                difference = max(abs(a / b - 1) for a, b in zip(*norms, strict=True))
            print(number, {name: round(value, 4) for name, value in spent.items()}, flush=True)
            if number > 2:
                for name, value in spent.items():
                    taken[name].append(value)
    medians = {f"{name}_seconds": median(values) for name, values in taken.items()}
    pairs = list(zip(taken["rollout"], taken["separate"], taken["joint"], strict=True))
    row = {
        "size": size, "weights": weights, "runs": runs, "rank": rank, "sequences": prompts * group, **medians,
        "update_factor": median(b / c for _, b, c in pairs),
        "step_factor": median((a + b) / (a + c) for a, b, c in pairs),
        "peak_gb": {name: peak / 1e9 for name, peak in peaks.items()},
        "grad_norm_difference": difference,
        "graphs": together.passes.graphs is not None,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    typer.run(main)
