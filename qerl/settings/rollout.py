"""Settings of samplers: the engine and its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from qerl.settings.base import PositiveInt, Settings

#: Draws at it are greedy in effect. Far below it, the division of logits overflows float32.
_LOWEST_TEMPERATURE = 1e-6


class SamplingSettings(Settings):
    """How completions are drawn. Defaults are those of the paper's rollout (Table 4)."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits. 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Tokens are drawn from the fewest likeliest ones that have this share of the probability that `top_k` keeps. 1
    keeps all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Tokens are drawn from this many likeliest ones. 0 keeps all."""
    max_tokens: PositiveInt = 4096
    """The most tokens of a completion."""

    @model_validator(mode="after")
    def _logits_do_not_overflow(self) -> SamplingSettings:
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            raise ValueError(
                f"sampling.temperature={self.temperature:g} is too small to divide by; use 0, which is greedy, or at "
                f"least {_LOWEST_TEMPERATURE:g}"
            )
        return self


class VllmSettings(Settings):
    """vLLM as the sampler."""

    utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the GPU's memory for the engine (weights, cache, CUDA graphs). The trainer needs the rest. In a
    job that has a part of the GPU, this is a share of that part."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of the KV cache in GiB. None takes what `utilization` leaves, on a CPU 1 GiB."""
    max_model_len: PositiveInt | None = None
    """Longest prompt with its completion, in tokens. None takes the model's context."""
    max_sequences: PositiveInt = 256
    """Largest number of sequences that are decoded together."""
    sleep: bool = False
    """Release the engine's memory between rollouts: weights move to host memory, the cache is dropped."""
    eager: bool = False
    """Neither compile nor capture CUDA graphs. The engine starts faster and runs slower."""
    tensor_parallel: PositiveInt = 1
    """Number of GPUs of this machine that share each layer of the engine. The trainer's policy stays whole on the first
    one."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_server(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and (removed := sorted({"url", "adapters"} & values.keys())):
            raise ValueError(f"the key {removed[0]} was removed with engine=vllm-server; delete it and use engine=vllm")
        return values


Kernels = Literal["auto", "portable"]
KvCacheDtype = Literal["auto", "fp8"]


class NativeSettings(Settings):
    """The native engine, which samples from the trainer's own weights on a GPU."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of the KV cache in GiB. None takes what the rollout can use, at most 60 % of the memory that is free before
    it. If that limit is reached, the cache's memory is released after each rollout, as with `sleep`."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Dtype of the KV cache. `auto` is that of the model. `fp8` (E4M3 with a scale for each token and head) holds 1.9
    times as many tokens in the same memory. The sampler's distribution then differs more from the trainer's, which
    `mismatch/kl` logs. It needs a GPU of compute capability 8.9."""
    sleep: bool = False
    """Release the cache's memory after each rollout. The next rollout takes about a second longer."""
    batch_invariant: bool = False
    """Make each completion independent of its batch, to the bit. Prompts are then computed one by one and every step
    has the size of a full batch, which is slower."""
    drafts: bool = False
    """Let a step verify several guessed tokens of each sequence where few sequences are left. Guesses come from the
    prompt, the completion so far, and other completions of the prompt. The tokens are those without guesses, except
    where roundings of a larger batch change a draw. With `batch_invariant` all bits are the same, also in a run that
    was killed and has forgotten the completions of its earlier steps.
    Models with delta nets have no drafts, because their states can't be rolled back."""
    kernels: Kernels = "auto"
    """Kernels of the products with NVFP4 and MXFP4 weights. `auto` takes those that were written for the GPU's
    generation, which is Hopper alone, and otherwise the portable ones in Triton. `portable` takes the latter
    everywhere."""


class EngineSettings(Settings):
    """The engine that draws the completions."""

    #: The key of `engine` in a configuration, for messages.
    engine_key: ClassVar[str] = "engine"

    engine: Literal["native", "vllm"] = "native"
    """`native` is this project's engine. `vllm` is vLLM within this process."""
    native: NativeSettings = NativeSettings()
    vllm: VllmSettings = VllmSettings()

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs that sampling needs."""
        return self.vllm.tensor_parallel if self.engine == "vllm" else 1

    @field_validator("engine", mode="before")
    @classmethod
    def _is_no_server(cls, value: Any) -> Any:
        if value == "vllm-server":
            raise ValueError("engine=vllm-server was removed; use engine=vllm, which is vLLM within this process")
        return value


class RolloutSettings(EngineSettings):
    """The rollout of each step: `prompts` problems with `group_size` completions each (G of Eq. 3)."""

    engine_key: ClassVar[str] = "rollout.engine"

    prompts: PositiveInt = 16
    group_size: PositiveInt = 8
    resample: Annotated[int, Field(ge=0, lt=256)] = 0
    """Number of further rounds of DAPO's dynamic sampling. Each round replaces problems whose completions all earn the
    same reward by the next problems."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt of a training problem, in tokens. Problems with longer ones are left out. With none, every prompt
    must fit into the model's context together with `sampling.max_tokens`."""
    sampling: SamplingSettings = SamplingSettings()

    @model_validator(mode="after")
    def _draws_at_a_temperature(self) -> RolloutSettings:
        if self.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature=0 is greedy: all completions of a problem are the same, and training "
                "divides by it; use a temperature above 0, such as 1.0 (an evaluation may have 0)"
            )
        return self


#: Keys of `EngineSettings` that change no completion. The sizes of cache and batch do, and drafts do, because they
#: decide which sequences are decoded together and so how sums are rounded.
UNDECIDING_OF_ENGINE: Any = {"native": {"sleep"}, "vllm": {"sleep", "url", "adapters"}}
