"""math- and aime-format data sets scored by lighteval, as its stock math_500 and aime24 tasks score them.

lighteval's Pipeline is left aside: its registry imports every task module, one of which downloads at import.
The task, its documents and its metric are lighteval's own objects, put together as the Pipeline does.
Of completions that state their answer in tags, the metric is given that answer in a box.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from datasets import Dataset, DatasetDict
from lighteval.metrics import apply_metric
from lighteval.metrics.metrics import Metrics
from lighteval.models.abstract_model import LightevalModel
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.lighteval_task import LightevalTask, LightevalTaskConfig
from lighteval.tasks.requests import Doc
from lighteval.utils.utils import remove_reasoning_tags
from transformers import PreTrainedTokenizerBase

from qerl.data.answers import extract
from qerl.data.prompts import prompt_ids, prompt_text
from qerl.evals.policy import Drawn, EvaluationSet, Policy, Verdict

_SPLIT = "test"
_REASONING_TAGS = [("<think>", "</think>")]


def _without_thinking(text: str) -> str:
    return str(remove_reasoning_tags(text, _REASONING_TAGS))


def _reader(dataset: EvaluationSet) -> Callable[[str], str]:
    """What the metric is given of a completion."""

    def boxed(text: str) -> str:
        answer = extract(text, dataset.format, dataset.answer)
        return "" if answer is None else f"$\\boxed{{{answer}}}$"

    return boxed if dataset.answer == "tags" else _without_thinking


class SamplerModel(LightevalModel):
    """lighteval's model interface over a policy; it generates only, and nothing is cached.

    `read` makes of a completion the text that metrics see.
    """

    def __init__(self, policy: Policy, read: Callable[[str], str] = _without_thinking) -> None:
        self.policy = policy
        self.read = read
        self.drawn: list[list[Drawn]] = []

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self.policy.tokenizer

    @property
    def add_special_tokens(self) -> bool:
        """Never: the chat template writes them."""
        return False

    @property
    def max_length(self) -> int:
        """Tokens of the longest completion."""
        return self.policy.params.max_tokens

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """Draw every repeat of every document in one call of the sampler; `drawn` keeps the completions."""
        stop = docs[0].stop_sequences or ()
        self.drawn = self.policy.draw([prompt_ids(self.tokenizer, doc.query, "") for doc in docs], stop)
        return [
            ModelResponse(
                text=[drawn.text for drawn in repeats],
                text_post_processed=[self.read(drawn.text) for drawn in repeats],
            )
            for repeats in self.drawn
        ]

    def loglikelihood(self, docs: list[Doc]) -> NoReturn:
        """Refuse: no task of the project scores given text."""
        raise NotImplementedError("a Sampler draws completions only; use a lighteval task with generative metrics")

    def loglikelihood_rolling(self, docs: list[Doc]) -> NoReturn:
        """Refuse: no task of the project scores given text."""
        self.loglikelihood(docs)


def task_config(dataset: EvaluationSet, metric: Any) -> LightevalTaskConfig:
    """Return the lighteval task of a math- or aime-format data set; its records are the fields of `Problem`."""

    def to_doc(record: dict[str, Any], task_name: str) -> Doc:
        gold = record["answer"] if dataset.format == "aime" else f"ANSWER: {record['solution']}"
        query = prompt_text(record["question"], dataset.instruction)
        return Doc(task_name=task_name, query=query, choices=[gold], gold_index=0)

    return LightevalTaskConfig(
        name=dataset.name,
        prompt_function=to_doc,
        hf_repo=dataset.name,
        hf_subset="default",
        hf_avail_splits=[_SPLIT],
        evaluation_splits=[_SPLIT],
        metrics=[metric],
    )


def _recording(metric: Any, extracted: list[str | None]) -> Any:
    """Make lighteval's metric append to `extracted` what its scoring function extracts from each completion."""
    score_one: Callable[..., float] = metric.sample_level_fn.compute_score

    def score_and_record(doc: Doc, model_response: ModelResponse) -> float:
        value = score_one(doc=doc, model_response=model_response)
        found = (doc.specific or {}).get("extracted_predictions")
        extracted.append(found[0] if found else None)
        return value

    metric.sample_level_fn.compute_score = score_and_record
    return metric


def _documents(task: LightevalTask, dataset: EvaluationSet) -> list[Doc]:
    """The task's documents in the order of the problems; lighteval shuffles them and numbers them by `id`."""
    # Set here, the data set is neither looked up on the hub nor cached on disk.
    task.dataset = DatasetDict({_SPLIT: Dataset.from_list([asdict(problem) for problem in dataset.problems])})
    return sorted(task.get_docs(), key=lambda doc: int(doc.id))


def score(policy: Policy, dataset: EvaluationSet) -> list[list[Verdict]]:
    """Draw and score the test split; verdicts by problem, then by repeat."""
    # One warning for each completion without an answer would fill the log; the samples file tells them.
    logging.getLogger("lighteval").setLevel(logging.ERROR)
    extracted: list[str | None] = []
    metric = _recording(Metrics.pass_at_k_math(sample_params={"k": 1, "n": 1}), extracted)
    docs = _documents(LightevalTask(task_config(dataset, metric)), dataset)
    model = SamplerModel(policy, _reader(dataset))
    responses = model.greedy_until(docs)
    # lighteval's own metric over samples would average the repeats: each is a response of its own.
    pairs = [(doc, ModelResponse(text=[text])) for doc, r in zip(docs, responses, strict=True) for text in r.final_text]
    outputs = apply_metric(docs=[doc for doc, _ in pairs], responses=[r for _, r in pairs], metrics=[metric])
    correct = [bool(output[metric.metric_name] == 1.0) for output in outputs]
    verdicts = zip(extracted, correct, strict=True)
    return [[Verdict(drawn, *next(verdicts)) for drawn in repeats] for repeats in model.drawn]
