"""The loss of a merge: a policy against the one checkpoint that it was merged into, on the same problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qerl.checkpoints.context import usable_length
from qerl.data.answers import is_correct
from qerl.data.prompts import prompt_ids
from qerl.data.thinking import Thinking
from qerl.evals.evaluate import open_task
from qerl.evals.policy import EvaluatedPolicy, EvaluationSet
from qerl.policy.policy import Policy
from qerl.results.intervals import Scores, accuracy_interval, difference_interval, mean_interval
from qerl.results.schema.evaluation import MergeLoss
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import Completion, SamplingParams
from qerl.settings.evaluation import EvaluationSettings

#: Positions whose distributions are compared at once: the vocabulary makes each of them large.
_POSITIONS = 64


def merge_loss(
    policy: Policy, merged: Policy, data: Path, settings: EvaluationSettings, most: int | None = None
) -> MergeLoss:
    """Measure KL, agreement and accuracy of `merged` against `policy` (see `MergeLoss`).

    The one task of `settings` names the split of the prepared problems in `data`. Its first `most` problems are asked,
    by the prompt and the grader of training. Both models draw by the same random numbers. On a GPU set `native.sleep`,
    so that the cache of one sampler is released before the other draws.
    """
    [task] = settings.tasks
    asked = open_task(task, {task.dataset: data})
    asked = replace(asked, problems=asked.problems[:most])
    ask = partial(prompt_ids, policy.tokenizer, instruction=asked.instruction, date=asked.date)
    prompts = [ask(problem.question) for problem in asked.problems]
    drawn, others = _draw(policy, prompts, settings), _draw(merged, prompts, settings)
    shares, merged_shares = (_right(policy, asked, prompts, each) for each in (drawn, others))
    kl, same, tokens = _compare(policy, merged, prompts, drawn)
    return MergeLoss(
        split=task.split,
        problems=len(prompts),
        repeats=settings.repeats,
        tokens=tokens,
        kl=mean_interval(kl),
        same_token=same,
        accuracy=accuracy_interval(shares[None]),
        accuracy_merged=accuracy_interval(merged_shares[None]),
        difference=difference_interval(merged_shares[None], shares),
        dtype=settings.dtype,
        sampling=settings.sampling,
    )


def _draw(policy: Policy, prompts: Sequence[list[int]], settings: EvaluationSettings) -> list[list[Completion]]:
    """The completions of each prompt."""
    params = SamplingParams(**settings.sampling.model_dump(), count=settings.repeats, seed=settings.seed)
    context = usable_length(policy.lm.config.to_dict(), settings)
    return EvaluatedPolicy(make_sampler(policy, settings), policy.tokenizer, params, context).complete(prompts)


def _right(
    policy: Policy, asked: EvaluationSet, prompts: Sequence[list[int]], drawn: Sequence[Sequence[Completion]]
) -> Scores:
    """The share of right completions of each problem, [problems]."""
    form = (asked.format, asked.answer, asked.units)
    thinking = Thinking(policy.tokenizer, asked.thinking)
    shares = []
    for problem, prompt, completions in zip(asked.problems, prompts, drawn, strict=True):
        begun = str(policy.tokenizer.decode(prompt))
        texts = [thinking.text(completion.token_ids, begun) for completion in completions]
        shares.append(np.mean([is_correct(text, problem.answer, *form) for text in texts]))
    return np.array(shares)


def _compare(
    policy: Policy, merged: Policy, prompts: Sequence[list[int]], drawn: Sequence[Sequence[Completion]]
) -> tuple[Scores, float, int]:
    """KL per token of each problem [problems], the share of tokens with the same most likely one, and their number."""
    kl, same = [], []
    for prompt, completions in zip(prompts, drawn, strict=True):
        pairs = [_of_tokens(policy, merged, prompt, completion.token_ids) for completion in completions]
        kl.append(torch.cat([divergence for divergence, _ in pairs]).mean().item())
        same += [agreement for _, agreement in pairs]
    agreements = torch.cat(same)
    return np.array(kl), agreements.double().mean().item(), len(agreements)


@torch.no_grad()
def _of_tokens(policy: Policy, merged: Policy, prompt: list[int], tokens: list[int]) -> tuple[Tensor, Tensor]:
    """KL(policy || merged), float64 [T], and whether both find the same token most likely, bool [T]."""
    logits, others = (_logits(model, prompt, tokens) for model in (policy, merged))
    parts = zip(logits.split(_POSITIONS), others.split(_POSITIONS), strict=True)
    kl = torch.cat([_kl(ours, theirs) for ours, theirs in parts])
    return kl.cpu(), (logits.argmax(-1) == others.argmax(-1)).cpu()


def _logits(policy: Policy, prompt: list[int], tokens: list[int]) -> Tensor:
    """The logits [T, vocabulary] from which each of the completion's tokens is drawn."""
    ids = torch.tensor([prompt + tokens], device=policy.device)
    with policy.autocast():
        return policy.lm(input_ids=ids, logits_to_keep=len(tokens) + 1).logits[0, :-1]


def _kl(logits: Tensor, others: Tensor) -> Tensor:
    """KL divergence of two distributions in nats, float64 [T], from their logits [T, vocabulary]."""
    ours, theirs = (torch.log_softmax(part.double(), -1) for part in (logits, others))
    return (ours.exp() * (ours - theirs)).sum(-1)
