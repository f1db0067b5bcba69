"""Sequence packing: completions as packed micro-batches, and log-probabilities of their tokens.

Shapes: N completions, T tokens of the longest completion, M drawn tokens of all, L tokens of the packed row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, groupby

import numpy as np
import torch

from qerl.kernels.packed_sequences import FixedPacking, KeyPlaces, Packing
from qerl.models import logprobs
from qerl.models.blocks import token_hidden
from qerl.models.policy import Policy
from qerl.models.structure import structure_of
from qerl.rollout.sampler import Completion


@dataclass(frozen=True)
class Sample:
    """One completion with its prompt and the inputs of its loss."""

    prompt: list[int]
    completion: Completion
    reward: float
    advantage: float

    @property
    def length(self) -> int:
        """Number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion.token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences in one row without padding, where a prompt precedes all its completions once.

    The row lacks the last token of each completion, which predicts nothing. It also lacks silent completions
    (`qerl.rl.update`), whose place among the N is kept, so that a loss adds up the same numbers with and without them.
    """

    index: list[int]  # index of each completion in the batch
    ids: torch.Tensor  # [1, L]
    positions: torch.Tensor  # [1, L] position of each token in its sequence
    packing: Packing
    keys: list[tuple[int, int]]  # of each piece, unique in the batch and independent of the packing
    states_M: torch.Tensor  # index in the row of the hidden state that predicts each completion token that was drawn
    targets_M: torch.Tensor  # drawn completion tokens of the row
    read_N: torch.Tensor  # [N] bool, whether the completion is in the row
    mask_NT: torch.Tensor  # [N, T] 1.0 on completion tokens that were drawn, 0.0 on an environment's
    finished_N: torch.Tensor  # [N] 1.0 where a stop token ended the completion
    sampler_logprobs_NT: torch.Tensor  # [N, T]
    rewards_N: torch.Tensor  # [N]
    advantages_N: torch.Tensor  # [N]

    @property
    def is_empty(self) -> bool:
        """Whether the row has no tokens, because all completions are silent."""
        return not self.ids.numel()

    def unpacked(self, values_M: torch.Tensor) -> torch.Tensor:
        """Values of the row's completion tokens [M] as [N, T], zero elsewhere."""
        empty = values_M.new_zeros(self.mask_NT.shape)
        return empty.masked_scatter(self.mask_NT.bool() & self.read_N[:, None], values_M)


def _padded(rows: Sequence[Sequence[float]], device: torch.device) -> torch.Tensor:
    longest = max(map(len, rows), default=0)
    padded = [[*row, *[0.0] * (longest - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float32, device=device).reshape(len(rows), longest)


def _digest(ids: list[int]) -> int:
    """A hash of token ids, so that the key of a prompt doesn't depend on how a batch is split."""
    return int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:8], "little")


def _groups(samples: Sequence[Sample], index: Sequence[int]) -> Iterator[list[int]]:
    """The samples `index` grouped by prompt; samples of a group must be adjacent."""
    return (list(group) for _, group in groupby(index, key=lambda i: samples[i].prompt))


def micro_batch(
    samples: Sequence[Sample], index: list[int], device: torch.device, silent: Collection[int] = ()
) -> MicroBatch:
    """Pack the samples `index` of a batch into one row, without those that are `silent`; none make an empty row."""
    ids, positions, states, lengths = (list[int]() for _ in range(4))
    prompts, keys = list[int | None](), list[tuple[int, int]]()

    def add(tokens: list[int], position: int, prompt: int | None, key: tuple[int, int]) -> None:
        ids.extend(tokens)
        positions.extend(range(position, position + len(tokens)))
        lengths.append(len(tokens))
        prompts.append(prompt)
        keys.append(key)

    read = [i for i in index if i not in silent]
    for group in _groups(samples, read):
        prompt, place = samples[group[0]].prompt, len(lengths)
        add(prompt, 0, None, (0, _digest(prompt)))
        last = len(ids) - 1  # predicts the first token of each of the prompt's completions
        for i in group:
            completion = samples[i].completion.token_ids
            before = [last, *range(len(ids), len(ids) + len(completion) - 1)][: len(completion)]
            states += compress(before, samples[i].completion.mask)
            # The last token predicts nothing, so a completion of one token adds nothing to the row.
            if len(completion) > 1:
                add(completion[:-1], len(prompt), place, (1, i))
    chosen = [samples[i] for i in index]
    completions = [s.completion for s in chosen]
    whole, real = (partial(torch.tensor, dtype=dtype, device=device) for dtype in (torch.long, torch.float32))
    return MicroBatch(
        index=index,
        ids=whole([ids]),
        positions=whole([positions]),
        packing=Packing.of(lengths, prompts, device),
        keys=keys,
        states_M=whole(states),
        targets_M=whole([t for c in (samples[i].completion for i in read) for t in compress(c.token_ids, c.mask)]),
        read_N=torch.tensor([i not in silent for i in index], device=device),
        mask_NT=_padded([c.mask for c in completions], device),
        finished_N=real([float(c.finished) for c in completions]),
        sampler_logprobs_NT=_padded([c.logprobs for c in completions], device),
        rewards_N=real([s.reward for s in chosen]),
        advantages_N=real([s.advantage for s in chosen]),
    )


def packed_tokens(samples: Sequence[Sample], group: Sequence[int]) -> int:
    """Number of tokens in a row with one prompt and its completions."""
    return len(samples[group[0]].prompt) + sum(max(len(samples[i].completion.token_ids) - 1, 0) for i in group)


def row_tokens(samples: Sequence[Sample], index: Sequence[int]) -> int:
    """Number of tokens in the row of the samples `index`."""
    return sum(packed_tokens(samples, group) for group in _groups(samples, index))


def split(
    samples: Sequence[Sample], max_tokens: int, parts: int = 1, index: Sequence[int] | None = None
) -> list[list[int]]:
    """Indices of the samples of each micro-batch, largest micro-batch first; `index` are those to split, or all.

    A micro-batch has at most `max_tokens` tokens; a longer completion is alone. A group that fits isn't split. If a
    group is split, each piece has the prompt. Several processes (`parts`) get equally many micro-batches of similar
    size.
    """
    # Filling each micro-batch to the limit would make fewer of them, but repeat a prompt at each cut; one of half the
    # limit costs no more per token.
    groups = list(_groups(samples, range(len(samples)) if index is None else index))
    total = sum(packed_tokens(samples, group) for group in groups)
    limit = min(max_tokens, math.ceil(total / parts))
    pieces = [piece for group in groups for piece in _cut(samples, group, limit)]
    # First fit with the largest first leaves the least room unused.
    pieces.sort(key=lambda piece: -packed_tokens(samples, piece))
    sizes = [packed_tokens(samples, piece) for piece in pieces]
    rows = _full(sizes, limit) if parts == 1 else _even(sizes, max_tokens, parts)
    rows.sort(key=lambda row: -sum(sizes[i] for i in row))
    return [sorted(i for place in row for i in pieces[place]) for row in rows]


def _full(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """The places of `sizes` in rows of at most `limit`: each in the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for place, size in enumerate(sizes):
        row = next((i for i, left in enumerate(room) if size <= left), len(room))
        if row == len(room):
            rows.append([])
            room.append(limit)
        rows[row].append(place)
        room[row] -= size
    return rows


def _even(sizes: Sequence[int], limit: int, parts: int) -> list[list[int]]:
    """The places of `sizes` in rows of at most `limit`, a multiple of `parts`: each in the emptiest row.

    Full rows would leave a last one that is small or missing, for which the other processes wait.
    """
    count = parts * math.ceil(sum(sizes) / (parts * limit))
    while True:
        rows: list[list[int]] = [[] for _ in range(count)]
        for place in range(len(sizes)):
            min(rows, key=lambda row: sum(sizes[i] for i in row)).append(place)
        if all(len(row) <= 1 or sum(sizes[i] for i in row) <= limit for row in rows):
            return [row for row in rows if row]
        count += parts


def _cut(samples: Sequence[Sample], group: list[int], limit: int) -> Iterator[list[int]]:
    piece: list[int] = []
    for i in group:
        if piece and packed_tokens(samples, [*piece, i]) > limit:
            yield piece
            piece = []
        piece.append(i)
    yield piece


# Packed rows of a few fixed sizes, in tensors that stay in place, as CUDA graphs need them.
#
# A row is filled up with padding tokens, in pieces of their own that no completion sees. Their outputs are read by
# nothing, so their gradients are exact zeros, which change no sum.

_CPU = torch.device("cpu")
#: The least tokens of a row, and the least queries and keys of its longest pieces.
_LEAST_TOKENS, _LEAST_PIECE = 256, 64


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def padded_tokens(count: int) -> int:
    """The least of the sizes 256, 384, 512, 768, 1024, ... above `count`: two an octave."""
    least = max(count + 1, _LEAST_TOKENS)
    size = _power_of_two(least)
    return 3 * size // 4 if 3 * size // 4 >= least else size


@dataclass(frozen=True)
class PaddedSize:
    """What the tensors of a row have room for. There are few sizes, so that graphs are few."""

    tokens: int
    states: int
    pieces: int
    keys: int
    copies: int
    longest: int
    widest: int

    @classmethod
    def of(cls, batch: MicroBatch) -> PaddedSize:
        """The least size for a micro-batch. There is a padding token at least, to which padding indices point."""
        packing, count = batch.packing, batch.ids.numel()
        tokens = padded_tokens(count)
        longest = _power_of_two(max(packing.longest, _LEAST_PIECE))
        padding = tokens - count
        return cls(
            tokens=tokens,
            states=max(_power_of_two(len(batch.targets_M)), tokens),
            pieces=max(_power_of_two(len(packing.lengths) + -(-padding // longest)), tokens // 8),
            keys=max(_power_of_two(sum(packing.widths) + padding), 4 * tokens),
            copies=_power_of_two(1 + max(map(packing.prompts.count, set(packing.prompts) - {None}), default=0)),
            longest=longest,
            widest=_power_of_two(max(packing.widest, _LEAST_PIECE)),
        )


class PaddedMicroBatch:
    """The inputs of a pass in tensors of one size, which stay in place; `fill` writes a micro-batch into them."""

    def __init__(self, size: PaddedSize, device: torch.device) -> None:
        int64, int32 = (partial(torch.zeros, dtype=dtype, device=device) for dtype in (torch.long, torch.int32))
        self.size = size
        self.ids, self.positions = int64(1, size.tokens), int64(1, size.tokens)
        self.states_M = int64(size.states)
        self.packing = FixedPacking(
            longest=size.longest,
            widest=size.widest,
            queries_ends=int32(size.pieces + 1),
            keys_ends=int32(size.pieces + 1),
            copies=KeyPlaces(
                sources=int64(size.keys),
                own=int64(size.tokens),
                shared=int64(size.tokens),
                places=int64(size.copies, size.tokens),
                missing=torch.ones(size.copies, size.tokens, dtype=torch.bool, device=device),
            ),
        )
        self._filled: MicroBatch | None = None

    def fill(self, batch: MicroBatch) -> None:
        """Write the inputs of `batch`, whose size is this one; nothing if they are there already."""
        if self._filled is batch:
            return
        count, last = batch.ids.numel(), self.size.tokens - 1
        for padded, values in ((self.ids, batch.ids), (self.positions, batch.positions)):
            padded[:, :count].copy_(values)
            padded[:, count:] = 0
        # Rows that no completion reads are spread, since gradients of rows with the same index are added in turn.
        chosen = len(batch.states_M)
        spread = count + np.arange(self.size.states - chosen) % (self.size.tokens - count)
        self.states_M[:chosen].copy_(batch.states_M)
        self.states_M[chosen:].copy_(torch.from_numpy(spread))
        self._fill_packing(batch.packing, self.size.tokens - count, last)
        self._filled = batch

    def _fill_packing(self, packing: Packing, padding: int, last: int) -> None:
        pieces = [self.size.longest] * (padding // self.size.longest)
        pieces += [rest] if (rest := padding % self.size.longest) else []
        lengths, prompts = [*packing.lengths, *pieces], [*packing.prompts, *[None] * len(pieces)]
        full, target = Packing.of(lengths, prompts, _CPU), self.packing
        _write(full.queries_ends, target.queries_ends, int(full.queries_ends[-1]))
        _write(full.keys_ends, target.keys_ends, int(full.keys_ends[-1]))
        copies, missing = full.copies, full.copies.missing
        _write(copies.sources, target.copies.sources, 0)
        _write(copies.own, target.copies.own, 0)
        _write(copies.shared, target.copies.shared, last)
        _write(copies.places, target.copies.places, 0)
        assert target.copies.missing is not None
        missing = torch.zeros(copies.places.shape, dtype=torch.bool) if missing is None else missing
        _write(missing, target.copies.missing, True)


def _write(values: torch.Tensor, target: torch.Tensor, filler: int) -> None:
    """Copy values to the first places of each dimension, and the filler to the others."""
    sizes = zip(reversed(target.shape), reversed(values.shape), strict=True)
    target.copy_(torch.nn.functional.pad(values, [n for size, count in sizes for n in (0, size - count)], value=filler))


# Passes over packed rows.


def token_states(policy: Policy, inputs: MicroBatch | PaddedMicroBatch) -> torch.Tensor:
    """The hidden states [M, H], in the base's dtype, that predict the completion tokens."""
    with policy.autocast():
        return token_hidden(policy.lm, inputs.ids, inputs.positions, inputs.packing)[0][inputs.states_M]


def head_logprobs(
    policy: Policy, states: torch.Tensor, batch: MicroBatch, temperature: float, keep_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy [M], float32, of a batch's tokens by their hidden states [M, H]."""
    head, structure = policy.lm.get_output_embeddings(), structure_of(policy.lm.config)
    cap = None if structure.logit_cap is None else logprobs.SoftCap(structure.logit_cap, structure.logit_scale)
    # Without a cap, a factor of the logits is one of the temperature.
    divisor = temperature if cap else temperature / structure.logit_scale
    return logprobs.logprobs_and_entropy(
        states, head.weight, batch.targets_M, divisor, keep_logits, bias=head.bias, cap=cap
    )


def logprobs_and_entropy(
    policy: Policy, batch: MicroBatch, temperature: float, keep_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the completion tokens, and the entropy of the distribution at each token.

    Both are [N, T] float32 at the sampling temperature, zero on padding. The entropy is H = -sum pi log pi.
    `keep_logits` is `keep` of `qerl.models.logprobs`.
    """

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        return head_logprobs(policy, token_states(policy, batch), batch, temperature, keep_logits)

    logprobs, entropies = policy.reading(compute)
    return batch.unpacked(logprobs), batch.unpacked(entropies)
