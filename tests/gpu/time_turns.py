"""Sampled tokens a second of conversations with a slow tool, beside completions of one turn, on the same engine.

    python -m tests.gpu.time_turns                # 7B in NVFP4, 64 x 8 sequences of 4 turns of 128 tokens
    python -m tests.gpu.time_turns --sigma 0.5    # turns of lognormal lengths, 128 on average

Both draw as many tokens in each sequence. A turn's reply comes after the latency. With the tokens a second come the
seconds in which the sampler has nothing to do but to wait for a reply, and those of its phases on the device. With a
`sigma` of 0 all turns end together, so that nothing is decoded while the tool works.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np
import torch
import typer

from qerl.checkpoints.shapes import prompt_id_range, vocabulary
from qerl.host.gpus import seconds
from qerl.models.policy import choose_device
from qerl.models.random import random_policy
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings


class Tool:
    """Replies to all turns but the last, after some seconds, without threads that would take the sampler's time.

    `lengths` [prompts, completions, turns] are the tokens of each turn. Every completion begins with its first turn.
    """

    def __init__(self, lengths: np.ndarray, reply: list[int], latency: float) -> None:
        self._lengths, self._reply, self._latency = lengths, reply, latency
        #: Tokens of each completion's present turn; the sampler reads a turn's when the turn begins.
        self.present: list[list[int]] = lengths[..., 0].tolist()
        self._turns = np.ones(lengths.shape[:2], dtype=int)
        #: When each reply comes, and to what.
        self._due: list[tuple[float, int, int]] = []
        #: Seconds for which a sampler without sequences to decode has waited.
        self.waited = 0.0

    def ask(self, prompt: int, number: int, tokens: Sequence[int]) -> None:
        last = self._turns[prompt, number] == self._lengths.shape[2]
        heappush(self._due, (perf_counter() + (0.0 if last else self._latency), prompt, number))

    def replies(self, wait: float) -> list[tuple[int, int, list[int] | None]]:
        if wait and self._due:
            pause = min(max(self._due[0][0] - perf_counter(), 0.0), wait)
            sleep(pause)
            self.waited += pause
        found: list[tuple[int, int, list[int] | None]] = []
        while self._due and self._due[0][0] <= perf_counter():
            _, prompt, number = heappop(self._due)
            turn = self._turns[prompt, number]
            self._turns[prompt, number] += 1
            last = turn == self._lengths.shape[2]
            if not last:
                self.present[prompt][number] = int(self._lengths[prompt, number, turn])
            found.append((prompt, number, None if last else self._reply))
        return found


def lengths_of(mean: int, sigma: float, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens of turns: lognormal with this mean and this deviation of their logarithm."""
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - sigma**2 / 2, sigma, shape)
    return np.maximum(np.rint(drawn), 1).astype(int)


def main(
    size: str = "7B", weights: str = "nvfp4", rank: int = 16, prompts: int = 64, group: int = 8, prompt: int = 256,
    turns: int = 4, tokens: int = 128, reply: int = 32, latency: float = 0.05, sigma: float = 0.0,
    rounds: int = 3,
) -> None:  # fmt: skip
    """Time both in turn, and print the tokens a second and the ratio of their medians."""
    policy = random_policy(Base(size, weights), rank, choose_device())  # type: ignore[arg-type]
    sampler = EngineSampler(policy, NativeSettings(), prompts * group)
    ids = np.random.default_rng(0).integers(*prompt_id_range(vocabulary(size)), size=(prompts, prompt)).tolist()
    lengths = lengths_of(tokens, sigma, (prompts, group, turns))
    total, replied = int(lengths.sum()), prompts * group * (turns - 1) * reply
    most = int(lengths.sum(2).max()) + (turns - 1) * reply
    rates: dict[str, list[float]] = {"one turn": [], f"{turns} turns": []}
    for round_ in range(rounds + 1):
        for name, taken in rates.items():
            tool = None if name == "one turn" else Tool(lengths, ids[0][:reply], latency)
            present: Any = tool.present if tool else lengths.sum(2).tolist()
            params = SamplingParams(most + 1, count=group, seed=round_, ignore_eos=True, lengths=present, turns=tool)
            with seconds() as elapsed:
                groups = sampler.generate(ids, params)
            drawn = np.array([[completion.drawn for completion in completions] for completions in groups])
            if (drawn != lengths.sum(2)).any():
                raise RuntimeError(f"{drawn.sum()} tokens were drawn of {total}, or others in some sequences")
            if round_:  # the first one captures graphs
                taken.append(total / elapsed.value)
                phases = sampler.phases
                steps = sum(time.steps for time in phases.decode.values())
                print(
                    f"{name}: {taken[-1]:,.0f} sampled tokens/s; {total:,} sampled tokens and "
                    f"{replied * bool(tool):,} of replies in {elapsed.value:.2f} s; "
                    f"{tool.waited if tool else 0.0:.2f} s waited for the tool; {steps} steps in "
                    f"{sum(time.seconds for time in phases.decode.values()):.2f} s, {phases.prefills} prefills in "
                    f"{phases.prefill:.2f} s, {phases.between:.2f} s between",
                    flush=True,
                )
    single, several = map(median, rates.values())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{turns} turns have {several / single:.3f} of the sampled tokens/s of one turn ({device}, {sampler.served})")


if __name__ == "__main__":
    typer.run(main)
