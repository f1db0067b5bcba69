"""Time of prompts in the project's engine, on random weights: a call draws one token after each prompt.

    python -m qerl.bench.prompts OUT.json --size 7B --weights nvfp4 --rank 16

The whole call is timed, the host's part included. The first call of each point may compile kernels and capture a graph,
so its time stands beside the samples. So does the memory that it made the process reserve, less what capturing
released.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer

from qerl.bench.ceilings import gpu_state
from qerl.bench.decode.points import IDS
from qerl.checkpoints.architectures import ARCHITECTURES
from qerl.host.profiling import seconds
from qerl.host.progress import configure_logging, log
from qerl.policy.policy import choose_device
from qerl.provenance.files import check_writable, write_json
from qerl.provenance.stamp import stamp
from qerl.random_models.policy import WEIGHTS, random_policy
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import NativeSettings

#: Prompts, and tokens of each.
POINTS = (
    *((1, tokens) for tokens in (16, 32, 64, 128, 256, 512, 768, 1024)),
    *((8, 16), (8, 64), (32, 16), (2, 250), (4, 200), (8, 256), (32, 256), (8, 4096)),
)
_REPEATS = 7


def measure(sampler: EngineSampler, prompts: int, tokens: int) -> dict[str, Any]:
    """Seconds of calls with `prompts` of `tokens` each."""
    samples, reserved, grown = [], _reserved(), None
    for round_ in range(1 + _REPEATS):
        numbers = np.random.default_rng([prompts, tokens, round_])
        ids = numbers.integers(*IDS, size=(prompts, tokens)).tolist()
        with seconds() as elapsed:
            sampler.generate(ids, SamplingParams(max_tokens=1, seed=round_))
        samples.append(elapsed.value)
        grown = _reserved() - reserved if grown is None else grown
    return {"prompts": prompts, "tokens": tokens, "first": samples[0], "samples": samples[1:], "reserved_bytes": grown}


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def main(out: Path, size: str = "7B", weights: str = "nvfp4", rank: int = 16) -> None:
    """Measure all points and write OUT. `weights`: bf16, nf4, mxfp4 or nvfp4; rank 0: no adapter."""
    if size not in ARCHITECTURES or weights not in WEIGHTS:
        raise typer.BadParameter(f"sizes are {', '.join(ARCHITECTURES)}, weights {', '.join(WEIGHTS)}")
    check_writable(out)
    start = time.perf_counter()
    sampler = EngineSampler(random_policy(size, weights, rank, choose_device()), NativeSettings(kv_cache_gib=8.0))
    longest = max(POINTS, key=lambda point: point[1])
    sampler.generate([[1000] * longest[1]] * max(count for count, _ in POINTS), SamplingParams(max_tokens=1))
    log.info("ready after %.1f s", time.perf_counter() - start)
    points = []
    for prompts, tokens in POINTS:
        points.append(measure(sampler, prompts, tokens))
        log.info("%d x %d: %.2f ms", prompts, tokens, 1e3 * float(np.median(points[-1]["samples"])))
    about = {"bench": "prompts", "size": size, "weights": weights, "rank": rank, "sampler": sampler.served}
    write_json(out, {**about, "gpu": gpu_state(), "points": points, "provenance": stamp()})


if __name__ == "__main__":
    configure_logging()
    typer.run(main)
