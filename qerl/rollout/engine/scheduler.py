"""The scheduler of sequences: continuous batching on a paged cache, with a group's prompt computed once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qerl.kernels.decode_state import IDLE, DecodeState, SamplingState
from qerl.kernels.delta_state import DeltaStates
from qerl.kernels.draft_state import MOST_DRAFTED
from qerl.kernels.geometry import PAGE, splits_of
from qerl.kernels.kv_cache import KVCache
from qerl.rollout.engine.cuda_graphs import DecodeGraphs
from qerl.rollout.engine.decoder import Decoder
from qerl.rollout.engine.paging import Pages
from qerl.rollout.engine.phases import PhaseClock
from qerl.rollout.engine.prefill import Prefill
from qerl.rollout.engine.sequences import DecodedSequence, ProgressLook, WaitingGroup
from qerl.rollout.engine.speculation import Speculation
from qerl.rollout.engine.transfer import Download, upload
from qerl.rollout.engine.verification import VerifyGraphs
from qerl.rollout.sampler import Completion, SamplingParams


@dataclass(frozen=True)
class Pool:
    """A sampler's device memory (cache and slots), the cache's page counts, and the graphs on it.

    `memory` is the graphs' memory pool, and `look_every` the number of decode steps between two looks. `verify` is
    there only for drafts, and `states` only for delta nets.
    """

    decoder: Decoder
    state: DecodeState
    cache: KVCache
    pages: Pages
    sampling: SamplingState
    steps: DecodeGraphs
    prefill: Prefill
    look_every: int
    verify: VerifyGraphs | None
    memory: Any
    states: DeltaStates | None = None


class Scheduler:
    """One call of `generate`; prompts of up to `prefill_tokens` tokens are computed together. `speculation` is given
    where the pool can verify drafts.
    """

    def __init__(
        self,
        pool: Pool,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        prefill_tokens: int,
        speculation: Speculation | None,
    ) -> None:
        self._prefill_tokens = prefill_tokens
        self._speculation, self._verifier = speculation, pool.verify
        self.clock = PhaseClock(pool.decoder.device)
        self._pool, self._params = pool, params
        self._truncated = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)
        self._replayed = params.replay is not None
        self._splits = splits_of(pool.pages.needed(max(map(len, prompts)) + params.max_tokens))
        self._active: dict[int, DecodedSequence] = {}
        self._free = list(range(pool.state.count - 1, -1, -1))
        self._table = np.zeros(tuple(pool.state.pages.shape), dtype=np.int32)
        self._done: dict[int, DecodedSequence] = {}
        #: Downloads in flight: looks, and the tokens and log-probabilities of sequences.
        self._looks: deque[ProgressLook] = deque()
        self._fetched: deque[tuple[Sequence[DecodedSequence], Download]] = deque()
        self._prompts = prompts
        #: Whether groups may wait that no sampler has taken.
        self._more = params.part is not None
        groups = map(self._group, params.part.initial if params.part else range(len(prompts)))
        # The longest prompts first, so that the batch's tail is short.
        self._queue = deque(sorted(groups, key=lambda group: -len(group.prompt)))

    def _group(self, number: int) -> WaitingGroup:
        prompt, count, first = list(self._prompts[number]), self._params.count, self._params.first * self._params.count
        places = [(number * count + c, self._params.limit(number, c)) for c in range(count)]
        return WaitingGroup(
            prompt, deque(DecodedSequence(place, first + place, prompt, limit) for place, limit in places)
        )

    def _waits(self) -> bool:
        """Whether a group waits to enter; without one, a group is taken that waits for any sampler of the batch."""
        if not self._queue and self._more and self._params.part:
            taken = self._params.part.more(1)
            self._queue.extend(map(self._group, taken))
            self._more = len(taken) > 0
        return len(self._queue) > 0

    @torch.no_grad()
    def run(self, stops: frozenset[int]) -> list[list[Completion]]:
        """Draw all completions, or those of the part; returns them in the order of the prompts."""
        while self._active or self._waits():
            self._admit()
            if not self._verify():
                self._decode()
            self._collect()
        self._catch_up()
        self.clock.end("between")
        groups: list[list[Completion]] = [[] for _ in self._prompts]
        for index, s in sorted(self._done.items()):
            groups[index // self._params.count].append(Completion(s.tokens, s.logprobs, s.tokens[-1] in stops))
        return groups

    # --- sequences enter ---

    def _admit(self) -> None:
        """Fill free slots with waiting sequences as long as pages are free, and draw their first tokens."""
        fresh: list[WaitingGroup] = []
        starting: list[tuple[DecodedSequence, WaitingGroup]] = []
        copies: list[tuple[int, int]] = []
        while self._free and self._waits() and self._has_room(self._queue[0], len(starting)):
            group = self._queue[0]
            sequence = group.waiting.popleft()
            sequence.slot = self._free.pop()
            if not group.pages:
                group.pages = self._pool.pages.take(self._pool.pages.needed(len(group.prompt)))
                group.row = sequence.slot
                fresh.append(group)
            copies += self._hand_over(group, sequence)
            starting.append((sequence, group))
            if not group.waiting:
                self._queue.popleft()
        if not starting:
            return
        self.clock.end("between")
        for batch in _batches(fresh, self._prefill_tokens):
            logits = self._pool.prefill.logits(*zip(*((g.prompt, g.pages, g.row) for g in batch), strict=True))
            for group, row in zip(batch, logits, strict=True):
                group.logits = row
        self._copy_pages(copies)
        self._copy_states(starting)
        self._start(starting)
        self.clock.end("prefill")

    def _has_room(self, group: WaitingGroup, starting: int) -> bool:
        """Whether enough pages are free for the next sequence of `group`, and for each one before it to grow by a
        page.
        """
        pages, others = self._pool.pages, len(self._active) + starting
        cost = 0 if group.pages else pages.needed(len(group.prompt))
        cost += len(group.waiting) > 1 and len(group.prompt) % pages.size > 0
        if not others and cost + 1 > pages.available:
            for other in self._queue:
                if other is not group and other.pages:
                    pages.give_back(other.pages)
                    other.pages, other.logits = [], None
        return cost + others <= pages.available

    def _hand_over(self, group: WaitingGroup, sequence: DecodedSequence) -> list[tuple[int, int]]:
        """Give the sequence the prompt's pages: full ones are shared, and a partly filled one is copied.

        Returns the copies to make as (from, to). The last sequence of a group receives the group's own pages.
        """
        pages = self._pool.pages
        if not group.waiting:
            sequence.pages = list(group.pages)
            return []
        whole = len(group.prompt) // pages.size
        sequence.pages = pages.share(group.pages[:whole])
        rest = group.pages[whole:]
        sequence.pages += pages.take(len(rest))
        return list(zip(rest, sequence.pages[whole:], strict=True))

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            self._pool.cache.copy_pages(*upload(copies, torch.int64, self._pool.decoder.device).T)

    def _copy_states(self, starting: Sequence[tuple[DecodedSequence, WaitingGroup]]) -> None:
        """Copy the states after prompts to slots. Only the last group can have sequences that wait: its are held."""
        states, last = self._pool.states, starting[-1][1]
        copies = [(group.row, sequence.slot) for sequence, group in starting if group.row != sequence.slot]
        if states is not None and last.waiting and last.row != states.held:
            copies.append((last.row, states.held))
            last.row = states.held
        if states is not None and copies:
            states.copy(*upload(copies, torch.int64, self._pool.decoder.device).T)

    def _start(self, starting: Sequence[tuple[DecodedSequence, WaitingGroup]]) -> None:
        """Write sequences to their slots and draw their first tokens."""
        state = self._pool.state
        sequences = [sequence for sequence, _ in starting]
        for sequence in sequences:
            self._active[sequence.slot] = sequence
            self._show_pages(sequence)
        columns = [(s.slot, len(s.prompt) + s.drawn - 1, s.drawn, s.key, s.limit) for s in sequences]
        rows, position, drawn, key, limit = upload(columns, torch.int64, state.token.device).T
        state.position[rows], state.drawn[rows] = position.int(), drawn.int()
        state.limit[rows], state.sequence[rows] = limit.int(), key
        self._upload_pages()
        if self._verifier is not None:
            self._verifier.texts.enter(rows, [divmod(s.index, self._params.count) for s in sequences])
        logits = torch.stack([group.logits for _, group in starting if group.logits is not None])
        if self._params.replay:
            self._upload_replay(sequences, rows)
        draw = self._pool.decoder.operations.draw
        draw(logits, rows.int(), state, self._pool.sampling, self._truncated, self._replayed)
        for sequence in sequences:
            sequence.steps += 1

    def _upload_replay(self, sequences: Sequence[DecodedSequence], rows: Tensor) -> None:
        """Put the tokens that are to come into the slots `rows`, where a replayed draw reads them."""
        assert self._params.replay is not None
        traces = [self._params.replay[s.index // self._params.count][s.index % self._params.count] for s in sequences]
        most = max(s.limit for s in sequences)
        padded = np.zeros((len(traces), most), dtype=np.int32)
        for row, trace in zip(padded, traces, strict=True):
            row[: len(trace)] = trace[:most]
        tokens = self._pool.state.tokens
        tokens[rows, :most] = upload(padded, torch.int32, tokens.device)

    def _show_pages(self, sequence: DecodedSequence) -> None:
        self._table[sequence.slot, : len(sequence.pages)] = sequence.pages

    def _upload_pages(self) -> None:
        pages = self._pool.state.pages
        pages.copy_(upload(self._table, torch.int32, pages.device))

    # --- sequences go on ---

    def _decode(self) -> None:
        """Launch the next steps of all sequences; sequences that then have all their tokens leave."""
        speculation, verifier, active = self._speculation, self._verifier, len(self._active)
        every = self._pool.look_every
        steps = speculation.plain_steps(active, every) if speculation else every
        left = max((self._params.max_tokens - sequence.sure for sequence in self._active.values()), default=0)
        count = min(steps, left)
        self._grow(count)
        self.clock.end("between")
        self._pool.steps.run(list(self._active), count, self._splits, self._truncated, self._replayed)
        self.clock.end("decode", len(self._active), count)
        self._advance(count, 0)
        if speculation is not None and verifier is not None and speculation.tries(len(self._active)):
            verifier.look(list(self._active))

    def _verify(self) -> bool:
        """Launch a step that verifies drafts; False if plain steps are expected to take less time."""
        rows = self._speculation.rows(len(self._active)) if self._speculation else 0
        if self._verifier is None or not rows:
            return False
        self._grow(1 + MOST_DRAFTED)
        self.clock.end("between")
        self._verifier.run(list(self._active), rows, self._splits, self._truncated, self._replayed)
        self.clock.end("verify", rows, 1)
        self._advance(1, MOST_DRAFTED)
        return True

    def _advance(self, least: int, more: int) -> None:
        """Note that steps were launched that give each sequence `least` tokens and may give `more`."""
        for sequence in self._active.values():
            sequence.steps += least
            sequence.drafted += more
        self._end([sequence for sequence in self._active.values() if sequence.sure >= self._params.max_tokens])

    def _grow(self, tokens: int) -> None:
        """Take pages for the tokens that the next steps may draw for each sequence; if too few are free, interrupt the
        sequences that started last.
        """
        pages, grown = self._pool.pages, False
        for sequence in list(self._active.values()):
            missing = self._missing(sequence, tokens)
            if missing > pages.available:
                self._catch_up()  # finished sequences free their pages, and it is known which drafts were right
                missing = self._missing(sequence, tokens)
            while missing > pages.available and sequence.slot in self._active:
                self._interrupt(next(reversed(self._active.values())))
            if missing > 0 and sequence.slot in self._active:
                sequence.pages += pages.take(missing)
                self._show_pages(sequence)
                grown = True
        if grown:
            self._upload_pages()

    def _missing(self, sequence: DecodedSequence, tokens: int) -> int:
        """Pages that a sequence lacks for so many more tokens."""
        drawn = min(sequence.drawn + tokens, self._params.max_tokens)
        return self._pool.pages.needed(len(sequence.prompt) + drawn - 1) - len(sequence.pages)

    def _interrupt(self, sequence: DecodedSequence) -> None:
        """Remove a sequence from its slot. It continues later, after prefill of its prompt and tokens so far.

        The host has caught up before, so the sequence isn't finished. Only here does the device wait for the host.
        """
        self._pool.state.position[sequence.slot] = IDLE
        self._fetch([sequence])
        self._leave(sequence)
        self._catch_up()
        self._queue.appendleft(WaitingGroup(sequence.prompt + sequence.tokens, deque([sequence])))

    # --- sequences leave ---

    def _collect(self) -> None:
        """Request which sequences have finished, without waiting: the result is read after the next steps."""
        if self._active:
            active = {slot: (s, s.steps, s.drafted) for slot, s in self._active.items()}
            progress, verifier = self._pool.state.progress[:, :-1].flatten(), self._verifier
            if verifier is not None:
                progress = torch.cat([progress, verifier.expected.view(torch.int32)])
            searches = verifier.searches if verifier is not None else 0
            self._looks.append(ProgressLook(active, searches, Download.of(progress)))
        while len(self._looks) > 1:
            self._see(self._looks.popleft())
        while self._fetched and self._fetched[0][1].arrived:
            self._store(*self._fetched.popleft())

    def _catch_up(self) -> None:
        """Wait for the device and read all downloads in flight."""
        while self._looks:
            self._see(self._looks.popleft())
        while self._fetched:
            self._store(*self._fetched.popleft())

    def _see(self, look: ProgressLook) -> None:
        """End the finished ones of the sequences that were in the slots; some may have left since."""
        with self.clock.waiting():
            host = look.progress.wait()
        count = self._pool.state.count
        positions, drawn, ended = host[:count].tolist(), host[count : 2 * count].tolist(), []
        for slot, (sequence, steps, drafted) in look.active.items():
            if self._active.get(slot) is not sequence:
                continue
            if positions[slot] == IDLE:
                ended.append(sequence)
            sequence.right, sequence.judged = drawn[slot] - steps, drafted
        self._end(ended)
        if self._speculation is not None:
            self._speculation.learn(look.searches, host[2 * count :].view(torch.float32).tolist())

    def _end(self, sequences: Sequence[DecodedSequence]) -> None:
        self._fetch(sequences)
        for sequence in sequences:
            self._leave(sequence)
            self._done[sequence.index] = sequence

    def _fetch(self, sequences: Sequence[DecodedSequence]) -> None:
        """Start the download of the sequences' tokens and log-probabilities, before others use their slots."""
        if not sequences:
            return
        state, most = self._pool.state, min(max(s.drawn for s in sequences), self._params.max_tokens)
        rows = upload([s.slot for s in sequences], torch.int64, state.token.device)
        if self._verifier is not None:
            self._pool.decoder.operations.keep(rows, self._verifier.texts.state, state)
        logprobs = state.logprobs[rows, :most].view(torch.int32)
        drawn = torch.cat([state.drawn[rows, None], state.tokens[rows, :most], logprobs], 1)
        self._fetched.append((sequences, Download.of(drawn)))

    def _store(self, sequences: Sequence[DecodedSequence], drawn: Download) -> None:
        with self.clock.waiting():
            host = drawn.wait()
        numbers, tokens, logprobs = host.tensor_split([1, 1 + host.shape[1] // 2], 1)
        rows = zip(numbers[:, 0].tolist(), tokens.tolist(), logprobs.view(torch.float32).tolist(), strict=True)
        for sequence, (count, own_tokens, own_logprobs) in zip(sequences, rows, strict=True):
            known = len(sequence.tokens)
            sequence.tokens += own_tokens[known:count]
            sequence.logprobs += own_logprobs[known:count]

    def _leave(self, sequence: DecodedSequence) -> None:
        del self._active[sequence.slot]
        self._free.append(sequence.slot)
        self._pool.pages.give_back(sequence.pages)
        sequence.slot, sequence.pages = IDLE, []


def _batches(groups: Sequence[WaitingGroup], most: int) -> Iterator[list[WaitingGroup]]:
    """Groups in batches of at most `most` tokens, or of one larger group."""
    batch: list[WaitingGroup] = []
    tokens = 0
    for group in groups:
        if batch and tokens + len(group.prompt) > most:
            yield batch
            batch, tokens = [], 0
        batch.append(group)
        tokens += len(group.prompt)
    if batch:
        yield batch


def pages_for(prompts: Sequence[Sequence[int]], max_tokens: int, sequences: int) -> tuple[int, int]:
    """Pages that the longest sequence alone needs, and pages with which no sequence ever waits.

    Both include page 0 and a page to copy.
    """
    longest = max(map(len, prompts)) + max_tokens
    each = -(-longest // PAGE)
    return each + 2, (each + 1) * sequences + each + 2
