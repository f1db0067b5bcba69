"""The project's harness tasks against the harnesses' stock tasks."""

import json
from importlib import import_module
from pathlib import Path

import lm_eval.tasks
import pytest
import yaml
from lighteval.metrics import apply_metric
from lighteval.models.model_output import ModelResponse
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from qerl.data.grading import is_correct
from qerl.data.records import Problem
from qerl.evals.evaluate import scorer
from qerl.evals.harness import EvaluatedPolicy, EvaluationSet
from qerl.evals.lm_eval import task_config
from qerl.rollout.sampler import SamplingParams
from qerl.settings.workflow import harness_of
from tests.unit.data.test_grading import IS_5, IS_18, NATIVE, NO_5, NO_18, TAGGED, tags
from tests.unit.evals.scripted import Scripted, make_tokenizer

GSM8K_GOLD = "She sold 1000 + 234 = <<1000+234=1234>>1,234 eggs.\n#### 1,234"
#: Completions that strict match counts, and those that it doesn't, by hand from the stock regex and ignore rules.
GSM8K = {
    True: [
        *("#### 1234", "#### 1,234", "1000 + 234 = 1234\n#### 1234\n", "#### 1234.", "#### 1234 eggs"),
        *("#### 1234\n#### 5", "#### 1,23,4"),
    ],
    False: [
        *("#### 5\n#### 1234", "#### 1", "#### 1235", "#### 12345", "#### -1234", "#### 1234.0", "####1234"),
        *("####  1234", "#### $1234", "### 1234", "The answer is 1234", "\\boxed{1234}", "####", "#### .", "[invalid]"),
        "",
    ],
}


def cases_of(table):
    return [(text, right) for right, texts in table.items() for text in texts]


def verdicts(task, repeat):
    """The verdicts of an lm-eval task's filter and metric on adversarial completions, as its evaluator runs them."""
    record = {"question": "How many?", "answer": GSM8K_GOLD}
    instances = []
    for number, (text, _) in enumerate(cases_of(GSM8K)):
        instance = Instance("generate_until", record, ("", {}), 0, metadata=("gsm8k", number, 1))
        instance.resps = ["#### wrong"] * repeat + [text]
        instances.append(instance)
    task._instances = instances
    task.apply_filters()
    key = "strict-match" if "strict-match" in instances[0].filtered_resps else f"strict-match {repeat}"
    return [task.process_results(record, [i.filtered_resps[key]])["exact_match"] == 1.0 for i in instances]


@pytest.fixture(scope="module")
def stock_gsm8k():
    """The task file that lm-eval ships, on one record instead of the hub's."""
    from datasets import Dataset, DatasetDict

    config = yaml.safe_load((Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml").read_text())
    config.pop("tag")
    rows = Dataset.from_list([{"question": "How many?", "answer": GSM8K_GOLD}])
    config["custom_dataset"] = lambda **_: DatasetDict({"train": rows, "test": rows})
    return ConfigurableTask(config=config)


@pytest.mark.parametrize("repeat", [0, 1])
def test_gsm8k_verdicts_are_those_of_the_stock_task(stock_gsm8k, repeat):
    problem = Problem("0", "How many?", GSM8K_GOLD, "1,234")
    ours = ConfigurableTask(config=task_config(EvaluationSet("words", "gsm8k", "", [problem]), repeats=repeat + 1))
    expected = verdicts(stock_gsm8k, 0)
    assert expected == [right for _, right in cases_of(GSM8K)]
    assert verdicts(ours, repeat) == expected


SOLUTION = "We add the halves: $\\frac14 + \\frac14 = \\frac12$. So it is $\\boxed{\\frac{1}{2}}$."
MATH = {
    True: ["\\boxed{\\frac12}", "\\boxed{0.5}", "\\boxed{\\frac{2}{4}}", "ANSWER: $\\frac{1}{2}$"],
    False: ["\\boxed{\\frac13}", "\\boxed{1}", "\\boxed{\\frac12} no, \\boxed{5}", "no idea", ""],
}
AIME = {
    True: [
        *("\\boxed{204}", "\\boxed{0204}", "Therefore, the final answer is: $\\boxed{204}$. I hope it is correct"),
        "204",
    ],
    False: ["\\boxed{2}", "\\boxed{205}", "\\boxed{204} or \\boxed{7}", "two hundred and four"],
}


@pytest.mark.parametrize(
    ("module", "task", "record_format", "record", "table"),
    [
        ("math_500", "math_500", "math", {"problem": "Add.", "solution": SOLUTION, "answer": "\\frac{1}{2}"}, MATH),
        ("aime", "aime24", "aime", {"problem": "Find it.", "answer": "204"}, AIME),
    ],
)
def test_lighteval_verdicts_are_those_of_the_stock_task(module, task, record_format, record, table):
    cases = cases_of(table)
    stock = getattr(import_module(f"lighteval.tasks.tasks.{module}"), task)
    metric = stock.metrics[0]
    docs = [stock.prompt_function(record, task)] * len(cases)
    outputs = apply_metric(docs=docs, responses=[ModelResponse(text=[t]) for t, _ in cases], metrics=[metric])
    expected = [output[metric.metric_name] == 1.0 for output in outputs]
    assert expected == [right for _, right in cases]
    problem = Problem("0", record["problem"], record.get("solution"), record["answer"])
    tokenizer = make_tokenizer()
    sampler = Scripted(tokenizer, lambda _, repeat: cases[repeat][0])
    policy = EvaluatedPolicy(sampler, tokenizer, SamplingParams(max_tokens=9, count=len(cases)))
    [ours] = scorer("lighteval")(policy, EvaluationSet("puzzles", record_format, "", [problem]))
    assert [verdict.correct for verdict in ours] == expected


def graded_texts(record_format, form):
    """(expected answer, completion) of the gates' vectors and the graders' tables."""
    file = Path(__file__).parents[2] / "tests/fixtures/gates/answers.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = [(row["answer"], row["text"]) for row in rows if (row["format"], row["form"]) == (record_format, form)]
    for kind, expected, right, wrong in NATIVE if form == "native" else TAGGED:
        found += [(expected, text) for text in (*right, *wrong) if kind == record_format]
    shown = (lambda answer: f"\\boxed{{{answer}}}") if form == "native" else tags
    if record_format == "math":
        found += [("5", shown(answer)) for answer in NO_5 + IS_5]
    elif (record_format, form) == ("gsm8k", "tags"):
        found += [("18", tags(answer)) for answer in NO_18 + IS_18]
    return list(dict.fromkeys(found))


#: Right for the reward and not for the harness, as docs/evaluation.md says: numbers spelled unlike the record's, which
#: lm-eval compares as text, and a point within the box.
REWARDED_ONLY = {
    ("gsm8k", "native"): ["#### 18.0", "#### 1800", "#### .5", "#### 0018"],
    ("gsm8k", "tags"): [
        "<think>9*2</think>\n<answer>$1,800.50</answer>",
        *map(tags, ["-$18.00", "$1,800.00", ".5", "18.00", "018"]),
    ],
    ("math", "native"): ["\\boxed{5.}"],
}


@pytest.mark.parametrize("form", ["native", "tags"])
@pytest.mark.parametrize("record_format", ["gsm8k", "math", "aime"])
def test_what_training_rewards_is_right_for_the_harness(record_format, form):
    """Evaluation counts every answer that training rewards, except numbers spelled unlike the record's.

    Of numbers in tags it counts no other answer either.
    """
    cases = graded_texts(record_format, form)
    problems = [
        Problem(str(number), f"question {number}", f"#### {expected}" if record_format == "gsm8k" else None, expected)
        for number, (expected, _) in enumerate(cases)
    ]
    tokenizer = make_tokenizer()
    sampler = Scripted(tokenizer, lambda number, _: cases[number][1])
    policy = EvaluatedPolicy(sampler, tokenizer, SamplingParams(max_tokens=9, count=1))
    verdicts = scorer(harness_of(record_format))(policy, EvaluationSet("puzzles", record_format, "", problems, form))
    rewarded_only, counted_only = [], []
    for (expected, text), [verdict] in zip(cases, verdicts, strict=True):
        rewarded = is_correct(text, expected, record_format, form)
        rewarded_only += [text] * (rewarded and not verdict.correct)
        counted_only += [text] * (verdict.correct and not rewarded and form == "tags" and record_format != "math")
    assert sorted(rewarded_only) == sorted(REWARDED_ONLY.get((record_format, form), []))
    assert counted_only == []
