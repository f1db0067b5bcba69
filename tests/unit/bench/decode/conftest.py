"""A commit for stamps, and a clock that only drawing moves."""

from contextlib import contextmanager

import pytest

from qerl.bench import decode
from qerl.bench import hf as decode_hf
from qerl.bench import timing as decode_points
from qerl.bench import vllm as decode_vllm
from qerl.host.gpus import Seconds


@pytest.fixture(autouse=True)
def commit(monkeypatch):
    """A commit for stamps."""
    monkeypatch.setenv("QERL_COMMIT", "test")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that only drawing moves: 2 s for the prompts with their first token, 0.25 s for each further one.

    Every engine is timed by it. The fixture is a `draw` that draws nothing and moves it.
    """
    now = [0.0]

    @contextmanager
    def seconds():
        taken, start = Seconds(), now[0]
        yield taken
        taken.value = now[0] - start

    def draw(prompts, count, seed):
        now[0] += 2.0 + 0.25 * (count - 1)
        return len(prompts) * count

    def timed(drawn, *sizes):
        return decode_points.timed(lambda *asked: (draw(*asked), drawn(*asked))[1], *sizes)

    monkeypatch.setattr(decode_points, "seconds", seconds)
    for engine in (decode, decode_hf, decode_vllm):
        monkeypatch.setattr(engine, "timed", timed)
    return draw
