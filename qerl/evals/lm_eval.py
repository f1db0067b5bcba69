"""gsm8k-format data sets scored by lm-eval: its stock gsm8k task on local records, zero-shot, strict match.

Of completions that state their answer in tags, the strict match's regular expression reads the tags; metric and all
else stay the stock task's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import lm_eval.tasks
import yaml
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from qerl.data.answers import after_thinking
from qerl.data.prompts import prompt_text
from qerl.evals.policy import Drawn, EvaluationSet, Policy, Verdict

_SPLIT = "test"
_STRICT = "strict-match"
_METRIC = "exact_match"
#: What lm-eval's regex filter returns where nothing matches.
_INVALID = "[invalid]"
#: The number in the last answer tag, with what `qerl.data.answers` lets stand around it.
_IN_TAGS = r"(?s)<answer>[\s$€£¥+]*(?:\\boxed\{)?(\-?[0-9\.\,]*[0-9])[^0-9<]*</answer>(?!.*<answer>)"


class SamplerLM(LM):
    """lm-eval's model interface over a policy; it generates only."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.drawn: list[list[Drawn]] = []

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Draw every repeat of every request in one call of the sampler; `drawn` keeps the completions.

        lm-eval lists a request once for each repeat, repeats side by side. Of the task's generation settings only
        `until` applies: temperature, top-p and length are the policy's.
        """
        unique = [request for _, same in groupby(requests, key=id) for request in [next(same)]]
        stop = unique[0].args[1]["until"]
        encode = self.policy.tokenizer.encode
        self.drawn = self.policy.draw([encode(r.args[0], add_special_tokens=False) for r in unique], stop)
        return [drawn.text for repeats in self.drawn for drawn in repeats]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the chat as text; its encoding is `qerl.data.prompts.prompt_ids`."""
        return str(
            self.policy.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    @property
    def tokenizer_name(self) -> str:
        """Name that lm-eval keys its request cache by (the cache is off)."""
        return str(self.policy.tokenizer.name_or_path)

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Refuse: no task of the project scores given text."""
        raise NotImplementedError("a Sampler draws completions only; use an lm-eval task of type generate_until")

    def loglikelihood_rolling(self, requests: list[Instance]) -> NoReturn:
        """Refuse: no task of the project scores given text."""
        self.loglikelihood(requests)


def task_config(dataset: EvaluationSet, repeats: int) -> dict[str, Any]:
    """Return lm-eval's gsm8k task on the data set's test split, with one strict-match filter for each repeat."""
    stock = yaml.safe_load((Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml").read_text())
    records = [{"question": problem.question, "answer": problem.solution} for problem in dataset.problems]
    [strict] = [filters["filter"] for filters in stock["filter_list"] if filters["name"] == _STRICT]
    read = _from_tags(strict) if dataset.answer == "tags" else strict
    return {
        **{key: stock[key] for key in ("output_type", "doc_to_target", "metric_list", "generation_kwargs", "metadata")},
        "task": dataset.name,
        # Records in memory: no look-up on the hub, no cache on disk that processes would share.
        "custom_dataset": lambda **_: DatasetDict({_SPLIT: Dataset.from_list(records)}),
        "test_split": _SPLIT,
        "doc_to_text": lambda record: prompt_text(record["question"], dataset.instruction),
        "num_fewshot": 0,
        "repeats": repeats,
        "filter_list": [{"name": str(repeat), "filter": [_only(repeat), *read]} for repeat in range(repeats)],
    }


def _custom(change: Callable[[list[str]], list[str]]) -> dict[str, Any]:
    """The filter step that changes the list of a problem's responses."""

    def apply(responses: Iterable[list[str]], records: Any) -> list[list[str]]:
        return [change(texts) for texts in responses]

    return {"function": "custom", "filter_fn": apply}


def _only(repeat: int) -> dict[str, Any]:
    return _custom(lambda texts: [texts[repeat]])


def _from_tags(strict: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The stock strict-match steps, reading the answer tags that follow the thinking."""
    [regex, first] = strict
    spoken = _custom(lambda texts: [after_thinking(text) for text in texts])
    return [spoken, {**regex, "regex_pattern": _IN_TAGS}, first]


def score(policy: Policy, dataset: EvaluationSet) -> list[list[Verdict]]:
    """Draw and score the test split; verdicts by problem, then by repeat."""
    # It warns of records in memory.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = SamplerLM(policy)
    repeats = policy.params.count
    tasks = TaskManager(include_defaults=False).load([task_config(dataset, repeats)])
    results = evaluate(model, tasks, bootstrap_iters=0, apply_chat_template=True)
    scored = {(sample["doc_id"], int(sample["filter"])): sample for sample in results["samples"][dataset.name]}
    return [
        [_verdict(drawn, scored[problem, repeat]) for repeat, drawn in enumerate(completions)]
        for problem, completions in enumerate(model.drawn)
    ]


def _verdict(drawn: Drawn, sample: dict[str, Any]) -> Verdict:
    [extracted] = sample["filtered_resps"]
    return Verdict(drawn, None if extracted == _INVALID else extracted, bool(sample[_METRIC] == 1.0))
