"""Rollouts: a step's problems and their sharing among processes, completions with rewards, and their storage."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, islice
from pathlib import Path

import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from qerl.checkpoints.files import context_length
from qerl.data.grading import extract, verdict
from qerl.data.prompts import TemplateInput, Thinking, check_lengths, longer_than, prompts_ids
from qerl.data.records import DataError, Problem
from qerl.data.sources import read_meta, read_split
from qerl.host.console import log
from qerl.host.gpus import seconds
from qerl.models.policy import Policy
from qerl.results.paths import rollouts_file
from qerl.results.schema import RolloutRow, StoredCompletion, write_rows
from qerl.rl.environments import Conversation, Conversations
from qerl.rl.packing import MicroBatch, Sample
from qerl.rl.parallel import Processes
from qerl.rl.rewards import (
    Answer,
    differ,
    function_parts,
    group_advantages,
    reward_parts,
    summed_advantages,
    total,
)
from qerl.rollout.sampler import BatchPart, Completion, Sampler, SamplingParams
from qerl.settings.data import AnswerForm, RecordFormat
from qerl.settings.run import RolloutSettings, RunSettings, ValidationSettings

# The sharing of a step's groups among the processes of a run, by the expected length of their completions.


@dataclass
class ExpectedLengths:
    """The length of completions that a problem is expected to get.

    It is the mean of the problem's latest group. A problem without one counts as its prompt's length, times the ratio
    of completions to prompts so far.
    """

    _of_problem: dict[str, float] = field(default_factory=dict)
    _prompts: int = 0
    _completions: float = 0

    def see(self, problem: str, prompt: int, completions: Sequence[int]) -> None:
        """Take note of a group: the tokens of its prompt and of its completions."""
        mean = sum(completions) / len(completions)
        # The latest group alone: the policy changes, and a mean over epochs would lag behind it.
        self._of_problem[problem] = mean
        self._prompts += prompt
        self._completions += mean

    def of(self, problem: str, prompt: int) -> float:
        """The expected tokens of a completion of the problem, whose prompt has `prompt` tokens."""
        ratio = self._completions / self._prompts if self._prompts else 1.0
        return self._of_problem.get(problem, prompt * ratio)


def shares(lengths: Sequence[float], processes: int, most: int) -> tuple[list[list[int]], list[int]]:
    """The groups with which each process begins, at most `most` of them, and those that wait for any; by their indices.

    The longest goes first, to the process with the least expected length among those with room. Each process has room
    for an equal share of all groups, rounded up.
    """
    order = sorted(range(len(lengths)), key=lambda group: -lengths[group])
    each = min(most, math.ceil(len(lengths) / processes))
    begun, waiting = order[: each * processes], order[each * processes :]
    initial: list[list[int]] = [[] for _ in range(processes)]
    expected = [0.0] * processes
    for group in begun:
        process = min((p for p in range(processes) if len(initial[p]) < each), key=expected.__getitem__)
        initial[process].append(group)
        expected[process] += lengths[group]
    return initial, waiting


@dataclass(frozen=True)
class WaitingGroups:
    """Groups that no process has begun. Each process takes the next ones when it has room, by a count that all share.

    A process that is lost after it took groups is missed where completions are exchanged, as any lost process is.
    """

    waiting: Sequence[int]
    processes: int
    #: Adds to the number of groups that are taken, and returns the sum.
    take: Callable[[int], int]

    def more(self, most: int) -> Sequence[int]:
        """At most `most` groups, and at most this process's share of what is left; none if all are taken."""
        size = 1
        if most > 1:
            left = len(self.waiting) - self.take(0)
            size = min(most, max(1, math.ceil(left / self.processes)))
        end = self.take(size)
        return self.waiting[end - size : end]


# Rollouts: the choice of a step's problems, their completions, and the completions' rewards.


@dataclass(frozen=True)
class Task:
    """The problems on which the policy is trained."""

    problems: list[Problem]
    format: RecordFormat
    instruction: str
    answer: AnswerForm = "native"
    units: tuple[str, ...] = ()
    thinking: tuple[str, str] | None = None
    given: TemplateInput = field(default_factory=TemplateInput)
    """What the chat template gets besides the messages."""
    held_out: tuple[Problem, ...] = ()
    """Problems of the validation split on which the policy is scored while it trains."""

    @staticmethod
    def of(data: Path, validation: ValidationSettings = ValidationSettings()) -> Task:  # noqa: B008 - immutable
        """The problems of a prepared data set. Raises DataError if scores are asked for and no problem is held out."""
        meta, held_out = read_meta(data), list[Problem]()
        if validation.every:
            held_out = read_split(data, "validation")[: validation.problems]
            if not held_out:
                raise DataError(
                    "validation.every scores on held-out problems, and the data set has no split validation; give it "
                    "one (of one list of records, origin.validation_fraction divides it off), or leave validation out"
                )
        form = meta.answer, tuple(meta.units), meta.thinking, TemplateInput.of(meta)
        return Task(read_split(data, "train"), meta.format, meta.instruction, *form, tuple(held_out))

    def fitting(self, tokenizer: PreTrainedTokenizerBase, settings: RolloutSettings, context: int | None) -> Task:
        """The task without problems longer than `rollout.max_prompt_tokens`. Raises DataError if any of the others
        doesn't fit `context`.
        """
        problems, held_out, most = self.problems, self.held_out, settings.max_prompt_tokens
        if most is not None:
            longer = longer_than(most, tokenizer, [*problems, *held_out], self.instruction, self.given)
            problems = [problem for problem in problems if problem.id not in longer]
            held_out = tuple(problem for problem in held_out if problem.id not in longer)
            if not problems or (self.held_out and not held_out):
                raise DataError(f"rollout.max_prompt_tokens={most} leaves none of {len(longer)} problems; raise it")
        if context is not None:
            limit, given = settings.sampling.max_tokens, [*problems, *held_out]
            longer = longer_than(context - limit, tokenizer, given, self.instruction, self.given)
            remedy = f"or leave such problems out by rollout.max_prompt_tokens={context - limit}"
            check_lengths(longer.values(), len(given), context, limit, remedy)
        return replace(self, problems=problems, held_out=held_out)

    def at(self, places: Iterable[int], seed: int) -> list[Problem]:
        """The problems at places of an endless sequence of epochs, each a permutation of all by (seed, epoch)."""
        return [self.problems[problem_index(len(self.problems), seed, place)] for place in places]

    def prompts(self, tokenizer: PreTrainedTokenizerBase, problems: Iterable[Problem]) -> list[list[int]]:
        """The token ids of each problem's chat up to the start of the policy's answer."""
        return prompts_ids(tokenizer, problems, self.instruction, self.given)


@dataclass(frozen=True)
class Group:
    """The completions of one problem, with their texts as graders read them (`qerl.data.prompts`) and their rewards.

    `scores` are the rewards that advantages compare: their sums, or each part that counts; NaN leaves one out.
    `timeouts` counts the completions whose comparison with the answer exceeded the grader's limits, and `waits` are the
    seconds that an environment took for each.
    """

    problem: Problem
    prompt: list[int]
    completions: list[Completion]
    texts: list[str]
    parts: list[dict[str, float | None]]
    rewards: list[float]
    timeouts: int = 0
    scores: Sequence[list[float]] = ()
    waits: Sequence[float] = ()

    @property
    def informative(self) -> bool:
        """Whether the rewards differ. Equal rewards have zero advantages and give no gradient."""
        return bool(differ(torch.tensor(self.scores or [self.rewards])).any())

    @property
    def solved(self) -> bool:
        """Whether a completion is right."""
        return any(part["correct"] == 1 for part in self.parts)


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
        #: The functions of the user that a warning has told to reward nothing.
        self._silent: set[str] = set()

    @cached_property
    def thinking(self) -> Thinking:
        """What ends the policy's thinking."""
        return Thinking(self.policy.tokenizer, self.task.thinking, self.task.given)

    def collect(self, step: int, position: int) -> Rollout:
        """The batch of `step`, the same in every process; earlier steps have used `position` problems.

        With `rollout.resample`, groups of equal rewards are replaced by groups of the next problems, in at most that
        many rounds. If too few groups remain, groups of equal rewards fill the batch.
        """
        rollout = self.settings.rollout
        drawn: list[Group] = []
        idle = [0.0] * self.processes.count
        # Dynamic sampling (DAPO): groups of equal rewards have no gradient, so others take their places.
        for round_ in range(1 + rollout.resample):
            missing = rollout.prompts - sum(group.informative for group in drawn)
            if round_ == 0 or missing > 0:
                start = position + len(drawn)
                chosen = self.task.at(range(start, start + missing), self.settings.seed)
                groups, waited = self._groups(step, chosen, rollout.group_size, self._seed(step, round_))
                drawn += groups
                idle = [sum(times) for times in zip(idle, waited, strict=True)]
        trained = drawn
        if rollout.resample:
            # The sort is stable, so that informative groups keep their order, and the first of the others fill the
            # batch.
            trained = sorted(drawn, key=lambda group: not group.informative)[: rollout.prompts]
        metrics = {"problems": position + len(drawn), **_metrics(drawn)}
        if len(idle) > 1:
            metrics |= {"seconds/idle": statistics.fmean(idle), "seconds/idle_max": max(idle)}
        return Rollout(self._samples(trained), metrics, drawn, trained)

    def _seed(self, step: int, round_: int = 0) -> int:
        # An odd multiplier, so that runs of different seeds don't share the draws of a repetition.
        return step_seed((self.settings.seed + self.settings.rollout.repetition * 0x9E3779B9) % 2**32, step, round_)

    def score(self, step: int) -> dict[str, float]:
        """The scores on held-out problems of the policy after `step`, as the sampler has it, in every process.

        All scores of a run have the same draws (no step has the number 0), so that they differ by the policy alone.
        """
        count = self.settings.validation.completions
        groups, _ = self._groups(step, list(self.task.held_out), count, self._seed(0))
        right = [[part["correct"] == 1 for part in group.parts] for group in groups]
        rewards = [reward for group in groups for reward in group.rewards if not math.isnan(reward)]
        return {
            "validation/pass@1": statistics.fmean(chain(*right)),
            **({"validation/pass@k": statistics.fmean(map(any, right))} if count > 1 else {}),
            "validation/reward": statistics.fmean(rewards or [math.nan]),
        }

    def _groups(self, step: int, chosen: list[Problem], count: int, seed: int) -> tuple[list[Group], list[float]]:
        """The groups of `count` completions of the problems, and the seconds for which each process waited."""
        turns, environment, tokenizer = None, self.settings.environment, self.policy.tokenizer
        if environment:
            read = tokenizer, context_length(self.policy.lm.config.to_dict()), self.policy.stop_token_ids, self.thinking
            turns = Conversations(environment, *read, chosen, self.task.instruction, self.task.given)
        sampling = self.settings.rollout.sampling.model_dump()
        limit = sampling["max_tokens"]
        prompts = turns.prompts(limit) if turns else self.task.prompts(tokenizer, chosen)
        part = self._part(chosen, prompts, count)
        params = SamplingParams(**sampling, count=count, seed=seed, part=part, turns=turns)
        # Graded where they were drawn, so that the processes share this work too.
        with seconds() as busy:
            completions = self.sampler.generate(prompts, params)
            if turns:
                turns.check()
            numbers = [number for number in range(len(prompts)) if completions[number]]
            own = [(prompts[number], completions[number], chosen[number]) for number in numbers]
            had = [[turns.of(number, place) for place in range(count)] for number in numbers] if turns else []
            drawn = list(zip(numbers, self._score(step, own, had), strict=True))
        return self._exchange(drawn, busy.value, len(prompts))

    def _part(self, chosen: list[Problem], prompts: list[list[int]], count: int) -> BatchPart | None:
        """The groups that this process draws; None if it is the only one."""
        if self.processes.count == 1:
            return None
        most = max(self.sampler.max_sequences // count, 1)
        lengths = [self._lengths.of(p.id, len(prompt)) for p, prompt in zip(chosen, prompts, strict=True)]
        initial, waiting = shares(lengths, self.processes.count, most)
        more = WaitingGroups(waiting, self.processes.count, self.processes.counter()).more if waiting else lambda _: ()
        return BatchPart(initial[self.processes.rank], more)

    def _exchange(self, drawn: list[tuple[int, Group]], busy: float, count: int) -> tuple[list[Group], list[float]]:
        """All groups in their order, in every process, and the seconds for which each waited."""
        # Every process gets all groups: the loss is normalized by the whole batch, and micro-batches are cut from it.
        parts = self.processes.gather([(drawn, busy)])
        groups = dict(numbered for part, _ in parts for numbered in part)
        if len(groups) != count or count != sum(len(part) for part, _ in parts):
            raise RuntimeError(f"{count} groups were shared out and other ones came back: a defect of qerl")
        for group in groups.values():
            self._lengths.see(group.problem.id, len(group.prompt), [len(c.token_ids) for c in group.completions])
        longest = max(busy for _, busy in parts)
        return [groups[number] for number in range(count)], [longest - busy for _, busy in parts]

    def _score(
        self,
        step: int,
        drawn: list[tuple[list[int], list[Completion], Problem]],
        conversations: Sequence[Sequence[Conversation]] = (),
    ) -> list[Group]:
        """The groups of prompts with their completions and problems, with rewards, also of their conversations."""
        limit, reward, task = self.settings.rollout.sampling.max_tokens, self.settings.reward, self.task
        texts: list[list[str]] = []
        asked: list[tuple[Problem, Answer]] = []
        for prompt, completions, problem in drawn:
            texts.append([self._text(prompt, completion) for completion in completions])
            of_completions = zip(texts[-1], completions, strict=True)
            asked += [(problem, Answer(text, c.drawn, limit, [*c.token_ids])) for text, c in of_completions]
        own = function_parts(reward, asked, step, task.instruction)
        for name in [name for name in reward.functions if name not in self._silent]:
            if own and all(part[name] is None for part in own):
                self._silent.add(name)
                log.warning(
                    "step %d: reward.functions.%s left out all %d completions; does it `return`?", step, name, len(own)
                )
        for part, conversation in zip(own, chain(*conversations), strict=False):
            part["environment"] = conversation.reward
        parts = iter(
            {**reward_parts(answer, problem, task.format, reward, task.answer, task.units), **of_functions}
            for (problem, answer), of_functions in zip(asked, own, strict=True)
        )
        waits = [[conversation.seconds for conversation in group] for group in conversations] or [[]] * len(drawn)
        return [
            self._group(prompt, completions, problem, read, list(islice(parts, len(completions))), wait)
            for (prompt, completions, problem), read, wait in zip(drawn, texts, waits, strict=True)
        ]

    def _text(self, prompt: list[int], completion: Completion) -> str:
        """The text of a completion as graders read it: the text of its turns, without what an environment replied."""
        ids, decode = completion.token_ids, self.policy.tokenizer.decode
        before = [prompt, *(ids[reply.start : reply.stop] for reply in completion.replies)]
        turns = zip(completion.turns, before, strict=True)
        return "\n".join(self.thinking.text(ids[turn.start : turn.stop], str(decode(ahead))) for turn, ahead in turns)

    def _group(
        self,
        prompt: list[int],
        completions: list[Completion],
        problem: Problem,
        texts: list[str],
        parts: list[dict[str, float | None]],
        waits: Sequence[float],
    ) -> Group:
        settings, form = self.settings, (problem.answer, self.task.format, self.task.answer, self.task.units)
        timeouts = sum(verdict(text, *form) == "timeout" for text in texts)
        weights = settings.reward_weights
        rewards, scores = [total(part, weights) for part in parts], list[list[float]]()
        if settings.reward.aggregation == "normalize_then_sum":
            known = ([part[name] for part in parts] for name in weights)
            scores = [[math.nan if value is None else value for value in values] for values in known]
        if settings.loss.name == "ppo" and any(map(math.isnan, rewards)):
            raise ValueError(
                f"all of reward.functions returned None for a completion of problem {problem.id}, and loss.name=ppo "
                "needs a reward of each; return a number"
            )
        return Group(problem, prompt, completions, texts, parts, rewards, timeouts, scores, waits)

    def _samples(self, groups: list[Group]) -> list[Sample]:
        rewards_PG = torch.tensor([group.rewards for group in groups])
        advantages_PG = torch.zeros_like(rewards_PG)
        if self.settings.reward.aggregation == "normalize_then_sum":
            parts_KPG = torch.tensor([group.scores for group in groups]).transpose(0, 1)
            advantages_PG = summed_advantages(parts_KPG, [*self.settings.reward_weights.values()])
        elif self.settings.loss.name != "ppo":  # for ppo the update computes advantages from values
            advantages_PG = group_advantages(rewards_PG, self.settings.loss.scale_advantages)
        return [
            Sample(group.prompt, *of_completion)
            for group, advantages in zip(groups, advantages_PG.tolist(), strict=True)
            for of_completion in zip(group.completions, group.rewards, advantages, strict=True)
        ]

    def to_store(self, step: int, rollout: Rollout) -> StoredStep | None:
        """The storing of a step, in every process; None if the step isn't stored."""
        limits, last = self.settings.stored_rollouts, self.settings.steps
        if limits.every == 0 or not (step in (1, last) or step % limits.every == 0):
            return None
        chosen, left = dict[int, int](), limits.tokens
        # From the batch's beginning: a choice by rewards would show a reader other completions than the run has.
        for place, group in enumerate(rollout.trained[: limits.problems]):
            lengths = [len(completion.token_ids) for completion in group.completions[: limits.completions]]
            if count := sum(tokens <= left for tokens in accumulate(lengths)):
                chosen[place] = count
                left -= sum(lengths[:count])
        return StoredStep(step, self, rollout, chosen)


def step_seed(seed: int, step: int, round_: int = 0) -> int:
    """A 64-bit seed from a run's seed, step and round, unique for seed < 2^32, step < 2^24 and round < 2^8."""
    return (seed << 32) | (step << 8) | round_


def _metrics(groups: list[Group]) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group.rewards if not math.isnan(reward)]
    parts = [part for group in groups for part in group.parts]
    known = {name: [value for part in parts if (value := part[name]) is not None] for name in parts[0]}
    completions = [completion for group in groups for completion in group.completions]
    timeouts = sum(group.timeouts for group in groups)
    of_turns = {}
    if "environment" in parts[0]:
        of_turns = {
            "turns": statistics.fmean(len(c.turns) for c in completions),
            "environment_tokens": sum(len(c.token_ids) - c.drawn for c in completions),
            "seconds/environment": sum(sum(group.waits) for group in groups),
        }
    return {
        "reward": statistics.fmean(rewards or [math.nan]),
        "reward/std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        **{f"reward/{name}": statistics.fmean(values) for name, values in known.items() if values},
        "reward/equal_groups": statistics.fmean(not group.informative for group in groups),
        "completion_tokens": sum(c.drawn for c in completions),
        "completion_length": statistics.fmean(c.drawn for c in completions),
        "truncated": statistics.fmean(not c.finished for c in completions),
        **({"grading/timeouts": timeouts} if timeouts else {}),
        "entropy/sampler": -sum(sum(c.logprobs) for c in completions) / max(sum(c.drawn for c in completions), 1),
        **of_turns,
    }


# Rollouts that a run stores for people to read: a file for each stored step, with a few problems and completions.
#
# Storing draws no random number and changes no tensor. It reads what the step has computed anyway, and has the update
# read stored completions that are silent. A step that a resumed run repeats rewrites its file, so that no step is
# stored twice.

#: Decimals of stored log-probabilities and entropies.
_DECIMALS = 3


@dataclass(frozen=True)
class StoredStep:
    """A step that is stored: `observe` collects entropies during its update, and `write` writes its file."""

    step: int
    collector: Collector
    rollout: Rollout
    #: The number of completions that are stored of each stored group, by the group's place in the batch.
    chosen: dict[int, int]
    _entropies: dict[int, list[float]] = field(default_factory=dict)

    @property
    def index(self) -> set[int]:
        """The stored completions, by their index in the batch."""
        size = self.collector.settings.rollout.group_size
        return {place * size + number for place, count in self.chosen.items() for number in range(count)}

    def observe(self, batch: MicroBatch, entropy_NT: torch.Tensor) -> None:
        """Copy the entropies of stored completions, which are rows of a micro-batch."""
        stored = self.index
        for row, (index, read) in enumerate(zip(batch.index, batch.read_N.tolist(), strict=True)):
            if read and index in stored:
                tokens = len(self.rollout.samples[index].completion.token_ids)
                self._entropies[index] = _rounded(entropy_NT[row, :tokens].tolist())

    def write(self, folder: Path) -> None:
        """Write the file; every process of the run must call this, because each has entropies of its micro-batches."""
        processes = self.collector.processes
        entropies = dict(processes.gather(list(self._entropies.items())))
        if processes.writes:
            write_rows(folder / rollouts_file(self.step), [self._row(place, entropies) for place in self.chosen])

    def _row(self, place: int, entropies: dict[int, list[float]]) -> RolloutRow:
        group, collector, task = self.rollout.trained[place], self.collector, self.collector.task
        tokenizer, thinking, settings = collector.policy.tokenizer, collector.thinking, collector.settings
        stored = []
        for number, completion in enumerate(group.completions[: self.chosen[place]]):
            ids, index = completion.token_ids, place * settings.rollout.group_size + number
            # Of a conversation, with the marks of its turns.
            hidden = () if completion.replies else thinking.hidden
            text = str(tokenizer.decode(ids)) if completion.replies else thinking.written(ids)
            advantage = None if settings.loss.name == "ppo" else round(self.rollout.samples[index].advantage, _DECIMALS)
            stored.append(
                StoredCompletion(
                    tokens=token_texts(tokenizer, ids, text, hidden),
                    logprobs=_rounded(completion.logprobs),
                    entropies=entropies[index],
                    parts=group.parts[number],
                    reward=None if math.isnan(group.rewards[number]) else group.rewards[number],
                    advantage=advantage,
                    extracted=extract(group.texts[number], task.format, task.answer, task.units),
                    finished=completion.finished,
                    replies=[(reply.start, reply.stop) for reply in completion.replies],
                )
            )
        return RolloutRow(
            step=self.step,
            problem=group.problem.id,
            prompt=str(tokenizer.decode(group.prompt)),
            gold=group.problem.answer,
            completions=stored,
        )


def _rounded(values: list[float]) -> list[float]:
    return [round(value, _DECIMALS) + 0.0 for value in values]  # + 0.0 makes -0.0 a plain zero


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str, hidden: Collection[int]) -> list[str]:
    """The text of each token of `ids`, whose decoded text is `text`; joined, they are `text`.

    The special tokens `hidden` have no text.
    A character of several tokens belongs to the last of them. If a tokenizer's whole text isn't what its tokens decode
    to one after the other, the last token has all that differs.
    """
    stream = DecodeStream(skip_special_tokens=False)
    pieces = ["" if id in hidden else stream.step(tokenizer.backend_tokenizer, id) or "" for id in ids]
    done = 0
    for place, piece in enumerate(pieces):
        if not text.startswith(piece, done):
            pieces[place:] = [""] * (len(pieces) - place)
            break
        done += len(piece)
    if pieces:
        pieces[-1] += text[done:]
    return pieces
