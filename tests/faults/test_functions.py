"""A user's reward that raises or hangs: the error names the reward and line, and finished work stays."""

import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qerl import __main__
from qerl.cli import commands as cli
from qerl.data.records import Problem
from qerl.rl.rewards import Answer, reward_parts
from qerl.settings.base import ConfigError
from qerl.settings.run import RewardSettings
from tests.faults.conftest import REWARD, read_rows

PROBLEM = Problem("7", "6 * 3?", "#### 18", "18", None)
MODULE = """
import re, socket, sys, time

def sleeps(answer, problem):
    time.sleep(3600)

def spins(answer, problem):
    while True:
        pass

def swallows(answer, problem):
    try:
        time.sleep(3600)
    except Exception:
        return 0.0

def backtracks(answer, problem):
    return float(bool(re.match("(a+)+$", "a" * 60 + "b")))

def waits_for_an_answer(answer, problem):
    here, there = socket.socketpair()
    return float(here.recv(1))

def quick(answer, problem):
    return 1.0

def breaks(answer, problem):
    return float(int("eighteen"))

def leaves(answer, problem):
    sys.exit(3)
"""


@pytest.fixture
def reward(tmp_path, monkeypatch):
    name = "own_faults"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)

    def reward(function: str, **changes) -> float:
        settings = RewardSettings(function=f"{name}:{function}", **changes)
        return reward_parts(Answer("#### 18", 5, 20), PROBLEM, "gsm8k", settings)["custom"]

    return reward


@pytest.mark.parametrize("function", ["sleeps", "spins", "swallows", "backtracks", "waits_for_an_answer"])
def test_a_reward_that_hangs_is_stopped_with_its_place(reward, function):
    """None of them returns within the test's own limit."""
    with pytest.raises(ConfigError, match=rf"reward.function own_faults:{function} wasn't done after 0\.1 s") as error:
        reward(function, timeout=0.1)
    assert "line " in str(error.value)
    assert "\n" not in str(error.value)


def test_the_limit_leaves_other_alarms_alone(reward):
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    timer = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        assert reward("quick", timeout=60.0) == 1.0
        assert reward("quick", timeout=None) == 1.0
        while not rung:
            time.sleep(0.01)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
    assert rung == [1]


def test_in_another_thread_a_reward_has_its_limit_too(reward):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(reward, "quick").result() == 1.0
        assert thread.submit(reward, "quick", timeout=None).result() == 1.0
        late = thread.submit(reward, "spins", timeout=0.1).exception()
        assert thread.submit(reward, "quick", timeout=0.1).result() == 1.0
    assert isinstance(late, ConfigError)
    assert re.search(r"own_faults:spins wasn't done after 0\.1 s \(it was at .*own_faults\.py, line [89]\)", str(late))


def test_the_error_of_a_reward_names_it_and_keeps_its_type(reward):
    with pytest.raises(ValueError, match="eighteen") as error:
        reward("breaks")
    [note] = error.value.__notes__
    assert note.startswith("reward.function own_faults:breaks raised this; mend the function")


def test_an_error_of_a_reward_is_no_sentence_of_ours(reward, monkeypatch):
    """A ValueError of the user's would else be told without the place that it comes from."""
    monkeypatch.setattr(cli, "app", lambda: reward("breaks"))
    with pytest.raises(ValueError, match="eighteen"):
        __main__.main()


def test_a_reward_that_ends_the_process_is_reported(reward):
    with pytest.raises(ConfigError, match=r"own_faults:leaves ended the process with code 3 \(.*own_faults\.py, line "):
        reward("leaves")


STUCK = f"""
import time
from pathlib import Path
calls = 0

def letters(answer, problem):
    global calls
    calls += 1
    if Path("stuck").exists() and calls > 2 * 4:
        time.sleep(3600)
    return inner(answer, problem)

{REWARD.replace("def letters", "def inner")}"""


def test_with_a_higher_limit_the_run_continues(run):
    run.reward(STUCK)
    Path("stuck").touch()
    reward = {"function": "fault_reward:letters"}
    with pytest.raises(ConfigError, match="allow it more time: then the run goes on from its last checkpoint"):
        run.train({"reward": {**reward, "timeout": 2.0}})
    [metrics] = run.work.glob("*/metrics.jsonl")
    done = read_rows(metrics)
    Path("stuck").unlink()
    rows = run.train({"reward": {**reward, "timeout": 30.0}})
    assert len(done) == 2
    assert rows[:2] == done  # with their seconds: not done again
    assert len(rows) == 4
