"""Evaluation of data sets of every format by the grader and the prompt of training."""

from __future__ import annotations

from qerl.data.answers import extract, is_correct
from qerl.data.prompts import prompt_ids
from qerl.evals.policy import EvaluatedPolicy, EvaluationSet, GradedCompletion


def score(policy: EvaluatedPolicy, dataset: EvaluationSet) -> list[list[GradedCompletion]]:
    """Draw and score completions; returns them by problem, then by repeat."""
    prompts = [prompt_ids(policy.tokenizer, problem.question, dataset.instruction) for problem in dataset.problems]
    form = (dataset.format, dataset.answer, dataset.units)
    return [
        [
            GradedCompletion(drawn, extract(drawn.text, *form), is_correct(drawn.text, problem.answer, *form))
            for drawn in completions
        ]
        for problem, completions in zip(dataset.problems, policy.draw(prompts), strict=True)
    ]
