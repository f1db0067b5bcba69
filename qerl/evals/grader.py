"""Evaluation of data sets of every format by the grader and the prompt of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qerl.data.answers import extract, is_correct
from qerl.data.prompts import prompts_ids
from qerl.data.records import Problem
from qerl.evals.policy import Drawn, EvaluatedPolicy, EvaluationSet, GradedCompletion


def score(policy: EvaluatedPolicy, dataset: EvaluationSet) -> list[list[GradedCompletion]]:
    """Draw and score completions; returns them by problem, then by repeat."""
    questions = (problem.question for problem in dataset.problems)
    prompts = prompts_ids(policy.tokenizer, questions, dataset.instruction)
    return [
        [
            GradedCompletion(drawn, *read)
            for drawn, read in zip(completions, verdicts(completions, problem, dataset), strict=True)
        ]
        for problem, completions in zip(dataset.problems, policy.draw(prompts), strict=True)
    ]


def verdicts(
    completions: Iterable[Drawn], problem: Problem, dataset: EvaluationSet
) -> Iterator[tuple[str | None, bool]]:
    """The answer that each completion of a problem states, and whether it is right; equal texts are graded once."""
    form = (dataset.format, dataset.answer, dataset.units)
    known: dict[str, tuple[str | None, bool]] = {}
    for text in (drawn.text for drawn in completions):
        if text not in known:
            known[text] = extract(text, *form), is_correct(text, problem.answer, *form)
        yield known[text]
