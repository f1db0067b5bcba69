"""Decode speed of the native engine by LoRA rank, in turn in one process: what an adapter costs.

    python -m qerl.bench.decode_ranks FOLDER --size 7B --weights nvfp4 --rank 0 --rank 16 --rank 64 --sequences 1

A job a rank, each on a GPU of one host, tells it less well: GPUs differ by some percent. The files are those of the
grid's jobs (`qerl.bench.decode`, `qerl.bench.grid`), and what they have is kept. All policies are in memory; a point's
peak is told without the other ones.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from qerl.bench.decode import check_weights, measure, sync_seconds
from qerl.bench.decode_points import PROMPT, SEQUENCES, TOKENS, DecodePoints, Job
from qerl.bench.grid import decode_id
from qerl.bench.grpo_step_work import shape_name
from qerl.host.profiling import peak_memory_bytes
from qerl.host.progress import configure_logging
from qerl.policy.policy import Policy, choose_device, weight_bytes
from qerl.random_models.policy import random_policy

_RANKS = (0, 16, 64)


def main(
    folder: Path,
    size: str = "7B",
    weights: str = "nvfp4",
    rank: Annotated[list[int] | None, typer.Option()] = None,
    sequences: Annotated[list[int] | None, typer.Option()] = None,
    prompt: int = PROMPT,
    tokens: int = TOKENS,
) -> None:
    """Measure each of `sequences` (1 to 256 by default) with each rank (0, 16 and 64) before the next.

    Those that FOLDER has are kept. `weights`: bf16, nf4, mxfp4 or nvfp4; rank 0: no adapter.
    """
    check_weights(weights)
    size, counts = shape_name(size), sequences or SEQUENCES
    files = {}
    for one in rank or _RANKS:
        name = decode_id("native", size, weights, one, prompt, tokens)
        files[one] = DecodePoints(folder / f"{name}.json", Job("native", size, weights, one, prompt, tokens))
    missing = [one for one, points in files.items() if points.missing(counts)]
    policies = {one: random_policy(size, weights, one, choose_device()) for one in missing}
    for one, policy in policies.items():
        files[one].note(sync_seconds=sync_seconds(policy) if one else [])
    held = sum(map(weight_bytes, policies.values()))
    for count in counts:
        for one, policy in policies.items():
            load = partial(partial, _measure, policy, held - weight_bytes(policy), prompt, tokens)
            files[one].run([count], load)


def _measure(policy: Policy, others: int, prompt: int, tokens: int, sequences: int) -> dict[str, Any]:
    """Figures of a point; `others`: bytes of the policies beside it."""
    figures = measure(policy, sequences, prompt, tokens)
    return figures | {"peak_memory_bytes": peak_memory_bytes() - others}


if __name__ == "__main__":
    configure_logging()
    typer.run(main)
