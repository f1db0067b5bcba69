"""Rollouts: the choice of a step's problems, their completions, and the completions' rewards."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from qerl.data.answers import verdict
from qerl.data.prompts import check_lengths, longer_than, prompts_ids
from qerl.data.records import DataError, Problem
from qerl.data.sources import read_meta, read_split
from qerl.data.thinking import Thinking
from qerl.host.profiling import seconds
from qerl.policy.policy import Policy
from qerl.rl.advantages import differ, group_advantages
from qerl.rl.data_parallel import Processes
from qerl.rl.rewards import Answer, reward_parts, total
from qerl.rl.sequence_packing import Sample
from qerl.rl.sharing import ExpectedLengths, part_of
from qerl.rollout.sampler import BatchPart, Completion, Sampler, SamplingParams
from qerl.settings.data import AnswerForm, RecordFormat
from qerl.settings.rollout import RolloutSettings
from qerl.settings.run import RunSettings


@dataclass(frozen=True)
class Task:
    """The problems on which the policy is trained."""

    problems: list[Problem]
    format: RecordFormat
    instruction: str
    answer: AnswerForm = "native"
    units: tuple[str, ...] = ()
    thinking: tuple[str, str] | None = None
    date: datetime.date | None = None
    """The date that a chat template states; None is today's."""

    @staticmethod
    def of(data: Path) -> Task:
        """The training problems of a prepared data set."""
        meta = read_meta(data)
        form = meta.answer, tuple(meta.units), meta.thinking, meta.date
        return Task(read_split(data, "train"), meta.format, meta.instruction, *form)

    def fitting(self, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings, context: int | None) -> Task:
        """The task without problems longer than `rollout.max_prompt_tokens`. Raises DataError if any of the others
        doesn't fit `context`.
        """
        kept, most = self.problems, settings.max_prompt_tokens
        if most is not None:
            longer = longer_than(most, tokenizer, kept, self.instruction, self.date)
            kept = [problem for problem in kept if problem.id not in longer]
            if not kept:
                raise DataError(f"rollout.max_prompt_tokens={most} leaves none of {len(longer)} problems; raise it")
        if context is not None:
            limit = settings.sampling.max_tokens
            longer = longer_than(context - limit, tokenizer, kept, self.instruction, self.date)
            remedy = f"or leave such problems out by rollout.max_prompt_tokens={context - limit}"
            check_lengths(longer.values(), len(kept), context, limit, remedy)
        return replace(self, problems=kept)

    def at(self, places: Iterable[int], seed: int) -> list[Problem]:
        """The problems at places of an endless sequence of epochs, each a permutation of all by (seed, epoch)."""
        return [self.problems[problem_index(len(self.problems), seed, place)] for place in places]

    def prompts(self, tokenizer: PreTrainedTokenizerBase, problems: Iterable[Problem]) -> list[list[int]]:
        """The token ids of each problem's chat up to the start of the policy's answer."""
        return prompts_ids(tokenizer, (problem.question for problem in problems), self.instruction, self.date)


@dataclass(frozen=True)
class Group:
    """The completions of one problem, with their texts as graders read them (`qerl.data.thinking`) and their rewards.

    `timeouts` counts the completions whose comparison with the answer exceeded the grader's limits.
    """

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    texts: list[str]
    parts: list[dict[str, float]]
    rewards: list[float]
    timeouts: int = 0

    @property
    def informative(self) -> bool:
        """Whether the rewards differ. Equal rewards have zero advantages and give no gradient."""
        return bool(differ(torch.tensor([self.rewards])))


@dataclass(frozen=True)
class Rollout:
    """The batch of one step, with metrics of all groups that were drawn for it.

    `samples` are the completions of the `trained` groups, in their order.
    """

    samples: list[Sample]
    metrics: dict[str, float]
    groups: list[Group]
    trained: list[Group]


def problem_index(count: int, seed: int, position: int) -> int:
    """The problem's index at a position in an endless sequence of epochs, each a permutation by (seed, epoch)."""
    epoch, offset = divmod(position, count)
    return int(_epoch_order(count, seed, epoch)[offset])


@lru_cache(maxsize=2)
def _epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


@dataclass(frozen=True)
class Behaviour:
    """What a step decides of how its completions are drawn."""

    temperature: float
    #: Sets the noise of a completion's number within its group, where each number has its own.
    perturb: Callable[[int], None] | None = None


class Collector:
    """Draws the batch of a step from a sampler.

    It has no state that a resumed run would need: expected lengths decide which process draws a group, and not what.
    """

    def __init__(self, settings: RunSettings, policy: Policy, sampler: Sampler, task: Task) -> None:
        if not task.problems:
            raise ValueError(f"data set {settings.dataset} has no training problems")
        self.settings = settings
        self.policy = policy
        self.sampler = sampler
        self.task = task
        self.processes = Processes()
        self._lengths = ExpectedLengths()

    @cached_property
    def thinking(self) -> Thinking:
        """What ends the policy's thinking."""
        return Thinking(self.policy.tokenizer, self.task.thinking)

    def collect(self, step: int, position: int, behaviour: Behaviour | None = None) -> Rollout:
        """The batch of `step`, the same in every process; earlier steps have used `position` problems.

        With `rollout.resample`, groups of equal rewards are replaced by groups of the next problems, in at most that
        many rounds. If too few groups remain, groups of equal rewards fill the batch. Without a `behaviour` the
        temperature is that of the settings.
        """
        rollout = self.settings.rollout
        behaviour = behaviour or Behaviour(rollout.sampling.temperature)
        drawn: list[Group] = []
        idle = [0.0] * self.processes.count
        for round_ in range(1 + rollout.resample):
            missing = rollout.prompts - sum(group.informative for group in drawn)
            if round_ == 0 or missing > 0:
                start = position + len(drawn)
                groups, waited = self._draw(range(start, start + missing), step, round_, behaviour)
                drawn += groups
                idle = [sum(times) for times in zip(idle, waited, strict=True)]
        chosen = drawn
        if rollout.resample:
            chosen = sorted(drawn, key=lambda group: not group.informative)[: rollout.prompts]
        metrics = {"problems": position + len(drawn), **_metrics(drawn)}
        if len(idle) > 1:
            metrics |= {"seconds/idle": statistics.fmean(idle), "seconds/idle_max": max(idle)}
        return Rollout(self._samples(chosen), metrics, drawn, chosen)

    def _draw(self, positions: range, step: int, round_: int, behaviour: Behaviour) -> tuple[list[Group], list[float]]:
        """The groups of the problems at `positions`, and the seconds for which each process waited for the others."""
        seed = self.settings.seed
        chosen = self.task.at(positions, seed)
        prompts = self.task.prompts(self.policy.tokenizer, chosen)
        sampling = self.settings.rollout.sampling.model_dump() | {"temperature": behaviour.temperature}
        params = SamplingParams(
            **sampling,
            count=self.settings.rollout.group_size,
            seed=step_seed(seed, step, round_),
            part=self._part(chosen, prompts, behaviour),
        )
        with seconds() as busy:
            completions = self._generate(prompts, params, behaviour.perturb)
            drawn = [
                (number, self._score(prompts[number], completions[number], chosen[number]))
                for number in range(len(prompts))
                if completions[number]
            ]
        return self._exchange(drawn, busy.value, len(prompts))

    def _part(self, chosen: list[Problem], prompts: list[list[int]], behaviour: Behaviour) -> BatchPart | None:
        """The groups that this process draws; None if it is the only one."""
        if self.processes.count == 1:
            return None
        most = max(self.sampler.max_sequences // self.settings.rollout.group_size, 1)
        if behaviour.perturb:  # each number of a group is drawn by a call of its own, so none is taken over
            most = len(prompts)
        lengths = [self._lengths.of(p.id, len(prompt)) for p, prompt in zip(chosen, prompts, strict=True)]
        return part_of(self.processes.rank, self.processes.count, lengths, most, self.processes.counter)

    def _exchange(self, drawn: list[tuple[int, Group]], busy: float, count: int) -> tuple[list[Group], list[float]]:
        """All groups in their order, in every process, and the seconds for which each waited."""
        parts = self.processes.gather([(drawn, busy)])
        groups = dict(numbered for part, _ in parts for numbered in part)
        if len(groups) != count or count != sum(len(part) for part, _ in parts):
            raise RuntimeError(f"{count} groups were shared out and other ones came back: a defect of qerl")
        for group in groups.values():
            self._lengths.see(group.problem.id, len(group.prompt), [len(c.token_ids) for c in group.completions])
        longest = max(busy for _, busy in parts)
        return [groups[number] for number in range(count)], [longest - busy for _, busy in parts]

    def _generate(
        self, prompts: list[list[int]], params: SamplingParams, perturb: Callable[[int], None] | None
    ) -> list[list[Completion]]:
        """The completions of each prompt; with `perturb` one number of all groups at a time, each with its noise."""
        if perturb is None:
            return self.sampler.generate(prompts, params)
        numbers = []
        for number in range(params.count):
            perturb(number)
            # No two draws share a key.
            single = replace(params, count=1, first=params.first + number * len(prompts))
            numbers.append(self.sampler.generate(prompts, single))
        return [list(chain(*singles)) for singles in zip(*numbers, strict=True)]

    def _score(self, prompt: list[int], completions: list[Completion], problem: Problem) -> Group:
        limit, weights = self.settings.rollout.sampling.max_tokens, self.settings.reward
        asked = str(self.policy.tokenizer.decode(prompt))
        texts = [self.thinking.text(c.token_ids, asked) for c in completions]
        answers = [Answer(text, len(c.token_ids), limit) for text, c in zip(texts, completions, strict=True)]
        task = self.task
        parts = [reward_parts(a, problem, task.format, weights, task.answer, task.units) for a in answers]
        form = problem.answer, task.format, task.answer, task.units
        timeouts = sum(verdict(text, *form) == "timeout" for text in texts)
        return Group(problem, prompt, completions, texts, parts, [total(p, weights) for p in parts], timeouts)

    def _samples(self, groups: list[Group]) -> list[Sample]:
        rewards_PG = torch.tensor([group.rewards for group in groups])
        advantages_PG = torch.zeros_like(rewards_PG)
        if self.settings.loss.name != "ppo":  # for ppo the update computes advantages from values
            advantages_PG = group_advantages(rewards_PG, self.settings.loss.scale_advantages)
        return [
            Sample(group.prompt, *of_completion)
            for group, advantages in zip(groups, advantages_PG.tolist(), strict=True)
            for of_completion in zip(group.completions, group.rewards, advantages, strict=True)
        ]


def step_seed(seed: int, step: int, round_: int = 0) -> int:
    """A 64-bit seed from a run's seed, step and round, unique for seed < 2^32, step < 2^24 and round < 2^8."""
    return (seed << 32) | (step << 8) | round_


def _metrics(groups: list[Group]) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group.rewards]
    parts = [part for group in groups for part in group.parts]
    completions = [completion for group in groups for completion in group.completions]
    timeouts = sum(group.timeouts for group in groups)
    return {
        "reward": statistics.fmean(rewards),
        "reward/std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        **{f"reward/{name}": statistics.fmean(part[name] for part in parts) for name in parts[0]},
        "reward/equal_groups": statistics.fmean(not group.informative for group in groups),
        "completion_tokens": sum(len(c.token_ids) for c in completions),
        "completion_length": statistics.fmean(len(c.token_ids) for c in completions),
        "truncated": statistics.fmean(not c.finished for c in completions),
        **({"grading/timeouts": timeouts} if timeouts else {}),
        "entropy/sampler": -sum(sum(c.logprobs) for c in completions)
        / max(sum(len(c.token_ids) for c in completions), 1),
    }
