"""The eager sampler. It reads the policy's own tensors, so nothing is merged, copied or synchronised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from transformers import DynamicCache

from qerl.models.linear import PackedLinear, dense_weights
from qerl.models.lora import SharedCasts
from qerl.models.policy import Policy
from qerl.rollout.sampler import BatchPart, Completion, Draft, SamplingParams, refuse_nan, stop_tokens


def uniforms(seed: int, sequence: int, count: int) -> np.ndarray:
    """`count` uniform draws for one sequence, float64 in [0, 1), a function of (seed, sequence) alone."""
    key = np.array([seed, sequence], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def draw(logits: torch.Tensor, uniform: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    logits [B, V], uniform [B] float64 in [0, 1) -> tokens [B] int64, log-probabilities [B] float32 under the
    distribution at the sampling temperature, before truncation by top-k and top-p.
    """
    logprobs = _logprobs(logits, params)
    tokens = _invert(logprobs.double().exp(), uniform, params) if params.temperature else logits.argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _logprobs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return torch.log_softmax(logits.float() / (params.temperature or 1.0), dim=-1)


def _invert(probs: torch.Tensor, uniform: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    if params.top_p == 1 and not params.top_k:
        return _search(probs.cumsum(-1), uniform)
    # Equal probabilities stay in the order of their tokens.
    sorted_probs, order = probs.sort(dim=-1, descending=True, stable=True)
    mass: torch.Tensor | float = 1.0
    if params.top_k:  # top-p is a share of what top-k keeps, as in vLLM and transformers
        sorted_probs[:, params.top_k :] = 0
        mass = sorted_probs.sum(-1, keepdim=True)
    # A token is kept while the mass before it is below top_p; this is the smallest set with mass of at least top_p.
    allowed = (sorted_probs.cumsum(-1) - sorted_probs) < params.top_p * mass
    position = _search((sorted_probs * allowed).cumsum(-1), uniform)
    return order.gather(-1, position[:, None])[:, 0]


def _search(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative mass exceeds the draw. Draws are below 1, so that token has mass."""
    target = (uniform * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=cumulative.shape[-1] - 1)


def _select(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Make the rows of a cache those of the given numbers, also in layers with recurrent states."""
    cache.reorder_cache(cast(torch.LongTensor, rows))


@dataclass
class _Batch:
    """Sequences that are decoded together; their number falls as sequences finish."""

    rows: torch.Tensor  # [B] index of each row's sequence
    tokens: torch.Tensor  # [B] last token
    positions: torch.Tensor  # [B] position of the last token
    mask: torch.Tensor  # [B, length] 1 where the cache holds a token
    cache: DynamicCache

    def keep(self, alive: torch.Tensor) -> None:
        """Drop finished rows from the batch and the cache."""
        index = alive.nonzero()[:, 0]
        self.rows, self.tokens, self.positions = self.rows[index], self.tokens[index], self.positions[index]
        self.mask = self.mask[index]
        _select(self.cache, index)


class EagerSampler:
    """Sampler in plain PyTorch with a KV cache. The prompt of a group is computed once.

    `max_sequences` bounds how many sequences are decoded together, and so the memory of the cache.
    """

    #: The share of finished rows at which the batch is compacted; doing it at each end would copy the cache too often.
    compact_at = 0.25

    def __init__(self, policy: Policy, max_sequences: int = 512) -> None:
        self.policy = policy
        self.max_sequences = max_sequences

    @property
    def served(self) -> str:
        """Description of the sampler and its weights, for results."""
        packed = {layer.weights_format for layer in self.policy.lm.modules() if isinstance(layer, PackedLinear)}
        dtype = str(self.policy.lm.dtype).removeprefix("torch.")
        return f"native, PyTorch on {' '.join([*packed, 'unpacked to', dtype]) if packed else dtype}"

    def sync(self) -> None:
        """Do nothing, since this sampler reads the policy's tensors."""

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """See `Sampler`."""
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt has no tokens; give each at least one")
        completions: list[list[Completion]] = [[] for _ in prompts]
        stride = max(self.max_sequences // params.count, 1)
        part = params.part or BatchPart(range(len(prompts)), lambda most: ())
        lm = self.policy.lm
        with dense_weights(lm, lm.dtype), SharedCasts(lm, every=True).unchanged(), self.policy.autocast():
            for numbers in part.batches(stride):
                drawn = self._generate_batch([prompts[number] for number in numbers], params, numbers)
                for number, group in zip(numbers, drawn, strict=True):
                    completions[number] = group
        refuse_nan(completions)
        return completions

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, numbers: Sequence[int]
    ) -> list[list[Completion]]:
        """Completions of some of the prompts, which have the indices `numbers`."""
        sequences = [(number, completion) for number in numbers for completion in range(params.count)]
        keys = [number * params.count + completion for number, completion in sequences]
        draws = np.stack([uniforms(params.seed, key, params.max_tokens) for key in keys])
        uniform = torch.from_numpy(draws).to(self.policy.device)
        limits = [params.limit(*sequence) for sequence in sequences]
        stops, alive = stop_tokens(self.policy, params), np.array(limits) > 0
        drafts = [Draft(given=params.replay[number][c] if params.replay else ()) for number, c in sequences]
        batch, logits = self._prefill(prompts, params.count)
        for step in range(params.max_tokens):
            tokens, logprobs = draw(logits, uniform[batch.rows, step], params)
            rows = batch.rows.tolist()
            given = [drafts[row].given[step : step + 1] for row in rows]
            if any(given):
                replaced = torch.tensor([len(one) > 0 for one in given], device=tokens.device)
                others = torch.tensor([one[0] if one else 0 for one in given], device=tokens.device)
                tokens = torch.where(replaced, others, tokens)
                logprobs = _logprobs(logits, params).gather(-1, tokens[:, None])[:, 0]
            ended = []
            for row, token, logprob, known in zip(rows, tokens.tolist(), logprobs.tolist(), given, strict=True):
                if alive[row]:  # others wait for the batch to be compacted
                    drafts[row].tokens.append(token)
                    drafts[row].logprobs.append(logprob)
                    stopped = token in stops and not known
                    alive[row] = not stopped and step + 1 < limits[row]
                    if stopped or (params.lengths and not alive[row]):
                        ended.append(row)
            if params.turns:
                # All replies are awaited, so that a batch doesn't depend on how long they take.
                for row in ended:
                    number, completion = sequences[row]
                    params.turns.ask(number, completion, drafts[row].tokens)
                places = {sequences[row]: row for row in ended}
                while places:
                    for number, completion, reply in params.turns.replies(1.0):
                        row = places.pop((number, completion))
                        alive[row] = drafts[row].goes_on(reply, params.max_tokens)
                        limits[row] = min(len(drafts[row].given) + params.limit(number, completion), params.max_tokens)
            if not alive.any():
                break
            logits = self._decode(batch, tokens, torch.from_numpy(alive[rows]).to(tokens.device))
        done = [draft.completion(stops) for draft in drafts]
        return [done[i : i + params.count] for i in range(0, len(done), params.count)]

    def _prefill(self, prompts: Sequence[Sequence[int]], count: int) -> tuple[_Batch, torch.Tensor]:
        """Compute left-padded prompts once, and repeat the cache for each completion of their groups."""
        device, longest = self.policy.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.policy.lm.config)
        logits = self._forward(ids, positions, mask, cache)
        rows = torch.arange(len(prompts) * count, device=device)
        _select(cache, rows // count)
        last = (lengths - 1).repeat_interleave(count)
        batch = _Batch(rows, rows, last, mask.repeat_interleave(count, 0), cache)
        return batch, logits.repeat_interleave(count, 0)

    def _decode(self, batch: _Batch, tokens: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
        """Feed the sampled tokens; returns logits [B, V] of the next ones."""
        batch.tokens = tokens
        if (~alive).sum() >= self.compact_at * len(alive):
            batch.keep(alive)
        batch.positions = batch.positions + 1
        batch.mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], dim=-1)
        return self._forward(batch.tokens[:, None], batch.positions[:, None], batch.mask, batch.cache)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits [B, V] after the last token of each row."""
        output = self.policy.lm(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
