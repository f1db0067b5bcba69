"""Settings of training: adapter, noise, loss and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    model_validator,
)

from qerl.settings.base import FilePath, Fraction, NonEmpty, PositiveInt, Settings

#: The linear layers of a block of Llama, whose names most models share. Together they mean all layers of any model.
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_EXPERTS = "experts."
#: The linear layers of a mixture's experts. They also mean the parts of gpt-oss's fused layer.
EXPERT_LAYERS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
#: The end of a layer's name; the structure of a model decides which it has.
Target = Annotated[str, Field(min_length=1)]


class AdapterSettings(Settings):
    """LoRA. Defaults are those of the paper's Table 4 and section 4.1, which don't state alpha."""

    rank: Annotated[int, Field(ge=0)] = 32
    alpha: PositiveInt = 64
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that an update drops. The mask is a function of seed, step, completion and layer,
    not of how the batch is split into micro-batches or among processes.
    """
    train_norms: bool = True
    """Whether the RMSNorms whose outputs projections read, two in each block, are trained too, as in the released
    scripts."""
    targets: NonEmpty[Target] = list(LAYERS)
    """The linear layers of the blocks that get an adapter, by the ends of their names in the model, such as
    `query_key_value`. The seven of the default together mean every linear layer of the blocks outside of a mixture's
    experts, whatever its name. All parts of a fused layer together, such as q, k and v of `qkv_proj`, mean that layer.
    Each expert of a mixture has an adapter of its own only where `experts.…` names its projections, gate and up
    together."""

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
    """K of Eq. 8. The first stage has no noise. In a run with fewer steps than stages each step is a stage, and the
    last stages are left out."""
    mode: Literal["sampler", "consistent"] = "sampler"
    """`sampler` adds noise to the behaviour policy only (Algorithm 1). `consistent` adds the same z in the training
    forward pass too."""
    norms: NonEmpty[Literal["attention", "mlp"]] = ["attention", "mlp"]
    """Norms of a block that carry noise: the one that the projections of attention read (`attention`), and the one that
    those of the MLP read (`mlp`). The paper has both."""
    per: Literal["step", "completion"] = "step"
    """`step` draws z once for all completions of a step. `completion` draws it for each number of a completion within
    its group, so that no two completions of a problem share it. It needs `mode: sampler`, and draws a step in as many
    parts as a group has completions."""
    placebo: bool = False
    """Follow the schedule with z = 0. The log has the sigma of the schedule and a norm of 0."""

    @model_validator(mode="after")
    def _mode_is_possible(self) -> NoiseSettings:
        if self.per == "completion" and self.mode == "consistent":
            raise ValueError(
                "noise.per=completion has no noise of its own for each row of an update; use mode: sampler"
            )
        return self

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> NoiseSettings:
        if self.schedule in ("off", "constant"):
            return self
        if self.stages < 3:
            raise ValueError(f"noise.stages={self.stages} leaves no schedule between start and end; use at least 3")
        if not 0 < self.sigma_end <= self.sigma_start:
            raise ValueError("noise.sigma_end must be above 0 and not above noise.sigma_start for a decaying schedule")
        return self


class ThermostatSettings(Settings):
    """A sampling temperature that follows the token entropy of another run (`qerl.rl.thermostat`).

    The first step has `rollout.sampling.temperature`. Evaluations have their own."""

    arm: str | None = None
    """Arm of the same experiment whose run at the same point of the grid is followed. It is trained first."""
    metrics: FilePath | None = None
    """File metrics.jsonl of the run that is followed, in place of an arm."""
    gain: Annotated[float, Field(gt=0, le=2)] = 0.1
    """Exponent by which the temperature of a step corrects the ratio of the wanted to the reached entropy. The ratio
    counts as e or 1 / e at most."""
    average_steps: Annotated[float, Field(ge=1)] = 4
    """Steps over which both entropies are averaged: each counts 1 − 1 / `average_steps` of the one after it."""
    lowest: Annotated[float, Field(gt=0)] = 0.25
    """Lowest temperature."""
    highest: Annotated[float, Field(gt=0)] = 4.0
    """Highest temperature."""

    @model_validator(mode="after")
    def _one_run_is_followed(self) -> ThermostatSettings:
        if (self.arm is None) == (self.metrics is None):
            raise ValueError("thermostat follows one run: give either its arm, or the file of its metrics")
        if self.lowest > self.highest:
            raise ValueError("thermostat.lowest must not be above thermostat.highest")
        return self


class PPOSettings(Settings):
    """Value function and advantages of PPO (`qerl.rl.ppo` has the formulas). The paper has no PPO.

    The default lambda is that of arXiv 1707.06347 (Tables 3 to 5). There is no discount, as is usual for rewards at the
    end of a text.
    """

    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of the generalized advantage estimation (arXiv 1506.02438, Eq. 16)."""
    whiten: bool = True
    """Scale advantages to mean 0 and variance 1 over the tokens of each step's batch."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """Largest change of a value that the loss counts, from the value before the first update on the rollout (as
    `clip_low`)."""
    value_coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the value's loss, which already has a factor of 0.5. The value function shares no trained weight with
    the policy."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate of the value function, with the policy's schedule. The default is ten times the policy's. In
    OpenRLHF it is nine times."""
    rank: PositiveInt = 32
    """Rank of the value function's LoRA adapter. The adapter has the policy's targets, no dropout and no trained
    norms."""
    alpha: PositiveInt = 64


class LossSettings(Settings):
    """The policy's loss (`qerl.rl.losses` has the formulas).

    The default is GRPO (paper Eq. 3) without a KL term (Appendix E)."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "bnpo", "ppo"] = "grpo"
    """Name of the loss. The released scripts run `bnpo` as DAPO. `ppo` uses a value function in place of groups."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence from the reference, which is the base without the adapter."""
    scale_advantages: bool = True
    """Divide advantages by the group's standard deviation (Eq. 4). The default of `dr_grpo` is false."""
    mask_truncated: bool = False
    """Exclude completions that reached the length limit from the loss (DAPO's overlong filtering)."""
    updates_per_rollout: PositiveInt = 1
    """Number of passes over one rollout, each with an optimizer step (mu of Algorithm 1)."""
    correction: Literal["off", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] = "off"
    """Importance weights that correct for the difference between sampler and trainer. The paper has none."""
    correction_cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight. Above it, `-truncate` cuts the weight and `-mask` drops the token or sequence."""
    silent_sample: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of the silent completions, whose gradient is zero, that an update reads. Metrics of entropy and mismatch
    count it for all of them. 1 reads all: more time, no change of the policy. With `kl` or `ppo` none are silent."""
    ppo: PPOSettings = PPOSettings()
    """Settings that only `ppo` uses."""

    @model_validator(mode="before")
    @classmethod
    def _dr_grpo_does_not_scale(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("name") != "dr_grpo":
            return values
        return {"scale_advantages": False, **values}


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """Optimizer and schedule (paper Table 4; warm-up, decay and clipping from the released scripts)."""

    name: Literal["adamw", "adamw8bit"] = "adamw8bit"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    betas: tuple[_Beta, _Beta] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    warmup_ratio: Fraction = 0.1
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.2
