"""Stock tasks in the project's evaluation against the harnesses' own path, on the same files of the hub."""

import json
import re
from pathlib import Path

import lm_eval
import lm_eval.tasks
import pytest
import yaml
from datasets import load_dataset
from lighteval.metrics import apply_metric
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.tasks import aime, math_500
from lighteval.utils.utils import remove_reasoning_tags
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from qerl.data.sources import prepare
from qerl.evals.evaluate import EvaluationError, evaluate
from qerl.evals.lighteval import stock_config
from qerl.settings.base import ConfigError, parse
from qerl.settings.data import DatasetSettings
from qerl.settings.workflow import STOCK_TASKS, EvaluationSettings
from tests.hub_layouts import REPOSITORIES, settings
from tests.unit.evals.scripted import Scripted, make_tokenizer

REPOSITORY = {
    "gsm8k": "openai/gsm8k",
    "math_500": "HuggingFaceH4/MATH-500",
    "aime24": "HuggingFaceH4/aime_2024",
    "aime25": "yentinglin/aime_2025",
    "amc23": "math-ai/amc23",
}
SPLIT = {"gsm8k": "test", "math_500": "test", "aime24": "train", "aime25": "train", "amc23": "test"}

#: Completions of every problem, one a repeat; {n} is the answer as the repository states it.
COMPLETIONS = [
    *("Therefore, the final answer is: $\\boxed{{{n}}}$. I hope it is correct", "ANSWER: ${n}$", "{n}"),
    "<think>\\boxed{{98}}\n#### 98</think>\nIt is {n}.\n#### {n}",
    *("<think>It is {n}.\n#### {n}</think> \\boxed{{98}}", "#### 98", "Six.\n#### {n}\n#### 98"),
    *("\\boxed{{{n}}}, or \\boxed{{98}}", "no idea", ""),
]


def script(tokenizer, answers):
    """A sampler that gives every problem the COMPLETIONS, as many as it is asked for."""
    return Scripted(tokenizer, lambda number, repeat: COMPLETIONS[repeat].format(n=answers[number]))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def source(tmp_path):
    def source(task):
        folder = tmp_path / "hub" / task
        if not folder.exists():
            REPOSITORIES[REPOSITORY[task]](folder)
        return folder

    return source


def hub_rows(folder, task, split=None):
    """The repository's rows, read by the `datasets` library itself."""
    subset = "main" if task == "gsm8k" else None
    rows = load_dataset(str(folder), subset, split=split or SPLIT[task], cache_dir=str(folder.parent / "cache"))
    return [dict(row) for row in rows]


def answer_of(row):
    return row["answer"].split("#### ")[-1]


@pytest.fixture
def run(tokenizer, source, tmp_path):
    """Evaluate a stock task on its repository, or that of the task `data`.

    Returns metrics, samples by (problem's number, repeat), and the sampler.
    """

    def run(task, data="", repeats=0, origin=None, **options):
        of = data or task
        changes = {"origin": origin} if origin else {}
        values = settings(REPOSITORY[of], source(of), **changes)
        prepare(parse(DatasetSettings, values, "datasets"), tmp_path / "data")
        sampler = script(tokenizer, [answer_of(row) for row in hub_rows(source(of), of)])
        entry = {"dataset": "data", "harness": STOCK_TASKS[task][0], "task": task, "name": task, **options}
        values = {"tasks": [entry], "repeats": repeats or len(COMPLETIONS)}
        evaluation = parse(EvaluationSettings, values, "evaluation")
        metrics = evaluate(sampler, tokenizer, evaluation, {"data": tmp_path / "data"}, tmp_path / "out", print)
        rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
        numbers = {identity: number for number, identity in enumerate(dict.fromkeys(row["problem"] for row in rows))}
        return metrics[task], {(numbers[row["problem"]], row["repeat"]): row for row in rows}, sampler

    return run


# --- lighteval -------------------------------------------------------------------------------------------------------


def stock_documents(task, rows, chat, tokenizer):
    """Documents and prompts of lighteval's own objects; of amc23, of aime24's on the rows under its names."""
    config = {"math_500": math_500.math_500, "aime24": aime.aime24, "aime25": aime.aime25, "amc23": aime.aime24}[task]
    if task == "amc23":
        rows = [{"problem": row["question"], "answer": row["answer"]} for row in rows]
    manager = PromptManager(use_chat_template=chat, tokenizer=tokenizer)
    docs = [config.prompt_function(row, task) for row in rows]
    return docs, [manager.prepare_prompt(doc) for doc in docs], config.metrics[0]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("task", ["math_500", "aime24", "aime25", "amc23"])
def test_lighteval_prompts_and_verdicts_are_the_stock_ones(run, source, tokenizer, task, chat):
    metrics, samples, sampler = run(task, chat=chat)
    rows = hub_rows(source(task), task)
    docs, prompts, metric = stock_documents(task, rows, chat, tokenizer)
    start = "" if chat else tokenizer.bos_token
    assert sampler.prompts == [start + prompt for prompt in prompts]

    for number, (doc, row) in enumerate(zip(docs, rows, strict=True)):
        for repeat, completion in enumerate(COMPLETIONS):
            text = completion.format(n=answer_of(row))
            # What lighteval's pipeline does to a response before its metrics.
            response = ModelResponse(
                text=[text], text_post_processed=[remove_reasoning_tags(text, [("<think>", "</think>")])]
            )
            [outcome] = apply_metric(docs=[doc], responses=[response], metrics=[metric])
            assert samples[number, repeat]["correct"] == outcome[metric.metric_name], (row, text)
    right = [metrics.accuracies[repeat] for repeat in range(len(COMPLETIONS))]
    assert right[0] == 1.0
    assert right[4] == right[5] == right[8] == right[9] == 0.0


@pytest.mark.parametrize("task", ["amc23", None])
def test_amc23_takes_integers_for_its_floats(tokenizer, source, tmp_path, task):
    """The case is run with the stock prompt and with the project's."""
    values = settings(REPOSITORY["amc23"], source("amc23"), instruction="Box the answer.")
    prepare(parse(DatasetSettings, values, "datasets"), tmp_path / "data")
    tasks = {"tasks": [{"dataset": "data", "harness": "lighteval", "task": task}], "repeats": 1}
    for answers, right in ((["27", "3159", "-1", "0"], 1.0), (["2", "315", "1", "-27"], 0.0)):
        sampler = script(tokenizer, answers)
        evaluation = parse(EvaluationSettings, tasks, "evaluation")
        metrics = evaluate(sampler, tokenizer, evaluation, {"data": tmp_path / "data"}, tmp_path / "out", print)
        assert metrics["data"].accuracy == right
        assert all(("Box the answer." in prompt) == (task is None) for prompt in sampler.prompts)


@pytest.mark.parametrize("task", ["math_500", "aime24", "aime25"])
def test_the_repositories_are_those_of_the_shipped_tasks_which_stay_as_they_are(run, task):
    config = stock_config(task)
    before = config.metrics[0].sample_level_fn.compute_score
    assert (config.name, config.hf_repo, list(config.evaluation_splits)) == (task, REPOSITORY[task], [SPLIT[task]])
    run(task, repeats=1)
    assert stock_config(task).metrics[0].sample_level_fn.compute_score is before


# --- lm-eval ---------------------------------------------------------------------------------------------------------


class Recorder(LM):
    """A model of lm-eval that keeps its prompts and gives known texts."""

    tokenizer_name = "recorder"
    loglikelihood = loglikelihood_rolling = None

    def __init__(self, tokenizer, texts):
        super().__init__()
        self.tokenizer, self.texts, self.prompts = tokenizer, texts, []

    def generate_until(self, requests):
        self.prompts += [request.args[0] for request in requests]
        return self.texts

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )


Recorder.__abstractmethods__ = frozenset()


@pytest.fixture
def stock_gsm8k(source, tmp_path, tokenizer, monkeypatch):
    """lm-eval's own entry point on its own task file, whose data set alone is replaced, by the repository's files."""
    # It describes the machine by a dozen processes.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)

    def evaluated(texts, chat, fewshot):
        config = yaml.safe_load((Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml").read_text())
        files = {split: str(source("gsm8k") / f"main/{split}-*.parquet") for split in ("train", "test")}
        del config["dataset_name"], config["tag"]
        config |= {"dataset_path": "parquet", "task": "stock"}
        config |= {"dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path / "cache")}}
        model, manager = Recorder(tokenizer, texts), TaskManager(include_defaults=False)
        options = {"apply_chat_template": chat, "bootstrap_iters": 0, "task_manager": manager}
        results = lm_eval.simple_evaluate(model, tasks=[config], num_fewshot=fewshot, **options)
        samples = results["samples"]["stock"]
        return model, {(s["doc_id"], s["filter"]): int(s["exact_match"]) for s in samples}

    return evaluated


@pytest.mark.parametrize(("chat", "fewshot"), [(True, None), (False, None), (True, 0), (False, 2)])
def test_gsm8k_prompts_are_those_of_lm_evals_entry_point(run, tokenizer, stock_gsm8k, chat, fewshot):
    _, _, sampler = run("gsm8k", chat=chat, fewshot=fewshot, repeats=1)
    model, _ = stock_gsm8k(["#### 1"] * 3, chat, fewshot)
    start = "" if chat else tokenizer.bos_token
    assert sampler.prompts == [start + prompt for prompt in model.prompts]
    shots = 5 if fewshot is None else fewshot
    assert all(len(re.findall("Question:", prompt)) == shots + 1 for prompt in sampler.prompts)


def test_gsm8k_verdicts_are_those_of_lm_evals_entry_point(run, source, stock_gsm8k):
    metrics, samples, _ = run("gsm8k")
    answers = [answer_of(row) for row in hub_rows(source("gsm8k"), "gsm8k")]
    for repeat, completion in enumerate(COMPLETIONS):
        _, scores = stock_gsm8k([completion.format(n=answer) for answer in answers], True, None)
        for number in range(len(answers)):
            sample = samples[number, repeat]
            assert sample["correct"] == scores[number, "strict-match"], completion
            assert sample["flexible"] == scores[number, "flexible-extract"], completion
    assert metrics.flexible > metrics.accuracy > 0


def test_the_examples_come_from_training_problems(run, source):
    _, _, sampler = run("gsm8k", repeats=1)
    train, test = ({row["question"] for row in hub_rows(source("gsm8k"), "gsm8k", name)} for name in ("train", "test"))
    for prompt in sampler.prompts:
        *examples, question = re.findall("Question: (.*)\n", prompt)
        assert question in test
        assert set(examples) <= train
    only_test = {"subset": "main", "splits": {"test": "test"}}
    with pytest.raises(EvaluationError, match=r"takes its examples from the training split.*set fewshot: 0"):
        run("gsm8k", origin=only_test)
    metrics, _, _ = run("gsm8k", origin=only_test, fewshot=0)
    assert metrics.problems == 3


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "data", "message"),
    [
        ("math_500", "amc23", "task math_500 reads the column `solution`, which records of"),
        ("math_500", "aime24", "task=math_500 needs records of format math, and those of 'data' are aime"),
        ("gsm8k", "amc23", "task=gsm8k needs records of format gsm8k, and those of 'data' are math"),
    ],
)
def test_a_task_that_does_not_fit_its_data_is_an_error(run, task, data, message):
    with pytest.raises((ConfigError, EvaluationError), match=message):
        run(task, data=data)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"harness": "lighteval", "task": "gsm8k"}, "task=gsm8k isn't one of lighteval; use harness: lm-eval"),
        ({"harness": "lighteval", "task": "aime24", "fewshot": 4}, "task=aime24 has no few-shot examples"),
        ({"harness": "lighteval", "fewshot": 4}, "chat and fewshot are settings of a stock task"),
        ({"harness": "lm-eval", "chat": False}, "chat and fewshot are settings of a stock task"),
        ({"harness": "lm-eval", "sampling": {"temperature": 0}}, r"repeats=4 at sampling\.temperature=0 of task data"),
    ],
)
def test_impossible_tasks_are_errors(task, message):
    entry = {"dataset": "data", **task}
    with pytest.raises(ConfigError, match=message):
        parse(EvaluationSettings, {"tasks": [entry]}, "evaluation")
    with pytest.raises(ConfigError, match="two tasks are called 'data' in results; give one of them a `name`"):
        parse(EvaluationSettings, {"tasks": [{"dataset": "data", "harness": "qerl"}] * 2}, "evaluation")


def test_each_task_may_sample_otherwise(tokenizer, source, tmp_path):
    """The paper's protocol with a greedy arm: two tasks on one data set, each at its own settings."""
    prepare(parse(DatasetSettings, settings(REPOSITORY["aime25"], source("aime25")), "datasets"), tmp_path / "data")
    sampler = script(tokenizer, [answer_of(row) for row in hub_rows(source("aime25"), "aime25")])
    both = {"dataset": "data", "harness": "lighteval", "task": "aime25"}
    greedy = {"name": "aime25-greedy", "repeats": 1, "sampling": {"temperature": 0, "max_tokens": 9}}
    values = {"tasks": [{**both, "name": "aime25", "repeats": 6}, {**both, **greedy}], "repeats": 2}
    evaluation = parse(EvaluationSettings, values, "evaluation")
    assert parse(EvaluationSettings, json.loads(evaluation.model_dump_json()), "evaluation") == evaluation
    metrics = evaluate(sampler, tokenizer, evaluation, {"data": tmp_path / "data"}, tmp_path / "out", print)
    drawn = [(call.count, call.temperature, call.top_p, call.max_tokens) for call in sampler.calls]
    assert drawn == [(6, 0.6, 0.95, 4096), (1, 0.0, 0.95, 9)]
    assert [(name, task.repeats, task.sampling.temperature) for name, task in metrics.items()] == [
        ("aime25", 6, 0.6),
        ("aime25-greedy", 1, 0.0),
    ]
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [row["dataset"] for row in rows] == ["aime25"] * 18 + ["aime25-greedy"] * 3
