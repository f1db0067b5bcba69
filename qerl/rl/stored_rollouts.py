"""Rollouts that a run stores for people to read: a file for each stored step, with a few problems and completions.

Storing draws no random number and changes no tensor. It reads what the step has computed anyway, and has the update
read stored completions that are silent. A step that a resumed run repeats rewrites its file, so that no step is stored
twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from qerl.data.answers import extract
from qerl.results.files import write_rows
from qerl.results.paths import rollouts_file
from qerl.results.schema.training import RolloutRow, StoredCompletion
from qerl.rl.rollouts import Collector, Group, Rollout
from qerl.rl.sequence_packing import MicroBatch
from qerl.settings.run import StoredRollouts

#: Decimals of stored log-probabilities and entropies.
_DECIMALS = 3


class RolloutStore:
    """Chooses which rollouts of a run are stored in `folder`."""

    def __init__(self, collector: Collector, folder: Path) -> None:
        self.collector = collector
        self.folder = folder

    def begin(self, step: int, rollout: Rollout) -> StoredStep | None:
        """The storing of a step, in every process; None if the step isn't stored."""
        settings = self.collector.settings
        every, last = settings.stored_rollouts.every, settings.steps
        if every == 0 or not (step in (1, last) or step % every == 0):
            return None
        return StoredStep(
            step, self.collector, rollout, _chosen(rollout.trained, settings.stored_rollouts), self.folder
        )


def _chosen(groups: list[Group], settings: StoredRollouts) -> dict[int, int]:
    """The number of completions that are stored of each stored group, by the group's place in the batch."""
    chosen: dict[int, int] = {}
    left = settings.tokens
    for place, group in enumerate(groups[: settings.problems]):
        lengths = [len(completion.token_ids) for completion in group.completions[: settings.completions]]
        if count := sum(tokens <= left for tokens in accumulate(lengths)):
            chosen[place] = count
            left -= sum(lengths[:count])
    return chosen


@dataclass(frozen=True)
class StoredStep:
    """A step that is stored: `look` collects entropies during its update, and `write` writes its file."""

    step: int
    collector: Collector
    rollout: Rollout
    chosen: dict[int, int]
    folder: Path
    _entropies: dict[int, list[float]] = field(default_factory=dict)

    @property
    def _size(self) -> int:
        return self.collector.settings.rollout.group_size

    @property
    def index(self) -> set[int]:
        """The stored completions, by their index in the batch."""
        return {place * self._size + number for place, count in self.chosen.items() for number in range(count)}

    def look(self, batch: MicroBatch, entropy_NT: torch.Tensor) -> None:
        """Copy the entropies of stored completions, which are rows of a micro-batch."""
        stored = self.index
        for row, (index, read) in enumerate(zip(batch.index, batch.read_N.tolist(), strict=True)):
            if read and index in stored:
                tokens = len(self.rollout.samples[index].completion.token_ids)
                self._entropies[index] = _rounded(entropy_NT[row, :tokens].tolist())

    def write(self) -> None:
        """Write the file; every process of the run must call this, because each has entropies of its micro-batches."""
        processes = self.collector.processes
        entropies = dict(processes.gather(list(self._entropies.items())))
        if processes.writes:
            write_rows(self.folder / rollouts_file(self.step), [self._row(place, entropies) for place in self.chosen])

    def _row(self, place: int, entropies: dict[int, list[float]]) -> RolloutRow:
        group = self.rollout.trained[place]
        return RolloutRow(
            step=self.step,
            problem=group.problem.id,
            prompt=str(self.collector.policy.tokenizer.decode(group.prompt)),
            gold=group.problem.answer,
            completions=[
                self._completion(group, number, place * self._size + number, entropies)
                for number in range(self.chosen[place])
            ],
        )

    def _completion(self, group: Group, number: int, index: int, entropies: dict[int, list[float]]) -> StoredCompletion:
        completion, text, task = group.completions[number], group.texts[number], self.collector.task
        ids, thinking = completion.token_ids, self.collector.thinking
        ppo = self.collector.settings.loss.name == "ppo"
        return StoredCompletion(
            tokens=token_texts(self.collector.policy.tokenizer, ids, thinking.written(ids), thinking.hidden),
            logprobs=_rounded(completion.logprobs),
            entropies=entropies[index],
            parts=group.parts[number],
            reward=group.rewards[number],
            advantage=None if ppo else round(self.rollout.samples[index].advantage, _DECIMALS),
            extracted=extract(text, task.format, task.answer, task.units),
            finished=completion.finished,
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
