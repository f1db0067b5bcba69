"""gsm8k-format data sets scored by lm-eval: its stock gsm8k task on local records, strict match.

With the project's prompts it is zero-shot, with the prompts of training. If completions state their answer in
tags, the strict match gets that number as `#### n`; metric and all else are the stock task's. As a stock task it has
the prompt, the examples and both filters of lm-eval's task file, and only the records are this project's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

import lm_eval.tasks
import yaml
from datasets import Dataset, DatasetDict
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from qerl.data.grading import after_thinking
from qerl.data.prompts import chat_text, plain_ids, prompt_text, prompts_ids, texts_ids
from qerl.evals.harness import Drawn, EvaluatedPolicy, EvaluationSet, GradedCompletion

_SPLIT = "test"
_STRICT = "strict-match"
_FLEXIBLE = "flexible-extract"
_METRIC = "exact_match"
#: The result of lm-eval's regex filter if nothing matches.
_INVALID = "[invalid]"


class SamplerLM(LM):
    """lm-eval's model interface for a policy, which only generates. `read` makes lm-eval's input of a completion.

    With `prompts`, each problem has these token ids in place of its request, which lacks the messages before it.
    """

    def __init__(
        self,
        policy: EvaluatedPolicy,
        read: Callable[[str], str] = after_thinking,
        *,
        chat: bool = True,
        prompts: list[list[int]] | None = None,
    ) -> None:
        super().__init__()
        self.read = read
        self.policy = policy
        self.chat = chat
        self.prompts = prompts
        self.drawn: list[list[Drawn]] = []

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Draw every repeat of every request in one call of the sampler; `drawn` keeps the completions.

        lm-eval lists a request once for each repeat, repeats side by side. Of the task's generation settings only
        `until` applies: temperature, top-p and length are the policy's.
        """
        unique = [request for _, same in groupby(requests, key=id) for request in [next(same)]]
        texts = [request.args[0] for request in unique]
        tokenizer = self.policy.tokenizer
        prompts = texts_ids(tokenizer, texts) if self.chat else [plain_ids(tokenizer, text) for text in texts]
        prompts = self.prompts or prompts
        self.drawn = self.policy.draw(prompts, stop=unique[0].args[1]["until"])
        return [self.read(drawn.text) for repeats in self.drawn for drawn in repeats]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render the chat as text; its encoding is `qerl.data.prompts.prompt_ids`."""
        return chat_text(self.policy.tokenizer, chat_history, add_generation_prompt, self.policy.given)

    @property
    def tokenizer_name(self) -> str:
        """The key of lm-eval's request cache, which is off."""
        return str(self.policy.tokenizer.name_or_path)

    def loglikelihood(self, requests: list[Instance]) -> NoReturn:
        """Refuse: no task of the project scores given text."""
        raise NotImplementedError("a Sampler draws completions only; use an lm-eval task of type generate_until")

    loglikelihood_rolling = loglikelihood


class _QuietTask(ConfigurableTask):  # type: ignore[misc]
    """lm-eval's task without the progress bar while it writes prompts, which takes no time."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def build_all_requests(self, **settings: Any) -> None:
        """Write the prompts without a progress bar."""
        with redirect_stderr(StringIO()):
            super().build_all_requests(**settings)


def task_config(dataset: EvaluationSet, repeats: int) -> dict[str, Any]:
    """Return lm-eval's gsm8k task on the data set's test split, with each filter once for each repeat."""
    file = yaml.safe_load((Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml").read_text(encoding="utf-8"))
    filters = {entry["name"]: entry["filter"] for entry in file["filter_list"]}
    if dataset.stock:
        fewshot = file["num_fewshot"] if dataset.stock.fewshot is None else dataset.stock.fewshot
        unused = {"tag", "dataset_path", "dataset_name"} | (set() if fewshot else {"training_split", "fewshot_split"})
        config = {key: value for key, value in file.items() if key not in unused} | {"num_fewshot": fewshot}
        splits: dict[str, list[dict[str, Any]]] = {file["test_split"]: [*dataset.stock.records]}
        splits |= {file["fewshot_split"]: [*dataset.stock.examples]} if fewshot else {}
    else:
        filters = {_STRICT: filters[_STRICT]}
        config = {
            **{key: file[key] for key in ("output_type", "doc_to_target", "metric_list", "metadata")},
            # The file's stop strings end the questions of few-shot prompts, and may occur within an answer here.
            "generation_kwargs": {**file["generation_kwargs"], "until": []},
            "test_split": _SPLIT,
            "doc_to_text": lambda record: prompt_text(record["question"], dataset.instruction),
            "num_fewshot": 0,
        }
        rows = [{"question": each.question, "answer": each.solution} for each in dataset.problems]
        splits = {_SPLIT: rows}
    return {
        **config,
        # A function that gives lm-eval the records, without the hub and without a cache on disk.
        "custom_dataset": lambda **_: DatasetDict({split: Dataset.from_list(each) for split, each in splits.items()}),
        "task": dataset.name,
        "repeats": repeats,
        "filter_list": [
            {"name": f"{name} {repeat}", "filter": [_only(repeat), *steps]}
            for name, steps in filters.items()
            for repeat in range(repeats)
        ],
    }


def _only(repeat: int) -> dict[str, Any]:
    """The filter step that leaves one of a problem's responses."""

    def apply(responses: Iterable[list[str]], records: Any) -> list[list[str]]:
        return [[texts[repeat]] for texts in responses]

    return {"function": "custom", "filter_fn": apply}


def _reader(dataset: EvaluationSet) -> Callable[[str], str]:
    """The function that makes lm-eval's input of a completion: of tags, their number as `#### n`.

    At the project's own prompts no thinking counts. The stock task reads the whole text, as lm-eval's entry point does.
    """

    def as_hashes(text: str) -> str:
        answer = dataset.read(text)
        return "" if answer is None else f"#### {answer}"

    return str if dataset.stock else as_hashes if dataset.answer == "tags" else after_thinking


def score(policy: EvaluatedPolicy, dataset: EvaluationSet) -> list[list[GradedCompletion]]:
    """Draw and score the test split; verdicts by problem, then by repeat."""
    # It would warn about records in memory.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    chat = dataset.stock is None or dataset.stock.chat
    given = policy.tokenizer, dataset.problems, dataset.instruction, policy.given
    prompts = None if dataset.stock else prompts_ids(*given)
    model = SamplerLM(policy, _reader(dataset), chat=chat, prompts=prompts)
    loaded = TaskManager(include_defaults=False).load(
        [{**task_config(dataset, policy.params.count), "class": _QuietTask}]
    )
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    # As lm-eval's own entry point has it: with the chat template, each example is a turn of the chat.
    results = evaluate(model, loaded, bootstrap_iters=0, apply_chat_template=chat, fewshot_as_multiturn=True)
    scored = {(sample["doc_id"], sample["filter"]): sample for sample in results["samples"][dataset.name]}
    return [
        [_verdict(drawn, scored, problem, repeat) for repeat, drawn in enumerate(completions)]
        for problem, completions in enumerate(model.drawn)
    ]


def _verdict(drawn: Drawn, scored: dict[tuple[int, str], Any], problem: int, repeat: int) -> GradedCompletion:
    strict, flexible = (scored.get((problem, f"{name} {repeat}")) for name in (_STRICT, _FLEXIBLE))
    assert strict is not None
    [extracted] = strict["filtered_resps"]
    return GradedCompletion(
        drawn,
        None if extracted == _INVALID else extracted,
        bool(strict[_METRIC] == 1.0),
        None if flexible is None else bool(flexible[_METRIC] == 1.0),
    )
