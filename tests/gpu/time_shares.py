"""What each part adds to a GRPO step of mixed lengths: parts of this project are switched off one after another.

    python -m tests.gpu.time_shares OUT.json --size 7B

Rows follow the way from this project's step to TRL's, each without one more part. With neither shared prompts nor
packing, a micro-batch has 16 completions, padded to the longest, as TRL's. The last row but TRL's own time (`qerl grid
config/peers.yaml` has it) is this project's products and losses on TRL's micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich import print

from qerl.bench.steps import run_settings, steps_with
from qerl.host.gpus import free_memory
from qerl.host.provenance import stamp, write_json
from qerl.models.policy import choose_device
from qerl.models.random import random_policy, with_random_adapter
from qerl.rl.packing import MicroBatch, Sample, micro_batch
from qerl.rollout.sampler import Completion
from qerl.settings.workloads import EngineStep, StepWork

#: Completions of TRL's micro-batches.
TOGETHER = 16


def _alone(samples: Sequence[Sample], index: Sequence[int]) -> Iterator[list[int]]:
    """Each completion with a prompt of its own, in place of `packing._groups`."""
    return ([i] for i in index)


def _padded(completion: Completion, tokens: int) -> Completion:
    """A completion with tokens behind it that nobody drew, which are computed and have no loss."""
    count, more = len(completion.token_ids), tokens - len(completion.token_ids)
    return replace(
        completion,
        token_ids=completion.token_ids + [0] * more,
        logprobs=completion.logprobs + [0.0] * more,
        replies=(range(count, tokens),) if more else (),
    )


def _padded_batch(
    samples: Sequence[Sample], index: list[int], device: torch.device, silent: Collection[int] = ()
) -> MicroBatch:
    longest = max(len(samples[i].completion.token_ids) for i in index)
    within = {i: replace(samples[i], completion=_padded(samples[i].completion, longest)) for i in index}
    return micro_batch([within.get(i, sample) for i, sample in enumerate(samples)], index, device, silent)


def _sixteens(samples: Sequence[Sample], *_: Any) -> list[list[int]]:
    return [[*range(first, first + TOGETHER)] for first in range(0, len(samples), TOGETHER)]


@contextmanager
def without_shared_prompts() -> Iterator[None]:
    """Each completion has a copy of its prompt in the row."""
    with patch("qerl.rl.packing._groups", _alone):
        yield


@contextmanager
def without_packing() -> Iterator[None]:
    """Neither shared prompts nor packing: micro-batches of 16 completions, padded to the longest."""
    with ExitStack() as patches:
        patches.enter_context(without_shared_prompts())
        patches.enter_context(patch("qerl.rl.update.split", _sixteens))
        patches.enter_context(patch("qerl.rl.update.micro_batch", _padded_batch))
        yield


#: Rows with the share of groups without a gradient that are skipped, recomputation, and what is switched off.
ROWS: dict[str, tuple[float, bool | str, Callable[[], Any]]] = {
    "as it is": (0.5, "auto", ExitStack),
    "activations recomputed": (0.5, True, ExitStack),
    "and silent groups read": (0.0, True, ExitStack),
    "and prompts repeated": (0.0, True, without_shared_prompts),
    "and completions padded": (0.0, True, without_packing),
}


def main(out: Path, size: Annotated[str, typer.Option()] = "7B", repeats: Annotated[int, typer.Option()] = 2) -> None:
    """Time the step of each row in turn, after one that isn't timed, and write medians in seconds."""
    rows = []
    base = None
    for name, (equal, recompute, off) in ROWS.items():
        work = StepWork(
            size=size, weights="nvfp4", rank=16, prompts=16, group_size=8, prompt=256, tokens=2048, median=300,
            sigma=0.8, equal_groups=equal, repeats=repeats,
        )  # fmt: skip
        asked = EngineStep(recompute=recompute, micro_batch_tokens=36_864, kv_cache_gib=None)
        base = base or random_policy(work.base, 0, choose_device())
        torch.manual_seed(0)
        with TemporaryDirectory() as folder, with_random_adapter(base, work.rank, train_norms=False) as policy, off():
            found = steps_with(policy, work, run_settings(work, asked), Path(folder))
            policy.lm.gradient_checkpointing_disable()
        parts = {part: median(getattr(step, part) for step in found["steps"]) for part in ("step", "rollout", "update")}
        rows.append({"row": name, **parts, "peak_bytes": found["memory"].peak_bytes})
        print(rows[-1])
        free_memory()
    write_json(out, {"size": size, "rows": rows, "provenance": stamp()})


if __name__ == "__main__":
    typer.run(main)
