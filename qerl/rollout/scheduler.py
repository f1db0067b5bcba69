"""The scheduler of sequences: continuous batching on a paged cache, with a group's prompt computed once."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from qerl.kernels.state import IDLE, PAGE, DecodeState, DeltaStates, KVCache, SamplingState, splits_of
from qerl.rollout.decoder import DecodeGraphs, Decoder, Download, Prefill, bucket_of, upload
from qerl.rollout.sampler import Completion, Request

# The KV cache's pages: their reference counts, kept on the host, and the slots that memory has room for.


class Pages:
    """`count` pages of `size` tokens with reference counts. Page 0 is reserved for writes that nobody reads."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.count = count
        self._holders = [0] * count
        self._free = list(range(count - 1, 0, -1))

    @property
    def available(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Number of pages that hold `tokens`."""
        return -(-tokens // self.size)

    def take(self, number: int) -> list[int]:
        """`number` free pages, each with one holder. Raises RuntimeError if fewer are free; callers check that
        first.
        """
        if number > self.available:
            raise RuntimeError(f"{number} pages of the KV cache are requested, but only {self.available} are free")
        pages = [self._free.pop() for _ in range(number)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add a holder to the pages."""
        for page in pages:
            self._check_held(page)
            self._holders[page] += 1
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a holder from the pages. Pages without a holder are free again."""
        for page in pages:
            self._check_held(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, page: int) -> None:
        if not self._holders[page]:
            raise RuntimeError(f"page {page} of the KV cache has no holder")


def slots_for(room: int, sequences: int, alone: int, page: int, state: int) -> int:
    """Slots of a pool in `room` bytes: one for each of the `sequences`, or fewer if they have states of `state` bytes.

    Each slot then also has the pages of the longest sequence, so that no sequence waits for pages. `alone` are the
    pages that it needs in an empty cache, and `page` the bytes of a page.
    """
    if not state:
        return sequences
    return max(1, min(sequences, (room - 2 * state - alone * page) // (state + (alone - 1) * page)))


# What the scheduler knows on the host: completions, groups of them, and looks at their progress.

#: The most decode steps between two looks for finished sequences; a look's result arrives while the next steps run.
MOST_STEPS = 8
#: Bytes of weights that steps read between two looks. They take an H200 some 3 ms, and a look takes the host 0.5 ms
#: (docs/lab/rollouts.md).
_LOOK_BYTES = 10e9


def steps_between_looks(weight_bytes: int) -> int:
    """Decode steps between two looks for finished sequences: 1 with weights of 7 GB and more, 2 with 7B in NVFP4, and 8
    below 1.3 GB.

    A finished sequence keeps its slot until a look's result is read, and the host mustn't be slower than the steps. The
    number depends on no clock, so a rollout can be repeated to the bit.
    """
    return min(max(round(_LOOK_BYTES / weight_bytes), 1), MOST_STEPS)


@dataclass
class DecodedSequence:
    """An unfinished completion. `tokens` and `logprobs` are those that have arrived on the host.

    `drawn` counts the tokens of all launched steps: one a step, unless a stop token has ended the completion.
    """

    #: The run, and the place among the completions of its request.
    index: tuple[int, int]
    key: int
    prompt: list[int]
    #: Tokens after which it ends, and those after which it may: the host knows only the latter.
    limit: int
    most: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: int = IDLE
    pages: list[int] = field(default_factory=list)
    drawn: int = 0


@dataclass(frozen=True)
class ProgressLook:
    """A look at the slots: the sequences in them at that time, and the slots' positions."""

    active: dict[int, DecodedSequence]
    positions: Download


@dataclass
class WaitingGroup:
    """Completions that wait to continue the same tokens; `pages` and `logits` are set once these are computed.

    `row` is then that of the delta nets' states after these tokens.
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

    `prefill`: prompts and first tokens, in `prefills` batches. `decode`: by batch size. `between`: the device copies
    results, or is idle until the host launches more. `host_wait`: the host waits for results.
    """

    prefill: float = 0.0
    prefills: int = 0
    decode: dict[int, DecodeTime] = field(default_factory=lambda: defaultdict(DecodeTime))
    between: float = 0.0
    host_wait: float = 0.0


@dataclass(frozen=True)
class _Mark:
    """The end of a phase. `sequences` and `steps` are set for steps."""

    phase: str
    time: torch.cuda.Event | float
    sequences: int = 0
    steps: int = 0


class PhaseClock:
    """Marks the ends of a rollout's phases in the device's stream, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._waited = 0.0
        self._marks = [_Mark("start", self._now())]

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, phase: str, sequences: int = 0, steps: int = 0) -> None:
        """End a phase: prefill, decode or between."""
        self._marks.append(_Mark(phase, self._now(), sequences, steps))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as the host's wait for the device."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def phases(self) -> RolloutPhases:
        """The time of each phase; waits until the device has reached the last mark."""
        phases = RolloutPhases(host_wait=self._waited)
        for before, after in pairwise(self._marks):
            if isinstance(before.time, float) or isinstance(after.time, float):
                seconds = float(after.time) - float(before.time)  # type: ignore[arg-type]
            else:
                after.time.synchronize()
                seconds = before.time.elapsed_time(after.time) / 1e3
            if after.phase == "decode":
                batch = phases.decode[bucket_of(after.sequences)]
                batch.steps += after.steps
                batch.sequences += after.sequences * after.steps
                batch.seconds += seconds
            elif after.phase == "prefill":
                phases.prefills += 1
                phases.prefill += seconds
            else:
                phases.between += seconds
        return phases


# The scheduler of sequences: continuous batching on a paged cache, with a group's prompt computed once.


@dataclass(frozen=True)
class Pool:
    """A sampler's device memory (cache and slots), the cache's page counts, and the graphs on it.

    `look_every` is the number of decode steps between two looks, and `states` are there only for delta nets.
    """

    decoder: Decoder
    state: DecodeState
    cache: KVCache
    pages: Pages
    sampling: SamplingState
    steps: DecodeGraphs
    prefill: Prefill
    look_every: int
    states: DeltaStates | None = None


class Scheduler:
    """Draws the completions of one request of each run of a cohort, or of a single run.

    Prompts of up to `prefill_tokens` tokens are computed together, also those of several runs.
    """

    def __init__(self, pool: Pool, requests: Sequence[Request], prefill_tokens: int) -> None:
        self._prefill_tokens = prefill_tokens
        self.clock = PhaseClock(pool.decoder.device)
        self._pool, self._requests = pool, requests
        every = [request.params for request in requests]
        self._truncated = any(params.temperature > 0 and (params.top_p < 1 or params.top_k > 0) for params in every)
        self._replayed = any(params.replay is not None for params in every)
        if self._replayed and not all(params.replay is not None for params in every):
            raise ValueError("tokens replace the drawn ones of all requests or of none")
        if len(every) > 1 and any(params.part for params in every):
            raise ValueError("processes share out the prompts of one run, not those of several")
        self._splits = splits_of(pool.pages.needed(max(request.longest for request in requests)))
        self._active: dict[int, DecodedSequence] = {}
        self._free = list(range(pool.state.count - 1, -1, -1))
        self._table = np.zeros(tuple(pool.state.pages.shape), dtype=np.int32)
        self._done: dict[tuple[int, int], DecodedSequence] = {}
        #: Downloads in flight: looks, and the tokens and log-probabilities of sequences.
        self._looks: deque[ProgressLook] = deque()
        self._fetched: deque[tuple[Sequence[DecodedSequence], Download]] = deque()
        #: Where groups may wait that no sampler has taken.
        self._more = requests[0].params.part
        groups = [self._group(run, number) for run, request in enumerate(requests) for number in request.numbers]
        # The longest prompts first, so that the batch's tail is short.
        self._queue = deque(sorted(groups, key=lambda group: -len(group.prompt)))

    def _group(self, run: int, number: int) -> WaitingGroup:
        request = self._requests[run]
        prompt, params = list(request.prompts[number]), request.params
        places = [(number * params.count + c, params.limit(number, c)) for c in range(params.count)]
        first, most = params.first * params.count, params.max_tokens
        sequences = (DecodedSequence((run, place), first + place, prompt, limit, most) for place, limit in places)
        return WaitingGroup(run, prompt, deque(sequences))

    def _waits(self) -> bool:
        """Whether a group waits to enter; without one, a group is taken that waits for any sampler of the batch."""
        if not self._queue and self._more:
            numbers = self._more.more(1)
            self._queue.extend(self._group(0, number) for number in numbers)
            self._more = self._more if numbers else None
        return len(self._queue) > 0

    @torch.no_grad()
    def run(self, stops: frozenset[int]) -> list[list[list[Completion]]]:
        """Draw all completions, or those of the part; returns those of each request, in the order of its prompts."""
        while self._active or self._waits():
            self._admit()
            self._decode()
            self._collect()
        self._catch_up()
        self.clock.end("between")
        drawn: list[list[list[Completion]]] = [[[] for _ in request.prompts] for request in self._requests]
        for (run, place), s in sorted(self._done.items()):
            group = drawn[run][place // self._requests[run].params.count]
            group.append(Completion(s.tokens, s.logprobs, s.tokens[-1] in stops))
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
                group.pages = self._pool.pages.take(self._pool.pages.needed(len(group.prompt)))
                group.row = sequence.slot
                new_groups.append(group)
            copies += self._hand_over(group, sequence)
            starting.append((sequence, group))
            if not group.waiting:
                self._queue.popleft()
        if not starting:
            return
        self.clock.end("between")
        for batch in _batches(new_groups, self._prefill_tokens):
            logits = self._pool.prefill.logits(*zip(*((g.prompt, g.pages, g.row, g.run) for g in batch), strict=True))
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
        full = len(group.prompt) // pages.size
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
        state = self._pool.state
        sequences = [sequence for sequence, _ in starting]
        for sequence in sequences:
            self._active[sequence.slot] = sequence
            self._show_pages(sequence)
        columns = [(s.slot, len(s.prompt) + s.drawn - 1, s.drawn, s.key, s.limit, s.index[0]) for s in sequences]
        rows, position, drawn, key, limit, run = upload(columns, torch.int64, state.token.device).T
        state.position[rows], state.drawn[rows] = position.int(), drawn.int()
        state.limit[rows], state.sequence[rows], state.run[rows] = limit.int(), key, run.int()
        self._upload_pages()
        logits = torch.stack([group.logits for _, group in starting if group.logits is not None])
        if self._replayed:
            self._upload_replay(sequences, rows)
        draw = self._pool.decoder.operations.draw
        draw(logits, rows.int(), state, self._pool.sampling, self._truncated, self._replayed)
        for sequence in sequences:
            sequence.drawn += 1

    def _upload_replay(self, sequences: Sequence[DecodedSequence], rows: Tensor) -> None:
        """Put the tokens that are to come into the slots `rows`, where a replayed draw reads them."""
        traces = [self._requests[run].trace(place) for run, place in (s.index for s in sequences)]
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
        missing = max((sequence.most - sequence.drawn for sequence in self._active.values()), default=0)
        count = min(self._pool.look_every, missing)
        self._grow(count)
        self.clock.end("between")
        self._pool.steps.run(list(self._active), count, self._splits, self._truncated, self._replayed)
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
            missing = pages.needed(len(sequence.prompt) + drawn - 1) - len(sequence.pages)
            if missing > pages.available:
                self._catch_up()  # finished sequences free their pages
            while missing > pages.available and sequence.slot in self._active:
                self._interrupt(next(reversed(self._active.values())))
            if missing > 0 and sequence.slot in self._active:
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
            self._looks.append(ProgressLook(dict(self._active), Download.of(self._pool.state.position[:-1])))
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
            positions = look.positions.wait().tolist()
        seen = look.active.items()
        self._end([s for slot, s in seen if self._active.get(slot) is s and positions[slot] == IDLE])

    def _end(self, sequences: Sequence[DecodedSequence]) -> None:
        self._fetch(sequences)
        for sequence in sequences:
            self._leave(sequence)
            self._done[sequence.index] = sequence

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


def pages_for(longest: int, sequences: int) -> tuple[int, int]:
    """Pages that a sequence of `longest` tokens alone needs, and pages with which none of so many ever waits.

    Both include page 0 and a page to copy.
    """
    each = -(-longest // PAGE)
    return each + 2, (each + 1) * sequences + each + 2
