"""math- and aime-format data sets scored by lighteval: its stock tasks, or the project's prompts with their metric.

`math_500`, `aime24` and `aime25` are the objects that lighteval ships. `amc23`, which it lacks, is its aime24 on other
records: the same prompt and metric, a gold answer that may be any number.

lighteval's Pipeline isn't used, because its registry imports every task module, and one downloads at import. The
task, its documents and its metric are lighteval's own objects, combined as in the Pipeline. The metric needs no model
of lighteval's. If completions state their answer in tags, the metric gets that answer in a box.
"""

from __future__ import annotations

import copy
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

from datasets import Dataset, DatasetDict
from lighteval.metrics import apply_metric
from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.lighteval_task import LightevalTask, LightevalTaskConfig
from lighteval.tasks.requests import Doc

from qerl.data.grading import after_thinking, boxed
from qerl.data.prompts import plain_ids, prompt_text, prompts_ids
from qerl.evals.harness import Drawn, EvaluatedPolicy, EvaluationSet, GradedCompletion
from qerl.settings.workflow import StockTask

_SPLIT = "test"
#: The CPU time of the comparison of a completion with the gold answer.
CPU_SECONDS = 10.0
#: lighteval's limits in seconds of wall-clock time, which are so high that only ours takes effect.
_NEVER = 3600


class _TimeUpError(BaseException):
    """A comparison over its limit. lighteval handles each `Exception` as an answer that can't be read."""


def _boxed(answer: str) -> str:
    return f"$\\boxed{{{answer}}}$"


def _reader(dataset: EvaluationSet) -> Callable[[str], str]:
    """The function that makes the metric's input from a completion.

    At the project's own prompts that is the answer which the reward reads: the tagged one, or the last box. In a text
    with a box, lighteval would first take what follows "final answer is".
    """

    def read(text: str) -> str:
        answer = dataset.read(text) or "" if dataset.answer == "tags" else boxed(text)
        return after_thinking(text) if answer is None else answer and _boxed(answer)

    return after_thinking if dataset.stock else read


def task_config(dataset: EvaluationSet) -> LightevalTaskConfig:
    """The lighteval task of a math- or aime-format data set, whose records have question and answer."""

    def to_doc(record: dict[str, Any], task_name: str) -> Doc:
        query, answer = prompt_text(record["question"], dataset.instruction), record["answer"]
        gold = answer if dataset.format == "aime" else f"ANSWER: {_boxed(answer)}"
        return Doc(task_name=task_name, query=query, choices=[gold], gold_index=0)

    return LightevalTaskConfig(
        name=dataset.name,
        prompt_function=to_doc,
        hf_repo=dataset.name,
        hf_subset="default",
        hf_avail_splits=[_SPLIT],
        evaluation_splits=[_SPLIT],
        metrics=[Metrics.pass_at_k_math(sample_params={"k": 1, "n": 1})],
    )


def stock_config(task: StockTask) -> LightevalTaskConfig:
    """A stock task of lighteval, or the project's amc23."""
    # Both import a solver framework, which only stock tasks need.
    from lighteval.tasks.tasks import aime, math_500

    # The hub's copy of AMC 2023 states floats ("27.0"), which the metric takes as numbers like any other.
    amc23 = replace(
        aime.aime24,
        name="amc23",
        hf_repo="math-ai/amc23",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
    )
    known = {"math_500": math_500.math_500, "aime24": aime.aime24, "aime25": aime.aime25, "amc23": amc23}
    return known[task]


def _recording(metric: Any, recorded: list[tuple[str | None, bool]]) -> Any:
    """A copy of lighteval's metric whose limit is CPU time.

    It appends to `recorded` what it extracts from each completion, and whether the comparison exceeded the limit.
    """
    metric = copy.deepcopy(metric)
    score_one: Callable[..., float] = metric.sample_level_fn.compute_score
    score_one.__self__.timeout_seconds = _NEVER  # type: ignore[attr-defined]

    def score_and_record(doc: Doc, model_response: ModelResponse) -> float:
        try:
            with _cpu_limit():
                value = score_one(doc=doc, model_response=model_response)
        except _TimeUpError:
            recorded.append((None, True))
            return 0.0
        predictions = (doc.specific or {}).get("extracted_predictions")
        recorded.append((predictions[0] if predictions else None, False))
        return value

    metric.sample_level_fn.compute_score = score_and_record
    return metric


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """A context that raises `_TimeUpError` after `CPU_SECONDS` of this process's CPU time."""

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        raise _TimeUpError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def score(policy: EvaluatedPolicy, dataset: EvaluationSet) -> list[list[GradedCompletion]]:
    """Draw and score the test split; verdicts by problem, then by repeat."""
    # It would log a warning for each completion without an answer, which the samples file already shows.
    logging.getLogger("lighteval").setLevel(logging.ERROR)
    config = stock_config(dataset.stock.task) if dataset.stock else task_config(dataset)
    rows = [{"question": each.question, "answer": each.answer} for each in dataset.problems]
    if dataset.stock:
        rows = dataset.stock.records
    task = LightevalTask(config)
    # Setting the data set avoids a look-up on the hub and a cache on disk.
    task.dataset = DatasetDict({config.evaluation_splits[0]: Dataset.from_list(rows)})
    # lighteval shuffles the documents and numbers them by `id`.
    docs: list[Doc] = sorted(task.get_docs(), key=lambda doc: int(doc.id))
    if dataset.stock is None:
        prompts = prompts_ids(policy.tokenizer, dataset.problems, dataset.instruction, policy.given)
    elif dataset.stock.chat:
        prompts = prompts_ids(policy.tokenizer, (doc.query for doc in docs), "", policy.given)
    else:
        prompts = [plain_ids(policy.tokenizer, doc.query) for doc in docs]
    drawn = policy.draw(prompts, docs[0].stop_sequences or ())
    recorded: list[tuple[str | None, bool]] = []
    metric, read = _recording(config.metrics[0], recorded), _reader(dataset)
    # lighteval's metric would average the repeats, so each repeat is scored as a separate response.
    pairs = [
        (doc, ModelResponse(text=[read(one.text)])) for doc, repeats in zip(docs, drawn, strict=True) for one in repeats
    ]
    outputs = apply_metric(docs=[doc for doc, _ in pairs], responses=[r for _, r in pairs], metrics=[metric])
    verdicts = zip(recorded, (bool(output[metric.metric_name] == 1.0) for output in outputs), strict=True)

    def graded(one: Drawn) -> GradedCompletion:
        (extracted, timeout), right = next(verdicts)
        return GradedCompletion(one, extracted, right, timeout=timeout)

    return [[graded(one) for one in repeats] for repeats in drawn]
