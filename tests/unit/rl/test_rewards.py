"""Rewards: parts and their sum, the user's own function, and which groups have advantages."""

import asyncio
import importlib
import math
import re
import sys

import pytest
import torch

from qerl import __main__
from qerl.cli import commands
from qerl.data.records import Problem, parse_record
from qerl.rl.rewards import Answer, differ, function_parts, group_advantages, overlong_penalty, reward_parts, total
from qerl.rl.rollouts import Group
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RewardSettings

PROBLEM = Problem("0", "6 * 3?", "6 * 3 = 18\n#### 18", "18", None)


@pytest.mark.parametrize(
    ("text", "correct", "well_formed"),
    [
        ("6 * 3 = 18\n#### 18", 1, 1),
        ("#### 18.0", 1, 1),
        ("#### 1999", 0, 1),
        ("18", 0, 0),
        ("#### 18\n#### 19", 1, 0),
        ("", 0, 0),
    ],
)
def test_correct_and_format_are_judged_apart(text, correct, well_formed):
    parts = reward_parts(Answer(text, 5, 20), PROBLEM, "gsm8k", RewardSettings())
    assert parts == {"correct": correct, "format": well_formed, "overlong": 0.0}


def test_the_total_weighs_the_parts():
    settings = RewardSettings(correct=2.0, format=0.2, overlong=0.5, overlong_buffer=10)
    parts = reward_parts(Answer("#### 18", 15, 20), PROBLEM, "gsm8k", settings)
    assert total(parts, settings.weights) == pytest.approx(2.0 + 0.2 - 0.5 * 0.5)


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1)])
def test_the_overlong_penalty_grows_linearly_over_the_buffer(tokens, penalty):
    """DAPO, Eq. 13, with a limit of 100 and a buffer of 20."""
    assert overlong_penalty(tokens, 100, 20) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("preset", "right", "form"),
    [
        ("upstream-gsm8k", 2.0, 0.2),
        ("upstream-gsm8k-hashes", 1.0, 0.2),
        ("upstream-bigmath", 1.0, 0.2),
        ("upstream-dapomath", 1.0, 0.0),
    ],
)
def test_a_preset_has_the_values_of_the_released_scripts(preset, right, form):
    settings = parse(RewardSettings, {"preset": preset}, "test")
    only_right, only_formed, both = "#### 18\n#### 18", "#### 19", "#### 18"
    rewards = [
        total(reward_parts(Answer(text, 5, 20), PROBLEM, "gsm8k", settings), settings.weights)
        for text in (only_right, only_formed, both, "")
    ]
    assert rewards == pytest.approx([right, form, right + form, 0])


def test_explicit_keys_win_over_the_preset():
    settings = parse(RewardSettings, {"preset": "upstream-gsm8k", "format": 0.5, "overlong_buffer": 3}, "test")
    assert (settings.correct, settings.format, settings.overlong_buffer) == (2.0, 0.5, 3)
    assert parse(RewardSettings, settings.model_dump(), "test") == settings


MODULE = """
import asyncio, math, numpy, re, sys, time, torch

short = lambda answer, problem: float(answer.tokens < 10 and answer.text.endswith(problem.answer))
list = lambda answer, problem: [0.5] * answer.tokens
nan = lambda answer, problem: math.nan
huge = lambda answer, problem: 10**400
word = lambda answer, problem: "1"
array = lambda answer, problem: numpy.float32(0.5)
compared = lambda answer, problem: numpy.float32(answer.tokens) < answer.limit
tensor = lambda answer, problem: torch.tensor(answer.tokens / answer.limit)
nothing = lambda answer, problem: None
broken = lambda answer, problem: {}["mine"]

seen = {}

def keeps(completions, prompts, completion_ids, answer, **columns):
    seen.update(completions=completions, prompts=prompts, ids=completion_ids, answer=answer, columns=columns)
    return [float(len(ids)) if len(ids) < 9 else None for ids in completion_ids]

def pops(completions, cases, **columns):
    return [case.pop() for case in cases]

pops_each = lambda answer, problem: problem.record["cases"].pop()

async def waits(completions, **columns):
    await asyncio.sleep(0)
    return torch.arange(len(completions))

async def each(answer, problem):
    running.append(answer.tokens)
    await asyncio.sleep(0.01)
    return len(running)

running = []

async def hangs(completions, **columns):
    await asyncio.sleep(60)

async def hangs_each(answer, problem):
    await asyncio.sleep(60)

named = lambda completions, level: [1.0 for _ in level]
lacking = lambda completions, solution, **columns: [1.0]
tokens = lambda completions, **columns: [[0.5] * 3 for _ in completions]
few = lambda completions, **columns: [1.0]
one = lambda completions, **columns: 1.0
text = lambda completions, **columns: ["1.0"] * len(completions)
raises = lambda completions, **columns: 1 / 0
unread = lambda answer, problem: int("eighteen")
leaves = lambda answer, problem: sys.exit(3)
backtracks = lambda answer, problem: bool(re.match("(a+)+$", "a" * 60 + "b"))

def spins(answer, problem):
    while True:
        pass

def swallows(answer, problem):
    try:
        time.sleep(3600)
    except Exception:
        return 0.0
"""
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 3?"}]
CHAT = parse_record({"prompt": ASKED, "answer": "18", "level": 2}, "prompt", "here")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module in the working directory, under a name of its own."""
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return name


def own(path, text="", tokens=(5,), problem=PROBLEM, **keys):
    """What the function gives completions of these numbers of tokens at step 4."""
    settings = parse(RewardSettings, {"functions": {"own": {"function": path, **keys}}}, "test")
    asked = [(problem, Answer(text, count, 20, range(count))) for count in tokens]
    return [part["own"] for part in function_parts(settings, asked, 4)]


def test_own_rewards_are_parts_with_weights(module):
    functions = {"short": {"function": f"{module}:short", "weight": 3.0}, "tensor": f"{module}:tensor"}
    settings = parse(RewardSettings, {"functions": functions, "correct": 0}, "test")
    asked = [(PROBLEM, Answer("#### 18", tokens, 20)) for tokens in (5, 15)]
    short, long = (
        {**reward_parts(answer, problem, "gsm8k", settings), **parts}
        for (problem, answer), parts in zip(asked, function_parts(settings, asked, 1), strict=True)
    )
    assert short == {"correct": 1, "format": 1, "overlong": 0, "short": 1, "tensor": 0.25}
    assert (total(short, settings.weights), total(long, settings.weights)) == pytest.approx(
        (0.1 + 3 + 0.25, 0.1 + 0.75)
    )


def test_settings_of_earlier_runs_have_one_function():
    earlier = parse(RewardSettings, {"function": "mine:f", "custom": 2.0, "timeout": 9.0, "format": 0}, "test")
    now = {"functions": {"custom": {"function": "mine:f", "weight": 2.0, "timeout": 9.0}}, "format": 0}
    assert earlier == parse(RewardSettings, now, "test")
    none = parse(RewardSettings, {"function": None, "custom": 1.0, "timeout": None}, "test")
    assert none == RewardSettings()
    for name in ("correct", "std", "a.b", ""):
        with pytest.raises(ConfigError, match="can't name a reward"):
            parse(RewardSettings, {"functions": {name: "mine:f"}}, "test")


@pytest.mark.parametrize(("name", "value"), [("array", 0.5), ("compared", 1.0), ("tensor", 0.25)])
def test_a_scalar_of_numpy_or_torch_is_a_number(module, name, value):
    assert own(f"{module}:{name}") == [value]


def test_a_completion_that_every_reward_leaves_out_has_none(module):
    settings = parse(RewardSettings, {"functions": {"own": f"{module}:nothing"}, "correct": 0, "format": 0}, "test")
    [parts] = function_parts(settings, [(PROBLEM, Answer("", 5, 20))], 1)
    assert parts == {"own": None}
    assert math.isnan(total({"correct": 1.0, "format": 1.0, "overlong": 0.0, **parts}, settings.weights))
    settings = settings.model_copy(update={"correct": 0.5})
    assert total({"correct": 1.0, "format": 1.0, "overlong": 0.0, **parts}, settings.weights) == 0.5


@pytest.mark.parametrize("problem", [CHAT, parse_record({"prompt": "6 * 3?", "answer": "18"}, "prompt", "here")])
def test_a_reward_of_trl_gets_what_trl_gives_it(module, problem):
    assert own(f"{module}:keeps", "#### 18", (5, 15), problem) == [5.0, None]
    seen, is_chat = importlib.import_module(module).seen, problem is CHAT
    assert seen == {
        "completions": [[{"role": "assistant", "content": "#### 18"}] if is_chat else "#### 18"] * 2,
        "prompts": [ASKED if is_chat else "6 * 3?"] * 2,
        "ids": [[*range(5)], [*range(15)]],
        "answer": ["18", "18"],
        "columns": {"level": [2, 2]} if is_chat else {},
    }


@pytest.mark.parametrize("name", ["pops", "pops_each"])
def test_a_reward_that_changes_its_columns_changes_them_for_no_other_completion_or_step(module, name):
    """As in TRL, which reads each record anew."""
    problem = parse_record({"prompt": ASKED, "cases": [1, 2, 3]}, "prompt", "here")
    assert [own(f"{module}:{name}", tokens=(5, 6), problem=problem) for _ in range(2)] == [[3, 3]] * 2


def test_rewards_that_wait_run_side_by_side(module):
    assert own(f"{module}:waits", tokens=(5, 6, 7)) == [0, 1, 2]
    assert own(f"{module}:each", tokens=(5, 6, 7)) == [3, 3, 3]  # all began before one ended
    assert own(f"{module}:named", tokens=(5, 6), problem=CHAT) == [1, 1]

    async def in_a_notebook():
        return own(f"{module}:waits", tokens=(5, 6))

    assert asyncio.run(in_a_notebook()) == [0, 1]


@pytest.mark.parametrize("name", ["hangs", "hangs_each", "spins", "swallows", "backtracks"])
def test_a_reward_that_hangs_is_stopped_with_its_place(module, name):
    """None of them returns within the test's own limit."""
    told = rf"^reward\.functions\.own {module}:{name} wasn't done after 0\.1 s .*line .*$"
    with pytest.raises(ConfigError, match=told):
        own(f"{module}:{name}", timeout=0.1)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        *(
            (name, ValueError, f"returned {value} for problem .* at step 4; it must return a number")
            for name, value in (("nan", "nan"), ("huge", "10*"), ("word", "'1'"), ("text", r"'1\.0'"))
        ),
        ("list", ValueError, "returned 5 values for problem .* at step 4; rewards of single tokens aren't supported"),
        ("tokens", ValueError, "returned 3 values for problem .* at step 4; rewards of single tokens aren't supported"),
        ("few", ValueError, "returned 1 values for problems .* at step 4; it must return a list of 2"),
        ("one", ValueError, r"returned 1\.0 for problems .*; it must return a list of 2"),
        ("lacking", ConfigError, "asks for 'solution', which no column of the records is called; .* answer, level"),
        ("leaves", ConfigError, "ended the process with code 3 for problem .* at step 4"),
        ("broken", KeyError, f"raised this for problem {CHAT.id} at step 4"),
        ("raises", ZeroDivisionError, f"raised this for problems {CHAT.id} to {CHAT.id} at step 4"),
    ],
)
def test_what_is_no_number_for_each_is_an_error_that_names_function_problem_and_step(module, name, error, message):
    assert own(f"{module}:{name}", tokens=()) == []  # as in a process without completions
    with pytest.raises(error) as raised:
        own(f"{module}:{name}", tokens=(5, 6), problem=CHAT)
    said = f"{raised.value} {getattr(raised.value, '__notes__', '')}"
    assert re.search(rf"reward\.functions\.own {module}:{name} {message}", said)


def test_an_error_of_a_reward_is_no_sentence_of_ours(module, monkeypatch):
    """A ValueError of the user's would else be told without the place that it comes from."""
    monkeypatch.setattr(commands, "app", lambda: own(f"{module}:unread"))
    with pytest.raises(ValueError, match="eighteen"):
        __main__.main()


def test_all_who_ask_whether_rewards_are_equal_get_one_answer():
    groups = [[0.1] * 8, [0.1 + 0.2, 0.3] * 4, [0.0] * 7 + [1e-3], [1000.1, 1000.1001] * 4]
    expected = [False, False, True, True]
    problem = Problem("id", "question", None, "1")
    assert [Group(problem, [], [], [], [], rewards).informative for rewards in groups] == expected
    assert differ(torch.tensor(groups)).tolist() == expected
    assert differ(torch.tensor(groups, dtype=torch.float64)).tolist() == expected
    assert group_advantages(torch.tensor(groups)).any(dim=1).tolist() == expected
