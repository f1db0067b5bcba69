"""Scores in the hub's formats: the model index of a card, and `.eval_results/*.yaml` of benchmarks.

https://huggingface.co/docs/hub/eval-results describes the second. It is for data sets that the hub has registered as
benchmarks, each with the names of its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml

from qerl.publishing.run_facts import RunScore, data_name
from qerl.publishing.sections import percent, scored_by

#: The folder in which the hub looks for scores.
EVAL_RESULTS = ".eval_results"
#: The task of each benchmark of the hub that the project's harnesses score, by data set, subset and split.
_BENCHMARKS: dict[tuple[str | None, str | None, str], str] = {("openai/gsm8k", "main", "test"): "gsm8k"}


def model_index(scores: Sequence[RunScore]) -> list[EvalResult]:
    """The policy's own scores as entries of a card's model index; accuracy is a share."""
    return [_indexed(score, *_place(score)) for score in scores if score.trained]


def eval_results(scores: Sequence[RunScore]) -> dict[str, str]:
    """The files of `.eval_results` by their path, with the policy's scores in percent. Other data sets have none."""
    benchmarked = [score for score in scores if score.trained and _place(score) in _BENCHMARKS]
    tasks = {_BENCHMARKS[_place(score)] for score in benchmarked}
    files = {
        task: [_entry(score, task) for score in benchmarked if _BENCHMARKS[_place(score)] == task] for task in tasks
    }
    return {
        f"{EVAL_RESULTS}/{task}.yaml": yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)
        for task, entries in sorted(files.items())
    }


def _indexed(score: RunScore, repo: str | None, subset: str | None, split: str) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=repo or score.label,
        dataset_name=data_name(score.data) if score.data else score.label,
        dataset_config=subset,
        dataset_split=split,
        dataset_revision=_revision(score),
        metric_type="accuracy",
        metric_name=f"accuracy ({scored_by(score)})",
        metric_value=round(score.accuracy.mean, 4),
    )


def _entry(score: RunScore, task: str) -> EvalResultEntry:
    return EvalResultEntry(
        dataset_id=str(_place(score)[0]),
        task_id=task,
        value=round(100 * score.accuracy.mean, 2),
        dataset_revision=_revision(score),
        date=score.provenance.time or None,
        notes=f"{scored_by(score)}, {score.score.repeats} completions a problem, 95 %: {percent(score.accuracy)}",
    )


def _place(score: RunScore) -> tuple[str | None, str | None, str]:
    """Repository, subset and split of the problems; no repository where they aren't of the hub."""
    if score.data is None or score.data.origin["source"] != "hub":
        return None, None, "test"
    origin = score.data.origin
    return origin["repo"], origin["subset"], origin["splits"]["test"]


def _revision(score: RunScore) -> str | None:
    """The commit of a data set of the hub."""
    return None if score.data is None else score.data.origin.get("revision")
