"""A commit for stamps, and a clock that only drawing moves."""

from contextlib import contextmanager

import pytest

from qerl.bench import timing as decode_points
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

    original = decode_points.timed

    def timed(engine, *about):
        return original(engine._replace(draw=lambda *asked: (draw(*asked), engine.draw(*asked))[1]), *about)

    monkeypatch.setattr(decode_points, "seconds", seconds)
    monkeypatch.setattr(decode_points, "timed", timed)
    return draw
