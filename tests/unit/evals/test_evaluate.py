"""The evaluation on samplers with known answers, so that every metric has an oracle."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from math import comb

import pytest

from qerl.data.prompts import prompt_ids, prompt_text
from qerl.data.records import Problem
from qerl.data.sources import prepare, read_meta, read_split
from qerl.evals.evaluate import EvaluationError, evaluate, scorer
from qerl.evals.harness import EvaluatedPolicy, EvaluationSet
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import ConfigError
from qerl.settings.data import CountdownData, DatasetSettings, Generated
from qerl.settings.run import SamplingSettings
from qerl.settings.workflow import EvaluationSettings, TaskSettings
from tests.conftest import nightly
from tests.unit.evals.scripted import Scripted, make_tokenizer

PROBLEMS = 8
HARNESS = {"gsm8k": "lm-eval", "math": "lighteval", "aime": "lighteval"}
#: Texts that a harness could take for its own templates, and a token of the chat template.
INSTRUCTION = {
    "gsm8k": " State  it as {{question}} \\boxed{n} {% raw %} <|im_end|> é #### n",
    "math": "State the answer in \\boxed{} {{question}}.",
    "aime": "",
}
TAGS = " Think in <think></think>, answer in <answer></answer>."


def places(tokenizer, datasets, split="test"):
    """The place of a prompt of training: data set and number of its problem. Another prompt has none."""
    known = {
        tuple(prompt_ids(tokenizer, problem.question, read_meta(folder).instruction)): (name, number)
        for name, folder in datasets.items()
        for number, problem in enumerate(read_split(folder, split))
    }
    return lambda _, prompt: known[tuple(prompt)]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def prepared_in(root, answer="native", units=()):
    for name, instruction in INSTRUCTION.items():
        origin = Generated(train=4, validation=4, test=PROBLEMS)
        asked = instruction + (TAGS if answer == "tags" else "")
        prepare(
            DatasetSettings(format=name, origin=origin, instruction=asked, answer=answer, units=list(units)),
            root / name,
        )
    return {name: root / name for name in INSTRUCTION}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return prepared_in(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(tokenizer, datasets, tmp_path):
    """Evaluate a script `(data set, problem number, repeat) -> text`; return metrics by data set, and the samples."""

    def run(script, repeats=2, names=tuple(HARNESS), temperature=0.6, datasets=datasets):
        sampler = Scripted(tokenizer, script, places(tokenizer, datasets))
        settings = EvaluationSettings(
            tasks=[TaskSettings(dataset=name, harness=HARNESS[name]) for name in names],
            sampling=SamplingSettings(temperature=temperature, top_p=0.9, max_tokens=77),
            repeats=repeats,
            seed=5,
        )
        result = evaluate(sampler, tokenizer, settings, datasets, tmp_path / "out", lambda message: None)
        samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
        return result, samples, sampler

    return run


@pytest.fixture
def problems(datasets):
    return {name: read_split(folder, "test") for name, folder in datasets.items()}


def stated(name, answer):
    return f"So it is\n#### {answer}" if name == "gsm8k" else f"So it is \\boxed{{{answer}}}"


def test_reference_solutions_score_one(run, problems):
    metrics, samples, _ = run(lambda name, number, repeat: problems[name][number].solution)
    for task in metrics.values():
        assert (task.accuracy, task.accuracies, task.extracted) == (1.0, [1.0, 1.0], 1.0)
        assert (task.problems, task.repeats, task.truncated) == (PROBLEMS, 2, 0.0)
    assert all(sample["correct"] == 1 and sample["agrees"] for sample in samples)


@pytest.mark.parametrize("solution", ["We compute $3+4=7$, and then $7-2$.", "So \\boxed{7}.", "It follows.", None])
def test_lighteval_compares_with_the_records_answer(tokenizer, solution):
    texts = ["\\boxed{5}", "\\boxed{7}"]
    sampler = Scripted(tokenizer, lambda _, repeat: texts[repeat])
    policy = EvaluatedPolicy(sampler, tokenizer, SamplingParams(max_tokens=9, count=2))
    [graded] = scorer("lighteval")(policy, EvaluationSet("d", "math", "", [Problem("0", "Which?", solution, "5")]))
    assert [each.correct for each in graded] == [True, False]


# --- the grader of training as a harness


@pytest.fixture(scope="module")
def countdown(tmp_path_factory):
    folder = tmp_path_factory.mktemp("countdown")
    origin = CountdownData(source="countdown", train=4, validation=3, test=PROBLEMS)
    prepare(DatasetSettings(format="countdown", origin=origin, instruction="Go."), folder)
    return folder


def test_countdown_is_scored_with_pass_at_k_and_distinct_solutions(tokenizer, countdown, tmp_path):
    """Nine of 64 completions are right: one formula with and without parentheses, which is one solution."""
    right, problems = 9, {split: read_split(countdown, split) for split in ("test", "validation")}

    def score(split, answer):
        sampler = Scripted(tokenizer, answer, places(tokenizer, {"countdown": countdown}, split))
        tasks = [TaskSettings(dataset="countdown", harness="qerl", split=split)]
        settings = EvaluationSettings(tasks=tasks, repeats=64, sampling=SamplingSettings())
        return evaluate(sampler, tokenizer, settings, {"countdown": countdown}, tmp_path, print)["countdown"]

    def answer(_, number, repeat):
        formula = problems["test"][number].solution.rpartition("#### ")[2]
        return f"#### {formula if repeat % 2 else f'({formula})'}" if repeat < right else "#### 0"

    of_test = score("test", answer)
    assert of_test.accuracy == of_test.pass_at[1] == right / 64
    assert of_test.pass_at[64] == 1
    assert of_test.pass_at[8] == pytest.approx(1 - comb(64 - right, 8) / comb(64, 8))
    assert (of_test.problems, of_test.agreement, of_test.distinct_solutions) == (PROBLEMS, 1, 1)
    counted = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
    assert [row.pop("problem") for row in counted] == [problem.id for problem in problems["test"]]
    assert counted == [{"dataset": "countdown", "right": right, "drawn": 64, "distinct": 1}] * PROBLEMS
    of_validation = score("validation", lambda _, number, repeat: problems["validation"][number].solution)
    assert (of_validation.problems, of_validation.accuracy) == (3, 1)


def test_each_repeat_is_scored_on_its_own(run, problems):
    """Repeat 0 solves every second problem, repeat 1 the first one only, repeat 2 none."""

    def script(name, number, repeat):
        right = [number % 2 == 0, number == 0, False][repeat]
        return stated(name, problems[name][number].answer if right else "98765")

    metrics, samples, _ = run(script, repeats=3)
    for task in metrics.values():
        assert task.accuracies == [0.5, 1 / PROBLEMS, 0.0]
        assert task.accuracy == pytest.approx((0.5 + 1 / PROBLEMS) / 3)
    number = {problem.id: i for name in problems for i, problem in enumerate(problems[name])}
    for sample in samples:
        i, answer = number[sample["problem"]], sample["gold"] if sample["correct"] else "98765"
        assert sample["correct"] == [i % 2 == 0, i == 0, False][sample["repeat"]]
        assert sample["agrees"]
        assert sample["extracted"] == answer or sample["dataset"] == "aime"  # 98765 is no answer of AIME


def test_samples_hold_every_completion(run, problems, tokenizer):
    def script(name, number, repeat):
        return f"{name} {number} {repeat} {stated(name, 12)}"

    metrics, samples, sampler = run(script)
    expected = {(name, problem.id, r) for name in problems for problem in problems[name] for r in range(2)}
    assert len(samples) == len(expected)
    assert {(s["dataset"], s["problem"], s["repeat"]) for s in samples} == expected
    for sample in samples:
        name, repeat = sample["dataset"], sample["repeat"]
        [number] = [i for i, p in enumerate(problems[name]) if p.id == sample["problem"]]
        problem = problems[name][number]
        assert sample["completion"] == script(name, number, repeat)
        assert sample["prompt"] == tokenizer.decode(prompt_ids(tokenizer, problem.question, INSTRUCTION[name]))
        assert prompt_text(problem.question, INSTRUCTION[name]) in sample["prompt"]
        assert (sample["harness"], sample["gold"], sample["extracted"]) == (HARNESS[name], problem.answer, "12")
        assert sample["tokens"] == len(sample["completion"]) + 1
        assert sample["finished"] is True
    assert metrics["gsm8k"].completion_tokens == sum(s["tokens"] for s in samples[: 2 * PROBLEMS]) / PROBLEMS / 2
    # One call a task, at the settings of the evaluation.
    assert len(sampler.calls) == 3
    for params in sampler.calls:
        assert (params.count, params.seed, params.max_tokens) == (2, 5, 77)
        assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 0)


def test_completions_without_an_answer_or_an_end_are_counted(monkeypatch, run):
    complete = Scripted._complete
    monkeypatch.setattr(
        Scripted,
        "_complete",
        lambda *of: replace(complete(*of), finished=of[-1] == 0),  # of the first repeat alone
    )
    metrics, samples, _ = run(lambda name, number, repeat: "no idea" if repeat else stated(name, "5"), repeats=4)
    assert [(task.extracted, task.truncated) for task in metrics.values()] == [(0.25, 0.75)] * 3
    assert all(sample["extracted"] is None and sample["correct"] == 0 for sample in samples if sample["repeat"])


@pytest.mark.parametrize(
    ("text", "accuracy"),
    [
        ("I think\nQuestion: what now?\n{right}", 1.0),  # a stop string of few-shot prompts
        ("<think>{wrong}</think>{right}", 1.0),
        # lighteval would read what stands before the box.
        ("The final answer is $m+n$, with $m=7$: {right}", 1.0),
        ("<think>{right}</think>Done.", 0.0),
        ("<think>{right}</think>{wrong}", 0.0),
    ],
)
def test_harnesses_read_the_answer_after_the_thinking(run, problems, text, accuracy):
    def script(name, number, repeat):
        right, wrong = (stated(name, answer) for answer in (problems[name][number].answer, "98765"))
        return text.format(right=right, wrong=wrong)

    metrics, samples, _ = run(script)
    assert {(task.accuracy, task.agreement) for task in metrics.values()} == {(accuracy, 1.0)}
    assert all(sample["extracted"] == sample["gold"] for sample in samples if accuracy)


def test_a_busy_machine_grades_as_an_idle_one(run, problems, monkeypatch):
    """lighteval's own limit is 5 seconds of the clock."""
    from lighteval.metrics.utils import math_comparison

    compare = math_comparison.sympy_expr_eq

    def slow(*given, **options):
        time.sleep(5.5)
        return compare(*given, **options)

    monkeypatch.setattr(math_comparison, "sympy_expr_eq", slow)

    def script(name, number, repeat):
        half = f"\\frac{{{2 * int(problems[name][number].answer)}}}{{2}}"  # equal by algebra, and not as text
        return stated(name, half) if number == repeat == 0 else "no idea"

    _, samples, _ = run(script, names=("math",))
    assert [sample["correct"] for sample in samples] == [1] + [0] * (len(samples) - 1)
    assert not any(sample["timeout"] for sample in samples)


def test_comparisons_over_their_limit_are_counted(run, problems, monkeypatch):
    monkeypatch.setattr("qerl.evals.lighteval.CPU_SECONDS", 0.5)

    def script(name, number, repeat):
        return "\\boxed{(x+y+z)^{99}}" if number == 0 else stated(name, problems[name][number].answer)

    metrics, samples, _ = run(script, names=("math",))
    over = [sample for sample in samples if sample["timeout"]]
    assert {sample["problem"] for sample in over} <= {problems["math"][0].id}
    assert metrics["math"].timeouts == len(over) > 0
    assert not any(sample["correct"] for sample in over)


def test_agreement_shows_where_the_project_grades_differently(run, problems):
    """lighteval takes a last number outside of a box; the project's own grader doesn't."""
    metrics, samples, _ = run(lambda name, number, repeat: f"it is {problems[name][number].answer}", names=("math",))
    assert metrics["math"].accuracy == 1.0
    assert metrics["math"].agreement == 0.0
    assert not any(sample["agrees"] for sample in samples)
    assert all(sample["extracted"] == sample["gold"] and sample["read"] is None for sample in samples)


def test_units_of_the_data_set_reach_reward_and_harness(run, problems, tmp_path):
    def script(name, number, repeat):
        return f"<think></think><answer>{problems[name][number].answer}%</answer>"

    folders = prepared_in(tmp_path, answer="tags", units=["%"])
    metrics, _, _ = run(script, repeats=1, names=("gsm8k",), datasets=folders)
    assert (metrics["gsm8k"].accuracy, metrics["gsm8k"].agreement) == (1.0, 1.0)


def test_harness_must_fit_the_format(tokenizer, datasets, tmp_path):
    for name, harness, fix in (("math", "lm-eval", "lighteval"), ("gsm8k", "lighteval", "lm-eval")):
        settings = EvaluationSettings(tasks=[TaskSettings(dataset=name, harness=harness)])
        with pytest.raises(ConfigError, match=f"'{name}'.*use harness: {fix}"):
            evaluate(None, tokenizer, settings, datasets, tmp_path, print)


def test_missing_folder_and_empty_split_are_errors(tokenizer, datasets, tmp_path):
    settings = EvaluationSettings(tasks=[TaskSettings(dataset="other", harness="lm-eval")])
    with pytest.raises(EvaluationError, match=r"evaluation\.tasks names 'other'"):
        evaluate(None, tokenizer, settings, datasets, tmp_path, print)
    (tmp_path / "test.jsonl").write_text("")
    about = json.loads((datasets["gsm8k"] / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps(about | {"rows": about["rows"] | {"test": 0}}))
    with pytest.raises(EvaluationError, match="no test problems"):
        evaluate(None, tokenizer, settings, {"other": tmp_path}, tmp_path, print)


#: A run of one test above, in which any connection is an error.
OFFLINE = """
import socket, sys
import pytest

def refuse(*args, **kwargs):
    raise AssertionError(f"network access: {args}")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
sys.exit(pytest.main([sys.argv[1], "-k", "reference_solutions", "-p", "no:cacheprovider"]))
"""


@nightly
def test_runs_without_network_and_leaves_nothing_in_the_home_folder(tmp_path):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    subprocess.run([sys.executable, "-c", OFFLINE, __file__], env={**kept, "HOME": str(tmp_path)}, check=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
