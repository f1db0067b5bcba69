"""The parts that all harnesses share: the evaluated policy, its completions, and the data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from transformers import PreTrainedTokenizerBase

from qerl.checkpoints.files import check_room
from qerl.data.grading import Verdict, extract, verdict
from qerl.data.prompts import TemplateInput, Thinking, check_lengths
from qerl.data.records import Problem
from qerl.rollout.sampler import Completion, Sampler, SamplingParams
from qerl.settings.data import AnswerForm, RecordFormat
from qerl.settings.workflow import StockTask


@dataclass(frozen=True)
class Drawn:
    """One completion up to the first stop string, with its text as graders read it (`qerl.data.prompts`)."""

    prompt: str
    text: str
    tokens: int
    finished: bool


@dataclass(frozen=True)
class GradedCompletion:
    """A completion, the answer that the harness extracted from it (None if it found none), and the harness's score.

    `flexible`: the score by lm-eval's flexible-extract, where the task has it beside the strict match. `timeout`: the
    harness's comparison exceeded its limit of CPU time.
    """

    drawn: Drawn
    extracted: str | None
    correct: bool
    flexible: bool | None = None
    timeout: bool = False


#: The columns from which a stock task makes its prompt and gold answer.
STOCK_COLUMNS: dict[StockTask, tuple[str, ...]] = {
    "gsm8k": ("question", "answer"),
    "math_500": ("problem", "solution"),
    "aime24": ("problem", "answer"),
    "aime25": ("problem", "answer"),
    "amc23": ("problem", "answer"),
}


@dataclass(frozen=True)
class Stock:
    """A task of the harness itself; `records` are the problems' own, in the columns that it reads (STOCK_COLUMNS)."""

    task: StockTask
    records: list[dict[str, str]]
    chat: bool = True
    fewshot: int | None = None
    """Number of examples before the question, from `examples`; None takes the task's number."""
    examples: Sequence[dict[str, str]] = ()


@dataclass(frozen=True)
class EvaluationSet:
    """A data set's problems, their records' format, the instruction appended to each question, the answers' form.

    `thinking` names delimiters of thinking, and `given` has what chat templates get (`DatasetSettings`).
    With `stock`, prompt and gold answer are the harness's, and instruction, form and units have no effect.
    """

    name: str
    format: RecordFormat
    instruction: str
    problems: list[Problem]
    answer: AnswerForm = "native"
    units: tuple[str, ...] = ()
    stock: Stock | None = None
    thinking: tuple[str, str] | None = None
    given: TemplateInput = field(default_factory=TemplateInput)

    def read(self, text: str) -> str | None:
        """The answer that the grader of training reads in a completion; None if it states none."""
        return extract(text, self.format, self.answer, self.units)

    def judge(self, text: str, problem: Problem) -> Verdict:
        """The verdict of the grader of training on a completion."""
        return verdict(text, problem.answer, self.format, self.answer, self.units)


@dataclass(frozen=True)
class EvaluatedPolicy:
    """A sampler with its tokenizer; `params.count` completions of each prompt are drawn, one for each repeat.

    `context` is the most tokens of a prompt with its completion, or None if unknown. `delimiters` name what begins and
    ends thinking, by default the tokenizer's, and `given` is what the chat template gets.
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    context: int | None = None
    delimiters: tuple[str, str] | None = None
    given: TemplateInput = field(default_factory=TemplateInput)

    @cached_property
    def thinking(self) -> Thinking:
        """What ends the policy's thinking."""
        return Thinking(self.tokenizer, self.delimiters, self.given)

    def draw(self, prompts: Sequence[list[int]], stop: Sequence[str] = ()) -> list[list[Drawn]]:
        """Return the completions of each prompt (token ids), in order, cut at the first of the stop strings."""
        drawn: list[list[Drawn]] = []
        for prompt, completions in zip(prompts, self.complete(prompts), strict=True):
            before = cast(str, self.tokenizer.decode(prompt))
            texts: dict[tuple[int, ...], str] = {}  # many completions of a prompt are the same
            drawn.append([])
            for completion in completions:
                ids = tuple(completion.token_ids)
                text = texts[ids] if ids in texts else texts.setdefault(ids, self.thinking.text(ids, before))
                end = min((text.index(string) for string in stop if string in text), default=None)
                drawn[-1].append(Drawn(before, text[:end], len(ids), completion.finished or end is not None))
        return drawn

    def complete(self, prompts: Sequence[list[int]]) -> list[list[Completion]]:
        """Return the completions of each prompt (token ids) as the sampler draws them."""
        if self.context is not None:
            limit = self.params.max_tokens
            check_room(self.context, limit, "max_tokens")
            longer = (len(prompt) for prompt in prompts if len(prompt) > self.context - limit)
            check_lengths(longer, len(prompts), self.context, limit, "or leave these prompts out")
        return self.sampler.generate(prompts, self.params)
