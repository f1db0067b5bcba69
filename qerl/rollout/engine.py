"""The native engine, which samples with fused products on the policy's own tensors, in CUDA graphs on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qerl.host.gpus import allocatable_bytes
from qerl.kernels.operations import operations_name
from qerl.kernels.state import FP8, PAGE, DecodeState, SamplingState, page_bytes
from qerl.models.linear import PackedLinear
from qerl.models.policy import Policy, weight_bytes
from qerl.rollout.decoder import DecodeGraphs, Decoder, Prefill
from qerl.rollout.sampler import Completion, Request, SamplingParams, refuse_nan, refused_fp8_cache, stop_tokens
from qerl.rollout.scheduler import Pages, Pool, RolloutPhases, Scheduler, pages_for, slots_for, steps_between_looks
from qerl.settings.base import ConfigError
from qerl.settings.run import NativeSettings

#: The most prompt tokens that are computed together.
PREFILL_TOKENS = 8192
#: Share of the free memory that the cache may use if no size is set.
FREE_SHARE = 0.6
_TO_LOWER = "lower max_tokens or the sequences of a rollout, or raise native.kv_cache_gib"


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
        self.policy = policy
        self.policies = [policy, *others]
        self.settings = settings
        self.max_sequences = max_sequences
        self._decoder = Decoder(self.policies, settings.kernels)
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
        return completions

    def generate_all(self, requests: Sequence[Request]) -> list[list[list[Completion]]]:
        """The completions of a request of each run, in the order of the policies. A run may have no prompts."""
        if len(requests) != len(self.policies):
            raise ValueError(f"{len(requests)} requests for {len(self.policies)} runs")
        if not all(len(prompt) for request in requests for prompt in request.prompts):
            raise ValueError("a prompt has no tokens; give each at least one")
        if not any(len(request.numbers) for request in requests):
            return [[[] for _ in request.prompts] for request in requests]
        self.sync()
        try:
            completions = self._generate(requests)
            for policy, request, drawn in zip(self.policies, requests, completions, strict=True):
                refuse_nan(policy, request.prompts, drawn)
        except BaseException as error:
            self.release()
            if isinstance(error, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(f"the rollout ran out of GPU memory; {_TO_LOWER}") from error
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
        for run, request in enumerate(requests):
            params = request.params
            pool.sampling.set(
                temperature=params.temperature,
                seed=params.seed,
                top_p=params.top_p,
                top_k=params.top_k,
                stops=stops,
                run=run,
            )
        prefill_tokens = 1 if self.settings.batch_invariant else PREFILL_TOKENS
        scheduler = Scheduler(pool, requests, prefill_tokens)
        completions = scheduler.run(stops)
        self.phases = scheduler.clock.phases()
        if pool.pages.available != pool.pages.count - 1:
            raise RuntimeError("pages of the KV cache are still in use after the rollout: a defect of the engine")
        return completions

    def _ready_pool(self, requests: Sequence[Request]) -> Pool:
        """The existing pool if it suffices, else a new one."""
        sequences = self.max_sequences
        if not self.settings.batch_invariant:
            sequences = min(sequences, sum(len(request.numbers) * request.params.count for request in requests))
        tokens = max(request.params.max_tokens for request in requests)
        longest, most = max(request.longest for request in requests), self._decoder.longest
        if most is not None and longest > most:
            room = most - longest + tokens
            remedy = f"lower max_tokens to {room}" if room > 0 else f"leave out prompts of {most} or more tokens"
            raise ConfigError(
                f"a sequence may have {longest} tokens, and the model's rotary positions change for all of its tokens "
                f"after {most}; {remedy}"
            )
        alone, most_pages = pages_for(longest, sequences)
        if self._pool is None or not self._serves(self._pool, alone, most_pages, tokens, sequences):
            self.release()
            self._pool = self._new_pool(alone, most_pages, tokens, sequences)
        if self._pool.pages.count < alone:
            if self.settings.kv_cache_gib is None:
                raise torch.OutOfMemoryError(f"a sequence needs {alone} pages, and memory has {self._pool.pages.count}")
            raise ConfigError(
                f"a sequence of {(alone - 2) * PAGE} tokens needs {alone} pages of the KV cache, which has "
                f"{self._pool.pages.count}; lower max_tokens or raise native.kv_cache_gib"
            )
        return self._pool

    def _serves(self, pool: Pool, alone: int, most_pages: int, max_tokens: int, sequences: int) -> bool:
        state = pool.state
        fits = state.tokens.shape[1] >= max_tokens and state.pages.shape[1] >= alone - 2
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
        decoder.compile_ahead(slots)
        state, states = DecodeState.empty(slots, tokens, pages_each, decoder.device), decoder.new_states(slots)
        cache = decoder.new_cache(min(most_pages, affordable), dtype)
        sampling = SamplingState.empty(decoder.device, len(self.policies))
        self.cache_bytes = cache.nbytes + (states.nbytes if states else 0)
        self.cache_wanted_bytes = most_pages * page + (sequences + 2) * state_bytes
        # Graphs never run at the same time, so they share one memory pool.
        memory = torch.cuda.graph_pool_handle() if decoder.device.type == "cuda" else None
        all_slots = self.settings.batch_invariant
        steps = DecodeGraphs(decoder, state, cache, sampling, all_slots, memory, states)
        pages, prefill = Pages(cache.pages, PAGE), Prefill(decoder, cache, memory, states)
        look_every = steps_between_looks(weight_bytes(self.policy))
        return Pool(decoder, state, cache, pages, sampling, steps, prefill, look_every, states)

    def _cache_bytes(self) -> int:
        """The largest allowed size of the cache in bytes."""
        if self.settings.kv_cache_gib is not None:
            return int(self.settings.kv_cache_gib * 2**30)
        if self.policy.device.type != "cuda":
            return 2**62
        return int(FREE_SHARE * allocatable_bytes())


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
