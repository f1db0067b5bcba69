"""The work of a GRPO step that this project and TRL are timed on, and the shape of the results.

Weights are random, so that only the amount of work counts. Prompts have an exact length, and no stop token ends a
completion. Only a LoRA adapter on all seven projections is trained, with one update per rollout. Rewards differ within
a group.
"""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qerl.data.prompts import prompt_ids
from qerl.data.records import Problem
from qerl.jobs.shapes import Work
from qerl.provenance.files import write_json
from qerl.provenance.stamp import stamp
from qerl.rl.rewards import Answer

#: Steps before the timed ones: kernels are compiled, engines set up.
WARMUP = 1
#: The parts of a step that are timed, in its order; the step has all of them and little else.
PARTS = ("sync", "rollout", "update")
_REWARDS = 2**16


def steps_of(work: Work) -> int:
    """The number of steps, warm-up included."""
    return WARMUP + work.repeats


def check_drawn(work: Work, completion_tokens: int) -> None:
    """Raise RuntimeError unless a step drew all its tokens."""
    wanted = work.completions * work.completion_tokens
    if completion_tokens != wanted:
        raise RuntimeError(f"a step drew {completion_tokens} tokens instead of {wanted}: its time says nothing")


def questions(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int) -> list[str]:
    """`count` questions of random digits, each a prompt of exactly `tokens` in the chat template."""
    digits = tokens - len(prompt_ids(tokenizer, "", ""))
    if digits < 1:
        raise ValueError(f"the chat template alone has {tokens - digits} tokens; use longer prompts than {tokens}")
    numbers = random.Random(0)
    drawn = ["".join(numbers.choices("0123456789", k=digits)) for _ in range(count)]
    if any(len(prompt_ids(tokenizer, question, "")) != tokens for question in drawn):
        raise RuntimeError("a digit isn't a token of this tokenizer; use one that splits numbers into digits")
    return drawn


def text_reward(text: str) -> float:
    """A reward from 0 to 1 by a hash of the completion. It differs even within a group of two, and costs nothing."""
    return zlib.crc32(text.encode()) % _REWARDS / _REWARDS


def reward(answer: Answer, problem: Problem) -> float:
    """`text_reward` as a reward function of a run."""
    return text_reward(answer.text)


def memory_of(peak: float, kv_cache: int, parts: dict[str, int]) -> dict[str, Any]:
    """Bytes of the GPU's memory as its allocator hands it out, or of the process on a CPU, where no cache is told.

    `parts` are disjoint; what they leave of the peak without the cache is activations, logits and buffers.
    `device_bytes` is all that is in use on the GPU now, whoever asked for it.
    """
    without = int(peak) - kv_cache
    return {
        "peak_bytes": int(peak),
        "kv_cache_bytes": kv_cache,
        "without_kv_cache_bytes": without,
        "parts": {**parts, "rest": without - sum(parts.values())},
        "device_bytes": device_bytes(),
    }


def device_bytes() -> int | None:
    """Bytes in use on the GPU: allocators' reserves, contexts and graphs included; none on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def write_result(
    out: Path,
    system: str,
    sampler: str,
    work: Work,
    settings: dict[str, Any],
    steps: list[dict[str, float]],
    memory: dict[str, Any],
) -> None:
    """Write a result: seconds of the timed steps by part, `memory_of` their highest peak, and what ran.

    `system` is a short name for tables, `sampler` who draws completions on what; `settings` are the system's own.
    """
    if len(steps) != work.repeats:
        raise RuntimeError(f"{len(steps)} steps were timed instead of {work.repeats}")
    result = _told(system, work, settings, "ok") | {"sampler": sampler, "warmup_steps": WARMUP, "steps": steps}
    write_json(out, result | {"memory": memory, "provenance": stamp()})


def write_failure(out: Path, system: str, work: Work, settings: dict[str, Any], status: str) -> None:
    """Write the reason why there is no result, in the form of `write_result`."""
    write_json(out, _told(system, work, settings, status) | {"provenance": stamp()})


def _told(system: str, work: Work, settings: dict[str, Any], status: str) -> dict[str, Any]:
    return {"bench": "grpo_step", "system": system, "work": work.model_dump(), "settings": settings, "status": status}
