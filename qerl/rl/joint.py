"""Joint updates of the runs of a cohort: passes over rows that hold micro-batches of several runs.

A run asks for the hidden states of a micro-batch, computes its loss from them, and hands back their gradient. Once all
runs wait, one pass computes the states of several, and once these have their losses, one backward pass their gradients.
Losses, clipping, optimizer and metrics stay with each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from qerl.kernels.packed_sequences import Packing
from qerl.models.joint import JointModel, Segments
from qerl.models.policy import Policy
from qerl.models.structure import structure_of
from qerl.rl.packing import PaddedSize, Row, joined, padded_tokens, token_states
from qerl.rl.passes import PassGraphs, Recomputation, pass_graphs
from qerl.settings.base import ConfigError
from qerl.settings.run import RunSettings


@dataclass(frozen=True)
class Forward:
    """A run asks for the states of a row."""

    row: Row
    #: Whether a backward pass follows.
    gradients: bool
    #: The most tokens of a row whose pass may be a CUDA graph.
    graph_tokens: int
    #: The tokens of the row whose logits the run keeps for the backward pass.
    logits_tokens: int


@dataclass(frozen=True)
class Backward:
    """A run hands back the gradient of its states [M, H]."""

    grad: Tensor


@dataclass(frozen=True)
class _Open:
    """A forward pass whose backward pass is due."""

    segments: Segments
    states: Tensor
    #: The number of states of each run of the pass.
    counts: dict[int, int]


class JointPasses:
    """The passes of all runs of a cohort. One forward pass at most waits for its backward pass."""

    def __init__(self, policies: Sequence[Policy], settings: RunSettings) -> None:
        """`settings` are a run's; all have those in common that `qerl.jobs.refused_engine` names.

        Raises `ConfigError` for a model whose attention takes no packed rows.
        """
        self._policy, self._settings = policies[0], settings
        if not structure_of(self._policy.lm.config).takes_packed_rows:
            raise ConfigError(
                "joint_updates needs attention that takes packed rows, which this model's doesn't; set "
                "joint_updates=false"
            )
        self.model = JointModel(policies)
        chosen = settings.gradient_checkpointing == "auto" and self._policy.device.type == "cuda"
        self._recomputation = Recomputation(self._policy) if chosen else None
        self._open: _Open | None = None
        #: The updates that read weights which are kept unpacked, and what ends that.
        self._readers, self._unpacked = 0, ExitStack()
        #: By runs and size, what graphs read, which stays in place; and the latest rows, which updates repeat.
        self._equal: dict[tuple[int, ...], Segments] = {}
        self._latest: dict[tuple[int, ...], tuple[list[Row], Row]] = {}
        none = torch.zeros(1, 0, dtype=torch.long, device=self._policy.device)
        self._empty = Row(none, none, Packing.of([], [], none.device), none[0])

    @cached_property
    def graphs(self) -> PassGraphs | None:
        """Passes as CUDA graphs, if they can be; read after the first rollout, which may move the weights."""
        return pass_graphs(self._policy, self._settings, self._recomputation)

    @contextmanager
    def weights(self, tokens: int, in_graphs: bool) -> Iterator[None]:
        """A context of a run's update, in which packed weights are kept unpacked where memory has room.

        `tokens` is the length of the run's longest row. Graphs unpack weights into their own buffers.
        """
        self.model.use_trained()
        if self._recomputation and not self._readers and not in_graphs:
            most = min(tokens * self.model.runs, self._settings.micro_batch_tokens)
            self._unpacked.enter_context(self._recomputation.weights(max(most, tokens)))
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if not self._readers:
                self._unpacked.close()

    def answer(self, requests: Mapping[int, Forward | Backward], runs: Sequence[int]) -> Mapping[int, Tensor | None]:
        """Do one pass for some of the requests, in order, and return their answers. `runs` are those that go on.

        Forward requests are answered by states [M, H] that need a gradient if the request says so.
        """
        if grads := {run: one.grad for run, one in requests.items() if isinstance(one, Backward)}:
            self._go_back(grads)
            return dict.fromkeys(grads)
        self._open = None  # all of its runs have failed
        asked = {run: one for run, one in requests.items() if isinstance(one, Forward)}
        # Passes without gradients come first in an update, so that runs without any wait for the others.
        reading = {run: one for run, one in asked.items() if not one.gradients}
        return self._go_forward(reading or asked, runs)

    def _go_forward(self, asked: Mapping[int, Forward], runs: Sequence[int]) -> dict[int, Tensor]:
        """Compute the states of some of the requests; `runs` are all that go on, in order."""
        # A graph has a segment for each run of a fixed group, and all are of one length, so that few are captured.
        each = padded_tokens(max(one.row.ids.numel() for one in asked.values()))
        most = min(one.graph_tokens for one in asked.values()) if self.graphs else 0
        if each <= most:
            group = self._group(next(iter(asked)), runs, max(1, min(most, self._settings.micro_batch_tokens) // each))
            chosen = {run: asked[run] for run in group if run in asked}
        else:
            chosen = self._fitting(asked)
        gradients = any(one.gradients for one in chosen.values())
        with torch.set_grad_enabled(gradients):
            segments, states = self._by_graph(chosen, group, each) if each <= most else self._by_rows(chosen)
        counts = {run: len(one.row.states_M) for run, one in chosen.items()}
        if gradients:
            self._open = _Open(segments, states, counts)
        parts = states.detach().split(list(counts.values()))
        return {run: part.detach().requires_grad_(gradients) for run, part in zip(counts, parts, strict=True)}

    @staticmethod
    def _group(run: int, runs: Sequence[int], most: int) -> Sequence[int]:
        """The run's group, of groups of `most` of the runs at most, which are as large as one another."""
        size = math.ceil(len(runs) / math.ceil(len(runs) / most))
        first = runs.index(run) // size * size
        return runs[first : first + size]

    def _fitting(self, asked: Mapping[int, Forward]) -> dict[int, Forward]:
        """The first requests whose rows together have no more tokens than a micro-batch may have."""
        chosen: dict[int, Forward] = {}
        room = self._settings.micro_batch_tokens
        for run, one in asked.items():
            tokens = one.row.ids.numel()
            if not chosen or tokens <= room:
                chosen[run] = one
                room -= tokens
        return dict(sorted(chosen.items()))

    def _by_rows(self, chosen: Mapping[int, Forward]) -> tuple[Segments, Tensor]:
        """Segments and states of the rows one behind the other."""
        lengths = [one.row.ids.numel() for one in chosen.values()]
        segments = Segments(list(chosen), lengths, self._policy.device)
        if self._recomputation and torch.is_grad_enabled():
            self._recomputation.choose(sum(lengths), max(one.logits_tokens for one in chosen.values()))
        training, recomputes = self._policy.lm.training, self._settings.gradient_checkpointing is not False
        if recomputes:  # which blocks do in training mode alone
            self._policy.lm.train()
        with self.model.at(segments):
            states = token_states(self._policy, joined([one.row for one in chosen.values()]))
        if recomputes:
            self._policy.lm.train(training)
        return segments, states

    def _by_graph(self, chosen: Mapping[int, Forward], runs: Sequence[int], each: int) -> tuple[Segments, Tensor]:
        """Segments and states of rows of a fixed size; a run without a request has a segment of padding."""
        assert self.graphs is not None
        rows = [chosen[run].row if run in chosen else self._empty for run in runs]
        key = *runs, each
        if key not in self._equal:
            self._equal[key] = Segments(list(runs), [each] * len(runs), self._policy.device)
        before, row = self._latest.get(key, ([], self._empty))
        if not before or any(one is not other for one, other in zip(rows, before, strict=True)):
            row = joined([*(row.filled(each) for row in rows[:-1]), rows[-1]])
            self._latest[key] = rows, row
        # A capture records to which tensors gradients are added, those of runs without a request as well.
        absent = [run for run in runs if run not in chosen]
        with self.model.at(self._equal[key]), self.model.gradients_in_place(absent):
            states = self.graphs.states(row, PaddedSize.of(row, each * len(runs)), key)
        return self._equal[key], states

    def _go_back(self, grads: Mapping[int, Tensor]) -> None:
        """Add the gradients of the open pass; those of runs that have failed are zero."""
        assert self._open is not None
        opened, self._open = self._open, None
        width = opened.states.shape[1]
        parts = [
            grads[run] if run in grads else opened.states.new_zeros(count, width)
            for run, count in opened.counts.items()
        ]
        with self.model.at(opened.segments):
            opened.states.backward(torch.cat(parts))


@dataclass(frozen=True)
class JointUpdate:
    """A run's part in joint updates; `ask` waits until a request is answered."""

    run: int
    passes: JointPasses
    ask: Callable[[Forward | Backward], Any]

    def clear_gradients(self) -> None:
        """Give the run's trained tensors gradients of zero, to which the passes add. They may have changed before."""
        self.passes.model.use_trained()
        self.passes.model.clear_gradients(self.run)

    def states(self, batch: Row, graph_tokens: int, logits_tokens: int) -> Tensor:
        """The states [M, H] of a micro-batch's completion tokens; see `Forward`."""
        states: Tensor = self.ask(Forward(batch, torch.is_grad_enabled(), graph_tokens, logits_tokens))
        return states

    def add_gradients(self, states: Tensor) -> None:
        """Continue the loss's backward pass, which has reached the states, and add the trained tensors' gradients."""
        assert states.grad is not None
        self.ask(Backward(states.grad))
