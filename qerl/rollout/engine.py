"""The native engine: continuous batching on a paged KV cache, in fused products on the policy's own tensors.

A group's prompt is computed once. On a GPU all steps are CUDA graphs, and the host waits for none of them.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from traceback import clear_frames
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from qerl.host.gpus import allocatable_bytes
from qerl.kernels import operations_name
from qerl.kernels.state import FP8, IDLE, PAGE, page_bytes, splits_of
from qerl.models.linear import PackedLinear
from qerl.models.policy import Policy, weight_bytes
from qerl.rollout.decoder import Decoder, Download, Pool, bucket_of, lay_out, pages_of, upload
from qerl.rollout.sampler import (
    Completion,
    Draft,
    Request,
    SamplingParams,
    refuse_nan,
    refused_fp8_cache,
    stop_tokens,
)
from qerl.settings.base import ConfigError
from qerl.settings.run import NativeSettings

Item = TypeVar("Item")

# What the scheduler knows on the host: completions, groups of them, and looks at their progress.

#: The most decode steps between two looks for finished sequences; a look's result arrives while the next steps run.
MOST_STEPS = 8
#: The least bytes of weights that steps read between two looks: an H200 takes some 3 ms, and the host 0.5 ms for a look
#: (docs/lab/rollouts.md).
_LOOK_BYTES = 10e9


def steps_between_looks(weight_bytes: int) -> int:
    """Decode steps between two looks for finished sequences: 1 with weights of 10 GB and more, 2 with 7B and 8B in
    NVFP4, and 8 below 1.4 GB.

    A finished sequence keeps its slot until a look's result is read, and the host mustn't be slower than the steps. The
    number depends on no clock, so a rollout can be repeated to the bit.
    """
    return min(ceil(_LOOK_BYTES / weight_bytes), MOST_STEPS)


#: Seconds for which an engine without sequences to decode waits for replies before it looks again.
_REPLY_WAIT = 0.01


@dataclass
class DecodedSequence(Draft):
    """An unfinished completion. `tokens` and `logprobs` are those that have arrived on the host.

    `drawn` counts the tokens of all launched steps: one a step, unless a stop token has ended the completion.
    """

    #: The run, and the place among the completions of its request.
    index: tuple[int, int]
    prompt: list[int]
    #: Tokens after which it ends, and those after which it may: the host knows only the latter.
    limit: int
    most: int
    slot: int = IDLE
    pages: list[int] = field(default_factory=list)
    drawn: int = 0


@dataclass
class WaitingGroup:
    """Completions that wait to continue the same tokens; `pages` and `logits` are set once these are computed.

    `row` then has the delta nets' states after these tokens.
    """

    run: int
    prompt: list[int]
    waiting: deque[DecodedSequence]
    pages: list[int] = field(default_factory=list)
    logits: Tensor | None = None
    row: int = IDLE


# Time of a rollout by phase: prefill, decode steps by batch size, and the time between them.


@dataclass
class DecodeTime:
    """Decode steps at one batch size; `sequences` is the sum of their sequences, without padding."""

    steps: int = 0
    sequences: int = 0
    seconds: float = 0.0


@dataclass
class RolloutPhases:
    """Seconds of a rollout on the device by phase, and seconds that the host waited meanwhile.

    `prefill`: prompts with first tokens, and replies, in `prefills` batches. `decode`: by batch size. `between`: the
    device copies results, or is idle until the host launches more. `host_wait`: the host waits for results.
    """

    prefill: float = 0.0
    prefills: int = 0
    decode: dict[int, DecodeTime] = field(default_factory=lambda: defaultdict(DecodeTime))
    between: float = 0.0
    host_wait: float = 0.0


class PhaseClock:
    """Marks the ends of a rollout's phases in the device's stream, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._waited = 0.0
        #: Phase, the time of its end, and for decode steps the number of sequences and of steps.
        self._marks: list[tuple[str, torch.cuda.Event | float, int, int]] = []
        self.end("start")

    def end(self, phase: str, sequences: int = 0, steps: int = 0) -> None:
        """End a phase: prefill, decode or between."""
        now: torch.cuda.Event | float = time.perf_counter()
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((phase, now, sequences, steps))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as the host's wait for the device."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def phases(self) -> RolloutPhases:
        """The time of each phase; waits until the device has reached the last mark."""
        phases = RolloutPhases(host_wait=self._waited)
        for (_, before, _, _), (phase, after, sequences, steps) in pairwise(self._marks):
            if isinstance(before, float) or isinstance(after, float):
                seconds = float(after) - float(before)  # type: ignore[arg-type]
            else:
                after.synchronize()
                seconds = before.elapsed_time(after) / 1e3
            if phase == "decode":
                batch = phases.decode[bucket_of(sequences)]
                batch.steps += steps
                batch.sequences += sequences * steps
                batch.seconds += seconds
            elif phase == "prefill":
                phases.prefills += 1
                phases.prefill += seconds
            else:
                phases.between += seconds
        return phases


# The scheduler of sequences: continuous batching on a paged cache, with a group's prompt computed once.


class Scheduler:
    """Draws the completions of a request of each run; without a cohort there is one.

    Prompts of up to `prefill_tokens` tokens are computed together, also those of several runs. `look_every` is the
    number of decode steps between two looks for finished sequences.
    """

    def __init__(self, pool: Pool, requests: Sequence[Request], prefill_tokens: int, look_every: int) -> None:
        self._prefill_tokens, self._look_every = prefill_tokens, look_every
        self.clock = PhaseClock(pool.decoder.device)
        self._pool, self._requests = pool, requests
        every = [request.params for request in requests]
        self._truncated = any(params.temperature > 0 and (params.top_p < 1 or params.top_k > 0) for params in every)
        self._replayed = any(params.replay or params.turns for params in every)
        if len(every) > 1 and any(params.part or params.ignore_eos != every[0].ignore_eos for params in every):
            raise ValueError("requests of several runs have no part of their prompts, and the same stop tokens")
        self._splits = splits_of(pages_of(max(request.longest for request in requests)))
        self._active: dict[int, DecodedSequence] = {}
        self._free = list(range(pool.state.count - 1, -1, -1))
        self._table = np.zeros(tuple(pool.state.pages.shape), dtype=np.int32)
        self._done: dict[tuple[int, int], DecodedSequence] = {}
        #: Sequences whose turn has ended. They keep their slots while they wait for a reply, unless pages are scarce.
        self._waiting: dict[tuple[int, int], DecodedSequence] = {}
        #: Waiting sequences whose turns have arrived on the host, and whose environments must be asked.
        self._unasked: list[DecodedSequence] = []
        #: Waiting sequences that have a reply, and the tokens that they could have drawn since.
        self._replied: list[DecodedSequence] = []
        self._idled = 0
        #: Downloads in flight: looks (the sequences in the slots, and the slots' positions), and what sequences drew.
        self._looks: deque[tuple[dict[int, DecodedSequence], Download]] = deque()
        self._fetched: deque[tuple[Sequence[DecodedSequence], Download]] = deque()
        #: Where groups may wait that no sampler has taken.
        self._more = requests[0].params.part
        groups = [self._group(run, number) for run, request in enumerate(requests) for number in request.numbers]
        # The longest prompts first, so that the batch's tail is short.
        self._queue = deque(sorted(groups, key=lambda group: -len(group.prompt)))

    def _group(self, run: int, number: int) -> WaitingGroup:
        prompt, params = list(self._requests[run].prompts[number]), self._requests[run].params
        places = [(number * params.count + c, params.limit(number, c)) for c in range(params.count)]
        most = params.max_tokens
        sequences = deque(DecodedSequence((run, place), prompt, limit, most) for place, limit in places)
        if params.replay:
            for sequence, trace in zip(sequences, params.replay[number], strict=True):
                sequence.given = trace[:most]
        return WaitingGroup(run, prompt, sequences)

    def _waits(self) -> bool:
        """Whether a group waits to enter; without one, a group is taken that waits for any sampler of the batch."""
        if not self._queue and self._more:
            numbers = self._more.more(1)
            self._queue.extend(self._group(0, number) for number in numbers)
            self._more = self._more if numbers else None
        return len(self._queue) > 0

    @torch.no_grad()
    def run(self, stops: frozenset[int]) -> list[list[list[Completion]]]:
        """Draw all completions, or only the part's; returns each request's, in the order of its prompts."""
        self._pool.compile(self._splits, self._truncated, self._replayed)
        while self._active or self._waiting or self._waits():
            self._admit()
            self._decode()
            self._collect()
            self._converse(stops)
        self._catch_up()
        self.clock.end("between")
        drawn: list[list[list[Completion]]] = [[[] for _ in request.prompts] for request in self._requests]
        for (run, place), s in sorted(self._done.items()):
            group = drawn[run][place // self._requests[run].params.count]
            group.append(s.completion(stops))
        return drawn

    # --- sequences enter ---

    def _admit(self) -> None:
        """Fill free slots with waiting sequences as long as pages are free, and draw their first tokens."""
        new_groups: list[WaitingGroup] = []
        starting: list[tuple[DecodedSequence, WaitingGroup]] = []
        copies: list[tuple[int, int]] = []
        while self._free and self._waits() and self._has_room(self._queue[0], len(starting)):
            group = self._queue[0]
            sequence = group.waiting.popleft()
            sequence.slot = self._free.pop()
            if not group.pages:
                group.pages = self._pool.pages.take(pages_of(len(group.prompt)))
                group.row = sequence.slot
                new_groups.append(group)
            copies += self._hand_over(group, sequence)
            starting.append((sequence, group))
            if not group.waiting:
                self._queue.popleft()
        if not starting:
            return
        self.clock.end("between")
        for batch in _batches(new_groups, [len(group.prompt) for group in new_groups], self._prefill_tokens):
            logits = self._pool.prefill(*zip(*((g.prompt, g.pages, g.row, g.run) for g in batch), strict=True))
            for group, row in zip(batch, logits, strict=True):
                group.logits = row
        if copies:
            self._pool.cache.copy_pages(*upload(copies, torch.int64, self._pool.decoder.device).T)
        self._copy_states(starting)
        self._start(starting)
        self.clock.end("prefill")

    def _has_room(self, group: WaitingGroup, starting: int) -> bool:
        """Whether enough pages are free for the next sequence of `group`, and for each one before it to grow by a
        page.
        """
        pages, others = self._pool.pages, len(self._active) + len(self._held) + starting
        cost = 0 if group.pages else pages_of(len(group.prompt))
        cost += len(group.waiting) > 1 and len(group.prompt) % PAGE > 0
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
        full = len(group.prompt) // PAGE
        sequence.pages = pages.share(group.pages[:full])
        rest = group.pages[full:]
        sequence.pages += pages.take(len(rest))
        return list(zip(rest, sequence.pages[full:], strict=True))

    def _copy_states(self, starting: Sequence[tuple[DecodedSequence, WaitingGroup]]) -> None:
        """Copy the states after prompts to slots. Only the last group can have sequences that wait: its are held."""
        states, last = self._pool.states, starting[-1][1]
        copies = [(group.row, sequence.slot) for sequence, group in starting if group.row != sequence.slot]
        if states is not None and last.waiting and last.row != states.group_row:
            copies.append((last.row, states.group_row))
            last.row = states.group_row
        if states is not None and copies:
            states.copy(*upload(copies, torch.int64, self._pool.decoder.device).T)

    def _start(self, starting: Sequence[tuple[DecodedSequence, WaitingGroup]]) -> None:
        """Write sequences to their slots and draw their first tokens."""
        sequences = [sequence for sequence, _ in starting]
        rows = self._place(sequences)
        logits = torch.stack([group.logits for _, group in starting if group.logits is not None])
        draw = self._pool.decoder.operations.draw
        draw(logits, rows.int(), self._pool.state, self._pool.sampling, self._truncated, self._replayed)
        for sequence in sequences:
            sequence.drawn += 1

    def _place(self, sequences: Sequence[DecodedSequence]) -> Tensor:
        """Write sequences to their slots, which are returned; their last tokens are in the cache or in `token`."""
        state = self._pool.state
        for sequence in sequences:
            self._active[sequence.slot] = sequence
            self._show_pages(sequence)
        columns = [(s.slot, len(s.prompt) + s.drawn - 1, s.drawn, s.limit, *s.index, len(s.given)) for s in sequences]
        rows, position, drawn, limit, run, key, given = upload(columns, torch.int64, state.token.device).T
        state.position[rows], state.drawn[rows], state.given[rows] = position.int(), drawn.int(), given.int()
        state.limit[rows], state.sequence[rows], state.run[rows] = limit.int(), key, run.int()
        self._upload_pages()
        # The tokens that are given are put where a draw reads them, unless the host has them from there.
        if any(texts := [s.given[len(s.tokens) :] for s in sequences]):
            placed = lay_out(texts, [s.slot for s in sequences], [len(s.given) for s in sequences])
            ids, slots, places = upload(placed, torch.int64, rows.device)
            state.tokens[slots, places] = ids.int()
        return rows

    def _show_pages(self, sequence: DecodedSequence) -> None:
        self._table[sequence.slot, : len(sequence.pages)] = sequence.pages

    def _upload_pages(self) -> None:
        pages = self._pool.state.pages
        pages.copy_(upload(self._table, torch.int32, pages.device))

    # --- sequences go on ---

    def _decode(self) -> None:
        """Launch the next steps of all sequences; sequences that then have all their tokens leave."""
        missing = max((sequence.most - sequence.drawn for sequence in self._active.values()), default=0)
        count = min(self._look_every, missing)
        self._grow(count)
        self.clock.end("between")
        # Rows of a run lie together, since a tile of 8 rows takes the time of all its runs' adapters. What pads the
        # batch counts as run 0, so that is last.
        chosen = sorted(self._active, key=lambda slot: -self._active[slot].index[0])
        self._pool.decode(chosen, count, self._splits, self._truncated, self._replayed)
        self.clock.end("decode", len(self._active), count)
        for sequence in self._active.values():
            sequence.drawn += count
        self._end([sequence for sequence in self._active.values() if sequence.drawn >= sequence.most])

    def _grow(self, tokens: int) -> None:
        """Take pages for the tokens that the next steps may draw for each sequence; if too few are free, interrupt the
        sequences that started last.
        """
        pages, grown = self._pool.pages, False
        for sequence in list(self._active.values()):
            drawn = min(sequence.drawn + tokens, sequence.most)
            missing = pages_of(len(sequence.prompt) + drawn - 1) - len(sequence.pages)
            if missing <= 0:
                continue
            if missing > pages.available:
                self._collect()  # looks also at sequences that have just started
                self._catch_up()  # finished sequences free their pages
            while missing > pages.available and sequence.slot in self._active:
                if self._held:
                    self._leave(self._held[-1])
                else:
                    self._interrupt(next(reversed(self._active.values())))
            if sequence.slot in self._active:
                sequence.pages += pages.take(missing)
                self._show_pages(sequence)
                grown = True
        if grown:
            self._upload_pages()

    def _interrupt(self, sequence: DecodedSequence) -> None:
        """Remove a sequence from its slot. It continues later, after prefill of its prompt and tokens so far.

        The host has caught up before, so the sequence isn't finished. Only here does the device wait for the host.
        """
        self._pool.state.position[sequence.slot] = IDLE
        self._fetch([sequence])
        self._leave(sequence)
        self._catch_up()
        self._queue.appendleft(WaitingGroup(sequence.index[0], sequence.prompt + sequence.tokens, deque([sequence])))

    # --- sequences leave ---

    def _collect(self) -> None:
        """Request which sequences have finished, without waiting: the result is read after the next steps."""
        if self._active:
            self._looks.append((dict(self._active), Download.of(self._pool.state.position[:-1])))
        while len(self._looks) > 1:
            self._see(*self._looks.popleft())
        while self._fetched and self._fetched[0][1].arrived:
            self._store(*self._fetched.popleft())

    def _catch_up(self) -> None:
        """Wait for the device and read all downloads in flight."""
        while self._looks:
            self._see(*self._looks.popleft())
        while self._fetched:
            self._store(*self._fetched.popleft())

    def _see(self, active: dict[int, DecodedSequence], look: Download) -> None:
        """End the finished ones of the sequences that were in the slots; some may have left since."""
        with self.clock.waiting():
            positions = look.wait().tolist()
        self._end([s for slot, s in active.items() if self._active.get(slot) is s and positions[slot] == IDLE])

    def _end(self, sequences: Sequence[DecodedSequence]) -> None:
        self._fetch(sequences)
        for sequence in sequences:
            if self._requests[sequence.index[0]].params.turns is None:
                self._leave(sequence)
                self._done[sequence.index] = sequence
                continue
            del self._active[sequence.slot]
            self._waiting[sequence.index] = sequence
            for active, _ in self._looks:  # which would end it again once it goes on
                active.pop(sequence.slot, None)

    def _fetch(self, sequences: Sequence[DecodedSequence]) -> None:
        """Start the download of the sequences' tokens and log-probabilities, before others use their slots."""
        if not sequences:
            return
        state, most = self._pool.state, max(min(s.drawn, s.most) for s in sequences)
        rows = upload([s.slot for s in sequences], torch.int64, state.token.device)
        logprobs = state.logprobs[rows, :most].view(torch.int32)
        drawn = torch.cat([state.drawn[rows, None], state.tokens[rows, :most], logprobs], 1)
        self._fetched.append((sequences, Download.of(drawn)))

    def _store(self, sequences: Sequence[DecodedSequence], drawn: Download) -> None:
        with self.clock.waiting():
            host = drawn.wait().numpy()
        numbers, tokens, logprobs = np.split(host, [1, 1 + host.shape[1] // 2], axis=1)
        rows = zip(numbers[:, 0].tolist(), tokens, logprobs.view(np.float32), strict=True)
        for sequence, (count, own_tokens, own_logprobs) in zip(sequences, rows, strict=True):
            new = slice(len(sequence.tokens), count)
            sequence.tokens += own_tokens[new].tolist()
            sequence.logprobs += own_logprobs[new].tolist()
            if sequence.index in self._waiting:
                self._unasked.append(sequence)

    # --- conversations

    @property
    def _held(self) -> list[DecodedSequence]:
        """The sequences that wait for a reply in their slots."""
        return [sequence for sequence in self._waiting.values() if sequence.slot != IDLE]

    def _converse(self, stops: frozenset[int]) -> None:
        """Ask for replies to the turns that have ended, and have the sequences go on whose replies have come.

        A sequence that has lost its slot has its reply in its next prefill.
        """
        if not self._waiting:
            return
        if idle := not self._active:
            self._catch_up()
        for sequence in self._unasked:
            (run, place), params = sequence.index, self._requests[sequence.index[0]].params
            if params.turns and (sequence.tokens[-1] in stops or params.lengths):
                params.turns.ask(*divmod(place, params.count), sequence.tokens)
            else:
                self._finish(sequence)
                idle = False
        self._unasked.clear()
        self._idled += len(self._replied) * self._look_every
        for run in dict.fromkeys(run for run, _ in self._waiting):
            params = self._requests[run].params
            for number, completion, reply in params.turns.replies(_REPLY_WAIT * idle) if params.turns else ():
                sequence, idle = self._waiting[run, number * params.count + completion], False
                if not sequence.goes_on(reply, sequence.most):
                    self._finish(sequence)
                    continue
                sequence.limit = min(len(sequence.given) + params.limit(number, completion), sequence.most)
                self._replied.append(sequence)
        # A pass over replies takes as long as a step with as many rows, in which the others would draw a token each. So
        # replies wait until they have more tokens than that. Once waiting has cost as much as decode steps would that
        # read the replies one token at a time, they take those.
        tokens = sum(len(s.given) - len(s.tokens) for s in self._replied)
        together = self._pool.extends and tokens > len(self._active)
        if self._replied and (together or not self._pool.extends or self._idled >= tokens):
            self._resume(together)

    def _resume(self, together: bool) -> None:
        """Have sequences go on: behind their replies if these are computed `together`, else where steps read them."""
        pages, resumed, computed = self._pool.pages, [], []
        for sequence in sorted(self._replied, key=lambda one: -one.index[0]):  # runs as in `_decode`
            del self._waiting[sequence.index]
            sequence.drawn = len(sequence.given)
            if sequence.slot == IDLE:
                whole = [*sequence.prompt, *sequence.given]
                self._queue.appendleft(WaitingGroup(sequence.index[0], whole, deque([sequence])))
                continue
            resumed.append(sequence)
            missing = pages_of(len(sequence.prompt) + sequence.drawn - 1) - len(sequence.pages)
            if together and missing <= pages.available:
                sequence.pages += pages.take(max(missing, 0))
                computed.append(sequence)
            else:  # steps take page after page, also those of others
                sequence.drawn = len(sequence.tokens)
        self._replied, self._idled = [], 0
        if not resumed:
            return
        rows, last = self._place(resumed), [s.given[s.drawn - 1] for s in resumed]
        self._pool.state.token[rows] = upload(last, torch.int64, rows.device)
        if not computed:
            return
        # The cache lacks the last token of the turn, and all of the reply but its last token, which a step reads.
        texts = {s.index: s.given[len(s.tokens) - 1 : -1] for s in computed}
        self.clock.end("between")
        for batch in _batches(computed, [len(texts[s.index]) for s in computed], self._prefill_tokens):
            ends = [len(s.prompt) + s.drawn - 1 for s in batch]
            self._pool.extend([texts[s.index] for s in batch], [s.slot for s in batch], ends)
        self.clock.end("prefill")

    def _finish(self, sequence: DecodedSequence) -> None:
        """End a conversation."""
        del self._waiting[sequence.index]
        if sequence.slot != IDLE:
            self._leave(sequence)
        self._done[sequence.index] = sequence

    def _leave(self, sequence: DecodedSequence) -> None:
        self._active.pop(sequence.slot, None)
        self._free.append(sequence.slot)
        self._pool.pages.give_back(sequence.pages)
        sequence.slot, sequence.pages = IDLE, []


def _batches(items: Sequence[Item], lengths: Sequence[int], most: int) -> Iterator[list[Item]]:
    """Items in batches of at most `most` tokens, or of one longer item."""
    batch: list[Item] = []
    tokens = 0
    for item, length in zip(items, lengths, strict=True):
        if batch and tokens + length > most:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += length
    if batch:
        yield batch


def slots_for(room: int, sequences: int, alone: int, page: int, state: int) -> int:
    """Slots of a pool in `room` bytes: one for each of the `sequences`, or fewer if they have states of `state` bytes.

    Each slot then also has the pages of the longest sequence, so that no sequence waits for pages. `alone` are the
    pages that it needs in an empty cache, and `page` the bytes of a page.
    """
    if not state:
        return sequences
    return max(1, min(sequences, (room - 2 * state - alone * page) // (state + (alone - 1) * page)))


def pages_for(longest: int, sequences: int) -> tuple[int, int]:
    """Pages that a sequence of `longest` tokens alone needs, and pages with which none of so many ever waits.

    Both include page 0 and a page to copy.
    """
    each = pages_of(longest)
    return each + 2, (each + 1) * sequences + each + 2


# The sampler, whose memory persists between calls.

#: The most tokens of prompts, or of replies, that are computed together.
PREFILL_TOKENS = 8192
#: Share of the free memory that the cache may use if no size is set.
FREE_SHARE = 0.6


class EngineSampler:
    """Samples from the policy's own weights. Cache and CUDA graphs persist between calls until `release`.

    With `others`, the policies of a cohort's further runs on the same base, it serves all of them together; a run's
    completions are those that it draws alone, but for the rounding of other batch sizes. `max_sequences` bounds how
    many sequences are decoded together; others wait and replace finished ones. Raises ConfigError for a model or a
    cache that the engine doesn't have on this device.
    """

    def __init__(
        self, policy: Policy, settings: NativeSettings, max_sequences: int = 512, others: Sequence[Policy] = ()
    ) -> None:
        capability = torch.cuda.get_device_capability(policy.device) if policy.device.type == "cuda" else None
        if settings.kv_cache_dtype == "fp8" and (refusal := refused_fp8_cache(capability)):
            raise ConfigError(refusal)
        self.policy, self.policies = policy, [policy, *others]
        self.settings = settings
        self.max_sequences = max_sequences
        self._decoder = Decoder(self.policies, settings.kernels)
        # Counted once, because to go through all tensors of 7B takes milliseconds.
        self._steps_between_looks = steps_between_looks(weight_bytes(policy))
        self._pool: Pool | None = None
        #: Whether memory bounds the cache's pages, and the slots of a model with delta nets.
        self._bounded = self._few_slots = False
        #: Bytes of the latest KV cache and states of delta nets, whether it is released or not.
        self.cache_bytes = 0
        #: Bytes of those with which no sequence of the latest rollout would wait.
        self.cache_wanted_bytes = 0
        #: Time of the latest rollout by phase.
        self.phases = RolloutPhases()

    @property
    def served(self) -> str:
        """Description of engine, kernels and weights, for results."""
        packed = {layer.weights_format for layer in self.policy.lm.modules() if isinstance(layer, PackedLinear)}
        kernels = sorted({type(linear).__name__ for linear in self._decoder.linears})
        weights = [*sorted(packed), str(self.policy.lm.dtype).removeprefix("torch.")]
        language = operations_name(self.policy.device.type == "cuda")
        return f"native engine, {language} and {', '.join(kernels)} on {' and '.join(weights)}"

    @property
    def released(self) -> bool:
        """Whether the memory of cache and CUDA graphs is released."""
        return self._pool is None

    def sync(self) -> None:
        """Copy the policy's present adapter; norms and noise are read in place."""
        self._decoder.sync()

    def release(self) -> None:
        """Release the memory of cache and CUDA graphs. The next call sets them up again."""
        self._pool = None
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """See `Sampler`. It syncs first, so that no caller can forget to.

        Raises ConfigError if the cache can't hold a sequence. Raises torch.OutOfMemoryError, naming the settings to
        lower, if the GPU's memory doesn't suffice.
        """
        [completions] = self.generate_all([Request(prompts, params)])
        refuse_nan(completions)
        return completions

    def generate_all(self, requests: Sequence[Request]) -> list[list[list[Completion]]]:
        """The completions of a request of each run, in the order of the policies; a run may have no prompts.

        Log-probabilities may be NaN (`refuse_nan`), so that a run which diverges ends without the others.
        """
        if len(requests) != len(self.policies):
            raise ValueError(f"{len(requests)} requests for {len(self.policies)} runs")
        if not all(len(prompt) for request in requests for prompt in request.prompts):
            raise ValueError("a prompt has no tokens; give each at least one")
        if not any(len(request.numbers) for request in requests):
            return [[[] for _ in request.prompts] for request in requests]
        self.sync()
        try:
            completions = self._generate(requests)
        except BaseException as error:
            clear_frames(error.__traceback__)  # their locals would keep the cache as long as the error is kept
            self.release()
            if isinstance(error, torch.OutOfMemoryError):
                remedy = "lower max_tokens or the sequences of a rollout, or raise native.kv_cache_gib"
                raise torch.OutOfMemoryError(f"the rollout ran out of GPU memory; {remedy}") from error
            raise
        if self.settings.sleep or self._scarce:
            self.release()
        return completions

    @property
    def _scarce(self) -> bool:
        """Whether the cache has all the memory that it may use, and needs more; an update then needs that memory."""
        return self._bounded and self.settings.kv_cache_gib is None

    def _generate(self, requests: Sequence[Request]) -> list[list[list[Completion]]]:
        pool, stops = self._ready_pool(requests), stop_tokens(self.policy, requests[0].params)
        for run, params in enumerate(request.params for request in requests):
            pool.sampling.set(
                temperature=params.temperature,
                seed=params.seed,
                top_p=params.top_p,
                top_k=params.top_k,
                stops=stops,
                run=run,
            )
        prefill_tokens = 1 if self.settings.batch_invariant else PREFILL_TOKENS
        scheduler = Scheduler(pool, requests, prefill_tokens, self._steps_between_looks)
        completions = scheduler.run(stops)
        self.phases = scheduler.clock.phases()
        if pool.pages.available != pool.pages.count - 1:
            raise RuntimeError("pages of the KV cache are still in use after the rollout: a defect of the engine")
        return completions

    def _ready_pool(self, requests: Sequence[Request]) -> Pool:
        """The existing pool if it suffices, else a new one."""
        sequences, tokens = self.max_sequences, max(request.params.max_tokens for request in requests)
        if not self.settings.batch_invariant:
            sequences = min(sequences, sum(len(request.numbers) * request.params.count for request in requests))
        longest, most = max(request.longest for request in requests), self._decoder.longest
        if most is not None and longest > most:
            room = most - longest + tokens
            remedy = f"lower max_tokens to {room}" if room > 0 else f"leave out prompts of {most} or more tokens"
            raise ConfigError(
                f"a sequence may have {longest} tokens, and the model's rotary positions change for all of its tokens "
                f"after {most}; {remedy}"
            )
        alone, most_pages = pages_for(longest, sequences)
        if self._pool and not self._suffices(self._pool, alone, most_pages, tokens, sequences):
            self.release()
        self._pool = self._pool or self._new_pool(alone, most_pages, tokens, sequences)
        if self._pool.pages.count < alone:
            if self.settings.kv_cache_gib is None:
                raise torch.OutOfMemoryError(f"a sequence needs {alone} pages, and memory has {self._pool.pages.count}")
            raise ConfigError(
                f"a sequence of {(alone - 2) * PAGE} tokens needs {alone} pages of the KV cache, which has "
                f"{self._pool.pages.count}; lower max_tokens or raise native.kv_cache_gib"
            )
        return self._pool

    # A function of its own, so that no local variable keeps the old pool in memory while the new one is made.
    def _suffices(self, pool: Pool, alone: int, most_pages: int, tokens: int, sequences: int) -> bool:
        state = pool.state
        fits = state.tokens.shape[1] >= tokens and state.pages.shape[1] >= alone - 2
        enough = state.count >= sequences or self._few_slots
        return fits and enough and (self._bounded or pool.pages.count >= most_pages)

    def _new_pool(self, alone: int, most_pages: int, max_tokens: int, sequences: int) -> Pool:
        decoder, heads = self._decoder, self._decoder.heads
        dtype = FP8 if self.settings.kv_cache_dtype == "fp8" else decoder.dtype
        page = len(decoder) * page_bytes(heads.kv, heads.dim, dtype)
        state_bytes, room = decoder.state_bytes, self._cache_bytes()
        slots = slots_for(room, sequences, alone, page, state_bytes)
        # Two more rows of states: an idle one and a held one.
        affordable = max(room - (slots + 2) * state_bytes, 0) // page
        self._bounded, self._few_slots = affordable < most_pages, slots < sequences
        # Powers of two, so that a slightly longer rollout needs no new graphs.
        pages_each, tokens = _power_of_two(alone - 2), _power_of_two(max_tokens)
        decoder.reach(pages_each * PAGE)
        all_slots = self.settings.batch_invariant
        pool = Pool(decoder, slots, tokens, pages_each, min(most_pages, affordable), dtype, all_slots)
        self.cache_bytes = pool.nbytes
        self.cache_wanted_bytes = most_pages * page + (sequences + 2) * state_bytes
        return pool

    def _cache_bytes(self) -> int:
        """The largest allowed size of the cache in bytes."""
        if self.settings.kv_cache_gib is not None:
            return int(self.settings.kv_cache_gib * 2**30)
        if self.policy.device.type != "cuda":
            return 2**62
        return int(FREE_SHARE * allocatable_bytes())


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
