"""The sharing of a step's groups: by expected length, and with groups that wait for any process."""

import json
import time
from itertools import chain, product

import pytest

from qerl.rl.parallel import start_processes
from qerl.rl.rollouts import ExpectedLengths, WaitingGroups, shares
from qerl.rl.train import make_trainer
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from tests.jobs import SETTINGS, write_inputs


def test_a_problem_is_expected_to_get_what_it_got_and_another_one_by_its_prompt():
    lengths = ExpectedLengths()
    assert lengths.of("new", 30) == 30
    lengths.see("a", 10, [40, 60])
    lengths.see("b", 30, [30])
    lengths.see("a", 10, [100, 140])
    assert lengths.of("a", 10) == 120
    assert lengths.of("b", 99) == 30
    assert lengths.of("new", 30) == 30 * (50 + 30 + 120) / (10 + 30 + 10)


@pytest.mark.parametrize(("count", "processes", "most"), [*product((1, 5, 16), (1, 2, 3), (1, 4, 100))])
def test_shares_are_equal_in_number_and_leave_what_has_no_room(count, processes, most):
    lengths = [float((7 * n) % 11) for n in range(count)]
    own, waiting = shares(lengths, processes, most)
    assert sorted(chain(*own, waiting)) == list(range(count))
    assert max(map(len, own)) <= min(most, -(-count // processes))
    assert len(waiting) == max(0, count - most * processes)
    begun = [lengths[group] for part in own for group in part]
    assert not waiting or min(begun) >= max(lengths[group] for group in waiting)


def test_long_groups_are_balanced_by_short_ones():
    """By hand: 9 | 8; 7 goes to 8's process, 3 to 9's; the last two fill the room of three each."""
    assert shares([3, 9, 1, 8, 7, 1], 2, 100) == ([[1, 0, 2], [3, 4, 5]], [])
    assert shares([1, 1, 50, 1], 2, 100) == ([[2, 3], [0, 1]], [])


def test_every_waiting_group_is_taken_once_and_the_last_ones_singly():
    taken = 0

    def take(more: int) -> int:
        nonlocal taken
        taken += more
        return taken

    one, other = (WaitingGroups(range(100, 111), 2, take) for _ in range(2))
    pieces = [list(part.more(4)) for part in (one, other, one, other, one, other, one)]
    assert [len(piece) for piece in pieces] == [4, 4, 2, 1, 0, 0, 0]
    assert list(chain(*pieces)) == list(range(100, 111))
    assert [list(one.more(1)), list(other.more(1))] == [[], []]


def record(folder, values: dict) -> None:
    """Draw a step's rollout in samplers with room for two groups; process 0 begins once process 1 has drawn all that
    waited.
    """
    trainer = make_trainer(parse(RunSettings, values, "test"), folder / "base", folder / "data", folder / "unused")
    collector, rank, done = trainer.collector, trainer.processes.rank, folder / "done"
    collector.sampler.max_sequences = 9
    drawn, generate = [], collector.sampler.generate

    def late(prompts, params):
        while trainer.processes.count == 2 and rank == 0 and not done.exists():
            time.sleep(0.01)
        groups = generate(prompts, params)
        drawn.extend(number for number, group in enumerate(groups) if group)
        if rank == 1:
            done.touch()
        return groups

    collector.sampler.generate = late
    rollout = collector.collect(1, 0)
    found = {
        "drawn": sorted(drawn),
        "tokens": [[c.token_ids for c in group.completions] for group in rollout.groups],
        "logprobs": [p for group in rollout.groups for c in group.completions for p in c.logprobs],
        "metrics": rollout.metrics,
    }
    (folder / f"{trainer.processes.count}-{rank}.json").write_text(json.dumps(found))


def test_a_process_takes_over_the_groups_that_wait_and_completions_are_those_of_one(tmp_path, forking):
    folder = write_inputs(tmp_path)
    values = {**SETTINGS, "rollout": {"prompts": 7, "group_size": 4, "sampling": {"max_tokens": 12}}}
    for count in (1, 2):
        given = folder, {**values, "processes": count}
        start_processes(count, record, *given) or record(*given)
    alone, late, early = (json.loads((folder / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    assert (len(late["drawn"]), len(early["drawn"])) == (2, 5)
    assert sorted(late["drawn"] + early["drawn"]) == list(range(7))
    for other in (late, early):
        assert other["tokens"] == alone["tokens"]
        assert other["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-5)
        idle = {name: other["metrics"].pop(f"seconds/{name}") for name in ("idle", "idle_max")}
        assert idle["idle"] == pytest.approx(idle["idle_max"] / 2)
        assert other["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
