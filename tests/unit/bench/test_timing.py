"""Points of a measurement: in turn or alone, and the result of one that runs out of memory."""

import gc
import weakref

import pytest

from qerl.bench.timing import Point, run_points


class Held:
    """The memory that a point holds."""


@pytest.fixture
def world():
    return {"order": [], "alive": weakref.WeakSet(), "most": 0}


def point(name, world, *, make_fails=False, fails_in=None):
    def make():
        if make_fails:
            raise MemoryError
        held = Held()
        held.itself = held
        world["alive"].add(held)

        def once(round_):
            world["order"].append((name, round_))
            world["most"] = max(world["most"], len(world["alive"]))
            if round_ == fails_in:
                raise MemoryError
            return {"round": round_, "held": id(held)}

        return once

    return Point({"name": name}, make)


def test_interleaved_points_are_held_together_and_timed_in_turn(world):
    done = run_points([point("a", world), point("b", world)], repeats=2)
    assert world["order"] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert world["most"] == 2
    assert [[s["round"] for s in p.samples] for p in done] == [[1, 2], [1, 2]]


def test_points_one_after_another_are_alone_in_memory(world):
    gc.disable()  # the cycle must go because it is collected, not by chance
    try:
        run_points([point("a", world), point("b", world), point("c", world)], repeats=1, interleave=False)
    finally:
        gc.enable()
    assert world["order"] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]
    assert world["most"] == 1


@pytest.mark.parametrize("interleave", [True, False])
def test_a_point_out_of_memory_is_a_row_and_the_others_are_measured(world, interleave):
    points = [point("a", world, make_fails=True), point("b", world, fails_in=1), point("c", world)]
    done = run_points(points, repeats=2, interleave=interleave)
    assert [p.status for p in done] == ["out of memory", "out of memory", "ok"]
    assert [len(p.samples) for p in done] == [0, 0, 2]
    assert ("b", 2) not in world["order"]
