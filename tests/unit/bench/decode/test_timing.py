"""The timing of a decode point: what counts, how often it is repeated, and what is no speed."""

import pytest

from qerl.bench.timing import Engine
from qerl.bench.timing import timed as time_point
from qerl.jobs import enough_runs
from qerl.settings.workloads import Decoding


def timed(draw, sequences, prompt, tokens, size="tiny"):
    """The point of an engine that draws so. It isn't that of the fixture, whose clock a `draw` moves itself."""
    work = Decoding(engine="native", size=size, weights="bf16", rank=0, prompt=prompt, tokens=tokens)
    return time_point(Engine(draw, "any", lambda: 1), work, sequences)


@pytest.mark.parametrize("tokens", [100, 32000, 151936])
def test_ids_of_prompts_are_in_the_vocabulary(clock, tokens, monkeypatch):
    monkeypatch.setattr("qerl.bench.timing.vocabulary", lambda size: tokens)
    seen = []

    def draw(prompts, count, seed):
        seen.extend(prompts)
        return clock(prompts, count, seed)

    timed(draw, 3, 50, 5)
    ids = [one for prompt in seen for one in prompt]
    assert min(1000, tokens // 2) <= min(ids)
    assert tokens // 3 <= max(ids) < min(100000, tokens)


def test_prompts_do_not_count(clock):
    lengths = set()

    def draw(prompts, count, seed):
        lengths.update((len(prompts), len(prompt)) for prompt in prompts)
        return clock(prompts, count, seed)

    point = timed(draw, 6, 10, 5)
    assert (point.samples, point.prompt_samples) == ([24.0] * 3, [2.0] * 3)
    assert lengths == {(6, 10)}


def test_a_busy_phase_of_the_machine_does_not_move_the_median(clock):
    runs = iter(range(7))

    def draw(prompts, count, seed):
        if next(runs) < 3:  # the warm-up, and the first round: prompts, all
            clock(prompts, 1, seed)
        return clock(prompts, count, seed)

    # 6 * 5 tokens; those of the first round took 2 s longer, its prompts too.
    point = timed(draw, 6, 10, 5)
    assert (point.samples, point.prompt_samples) == ([30 / 3.25, 24.0, 24.0], [4.0, 2.0, 2.0])
    assert point.prompt_seconds == 2.0


def test_what_prompts_take_longer_throughout_is_not_decoding(clock):
    def draw(prompts, count, seed):
        clock(prompts, 1, seed)
        return clock(prompts, count, seed)

    assert timed(draw, 6, 10, 5).samples == [24.0] * 3


@pytest.mark.parametrize(
    ("seconds", "runs"), [(0.01, 9), (0.6, 9), (0.7, 8), (1.2, 5), (1.7, 3), (9.9, 3), (10.0, 1), (60.0, 1)]
)
def test_short_runs_are_repeated_more_often_and_long_ones_not_at_all(seconds, runs):
    assert [count for count in range(12) if enough_runs([seconds] * count)] == [*range(runs, 12)]


def test_a_long_run_is_timed_once(clock):
    """By that clock, 33 tokens take 10 s, the first one with the prompts."""
    assert timed(clock, 6, 10, 32).samples == [24.0]
    assert timed(clock, 6, 10, 31).samples == [24.0] * 3


def test_work_that_was_not_done_is_not_timed(clock):
    with pytest.raises(RuntimeError, match="35 tokens were drawn instead of 36"):
        timed(lambda *arguments: clock(*arguments) - 1, 6, 10, 5)


def test_time_within_that_of_the_prompts_is_no_speed(clock):
    with pytest.raises(RuntimeError, match="decode more of them"):
        timed(lambda prompts, count, seed: clock(prompts, 1, seed) * count, 6, 10, 5)
