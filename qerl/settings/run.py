"""Settings of a training run, in a grid or by hand: its sampler, reward, adapter, noise, loss and optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from qerl.settings.base import (
    FilePath,
    Fraction,
    FunctionPath,
    Name,
    NonEmpty,
    PositiveInt,
    Seed,
    Settings,
    can_name_a_file,
    not_empty,
)
from qerl.settings.data import DatasetSettings, HubData, LocalData
from qerl.settings.models import Base, CalibrationSettings, RandomErrorSettings, Recipe, WeightFormat

# Settings of samplers: the engine and its sampling parameters.

#: Draws at it are greedy in effect. Far below it, the division of logits overflows float32.
_LOWEST_TEMPERATURE = 1e-6


class SamplingSettings(Settings):
    """How completions are drawn. The defaults are the paper's (Table 4)."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits. 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the fewest likeliest tokens that have this share of the probability that `top_k` keeps."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many likeliest tokens. 0 keeps all."""
    max_tokens: PositiveInt = 4096

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
    """Share of the GPU's memory, or of the job's part of it, for the engine (weights, cache, CUDA graphs)."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of the KV cache in GiB. None takes what `utilization` leaves, on a CPU 1 GiB."""
    max_model_len: PositiveInt | None = None
    """Longest prompt with its completion, in tokens. None takes the model's context."""
    max_sequences: PositiveInt = 256
    """Most sequences decoded together."""
    sleep: bool = False
    """Release the engine's memory between rollouts: weights move to the host, the cache is dropped."""
    eager: bool = False
    """Neither compile nor capture CUDA graphs, for a faster start and slower steps."""
    tensor_parallel: PositiveInt = 1
    """GPUs of this machine that share each layer of the engine. The trainer's policy stays whole on the first."""


Kernels = Literal["auto", "portable"]
KvCacheDtype = Literal["auto", "fp8"]


class NativeSettings(Settings):
    """The native engine, which samples from the trainer's own weights on a GPU."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of the KV cache in GiB. None takes what the rollout can use, at most 60 % of the memory that is free before
    it. If that limit is reached, the cache is released after each rollout, as with `sleep`."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """`auto` is the model's dtype. `fp8` (E4M3 with a scale for each token and head) holds 1.9 times as many tokens,
    needs compute capability 8.9, and makes the sampler differ more from the trainer, which `mismatch/kl` logs."""
    sleep: bool = False
    """Release the cache's memory after each rollout. The next rollout takes about a second longer."""
    batch_invariant: bool = False
    """Make each completion independent of its batch, to the bit, which is slower."""
    kernels: Kernels = "auto"
    """Kernels of the products with NVFP4 and MXFP4 weights. `auto` takes those written for Hopper where the GPU is one,
    and otherwise the portable ones in Triton. `portable` takes the latter everywhere."""


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


class RolloutSettings(EngineSettings):
    """The rollout of each step: `prompts` problems with `group_size` completions each (G of Eq. 3)."""

    engine_key: ClassVar[str] = "rollout.engine"

    prompts: PositiveInt = 16
    group_size: PositiveInt = 8
    resample: Annotated[int, Field(ge=0, lt=256)] = 0
    """Further rounds of DAPO's dynamic sampling. A round replaces groups of equal rewards by the next problems."""
    max_prompt_tokens: PositiveInt | None = None
    """Leave out training problems with longer prompts, in tokens. With none, every prompt must fit into the model's
    context together with `sampling.max_tokens`."""
    sampling: SamplingSettings = SamplingSettings()
    repetition: Annotated[int, Field(ge=0)] = 0
    """Draws other completions for each number, from the same problems and initial adapter, to tell how far a run is
    from its own repetition."""

    @model_validator(mode="after")
    def _draws_at_a_temperature(self) -> RolloutSettings:
        if self.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature=0 is greedy: all completions of a problem are the same, and training "
                "divides by it; use a temperature above 0, such as 1.0 (an evaluation may have 0)"
            )
        return self


#: Keys of `EngineSettings` that change no completion. The sizes of cache and batch do, because they decide which
#: sequences are decoded together and so how sums are rounded.
UNDECIDING_OF_ENGINE: Any = {"native": {"sleep"}, "vllm": {"sleep"}}


# Settings of verifiable rewards, and the presets of the released scripts.

RewardPreset = Literal["upstream-gsm8k", "upstream-gsm8k-hashes", "upstream-bigmath", "upstream-dapomath"]
#: The released scripts' values: GSM8K since 27 Nov 2025 and before; BigMath; DAPO-Math and MiroMind.
REWARD_PRESETS: dict[RewardPreset, dict[str, float]] = {
    "upstream-gsm8k": {"correct": 2.0, "format": 0.2},
    "upstream-gsm8k-hashes": {"correct": 1.0, "format": 0.2},
    "upstream-bigmath": {"correct": 1.0, "format": 0.2},
    "upstream-dapomath": {"correct": 1.0, "format": 0.0},
}


#: Names of the log that begin as those of parts do.
_RESERVED = ("correct", "format", "overlong", "environment", "std", "equal_groups")


def _names_a_part(name: str) -> str:
    if not name.isidentifier() or name in _RESERVED:
        raise ValueError(f"{name!r} can't name a reward; use letters, digits and _, and none of {', '.join(_RESERVED)}")
    return name


class RewardFunction(Settings):
    """A reward of your own. `module:function` in place of these keys is a function of weight 1."""

    function: FunctionPath
    """With a parameter `completions` or `prompts` it is called as by TRL, once for many completions, with the keywords
    `completions`, `prompts`, `completion_ids` and a list for each column of the records. Any other is called for each
    completion as `function(answer: qerl.rl.rewards.Answer, problem: qerl.data.records.Problem)`. Both may be `async`.
    For each completion it gives a number between -1e15 and 1e15, or None, which leaves the completion out of this
    reward."""
    weight: float = 1.0
    timeout: Annotated[float, Field(gt=0)] | None = 300.0
    """Seconds that a call may take before it stops the run; a start with a higher limit continues. None sets no
    limit."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_path(cls, values: Any) -> Any:
        return {"function": values} if isinstance(values, str) else values


class RewardSettings(Settings):
    """Weights of the reward's parts (`qerl.rl.rewards`)."""

    preset: RewardPreset | None = None
    """Sets `correct` and `format` to the released scripts' values; keys given beside it win. Grading stays this
    project's."""
    correct: float = 1.0
    format: float = 0.1
    functions: dict[Annotated[str, AfterValidator(_names_a_part)], RewardFunction] = {}
    """Rewards of your own by the names of their parts, as `{brevity: "mine:brevity", style: {function: "mine:style",
    weight: 0.5}}`."""
    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """How several rewards become an advantage, as in TRL: the deviation of their weighted sum, or the weighted sum of
    their deviations within a group, scaled by its deviation in the batch."""
    overlong: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the penalty for long completions."""
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Tokens before the limit over which DAPO's soft penalty goes from 0 to -1. With 0 there is none."""

    @model_validator(mode="before")
    @classmethod
    def _with_functions(cls, values: Any) -> Any:
        """The values of earlier runs, which had at most one function, whose part was called `custom`."""
        earlier = {"function": "function", "custom": "weight", "timeout": "timeout"}
        if not isinstance(values, Mapping) or "function" not in values or "functions" in values:
            return values
        function = {name: values[key] for key, name in earlier.items() if key in values}
        functions = {"custom": function} if function.get("function") else {}
        return {"functions": functions, **{key: value for key, value in values.items() if key not in earlier}}

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("preset") not in get_args(RewardPreset):
            return values
        return {**REWARD_PRESETS[values["preset"]], **values}

    @model_validator(mode="after")
    def _has_parts_to_normalize(self) -> RewardSettings:
        if self.aggregation == "normalize_then_sum" and not self.weights:
            raise ValueError("reward.aggregation=normalize_then_sum needs a part with a weight; give one")
        return self

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part, without those parts that are always 0 or have no weight."""
        parts = {"correct": self.correct, "format": self.format, "overlong": self.overlong * bool(self.overlong_buffer)}
        own = {name: each.weight for name, each in self.functions.items()}
        return {**{name: weight for name, weight in parts.items() if weight}, **own}


class EnvironmentSettings(Settings):
    """What replies to the policy's turns: a tool, a game, a second try (docs/runs.md). `module:Class` in place of these
    keys is an environment of that class.
    """

    name: FunctionPath
    """The class as `module:Class`, with the methods of `qerl.rl.environments.Environment`. Each completion has an
    instance."""
    arguments: dict[str, Any] = {}
    """Arguments of the class, by name."""
    turns: PositiveInt = 8
    """Most turns of the policy in a completion."""
    timeout: Annotated[float, Field(gt=0)] | None = 300.0
    """Seconds that a reset or a reply may take before it stops the run; a start with a higher limit continues. None
    sets no limit."""
    weight: float = 1.0
    """Weight of the sum of the turns' rewards, beside the weights of `reward`."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_path(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) else values


# Settings of training: adapter, noise, loss and optimizer.

#: The linear layers of a block of Llama, whose names most models share. Together they mean all layers of any model.
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EXPERTS = "experts."
#: The linear layers of a mixture's experts. They also mean the parts of gpt-oss's fused layer.
EXPERT_LAYERS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
#: The end of a layer's name; the structure of a model decides which it has.
Target = Annotated[str, Field(min_length=1)]


class AdapterSettings(Settings):
    """LoRA. The defaults are the paper's (Table 4 and section 4.1), which doesn't state alpha."""

    rank: Annotated[int, Field(ge=0)] = 32
    alpha: PositiveInt = 64
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that an update drops, by a function of seed, step, completion and layer."""
    train_norms: bool = True
    """Whether the two RMSNorms of each block whose outputs projections read are trained too, as in the released
    scripts."""
    # The seven names of the default mean all layers outside of experts, so names of their own (experts.up_proj) are the
    # only ones that nobody gives by accident; Qwen3-30B-A3B's experts have 60 times as many adapter weights as its
    # attention.
    targets: NonEmpty[Target] = list(LAYERS)
    """Linear layers of the blocks that get an adapter, by the ends of their names. The default means every linear layer
    outside of a mixture's experts, whatever its name, and all parts of a fused layer mean that layer. `experts.…` gives
    each expert an adapter of its own."""

    @property
    def of_experts(self) -> list[str]:
        """The projections of experts that get adapters, such as "up_proj"."""
        return [target.removeprefix(_EXPERTS) for target in self.targets if target.startswith(_EXPERTS)]

    @property
    def beside_experts(self) -> list[str]:
        """The other targets."""
        return [target for target in self.targets if not target.startswith(_EXPERTS)]

    @model_validator(mode="after")
    def _experts_are_possible(self) -> AdapterSettings:
        if self.of_experts and self.dropout:
            raise ValueError(
                f"adapter.dropout={self.dropout} isn't possible with experts among adapter.targets, because PEFT has "
                "none on their stacks; use 0"
            )
        if len({"gate_proj", "up_proj"} & set(self.of_experts)) == 1:
            raise ValueError(
                "adapter.targets has one of experts.gate_proj and experts.up_proj, which transformers stacks in one "
                "weight; name both, or none"
            )
        return self


class NoiseSettings(Settings):
    """Adaptive Quantization Noise (paper section 3.3, Eq. 7 to 12)."""

    schedule: Literal["off", "exponential", "exponential-reaching", "linear", "cosine", "logarithmic", "constant"] = (
        "off"
    )
    sigma_start: Annotated[float, Field(ge=0)] = 1e-2
    sigma_end: Annotated[float, Field(ge=0)] = 5e-4
    stages: PositiveInt = 10
    """K of Eq. 8. The first stage has no noise. With fewer steps than stages each step is a stage."""
    mode: Literal["sampler", "consistent"] = "sampler"
    """`sampler` adds noise to the behaviour policy only (Algorithm 1). `consistent` adds the same z in the training
    forward pass too."""
    norms: NonEmpty[Literal["attention", "mlp"]] = ["attention", "mlp"]
    """Norms of a block that carry noise: before attention (`attention`) and before the MLP (`mlp`). The paper has
    both."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_results(cls, values: Any) -> Any:
        # Stored results have the defaults of two keys that were removed.
        if isinstance(values, dict) and (values.get("per"), values.get("placebo")) == ("step", False):
            values = {key: value for key, value in values.items() if key not in ("per", "placebo")}
        return values

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> NoiseSettings:
        if self.schedule in ("off", "constant"):
            return self
        if self.stages < 3:
            raise ValueError(f"noise.stages={self.stages} leaves no schedule between start and end; use at least 3")
        if not 0 < self.sigma_end <= self.sigma_start:
            raise ValueError("noise.sigma_end must be above 0 and not above noise.sigma_start for a decaying schedule")
        return self

    def sigma(self, step: int, total_steps: int) -> float:
        """Standard deviation of the noise at `step` (1-based) of `total_steps`.

        With M steps and K stages, the stage is k = floor((step - 1) / floor(M / K)), at most K - 1; stage 0 has no
        noise (Eq. 8). With fewer steps than stages (M < K), each step is a stage: k = step - 1, which stays below
        K - 1. The paper gives no formulas for the decays besides `exponential`; they run from sigma_start in stage 1
        to sigma_end in stage K - 1. `constant` is sigma_start in every stage, including stage 0.
        """
        if self.schedule == "off":
            return 0.0
        start, end = self.sigma_start, self.sigma_end
        if self.schedule == "constant":
            return start
        # The last stage takes the steps that K leaves over.
        stage = min((step - 1) // max(total_steps // self.stages, 1), self.stages - 1)
        if stage == 0:
            return 0.0
        # Eq. 8 as printed, whose last stage stops at 6.98e-4 for 1e-2 -> 5e-4 and K = 10.
        if self.schedule == "exponential":
            return start * (end / start) ** ((stage - 1) / (self.stages - 1))
        progress = (stage - 1) / (self.stages - 2)
        remaining = {
            # As in the released code, which stretches the exponent so that the last stage reaches sigma_end.
            "exponential-reaching": lambda: (start * (end / start) ** progress - end) / (start - end or 1.0),
            "linear": lambda: 1 - progress,
            "cosine": lambda: (1 + math.cos(math.pi * progress)) / 2,
            "logarithmic": lambda: 1 - math.log(1 + stage - 1) / math.log(self.stages - 1),
        }[self.schedule]()
        return end + (start - end) * remaining


class PPOSettings(Settings):
    """Value function and advantages of PPO (docs/algorithms.md). The paper has no PPO.

    The default lambda is from arXiv 1707.06347 (Tables 3 to 5). There is no discount, as is usual for text.
    """

    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of the generalized advantage estimation (arXiv 1506.02438, Eq. 16)."""
    whiten: bool = True
    """Scale advantages to mean 0 and variance 1 over the tokens of a step."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """Largest change of a value that the loss counts, as `clip_low`."""
    value_coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the value's loss, which already has a factor of 0.5."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate of the value function, with the policy's schedule: ten times the policy's default (nine in
    OpenRLHF)."""
    rank: PositiveInt = 32
    """Rank of the value function's adapter, which has the policy's targets, no dropout and no trained norms."""
    alpha: PositiveInt = 64


_Positive = Annotated[float, Field(gt=0)]


class LossSettings(Settings):
    """The policy's loss (docs/algorithms.md has the formulas). The default is GRPO without a KL term."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "bnpo", "cispo", "sapo", "ppo"] = "grpo"
    """The released scripts run `bnpo` as DAPO. `ppo` uses a value function in place of groups."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    ratio_cap: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio of a token with a negative advantage, which has none otherwise (two-sided clipping). For `cispo` it
    is needed, as the largest weight of any token, such as 5."""
    sapo_temperatures: tuple[_Positive, _Positive] = (1.0, 1.05)
    """Temperatures of `sapo` for positive and for other advantages."""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the base without the adapter."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the bonus for each token's entropy at the sampling temperature, in nats. The paper has none."""
    scale_advantages: bool = True
    """Divide advantages by the group's standard deviation (Eq. 4). The default of `dr_grpo` is false."""
    mask_truncated: bool = False
    """Exclude completions that reached the length limit (DAPO's overlong filtering)."""
    updates_per_rollout: PositiveInt = 1
    """Passes over one rollout, each with an optimizer step (mu of Algorithm 1)."""
    correction: Literal["off", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] = "off"
    """Importance weights between sampler and trainer. The paper has none."""
    correction_cap: Annotated[float, Field(ge=1)] = 2.0
    """Above it, `-truncate` cuts the weight and `-mask` drops the token or sequence."""
    silent_sample: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of the completions without a gradient that an update reads, for the metrics of entropy and mismatch. It
    changes no policy. With `kl`, `entropy` or `ppo` none are silent."""
    ppo: PPOSettings = PPOSettings()
    """Settings that only `ppo` uses."""

    @model_validator(mode="before")
    @classmethod
    def _dr_grpo_does_not_scale(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("name") != "dr_grpo":
            return values
        return {"scale_advantages": False, **values}

    @model_validator(mode="after")
    def _cispo_has_a_cap(self) -> LossSettings:
        if self.name == "cispo" and self.ratio_cap is None:
            raise ValueError("loss.name=cispo needs loss.ratio_cap, the largest weight of a token, such as 5")
        return self


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """Optimizer and schedule (paper Table 4; warm-up, decay and clipping from the released scripts)."""

    name: Literal["adamw", "adamw8bit"] = "adamw8bit"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    betas: tuple[_Beta, _Beta] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    warmup_ratio: Fraction = 0.1
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.2


# Settings of a training run, in a grid or by hand.

#: Keys of `RunSettings` that decide neither the result of a run nor the time of its steps.
UNDECIDING_OF_STEPS: Any = {
    "reward": {"functions": {"__all__": {"timeout"}}},
    "environment": {"timeout"},
    "on_no_signal": True,
    "checkpoint_every": True,
    "stored_rollouts": True,
    "track": True,
}


# Sizes of caches and batches are compared, because a batch's composition decides how sums are rounded;
# gradient_checkpointing isn't, since recomputed blocks are equal to the bit.
#: Keys of `RunSettings` that don't decide the result of a run. If they change, a finished run stays and a killed run
#: continues.
UNDECIDING: Any = {
    **UNDECIDING_OF_STEPS,
    "gradient_checkpointing": True,
    "processes": True,
    "nodes": True,
    "node_timeout": True,
    "rollout": UNDECIDING_OF_ENGINE,
}


#: Keys of `RunSettings` that must fit the model's structure.
FITTED: Any = {
    "weights": True,
    "recipe": True,
    "pack_delta_nets": True,
    "method": True,
    "adapter": {"targets", "train_norms", "dropout"},
    "noise": {"schedule", "norms"},
    "rollout": {"engine"},
}
#: With those by which the lengths of its problems are checked, all that the check of a run reads.
CHECKED: Any = {
    **FITTED,
    "model": True,
    "dataset": True,
    "validation": {"every", "problems"},
    "reward": {"correct"},
    "rollout": {
        "engine": True,
        "max_prompt_tokens": True,
        "sampling": {"max_tokens"},
        "vllm": {"max_model_len"},
    },
}


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class StoredRollouts(Settings):
    """The part of its rollouts that a run stores, for people to read with `qerl view`. Storing changes no result."""

    every: Annotated[int, Field(ge=0)] = 10
    """Store the rollouts of the first step, of every n-th and of the last one. 0 stores none."""
    problems: PositiveInt = 8
    """Most problems of a stored step."""
    completions: PositiveInt = 8
    """Most completions of each problem."""
    tokens: PositiveInt = 65536
    """Most completion tokens of a stored step, of about five bytes each on disk."""


class ValidationSettings(Settings):
    """Scores on held-out problems while the policy trains. Completions are drawn as in a rollout, without noise."""

    every: Annotated[int, Field(ge=0)] = 0
    """Score before the first step, after every n-th and after the last one. 0 scores never."""
    problems: PositiveInt = 64
    """At most so many problems, the first ones of the split `validation`."""
    completions: PositiveInt = 1
    """Completions of each problem; with several, a score has pass@k of all of them, too."""
    measure: Literal["pass@1", "reward"] = "pass@1"
    """What `keep` and `patience` compare: the share of right answers, or the mean reward."""
    keep: Literal["last", "best"] = "last"
    """The policy that the run ends with: of the last step, or of the step with the best score (the first of equals)."""
    patience: PositiveInt | None = None
    """End the run after so many scores in a row that are no better than the best one."""

    @model_validator(mode="after")
    def _compares_scores(self) -> ValidationSettings:
        if not self.every and (self.keep == "best" or self.patience):
            raise ValueError("keep=best and patience compare scores, and every=0 makes none; set every")
        return self


class RunSettings(Settings):
    """All settings that determine a training run."""

    model: str
    dataset: str
    weights: WeightFormat = "nvfp4"
    recipe: Recipe = "rtn"
    """`rtn` rounds to nearest, without data. `awq` (nvfp4 and mxfp4) first scales channels by their activations on
    calibration texts. `random` (bf16) adds a random error as large as that of rounding."""
    # Published hybrids keep delta nets in higher precision, and nobody has measured here what 4 bits cost. vLLM runs
    # in_proj_qkv and in_proj_z as one layer, so both get one scale.
    pack_delta_nets: bool = False
    """Whether `in_proj_qkv`, `in_proj_z` and `out_proj` of a hybrid's delta nets are packed in 4 bits too. The effect
    on quality isn't measured here."""
    calibration: CalibrationSettings = CalibrationSettings()
    """For `recipe: awq`."""
    random_error: RandomErrorSettings = RandomErrorSettings()
    """For `recipe: random`."""
    method: Literal["full", "lora"] = "lora"
    adapter: AdapterSettings = AdapterSettings()
    noise: NoiseSettings = NoiseSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    environment: EnvironmentSettings | None = None
    """What replies to the policy's turns. Without one, a completion is a single turn. `rollout.sampling.max_tokens`
    counts the tokens of all turns and replies."""
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    steps: PositiveInt = 200
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens in one forward and backward pass. A prompt counts once for all its completions there."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Keep only the input of each block and compute the rest again in the backward pass. `auto` does so for as many
    blocks as the GPU's free memory requires, and for none on a CPU."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    checkpoint_every: PositiveInt = 10
    on_no_signal: Literal["warn", "stop"] = "warn"
    """What follows if no completion of the first step states a readable answer, or rewards are equal within every group
    for three steps: a warning that shows a completion, or the end of the run."""
    stored_rollouts: StoredRollouts = StoredRollouts()
    validation: ValidationSettings = ValidationSettings()
    track: list[TrackerName] = []
    """Trackers that get each step's metrics, besides metrics.jsonl (docs/tracking.md)."""
    processes: PositiveInt = 1
    """Processes that share each step's work, on as many GPUs (docs/scaling.md). The result is that of one process up to
    the order in which gradients are added."""
    nodes: PositiveInt = 1
    """Machines that the processes are divided among equally. The run is started on each (docs/scaling.md)."""
    node_timeout: PositiveInt = 1800
    """Seconds that a process of several machines waits for the others before the run ends. It must exceed the time by
    which one machine's rollout may outlast another's."""
    # 32 bits: a step's 64-bit seed has the run's seed in its upper half, and Philox, torch and NumPy accept no negative
    # seeds.
    seed: Seed = 0

    @property
    def own_functions(self) -> set[str]:
        """The paths of the user's functions and of an environment."""
        functions = {each.function for each in self.reward.functions.values()}
        return functions | {self.environment.name} if self.environment else functions

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each part of the reward, the environment's rewards included."""
        return {**self.reward.weights, **({"environment": self.environment.weight} if self.environment else {})}

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run needs, on all machines."""
        return max(self.processes, self.rollout.engine_gpus)

    @property
    def processes_of_node(self) -> int:
        """Number of processes on each machine."""
        return self.processes // self.nodes

    @property
    def gpus_of_node(self) -> int:
        """Number of GPUs that the run needs on each machine."""
        return max(self.processes_of_node, self.rollout.engine_gpus)

    @property
    def joins_free_memory(self) -> bool:
        """Whether its processes join free parts of GPU memory. vLLM within the process manages memory by itself."""
        return self.rollout.engine != "vllm"

    @model_validator(mode="after")
    def _combination_is_possible(self) -> RunSettings:
        if self.method == "full" and self.weights != "bf16":
            raise ValueError(
                f"method=full can't train weights={self.weights}, which are frozen; use weights=bf16 or method=lora"
            )
        if self.recipe == "awq" and self.weights not in ("nvfp4", "mxfp4"):
            raise ValueError(f"recipe=awq scales for nvfp4 and mxfp4, not for weights={self.weights}; use recipe=rtn")
        if self.recipe == "random" and self.weights != "bf16":
            raise ValueError(f"recipe=random adds its error to weights=bf16, not to weights={self.weights}")
        if self.pack_delta_nets and (self.weights == "bf16" or self.recipe == "awq"):
            other = "weights=bf16" if self.weights == "bf16" else "recipe=awq"
            raise ValueError(
                f"pack_delta_nets=true rounds layers to nearest in 4 bits, which {other} doesn't; "
                "use pack_delta_nets=false"
            )
        if self.method == "lora" and self.adapter.rank == 0:
            raise ValueError("adapter.rank=0 leaves method=lora nothing to train; use rank >= 1 or method=full")
        if self.method == "full" and self.rollout.engine != "native":
            raise ValueError(
                f"rollout.engine={self.rollout.engine} takes adapters and norms only; use rollout.engine=native with "
                "method=full"
            )
        if self.environment and (engine := self.rollout.engine) != "native":
            raise ValueError(
                f"environment replies to turns of rollout.engine=native alone, and not with rollout.engine={engine}"
            )
        if self.validation.keep == "best" and self.method == "full":
            raise ValueError("validation.keep=best holds a copy of what is trained, which needs method=lora")
        if self.loss.kl and self.method == "full":
            raise ValueError("loss.kl needs method=lora: the reference is the base without the adapter")
        if self.processes % self.nodes or (self.nodes > 1 and self.processes == 1):
            raise ValueError(
                f"nodes={self.nodes} machines can't share processes={self.processes} equally; use a multiple of nodes"
            )
        if self.method == "full" and self.processes > 1 and self.gradient_checkpointing == "auto":
            raise ValueError(
                "gradient_checkpointing=auto can't measure the shards of method=full with several processes; use true "
                "or false"
            )
        if self.loss.name == "ppo" and self.method == "full":
            raise ValueError("loss.name=ppo needs method=lora: policy and value function share a frozen base")
        if self.loss.name == "ppo" and self.adapter.of_experts:
            raise ValueError(
                "loss.name=ppo has no value function with adapters of experts; leave experts out of adapter.targets"
            )
        if not any(self.reward_weights.values()):
            raise ValueError(
                "reward has no part with a weight, so that every completion would earn 0; give reward.correct, or one "
                "of reward.functions, a weight"
            )
        if self.rollout.group_size == 1 and self.loss.name != "ppo":
            raise ValueError(
                f"rollout.group_size=1 leaves loss.name={self.loss.name} nothing to compare a completion with; "
                "use at least 2, or loss.name=ppo"
            )
        if self.rollout.group_size == 1 and self.rollout.resample:
            raise ValueError("rollout.resample compares rewards within a group; use rollout.group_size >= 2")
        if self.reward.overlong_buffer >= self.rollout.sampling.max_tokens:
            raise ValueError("reward.overlong_buffer must be below rollout.sampling.max_tokens")
        if self.reward.aggregation == "normalize_then_sum" and (
            self.loss.name == "ppo" or not self.loss.scale_advantages
        ):
            raise ValueError(
                "reward.aggregation=normalize_then_sum scales rewards by groups, which loss.name=ppo and "
                "loss.scale_advantages=false don't; use sum_then_normalize"
            )
        return self

    @property
    def base(self) -> Base:
        """The run's base, with the data set of its calibration or the seed of its random error."""
        calibration, error = None, None
        if self.recipe == "awq":
            calibration = self.calibration.model_copy(update={"dataset": self.calibration.dataset or self.dataset})
        if self.recipe == "random":
            seed = self.seed if self.random_error.seed is None else self.random_error.seed
            error = self.random_error.model_copy(update={"seed": seed})
        return Base(self.model, self.weights, self.recipe, self.pack_delta_nets, calibration, error)


#: Keys of `RunFile` that make several runs of it.
OF_SEVERAL = frozenset({"seeds", "runs"})


class RunFile(RunSettings):
    """A run by hand (`qerl train run.yaml`): the keys of `RunSettings`, with the model, the data and the folder itself.

    Relative paths count from the working directory, `~` is the user's folder, and variables are refused.
    """

    model: str
    """A folder in the hub's layout, dense or already quantized to `weights`, or `org/name` of the hub, with `@revision`
    for another revision than the main branch."""
    dataset: DatasetSettings  # type: ignore[assignment]
    """A file or folder of records, or a mapping with the keys of DatasetSettings."""
    out: FilePath
    """A new folder for all that the run makes."""
    seeds: list[Seed] = []
    """Several runs that differ in their seed. They train side by side on one copy of the base, each in a folder of its
    own in `out`, such as `seed0`."""
    runs: dict[Name, dict[str, Any]] = {}
    """Several runs by name, each with the keys in which it differs from this file, such as `{hot:
    {rollout.sampling.temperature: 1.2}}`; with `seeds`, each has every seed. Runs of one base and engine train side by
    side, and others one after another."""

    @field_validator("seeds", mode="after")
    @classmethod
    def _seeds_differ(cls, seeds: list[int]) -> list[int]:
        if repeated := {seed for seed in seeds if seeds.count(seed) > 1}:
            raise ValueError(f"seed {min(repeated)} stands there twice, and would be the same run; leave one out")
        return seeds

    @field_validator("runs", mode="after")
    @classmethod
    def _runs_have_keys_of_a_run(cls, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, keys in runs.items():
            if of_all := keys.keys() & {"out", *OF_SEVERAL}:
                raise ValueError(f"{name} can't have the key {min(of_all)}, which is of all runs; leave it out there")
        return runs

    @model_validator(mode="after")
    def _seeds_stand_once(self) -> RunFile:
        if self.seeds and ("seed" in self.model_fields_set or any("seed" in keys for keys in self.runs.values())):
            raise ValueError("seed and seeds are both given; leave one of them out")
        return self

    @field_validator("calibration", mode="after")
    @classmethod
    def _calibrates_on_its_own_data(cls, calibration: CalibrationSettings) -> CalibrationSettings:
        if calibration.dataset is not None:
            raise ValueError("dataset can't be given here: a run by hand is calibrated on its own data; leave it out")
        return calibration

    @field_validator("model", mode="before")
    @classmethod
    def _may_be_a_path_of_python(cls, model: Any) -> Any:
        return str(model) if isinstance(model, Path) else model

    @field_validator("model", mode="after")
    @classmethod
    def _folder_is_absolute(cls, model: str) -> str:
        return str(path.resolve()) if (path := can_name_a_file(Path(not_empty(model)))).is_dir() else model

    @field_validator("dataset", mode="after")
    @classmethod
    def _data_path_is_absolute(cls, dataset: DatasetSettings) -> DatasetSettings:
        origin = dataset.origin
        if isinstance(origin, LocalData):
            return dataset.model_copy(update={"origin": origin.model_copy(update={"path": origin.path.resolve()})})
        if isinstance(origin, HubData) and origin.folder is not None:
            return dataset.model_copy(update={"origin": origin.model_copy(update={"folder": origin.folder.resolve()})})
        return dataset

    @field_validator("out", mode="after")
    @classmethod
    def _out_is_absolute(cls, out: Path) -> Path:
        return out.resolve()

    @property
    def settings(self) -> RunSettings:
        """The settings that determine the run, without its folder."""
        values = {name: getattr(self, name) for name in RunSettings.model_fields}
        return RunSettings(**{**values, "dataset": "data"})
