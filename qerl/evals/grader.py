"""Evaluation of data sets of every format by the grader and the prompt of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qerl.data.answers import Verdict, extract, verdict
from qerl.data.prompts import prompts_ids
from qerl.data.records import Problem
from qerl.evals.policy import Drawn, EvaluatedPolicy, EvaluationSet, GradedCompletion


def score(policy: EvaluatedPolicy, dataset: EvaluationSet) -> list[list[GradedCompletion]]:
    """Draw and score completions; returns them by problem, then by repeat."""
    questions = (problem.question for problem in dataset.problems)
    prompts = prompts_ids(policy.tokenizer, questions, dataset.instruction, policy.date)
    return [
        [
            GradedCompletion(drawn, read, judged == "right", timeout=judged == "timeout")
            for drawn, (read, judged) in zip(completions, verdicts(completions, problem, dataset), strict=True)
        ]
        for problem, completions in zip(dataset.problems, policy.draw(prompts), strict=True)
    ]


def verdicts(
    completions: Iterable[Drawn], problem: Problem, dataset: EvaluationSet
) -> Iterator[tuple[str | None, Verdict]]:
    """The answer that each completion of a problem states, and the verdict on it; equal texts are graded once."""
    form = (dataset.format, dataset.answer, dataset.units)
    known: dict[str, tuple[str | None, Verdict]] = {}
    for text in (drawn.text for drawn in completions):
        if text not in known:
            known[text] = extract(text, *form), verdict(text, problem.answer, *form)
        yield known[text]
