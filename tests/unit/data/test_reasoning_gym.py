"""Problems of reasoning-gym against the library's own data sets and scorers, where it is installed."""

import json
import re
from collections import Counter
from importlib.util import find_spec

import pytest

from qerl.data import expressions, records
from qerl.data.generated import generate
from qerl.data.grading import credit, is_correct, statement, verdict, well_formed
from qerl.data.records import DataError, parse_record
from qerl.data.sources import prepare, read_split
from qerl.evals.evaluate import evaluate
from qerl.jobs import DataJob
from qerl.rl.rewards import Answer, reward_parts
from qerl.settings.base import ConfigError
from qerl.settings.data import DatasetSettings, ReasoningGymData
from qerl.settings.run import RewardSettings, SamplingSettings
from qerl.settings.workflow import EvaluationSettings, TaskSettings
from qerl.workflow.run_folder import checked_source
from tests.unit.evals.scripted import Scripted, make_tokenizer

FORMAT = "reasoning_gym"
SIZES = {"train": 60, "validation": 8, "test": 12}
needs_the_library = pytest.mark.skipif(find_spec(FORMAT) is None, reason="reasoning-gym isn't installed")


def source(task="countdown", **settings):
    return ReasoningGymData(source=FORMAT, task=task, **{**SIZES, **settings})


def entry_of(task, seed=3):
    """A problem as the library makes it, and as a problem of this package."""
    import reasoning_gym

    task_set = reasoning_gym.create_dataset(task, seed=seed, size=1)
    about = {"task": task, "arguments": {}, "level": None, "version": records.installed_version("reasoning-gym")}
    record = json.loads(json.dumps({**task_set[0], **about}))
    return task_set, task_set[0], parse_record(record, FORMAT, "here")


def points(answer, problem):
    return credit(f"Well.\n<answer>{answer}</answer>", problem.answer, FORMAT)


def core(record):
    """A countdown problem in any of its wordings, without the order of its numbers."""
    numbers = re.search(r"numbers:? ([\d, ]+\d)", record["question"])[1].split(", ")
    return sorted(numbers), re.search(r"(?:equals|make|Calculate) (\d+)", record["question"])[1]


@needs_the_library
def test_splits_have_their_sizes_share_no_problem_in_another_order_and_the_seed_decides():
    """With few numbers, so that most problems of the library are another one in another order."""
    few = {"arguments": {"min_numbers": 3, "max_numbers": 3, "max_value": 6, "min_target": 1, "max_target": 40}}
    splits = generate(source(**few, train=150), FORMAT)
    cores = {s: [str(core(record)) for record in of] for s, of in splits.items()}
    assert {split: len(of) for split, of in splits.items()} == {**SIZES, "train": 150}
    held_out = Counter(cores["test"] + cores["validation"])
    assert max(held_out.values()) == 1
    assert not held_out.keys() & set(cores["train"])
    assert len(set(cores["train"])) < 150  # in another order it is there
    assert len({record["question"] for of in splits.values() for record in of}) == 170
    assert splits == generate(source(**few, train=150), FORMAT) != generate(source(**few, seed=1), FORMAT)


@needs_the_library
def test_levels_are_those_of_the_curriculum_and_arguments_win():
    from reasoning_gym.factory import create_curriculum

    drawn = generate(source("chain_sum", levels=[0, 2], arguments={"allow_negation": True}), FORMAT)["train"]
    assert {record["level"] for record in drawn} == {0, 2}
    curriculum = create_curriculum("chain_sum")
    for level in (0, 2):
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration()
        terms = {record["metadata"]["num_terms"] for record in drawn if record["level"] == level}
        assert terms == set(range(config.min_terms, config.max_terms + 1))
    assert any(record["answer"].startswith("-") for record in drawn)


@needs_the_library
@pytest.mark.parametrize(
    "task", ["countdown", "spell_backward", "n_queens", "simple_integration", "boxnet", "basic_arithmetic"]
)
def test_points_are_those_of_the_librarys_own_scorer(task):
    task_set, entry, problem = entry_of(task)
    own = entry["answer"] or "[]"
    for answer in (own, own[:-1], f"{own} 1", "42", "x**2 + C", "[1, 2]", "(1 + 2) * 3", "I do not know", "a b\nc"):
        try:
            expected = task_set.score_answer(answer, entry)
        except (AttributeError, TypeError, ValueError):  # of the scorer, for an answer of another form
            expected = 0
        assert points(answer, problem) == pytest.approx(expected), answer
        text = statement(json.dumps({"answer": answer}), FORMAT)
        assert is_correct(text, problem.answer, FORMAT) is (expected == 1)
        assert well_formed(text, FORMAT)
        assert not is_correct(answer, problem.answer, FORMAT)
        tagged = statement(json.dumps({"answer": answer}), FORMAT, "tags")
        parts = reward_parts(Answer(tagged, 5, 9), problem, FORMAT, RewardSettings(), "tags")
        assert parts == {"correct": pytest.approx(expected), "format": 1.0, "overlong": 0.0}
    assert not well_formed(f"{statement(problem.answer, FORMAT)} or so", FORMAT)


@needs_the_library
@pytest.mark.parametrize(
    ("task", "attack"),
    [
        ("countdown", "open({!r}, 'w')"),
        ("countdown", "sin('open({!r}, chr(119))')"),
        ("simple_integration", "['open({!r}, \\x22w\\x22)']"),
        ("simple_integration", "(lambda: open({!r}, 'w'))()"),
        ("n_queens", "[open({!r}, 'w')]"),
    ],
)
def test_an_answer_never_runs_as_code(task, attack, tmp_path):
    _, _, problem = entry_of(task)
    assert points(attack.format(str(tmp_path / "made")), problem) < 0.1
    assert not [*tmp_path.iterdir()]


@needs_the_library
def test_a_wrong_answer_is_silent_and_an_endless_one_a_timeout(capsys):
    _, _, tower = entry_of("tower_of_hanoi")
    assert expressions.points_of("Move disk 2 from Peg 12 to Peg 3", json.loads(tower.answer)) == 0
    assert capsys.readouterr() == ("", "")  # the scorer prints such moves
    _, _, problem = entry_of("countdown")
    assert verdict("<answer>9**9**9**9</answer>", problem.answer, FORMAT) == "timeout"
    assert points("9**9**9**9", problem) == 0


@needs_the_library
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "countdwn"}, "task countdwn: Dataset 'countdwn' not registered"),
        ({"arguments": {"most": 4}}, "task countdown: .*unexpected keyword argument 'most'"),
        ({"levels": [99]}, r"task countdown: level 99 is too high: there are levels 0 to \d"),
        ({"task": "arc_agi"}, "task arc_agi doesn't give its own answer .* choose another task"),
        (
            {"arguments": {"min_numbers": 2, "max_numbers": 2, "max_value": 3, "min_target": 3, "max_target": 5}},
            "no more problems",
        ),
    ],
)
def test_what_the_library_cannot_make_is_a_sentence(settings, message):
    with pytest.raises(DataError, match=message):
        generate(source(**settings), FORMAT)


@needs_the_library
def test_evaluation_and_stored_records_know_the_version_that_made_them(tmp_path, monkeypatch):
    settings = DatasetSettings(format=FORMAT, origin=source("basic_arithmetic"))
    prepare(settings, tmp_path / "data")
    problems, tokenizer = read_split(tmp_path / "data", "test"), make_tokenizer()
    task = TaskSettings(dataset="gym", harness="qerl")
    script = Scripted(
        tokenizer,
        lambda _, number, repeat: statement(problems[number].answer, FORMAT) if repeat < 2 else "<answer>",
        lambda index, _: ("gym", index),
    )
    asked = EvaluationSettings(tasks=[task], repeats=8, sampling=SamplingSettings())
    scores = evaluate(script, tokenizer, asked, {"gym": tmp_path / "data"}, tmp_path, print)["gym"]
    assert (scores.problems, scores.accuracy, scores.pass_at[8], scores.agreement) == (12, 0.25, 1, 1)
    job = DataJob(settings=settings, lock_file=None, out=tmp_path)
    made = job.code
    for module in ("records", "generated"):
        monkeypatch.setattr(f"qerl.data.{module}.installed_version", lambda _: "0.1.26")
    monkeypatch.setattr("qerl.jobs.installed_version", lambda _: "0.1.26")
    assert job.code != made
    with pytest.raises(DataError, match=r"was made by reasoning-gym 0\.1\.25, and 0\.1\.26 is installed here"):
        read_split(tmp_path / "data", "test")


def test_without_the_library_a_run_names_the_extra_before_any_work(tmp_path, monkeypatch):
    from qerl.settings.run import RunFile

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == FORMAT else find_spec(name))
    dataset = {"format": FORMAT, "origin": {"source": FORMAT, "task": "countdown"}}
    settings = RunFile.model_validate({"model": str(tmp_path), "dataset": dataset, "out": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match=r"origin\.source: reasoning_gym isn't installed; .* 'qerl\[reasoning_gym\]'"):
        checked_source(settings)
