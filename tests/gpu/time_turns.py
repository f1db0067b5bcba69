"""Sampled tokens a second of conversations with a slow tool, beside completions of one turn, on the same engine.

    python -m tests.gpu.time_turns                # 7B in NVFP4, 64 x 8 sequences of 4 turns of 128 tokens

Both draw as many tokens in as many sequences. A turn's reply comes after the latency. With the tokens a second come the
seconds in which the sampler has nothing to do but to wait for a reply, and those of its phases on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from statistics import median
from threading import Timer
from time import perf_counter

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
    """Replies to all turns but the last with tokens of a fixed number, after some seconds."""

    def __init__(self, turns: int, reply: list[int], latency: float) -> None:
        self._turns, self._reply, self._latency = turns, reply, latency
        self._asked: dict[tuple[int, int], int] = {}
        self._replies: SimpleQueue[tuple[int, int, list[int] | None]] = SimpleQueue()
        #: Seconds for which a sampler without sequences to decode has waited.
        self.waited = 0.0

    def ask(self, prompt: int, number: int, tokens: Sequence[int]) -> None:
        turn = self._asked[prompt, number] = self._asked.get((prompt, number), 0) + 1
        reply = self._reply if turn < self._turns else None
        Timer(self._latency if reply else 0.0, self._replies.put, [(prompt, number, reply)]).start()

    def replies(self, wait: float) -> list[tuple[int, int, list[int] | None]]:
        found, began = [], perf_counter()
        try:
            found.append(self._replies.get(block=wait > 0, timeout=wait or None))
            self.waited += perf_counter() - began
            while True:
                found.append(self._replies.get_nowait())
        except Empty:
            self.waited += 0.0 if found else perf_counter() - began
            return found


def main(
    size: str = "7B", weights: str = "nvfp4", rank: int = 16, prompts: int = 64, group: int = 8, prompt: int = 256,
    turns: int = 4, tokens: int = 128, reply: int = 32, latency: float = 0.05, rounds: int = 3,
) -> None:  # fmt: skip
    """Time both in turn, and print the tokens a second and the ratio of their medians."""
    policy = random_policy(Base(size, weights), rank, choose_device())  # type: ignore[arg-type]
    sampler = EngineSampler(policy, NativeSettings(), prompts * group)
    ids = np.random.default_rng(0).integers(*prompt_id_range(vocabulary(size)), size=(prompts, prompt)).tolist()
    most = turns * tokens + (turns - 1) * reply
    rates: dict[str, list[float]] = {"one turn": [], f"{turns} turns": []}
    for round_ in range(rounds + 1):
        for name, taken in rates.items():
            tool = None if name == "one turn" else Tool(turns, ids[0][:reply], latency)
            lengths = ((turns * tokens if tool is None else tokens,) * group,) * prompts
            params = SamplingParams(most + 1, count=group, seed=round_, ignore_eos=True, lengths=lengths, turns=tool)
            with seconds() as elapsed:
                drawn = sum(c.drawn for completions in sampler.generate(ids, params) for c in completions)
            if drawn != prompts * group * turns * tokens:
                raise RuntimeError(f"{drawn} tokens were drawn of {prompts * group * turns * tokens}")
            if round_:  # the first one captures graphs
                taken.append(drawn / elapsed.value)
                phases = sampler.phases
                steps = sum(time.steps for time in phases.decode.values())
                print(
                    f"{name}: {taken[-1]:,.0f} sampled tokens/s; {drawn:,} sampled tokens and "
                    f"{prompts * group * (most - turns * tokens) * bool(tool):,} of replies in {elapsed.value:.2f} s; "
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
