"""Time of a rollout by phase: prefill, decode steps by batch size, and the time between them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from qerl.rollout.engine.cuda_graphs import bucket_of


@dataclass
class DecodeTime:
    """Decode steps at one batch size; `sequences` is the sum of their sequences, without padding."""

    steps: int = 0
    sequences: int = 0
    seconds: float = 0.0


@dataclass
class RolloutPhases:
    """Seconds of a rollout on the device by phase, and seconds that the host waited meanwhile.

    `prefill`: prompts and first tokens, in `prefills` batches. `decode`: by batch size. `verify`: steps that verify
    drafts, by batch size, with their rows in place of sequences. `between`: the device copies results, or is idle until
    the host launches more. `host_wait`: the host waits for results.
    """

    prefill: float = 0.0
    prefills: int = 0
    decode: dict[int, DecodeTime] = field(default_factory=lambda: defaultdict(DecodeTime))
    verify: dict[int, DecodeTime] = field(default_factory=lambda: defaultdict(DecodeTime))
    between: float = 0.0
    host_wait: float = 0.0


@dataclass(frozen=True)
class _Mark:
    """The end of a phase. `sequences` and `steps` are set for steps."""

    phase: str
    time: torch.cuda.Event | float
    sequences: int = 0
    steps: int = 0


class PhaseClock:
    """Marks the ends of a rollout's phases in the device's stream, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._waited = 0.0
        self._marks = [_Mark("start", self._now())]

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, phase: str, sequences: int = 0, steps: int = 0) -> None:
        """End a phase: prefill, decode, verify or between."""
        self._marks.append(_Mark(phase, self._now(), sequences, steps))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as the host's wait for the device."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def phases(self) -> RolloutPhases:
        """The time of each phase; waits until the device has reached the last mark."""
        phases = RolloutPhases(host_wait=self._waited)
        for before, after in pairwise(self._marks):
            seconds = _seconds(before.time, after.time)
            if after.phase in ("decode", "verify"):
                batches = phases.decode if after.phase == "decode" else phases.verify
                batch = batches[bucket_of(after.sequences)]
                batch.steps += after.steps
                batch.sequences += after.sequences * after.steps
                batch.seconds += seconds
            elif after.phase == "prefill":
                phases.prefills += 1
                phases.prefill += seconds
            else:
                phases.between += seconds
        return phases


def _seconds(before: torch.cuda.Event | float, after: torch.cuda.Event | float) -> float:
    if isinstance(before, float) or isinstance(after, float):
        return float(after) - float(before)  # type: ignore[arg-type]
    after.synchronize()
    return before.elapsed_time(after) / 1e3
