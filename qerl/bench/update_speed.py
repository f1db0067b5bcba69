"""The update alone, on a random checkpoint: tokens a second, and time and memory of a micro-batch by part.

    python -m qerl.bench.update_speed OUT.json --size 7B --weights nvfp4 --weights bf16

Nothing is downloaded and nothing is sampled: completions are random tokens of random lengths.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from qerl.host.profiling import peak_memory_bytes, reset_peak_memory, seconds
from qerl.host.progress import configure_logging, log
from qerl.layers import linear_logprobs
from qerl.policy.policy import Policy, weight_bytes
from qerl.provenance.files import write_json
from qerl.provenance.stamp import stamp
from qerl.random_models.checkpoint import write_checkpoint
from qerl.rl.activation_checkpointing import blocks
from qerl.rl.data_parallel import Processes
from qerl.rl.sequence_packing import Sample, micro_batch, split, token_states
from qerl.rl.train import make_policy
from qerl.rl.update import Updater
from qerl.rollout.sampler import Completion
from qerl.settings.base import parse
from qerl.settings.run import RunSettings


def _settings(weights: str, values: dict[str, Any]) -> RunSettings:
    run = {
        "model": values["size"],
        "dataset": "random",
        "weights": weights,
        "dtype": "bfloat16",
        "adapter": {"rank": values["rank"], "alpha": 2 * values["rank"]},
        "rollout": {
            "prompts": values["prompts"],
            "group_size": values["group_size"],
            "sampling": {"max_tokens": 2 * values["mean_tokens"]},
        },
        "micro_batch_tokens": values["micro_batch_tokens"],
        "gradient_checkpointing": values["recompute"],
    }
    return parse(RunSettings, run, "update_speed")


def _samples(settings: RunSettings, values: dict[str, Any], vocabulary: int) -> list[Sample]:
    """Groups of completions whose lengths are uniform from half to one and a half of the mean."""
    numbers, mean = random.Random(0), values["mean_tokens"]
    draw = lambda count: [numbers.randrange(vocabulary) for _ in range(count)]  # noqa: E731
    samples = []
    for _ in range(settings.rollout.prompts):
        prompt = draw(values["prompt_tokens"])
        for _ in range(settings.rollout.group_size):
            ids = draw(numbers.randint(mean // 2, 3 * mean // 2))
            completion = Completion(ids, [numbers.uniform(-12.0, -11.0) for _ in ids], True)
            samples.append(Sample(prompt, completion, 0.0, numbers.gauss(0.0, 1.0)))
    return samples


def _measure(settings: RunSettings, values: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    policy = make_policy(settings, checkpoint)
    updater = Updater(settings, policy, Processes())
    samples = _samples(settings, values, policy.lm.config.vocab_size)
    index = split(samples, settings.micro_batch_tokens)
    updater.update(1, samples)  # warms up
    times, peak = [], 0
    for step in range(2, 2 + values["repeats"]):
        reset_peak_memory()
        with seconds() as elapsed:
            metrics = updater.update(step, samples)
        times.append(elapsed.value)
        peak = max(peak, peak_memory_bytes())
    tokens = sum(sample.length for sample in samples)
    return {
        "weights": settings.weights,
        "sequences": len(samples),
        "tokens": tokens,
        "completion_tokens": sum(len(sample.completion.token_ids) for sample in samples),
        "packed_tokens": sum(micro_batch(samples, part, policy.device).ids.numel() for part in index),
        "micro_batches": len(index),
        "seconds": times,
        "tokens_per_second": [tokens / one for one in times],
        "peak_memory_bytes": peak,
        "weight_bytes": weight_bytes(policy),
        "parts": _by_part(policy, samples, index[0]),
        "grad_norm": metrics["grad_norm"],
    }


def _by_part(policy: Policy, samples: list[Sample], index: list[int]) -> dict[str, Any]:
    """Seconds, bytes held afterwards and peak bytes of each part of the largest micro-batch, after one that warms
    up."""
    batch = micro_batch(samples, index, policy.device)
    head = policy.lm.get_output_embeddings().weight
    policy.lm.train()
    parts: dict[str, Any] = {}
    for _ in range(2):
        policy.lm.zero_grad(set_to_none=True)
        recomputed = sum(block.gradient_checkpointing for block in blocks(policy.lm))
        parts = {"tokens": batch.ids.numel(), "recomputed_blocks": recomputed, "before": {"held_bytes": _held()}}
        with _part(parts, "blocks"):
            states = token_states(policy, batch)
        with _part(parts, "logprobs"):
            logprobs, _ = linear_logprobs.logprobs_and_entropy(states, head, batch.targets_M)
        with _part(parts, "logprobs_backward"):
            (grad,) = torch.autograd.grad(logprobs.sum(), states)
        with _part(parts, "blocks_backward"):
            states.backward(grad)
        del states, logprobs, grad
    policy.lm.eval()
    return parts


@contextmanager
def _part(parts: dict[str, Any], name: str) -> Iterator[None]:
    reset_peak_memory()
    with seconds() as elapsed:
        yield
    parts[name] = {"seconds": elapsed.value, "held_bytes": _held(), "peak_bytes": peak_memory_bytes()}


def _held() -> int | None:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def main(
    out: Path,
    size: str = "7B",
    weights: Annotated[list[str] | None, typer.Option()] = None,
    prompts: int = 16,
    group_size: int = 8,
    prompt_tokens: int = 128,
    mean_tokens: int = 1024,
    rank: int = 16,
    micro_batch_tokens: int = 16384,
    recompute: str = "false",
    repeats: int = 3,
) -> None:
    """Measure each of `weights` (nvfp4 and bf16 by default) in turn and write OUT; `recompute` is
    `gradient_checkpointing`."""
    values = {key: value for key, value in locals().items() if key not in ("out", "weights")}
    points = []
    for weights_format in weights or ["nvfp4", "bf16"]:
        with TemporaryDirectory() as work:
            checkpoint = Path(work) / "model"
            write_checkpoint(checkpoint, size, weights_format, ["0 1 2 3 4 5 6 7 8 9"] * 50)
            points.append(_measure(_settings(weights_format, values), values, checkpoint))
        log.info("%s", points[-1])
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    write_json(out, {"bench": "update_speed", "settings": values, "points": points, "provenance": stamp()})


if __name__ == "__main__":
    configure_logging()
    typer.run(main)
