"""Decode speed of the native engine on random weights of Qwen2.5's shapes: tokens a second by sequences.

    python -m qerl.bench.decode OUT.json --size 7B --weights nvfp4 --rank 16 --sequences 1 --sequences 32

`qerl.bench.decode_points` says how it is timed and what is written. Weights never touch the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from qerl.bench.decode_points import PROMPT, SEQUENCES, TOKENS, DecodePoints, Job, Measure, timed
from qerl.bench.grpo_step_work import shape_name
from qerl.host.profiling import seconds
from qerl.host.progress import configure_logging
from qerl.policy.policy import Policy, choose_device, weight_bytes
from qerl.random_models.policy import WEIGHTS, random_policy
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import NativeSettings

#: No bound on the KV cache: where memory has no room for all sequences, the point is out of memory. With a bound some
#: would wait for others, and the point be one of fewer sequences.
_SETTINGS = NativeSettings(kv_cache_gib=2.0**20)


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
