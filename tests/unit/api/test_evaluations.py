"""Samples and evaluations by hand through the Python API."""

import json
from pathlib import Path

import pytest

import qerl
from qerl.data.sources import parse_run, prepare
from qerl.evals import evaluate
from qerl.evals.evaluate import EvaluationError
from qerl.settings.base import ConfigError, UserError
from qerl.settings.workflow import TaskSettings
from tests.unit.api.conftest import ROWS


def test_samples_follow_the_seed_and_the_instruction(model):
    policy = qerl.load(model, dtype="float32")
    first, again = (qerl.sample(policy, ["a", "b"], count=3, seed=1, max_tokens=5) for _ in range(2))
    assert first == again
    assert [len(row) for row in first] == [3, 3]
    assert all(drawn.tokens <= 5 for row in first for drawn in row)
    assert first != qerl.sample(policy, ["a", "b"], count=3, seed=2, max_tokens=5)
    [[drawn]] = qerl.sample(policy, ["a"], instruction="Be brief.", max_tokens=5)
    assert "".join(drawn.prompt.split()) == "aBebrief.:"


@pytest.mark.parametrize("kind", [str, Path])
def test_a_model_is_sampled_and_scored_by_its_folder(model, problems, tmp_path, kind):
    path, loaded = kind(model), qerl.load(model)
    assert qerl.sample(path, ["a"], seed=1, max_tokens=5) == qerl.sample(loaded, ["a"], seed=1, max_tokens=5)
    one = qerl.evaluate(path, kind(problems), kind(tmp_path / "path"), repeats=1, max_tokens=4).samples
    other = qerl.evaluate(loaded, problems, tmp_path / "loaded", repeats=1, max_tokens=4).samples
    assert one["completion"].tolist() == other["completion"].tolist()
    assert all("####" in prompt for prompt in one["prompt"])  # the default instruction


def test_a_run_is_asked_as_it_was_trained(values, problems, tmp_path):
    dataset = {"format": "gsm8k", "instruction": "Go.", "origin": {"source": "local", "path": str(problems)}}
    run = qerl.train({**values, "dataset": dataset})
    [[drawn]] = qerl.sample(run.folder, ["a"], max_tokens=4)
    [[bare]] = qerl.sample(str(run.folder), ["a"], instruction="", max_tokens=4)
    assert ["".join(one.prompt.split()) for one in (drawn, bare)] == ["aGo.:", "a:"]
    outcome = qerl.evaluate(str(run.folder), problems, tmp_path / "e", repeats=1, max_tokens=4)
    assert all("".join(prompt.split()).endswith("Go.:") for prompt in outcome.samples["prompt"])


def test_every_problem_of_a_file_is_evaluated(model, problems, tmp_path):
    policy = qerl.load(model, dtype="float32")
    outcome = qerl.evaluate(policy, problems, tmp_path / "e", repeats=2, max_tokens=4)
    assert (outcome.metrics["problems"], outcome.metrics["repeats"]) == (40, 2)
    assert outcome.metrics["harness"] == "lm-eval"
    assert len(outcome.samples) == 80
    assert outcome.accuracy.mean == pytest.approx(outcome.metrics["accuracy"])
    assert outcome.accuracy.low <= outcome.accuracy.mean <= outcome.accuracy.high
    with pytest.raises(ConfigError, match="holds an evaluation already"):
        qerl.evaluate(policy, problems, tmp_path / "e")
    with pytest.raises(EvaluationError, match="state no answer"):  # before the policy is looked for
        qerl.evaluate(tmp_path / "none", [{"prompt": "Two?"}], tmp_path / "unanswered")
    with pytest.raises(ConfigError, match=r"repeats=4 at sampling\.temperature=0 .*use repeats=1"):
        qerl.evaluate(tmp_path / "none", ROWS, tmp_path / "greedy", temperature=0)
    given = qerl.evaluate(policy, ROWS, tmp_path / "given", repeats=2, max_tokens=4)
    assert given.samples["completion"].tolist() == outcome.samples["completion"].tolist()


def test_a_folder_that_another_process_is_filling_is_left_to_it(model, problems, tmp_path, monkeypatch):
    score = evaluate.score_policy

    def score_while_another_starts(*arguments):
        monkeypatch.setattr(evaluate, "score_policy", score)
        with pytest.raises(ConfigError, match=r"process \d+ on .* is at work in .*/e/work; wait"):
            qerl.evaluate(model, [], tmp_path / "e")
        score(*arguments)

    monkeypatch.setattr(evaluate, "score_policy", score_while_another_starts)
    outcome = qerl.evaluate(model, problems, tmp_path / "e", repeats=1, max_tokens=4)
    assert len(outcome.samples) == 40
    left = {"data", "outcomes.jsonl", "result.json", "samples.jsonl"}
    assert {path.name for path in outcome.folder.iterdir()} == left


def test_a_stock_task_has_its_own_prompt_and_examples(model, problems, tmp_path):
    policy = qerl.load(model, dtype="float32")
    origin = {"source": "generated", "train": 6, "validation": 2, "test": 3}
    data = {"format": "gsm8k", "origin": origin, "instruction": "Be brief."}
    stock = qerl.evaluate(policy, data, tmp_path / "stock", task="gsm8k", repeats=1, max_tokens=4)
    assert (stock.metrics["task"], stock.metrics["problems"]) == ("gsm8k", 3)
    settings = TaskSettings(dataset="any", harness="lm-eval", task="gsm8k", fewshot=1, repeats=2)
    one = qerl.evaluate(policy, data, tmp_path / "one", task=settings, max_tokens=4)
    assert (one.metrics["repeats"], one.metrics["flexible"] is not None) == (2, True)
    prompts = ["".join(outcome.samples["prompt"][0].split()) for outcome in (stock, one)]
    assert [prompt.count("Question:") for prompt in prompts] == [6, 2]
    assert not any("Bebrief." in prompt for prompt in prompts)
    with pytest.raises(ConfigError, match="leave out instruction, answer and units"):
        qerl.evaluate(policy, data, tmp_path / "e", task="gsm8k", instruction="Be brief.")
    with pytest.raises(ConfigError, match="no stock task 'gms8k'; use one of gsm8k, math_500"):
        qerl.evaluate(policy, data, tmp_path / "e", task="gms8k")
    with pytest.raises(ValueError, match=r"takes its examples from the training split.*set fewshot: 0"):
        qerl.evaluate(policy, problems, tmp_path / "e", task="gsm8k")


def test_prepared_data_is_evaluated_on_its_test_split(model, problems, tmp_path):
    settings = parse_run({"model": "m", "dataset": str(problems), "out": "o"}, "test").dataset
    prepare(settings, tmp_path / "data")
    policy = qerl.load(model, dtype="float32")
    with pytest.raises(EvaluationError, match="state no answer"):
        qerl.evaluate(policy, [{"prompt": "Two?"}], tmp_path / "e")
    outcome = qerl.evaluate(policy, tmp_path / "data", tmp_path / "e", max_tokens=4)
    assert not (tmp_path / "e/data").exists()  # whose problems weren't asked
    rows = [json.loads(line) for line in (tmp_path / "data/test.jsonl").open()]
    assert 0 < len(rows) < 40
    assert set(outcome.samples["gold"]) == {row["answer"].removeprefix("#### ") for row in rows}


def sample(prompts, count=1, **options):
    return lambda policy, out: qerl.sample(policy, prompts, count=count, **options)


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (sample([[{"role": "user", "content": "Two?"}]]), "text of one user's message, not .*'role': 'user'"),
        (sample(["Two?", None]), "must be a string.* not None"),
        *((sample(["Two?"], n), f"`count` must be a whole number above 0, not {n!r}") for n in (0, "4", 2.5, True)),
        (sample(["Tw\ud800?"]), "a prompt has half of a surrogate pair at character 2, which is no character"),
        (
            lambda policy, out: qerl.evaluate(policy, ROWS, out, instruction="\ud800"),
            "instruction has half of a surrogate",
        ),
        *((sample(prompts), "prompts must be a list of strings") for prompts in (None, "a")),
        (sample(["a"], max_token=5), "unknown key `max_token`"),
        (sample(["a"], seed=-1), "`seed` must be a whole number from 0 to 4294967295, not -1"),
        (lambda policy, out: qerl.sample(5, ["Two?"]), "a policy is a folder of .*, what qerl.load returns.*, not 5"),
        (lambda policy, out: qerl.evaluate(5, [], out), "a policy is a folder of .*, what qerl.load returns.*, not 5"),
        (lambda policy, out: qerl.load(None), "a model or a run must be a path, not None"),
        (lambda policy, out: qerl.load(""), "a model or a run: this is empty"),
        (lambda policy, out: qerl.load("x\ud800"), "a model or a run: this can't be a file's name"),
        (lambda policy, out: qerl.quantize("m", out, ["nvfp4"]), r"weights=\['nvfp4'\] is no 4-bit format"),
        (lambda policy, out: qerl.evaluate(policy, ROWS, None), "out must be a path, not None"),
        (lambda policy, out: qerl.evaluate(policy, None, out), "`problems` must be records, or a file or folder of"),
        (lambda policy, out: qerl.evaluate(policy, [{"more": "\ud800", **ROWS[0]}], out), "half of a surrogate pair"),
    ],
)
def test_a_wrong_argument_is_a_sentence(model, tmp_path, use, sentence):
    policy = qerl.load(model, dtype="float32")
    with pytest.raises(UserError, match=sentence):
        use(policy, tmp_path / "out")
