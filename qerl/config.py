"""Every setting of the project: pydantic models, the one home of each default.

Importing this module costs no torch: the workflow parses the configuration on every call of Snakemake.
Unknown keys and impossible combinations are errors that name the key and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from qerl.config_errors import nearest, sentence
from qerl.yaml_values import DuplicateKey, UniqueKeys, as_meant

RecordFormat = Literal["gsm8k", "math", "aime"]
WeightFormat = Literal["bf16", "nf4", "mxfp4", "nvfp4"]
Recipe = Literal["rtn", "awq"]
Harness = Literal["lm-eval", "lighteval"]
Split = Literal["train", "validation", "test"]
AnswerForm = Literal["native", "tags"]
#: The linear layers of a block, in every architecture that is supported.
Layer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

#: Weights that share one scale, by format (NF4: bitsandbytes' block, along the flattened tensor).
GROUP_SIZE: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}

PositiveInt = Annotated[int, Field(gt=0, lt=2**63)]
#: What every consumer takes: a step's seed of 64 bits holds the run's in its upper half.
SEEDS = 2**32
Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
Fraction = Annotated[float, Field(ge=0, le=1)]


S = TypeVar("S", bound="Settings")
T = TypeVar("T")
NonEmpty = Annotated[list[T], Field(min_length=1)]


class UserError(ValueError):
    """An error that the user can correct. Its message is one line, shortened in the middle where it quotes much."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= 2000 else f"{line[:1500]} ... {line[-450:]}")


class ConfigError(UserError):
    """A configuration that can't run. The message is one sentence for the user."""


class Settings(BaseModel):
    """Base class of all settings, which are immutable. An unknown key, NaN and infinity are errors.

    Where a setting can be off, `off`, `none` and `false` all mean off. True and false don't count as numbers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, values: Any) -> Any:
        return as_meant(cls, values)


def _names_a_function(path: str) -> str:
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", path) or ".py:" in path:
        raise ValueError(f"{path!r} is no import path; write `module:function` (no .py)")
    return path


FunctionPath = Annotated[str, AfterValidator(_names_a_function)]


def can_name_a_file(path: Path) -> Path:
    """The path, unless no file system accepts it: looking for such a file would raise errors of many kinds."""
    text = str(path)
    unwritable = "\0" in text or any("\ud800" <= character <= "\udfff" for character in text)
    if unwritable or len(text) > 1024 or any(len(part.encode()) > 255 for part in path.parts):
        raise ValueError("no file has such a name: it is too long, or holds what is no character")
    return path


FilePath = Annotated[Path, AfterValidator(can_name_a_file)]


def _is_a_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}", name):
        raise ValueError(
            f"{name[:100]!r} names folders and files of results: use at most 100 letters, digits and . _ + -, "
            "and none of . + - first"
        )
    return name


#: A key of a configuration that becomes a part of paths and commands.
Name = Annotated[str, AfterValidator(_is_a_name)]


# --- data ------------------------------------------------------------------------------------------------------------


class Generated(Settings):
    """Arithmetic word problems made by `qerl.data.arithmetic`."""

    source: Literal["generated"] = "generated"
    seed: Seed = 0
    train: PositiveInt = 4096
    validation: PositiveInt = 256
    test: PositiveInt = 256
    terse: Fraction = 0.55
    """Share of the training solutions that state the answer at once, without the steps. The other splits have no such
    solutions."""


class LocalData(Settings):
    """A file of records (.jsonl, .json, .parquet), split by a hash of the question, or a folder with one file per
    split."""

    source: Literal["local"]
    path: FilePath
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2


class HubData(Settings):
    """A data set of the Hugging Face hub at a pinned revision: from the hub, its cache or a local copy."""

    source: Literal["hub"]
    repo: str
    revision: str | None = None
    """A commit. It may be a branch or tag, or be left out, if a lock file (the key `lock`) resolves it to a commit."""
    subset: str | None = None
    """The repository's name of the subset, such as `main` of openai/gsm8k."""
    splits: dict[Split, str] = {"train": "train", "test": "test"}
    """Maps each split of this project to one of the repository. `{test: train}` tests on a repository's only split,
    called train."""
    folder: FilePath | None = None
    """A local copy of the repository, read in place of the hub. `hf download --repo-type dataset REPO --local-dir
    FOLDER` makes one."""


class FunctionData(Settings):
    """Records that a function of the user returns.

    It returns a list, which is split by a hash of the question, or a mapping from split names (train, validation, test)
    to lists."""

    source: Literal["python"]
    function: FunctionPath
    """`module:function`, importable from the working directory or installed. It is called without an argument. It may
    also be a generator, or return a `datasets.Dataset`."""
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2


Bound = Annotated[float, Field(allow_inf_nan=True)]


class FilterSettings(Settings):
    """Conditions on training records. Records that fail one are dropped. Validation and test are never filtered."""

    max_characters: PositiveInt | None = None
    """Longest question that is kept, in characters. The released scripts use 1024 on BigMath."""
    levels: list[int] | None = None
    """Levels (column `level`) that are kept. A record without a level is dropped."""
    within: dict[str, tuple[Bound, Bound]] = {}
    """Columns whose number must lie between two bounds, inclusive, as `{llama8b_solve_rate: [0, 0.5]}`. A record
    without that number is dropped."""


#: What a data set's instruction is where none is given, by the form of the answers and the record format. A policy that
#: isn't told how to state its answer states it in some other way, and earns nothing.
_TAGGED = "Reason between <think> and </think>, then give the final answer alone between <answer> and </answer>."
_BOXED = "Let's think step by step and output the final answer within \\boxed{}."
INSTRUCTIONS: dict[AnswerForm, dict[RecordFormat, str]] = {
    "native": {
        "gsm8k": 'Let\'s think step by step and output the final answer after "####".',
        "math": _BOXED,
        "aime": _BOXED,
    },
    "tags": {"gsm8k": _TAGGED, "math": _TAGGED, "aime": _TAGGED},
}


def _instruction_of(values: dict[str, Any]) -> str:
    """The default of `DatasetSettings.instruction`; `values` are the fields before it."""
    return INSTRUCTIONS[values["answer"]][values["format"]]


class DatasetSettings(Settings):
    """A set of problems with verifiable answers.

    Each question counts once, in the first of test, validation and train that has it. A question with contradictory
    answers is dropped with a warning."""

    format: RecordFormat
    columns: dict[str, str] = {}
    """Maps the format's column names to those of the records, where they differ: `{problem: prompt, answer:
    solution}`."""
    filter: FilterSettings = FilterSettings()
    origin: Annotated[Generated | LocalData | HubData | FunctionData, Field(discriminator="source")]
    answer: AnswerForm = "native"
    """How completions state their answer. `native` reads it as the records state it (`#### n`, `\\boxed{}`). `tags`
    reads `<think>...</think><answer>...</answer>`, which the instruction must ask for. The records don't change."""
    instruction: str = Field(default_factory=_instruction_of)
    """Text appended to each question, on a line of its own, that tells the policy how to state the answer. The default
    asks for what the grader of the format reads: `#### n` (gsm8k), `\\boxed{}` (math, aime), or the tags. An empty text
    appends nothing."""
    units: list[str] = []
    """Words and signs that may follow a number without changing it, such as `["%", points]`. They add to the built-in
    units (docs/evaluation.md). A number followed by any other word doesn't count as an answer."""

    @property
    def own_file(self) -> Path | None:
        """The user's own file or folder that the data set is made of."""
        if isinstance(self.origin, LocalData):
            return self.origin.path
        return self.origin.folder if isinstance(self.origin, HubData) else None

    @field_validator("units")
    @classmethod
    def _units_hold_no_digits(cls, units: list[str]) -> list[str]:
        for unit in units:
            if not unit.strip() or any(sign in "0123456789.,<>" for sign in unit):
                raise ValueError(
                    f"a unit is a word or a sign such as '%', without digits, points and commas; got {unit!r}"
                )
        return [unit.strip() for unit in units]

    @model_validator(mode="after")
    def _tags_are_asked_for(self) -> DatasetSettings:
        if self.answer == "tags" and not all(tag in self.instruction for tag in ("<think>", "<answer>")):
            raise ValueError(
                "answer: tags needs an instruction that asks for <think>...</think><answer>...</answer>; "
                "the given one doesn't name both tags"
            )
        return self


# --- models ----------------------------------------------------------------------------------------------------------


class PretrainSettings(Settings):
    """A miniature Qwen2 that is trained from scratch, supervised, on worked solutions. RL then improves it."""

    source: Literal["pretrain"]
    datasets: list[str]
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 512
    layers: PositiveInt = 4
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    vocab_size: PositiveInt = 768
    max_steps: PositiveInt = 800
    batch_size: PositiveInt = 32
    learning_rate: float = 5e-3
    target_accuracy: Fraction = 0.50
    """Training stops when the policy solves this share of the first data set's validation problems, checked every
    `check_every` steps. A final accuracy outside `accepted` is an error."""
    accepted: tuple[float, float] = (0.30, 0.60)
    check_every: PositiveInt = 200
    seed: Seed = 0

    @model_validator(mode="after")
    def _dimensions_fit_the_blocks(self) -> PretrainSettings:
        for name in ("hidden_size", "intermediate_size"):
            if getattr(self, name) % 64:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be a multiple of 64, the widest quantization block"
                )
        return self


class LocalModel(Settings):
    """A folder in the hub's layout: config.json, safetensors (sharded or not), tokenizer.json."""

    source: Literal["local"]
    path: FilePath


class HubModel(Settings):
    """A model of the Hugging Face hub at a pinned revision."""

    source: Literal["hub"]
    repo: str
    revision: str
    """A commit. A branch or tag needs a lock file (the key `lock`) that resolves it to a commit."""


class LockedRepo(Settings):
    """An entry of a lock file, which maps each repository of the hub to these keys.

    Data sets have names such as `datasets/org/name`. `qerl lock CONFIG` writes the file."""

    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    """The commit."""
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    """SHA-256 of each file. Each download is checked against it."""


ModelSettings = Annotated[PretrainSettings | LocalModel | HubModel, Field(discriminator="source")]


# --- quantization ----------------------------------------------------------------------------------------------------


class CalibrationSettings(Settings):
    """The texts on which `recipe: awq` measures activations: training problems and solutions in the chat template.

    The paper uses 256 texts of 2,048 tokens from another data set."""

    dataset: str | None = None
    """Data set of the texts. None takes the run's own."""
    samples: PositiveInt = 256
    """Number of texts. A smaller data set is used whole."""
    length: PositiveInt = 2048
    """Longest text, in tokens. Longer ones are cut."""
    seed: Seed = 0
    """Seed of the draw of texts."""


# --- a training run --------------------------------------------------------------------------------------------------


class AdapterSettings(Settings):
    """LoRA. Defaults are those of the paper's Table 4 and section 4.1, which don't state alpha."""

    rank: Annotated[int, Field(ge=0)] = 32
    alpha: PositiveInt = 64
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that an update drops. The mask is a function of seed, step, completion and layer,
    however the batch is cut or shared among processes."""
    train_norms: bool = True
    """Whether the two RMSNorms of each block are trained too, as in the released scripts."""
    targets: NonEmpty[Layer] = list(get_args(Layer))


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

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> NoiseSettings:
        if self.schedule in ("off", "constant"):
            return self
        if self.stages < 3:
            raise ValueError(f"noise.stages={self.stages} leaves no schedule between start and end; use at least 3")
        if not 0 < self.sigma_end <= self.sigma_start:
            raise ValueError("noise.sigma_end must be above 0 and not above noise.sigma_start for a decaying schedule")
        return self


class SamplingSettings(Settings):
    """How completions are drawn. Defaults are those of the paper's rollout (Table 4)."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: PositiveInt = 4096


class VllmSettings(Settings):
    """vLLM as the sampler."""

    utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the GPU's memory for the engine (weights, cache, CUDA graphs). The trainer needs the rest."""
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
    url: str | None = None
    """Address of the server, such as http://host:8000, for `vllm-server`."""
    adapters: FilePath | None = None
    """Folder for adapters, at the same path on this host and the server's, for `vllm-server`."""


class NativeSettings(Settings):
    """The native engine, which samples from the trainer's own weights on a GPU."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Size of the KV cache in GiB. None takes what the rollout can use, at most 60 % of the memory that is free before
    it. If that limit is reached, the cache's memory is released after each rollout, as with `sleep`."""
    sleep: bool = False
    """Release the cache's memory after each rollout. The next rollout takes about a second longer."""
    batch_invariant: bool = False
    """Make each completion independent of its batch, to the bit. Prompts are then computed one by one and every step
    has the size of a full batch, which is slower."""


class EngineSettings(Settings):
    """The engine that draws the completions."""

    engine: Literal["native", "vllm", "vllm-server"] = "native"
    """`native` is this project's engine. `vllm` is vLLM within this process. `vllm-server` is a running
    OpenAI-compatible server of vLLM."""
    native: NativeSettings = NativeSettings()
    vllm: VllmSettings = VllmSettings()

    @property
    def engine_gpus(self) -> int:
        """Number of GPUs that sampling takes."""
        return self.vllm.tensor_parallel if self.engine == "vllm" else 1

    @model_validator(mode="after")
    def _server_is_known(self) -> EngineSettings:
        if self.engine == "vllm-server" and not (self.vllm.url and self.vllm.adapters):
            raise ValueError("engine=vllm-server needs vllm.url and vllm.adapters, a folder that both hosts see")
        return self


class RolloutSettings(EngineSettings):
    """The rollout of each step: `prompts` problems with `group_size` completions each (G of Eq. 3)."""

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


RewardPreset = Literal["upstream-gsm8k", "upstream-gsm8k-hashes", "upstream-bigmath", "upstream-dapomath"]

#: The released scripts' values: GSM8K since 27 Nov 2025 and before; BigMath; DAPO-Math and MiroMind.
REWARD_PRESETS: dict[RewardPreset, dict[str, float]] = {
    "upstream-gsm8k": {"correct": 2.0, "format": 0.2},
    "upstream-gsm8k-hashes": {"correct": 1.0, "format": 0.2},
    "upstream-bigmath": {"correct": 1.0, "format": 0.2},
    "upstream-dapomath": {"correct": 1.0, "format": 0.0},
}


class RewardSettings(Settings):
    """Weights of the reward's parts (`qerl.rl.rewards`)."""

    preset: RewardPreset | None = None
    """Sets `correct` and `format` to the released scripts' values. Keys given beside it win. Grading stays this
    project's, because the scripts' graders have defects."""
    correct: float = 1.0
    format: float = 0.1
    custom: float = 1.0
    """Weight of `function`."""
    function: FunctionPath | None = None
    """A reward of your own, `module:function`, importable from the working directory or installed. It is called as
    `function(answer: qerl.rl.rewards.Answer, problem: qerl.data.records.Problem)` and returns a finite number."""
    timeout: Annotated[float, Field(gt=0)] | None = 300.0
    """Longest time that a call of `function` may take, in seconds. A longer call stops the run with the function's
    position. A start with a higher limit continues from the last checkpoint. None sets no limit."""
    overlong: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the penalty for long completions."""
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Number of tokens before the limit over which DAPO's soft penalty goes from 0 to -1. With 0 there is no
    penalty."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("preset") not in get_args(RewardPreset):
            return values
        return {**REWARD_PRESETS[values["preset"]], **values}


#: Keys of `EngineSettings` that change no completion. Not the size of the cache or of the batch: what is decoded
#: together decides how sums are rounded.
UNDECIDING_OF_ENGINE: Any = {"native": {"sleep"}, "vllm": {"sleep", "url", "adapters"}}
#: Keys of `RunSettings` that decide neither the outcome of a run nor what its steps take.
UNDECIDING_OF_STEPS: Any = {"reward": {"timeout"}, "on_no_signal": True, "checkpoint_every": True}
#: Keys of `RunSettings` that don't decide the outcome of a run: changed, a finished run stays, a killed one goes on.
UNDECIDING: Any = {**UNDECIDING_OF_STEPS, "gradient_checkpointing": True, "rollout": UNDECIDING_OF_ENGINE}


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
    ppo: PPOSettings = PPOSettings()
    """Settings that only `ppo` uses."""

    @model_validator(mode="before")
    @classmethod
    def _dr_grpo_does_not_scale(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("name") != "dr_grpo":
            return values
        return {"scale_advantages": False, **values}


class OptimizerSettings(Settings):
    """Optimizer and schedule (paper Table 4; warm-up, decay and clipping from the released scripts)."""

    name: Literal["adamw", "adamw8bit"] = "adamw8bit"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    warmup_ratio: Fraction = 0.1
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.2


class RunSettings(Settings):
    """All settings that determine a training run."""

    model: str
    dataset: str
    weights: WeightFormat = "nvfp4"
    recipe: Recipe = "rtn"
    """How weights are quantized. `rtn` rounds to nearest, without data. `awq` (nvfp4 and mxfp4) first scales channels
    by their activations on calibration texts."""
    calibration: CalibrationSettings = CalibrationSettings()
    """Settings that only `recipe: awq` uses."""
    method: Literal["full", "lora"] = "lora"
    adapter: AdapterSettings = AdapterSettings()
    noise: NoiseSettings = NoiseSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    steps: PositiveInt = 200
    micro_batch_tokens: PositiveInt = 16384
    """Largest number of tokens in one forward and backward pass. A prompt counts once for all its completions there.
    Gradients accumulate over as many passes as the batch needs."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Keep only the input of each block and compute the rest again in the backward pass, for less memory and more time.
    `auto` does so for as many blocks as the GPU's free memory requires, and for none on a CPU. With memory to spare it
    also keeps logits, and unpacks weights once per update."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    checkpoint_every: PositiveInt = 10
    on_no_signal: Literal["warn", "stop"] = "warn"
    """What happens to a run whose rewards teach nothing. That is so if no completion of the first step states a
    readable answer, or if rewards are equal within every group for three steps. `warn` prints one warning with a
    completion. `stop` ends the run."""
    processes: PositiveInt = 1
    """Number of processes that share each step's work (data parallelism), on as many GPUs. The result is that of one
    process up to the order in which gradients are added."""
    seed: Seed = 0

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run takes."""
        return max(self.processes, self.rollout.engine_gpus)

    @model_validator(mode="after")
    def _combination_is_possible(self) -> RunSettings:
        if self.method == "full" and self.weights != "bf16":
            raise ValueError(
                f"method=full can't train weights={self.weights}, which are frozen; use weights=bf16 or method=lora"
            )
        if self.recipe == "awq" and self.weights not in ("nvfp4", "mxfp4"):
            raise ValueError(f"recipe=awq scales for nvfp4 and mxfp4, not for weights={self.weights}; use recipe=rtn")
        if self.method == "lora" and self.adapter.rank == 0:
            raise ValueError("adapter.rank=0 leaves method=lora nothing to train; use rank >= 1 or method=full")
        if self.method == "full" and self.rollout.engine != "native":
            raise ValueError(
                f"rollout.engine={self.rollout.engine} takes adapters and norms only; use rollout.engine=native with "
                "method=full"
            )
        if self.rollout.engine == "vllm-server" and (self.adapter.train_norms or self.noise.schedule != "off"):
            raise ValueError(
                "rollout.engine=vllm-server can't take norms, trained or noisy; set adapter.train_norms=false and "
                "noise.schedule=off, or use rollout.engine=vllm"
            )
        if self.loss.kl and self.method == "full":
            raise ValueError("loss.kl needs method=lora: the reference is the base without the adapter")
        if self.loss.name == "ppo" and self.method == "full":
            raise ValueError("loss.name=ppo needs method=lora: policy and value function share a frozen base")
        if self.rollout.group_size == 1 and self.loss.name != "ppo":
            raise ValueError(
                f"rollout.group_size=1 leaves loss.name={self.loss.name} nothing to compare a completion with; "
                "use at least 2, or loss.name=ppo"
            )
        if self.rollout.group_size == 1 and self.rollout.resample:
            raise ValueError("rollout.resample compares rewards within a group; use rollout.group_size >= 2")
        if self.reward.overlong_buffer >= self.rollout.sampling.max_tokens:
            raise ValueError("reward.overlong_buffer must be below rollout.sampling.max_tokens")
        return self

    @property
    def calibrated(self) -> CalibrationSettings | None:
        """The calibration of the run's checkpoint, with its data set's name, or none."""
        if self.recipe == "rtn":
            return None
        return self.calibration.model_copy(update={"dataset": self.calibration.dataset or self.dataset})


class RunFile(RunSettings):
    """A run by hand (`qerl train run.yaml`): the keys of `RunSettings`, with the model, the data and the folder itself.

    Relative paths count from the working directory and are stored as absolute paths.
    """

    model: str
    """A folder in the hub's layout, dense or already quantized to `weights`, or `org/name` of the hub. `@revision`
    after the name takes another revision than the main branch."""
    dataset: DatasetSettings  # type: ignore[assignment]
    """A file or folder of records, or a mapping with the keys of DatasetSettings."""
    out: FilePath
    """A new folder for all that the run makes. A killed run continues from its content."""

    @field_validator("calibration", mode="after")
    @classmethod
    def _calibrates_on_its_own_data(cls, calibration: CalibrationSettings) -> CalibrationSettings:
        if calibration.dataset is not None:
            raise ValueError("dataset can't be given here: a run by hand is calibrated on its own data; leave it out")
        return calibration

    @field_validator("model", mode="after")
    @classmethod
    def _folder_is_absolute(cls, model: str) -> str:
        return str(path.resolve()) if (path := can_name_a_file(Path(model))).is_dir() else model

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


# --- evaluation and profiling ----------------------------------------------------------------------------------------


StockTask = Literal["gsm8k", "math_500", "aime24", "aime25", "amc23"]

#: The record formats that each harness has a task for.
SCORED: dict[Harness, tuple[RecordFormat, ...]] = {"lm-eval": ("gsm8k",), "lighteval": ("math", "aime")}

#: The harness and the record format of each stock task. lighteval has no amc23: it is built of its aime tasks' parts.
STOCK_TASKS: dict[StockTask, tuple[Harness, RecordFormat]] = {
    "gsm8k": ("lm-eval", "gsm8k"),
    "math_500": ("lighteval", "math"),
    "aime24": ("lighteval", "aime"),
    "aime25": ("lighteval", "aime"),
    "amc23": ("lighteval", "math"),
}


class TaskSampling(Settings):
    """Sampling settings of one task that differ from the evaluation's. None takes the evaluation's."""

    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    max_tokens: PositiveInt | None = None


class TaskSettings(Settings):
    """One evaluation task: the test split of a data set, scored by a harness."""

    dataset: str
    harness: Harness
    name: str = ""
    """Name of the task in results, by default that of the data set. Two tasks on one data set need different names."""
    task: StockTask | None = None
    """A stock task of the harness, with its own prompt, gold answer and metric. Without one, prompts are the data
    set's, as in training, and only the metric is the harness's."""
    chat: bool = True
    """Give the prompt as a user's message in the chat template. False gives a stock task its prompt as plain text, as
    `lm_eval` does without `--apply_chat_template`."""
    fewshot: Annotated[int | None, Field(ge=0)] = None
    """Number of solved examples before a stock task's question, from the training split. None takes the task's own
    number: 5 for gsm8k, 0 for the others."""
    repeats: PositiveInt | None = None
    """Number of completions of each problem. None takes the evaluation's."""
    sampling: TaskSampling = TaskSampling()

    @model_validator(mode="after")
    def _fits_the_stock_task(self) -> TaskSettings:
        if self.task is None and (not self.chat or self.fewshot is not None):
            raise ValueError("chat and fewshot are settings of a stock task; name one with `task`, or leave them out")
        if self.task and self.harness != STOCK_TASKS[self.task][0]:
            raise ValueError(f"task={self.task} is none of {self.harness}; use harness: {STOCK_TASKS[self.task][0]}")
        if self.task and self.harness == "lighteval" and self.fewshot:
            raise ValueError(f"task={self.task} has no few-shot examples; leave fewshot out")
        return self

    @property
    def label(self) -> str:
        """The task's name in results."""
        return self.name or self.dataset


class EvaluationSettings(EngineSettings):
    """How policies are evaluated, always without noise. The default sampling is that of the paper's section 4.1."""

    tasks: list[TaskSettings]
    sampling: SamplingSettings = SamplingSettings(temperature=0.6, top_p=0.95)
    repeats: PositiveInt = 4
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: Seed = 0

    def sampling_of(self, task: TaskSettings) -> SamplingSettings:
        """How the completions of `task` are drawn."""
        return self.sampling.model_copy(update=task.sampling.model_dump(exclude_none=True))

    def repeats_of(self, task: TaskSettings) -> int:
        """Number of completions of each problem of `task`."""
        return task.repeats or self.repeats

    @model_validator(mode="after")
    def _labels_differ(self) -> EvaluationSettings:
        labels = [task.label for task in self.tasks]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise ValueError(f"two tasks are called {twice[0]!r} in results; give one of them a `name`")
        return self

    @model_validator(mode="after")
    def _repeats_differ(self) -> EvaluationSettings:
        own = [(f" of task {task.label}", self.sampling_of(task), self.repeats_of(task)) for task in self.tasks]
        for whose, sampling, repeats in own or [("", self.sampling, self.repeats)]:
            if sampling.temperature == 0 and repeats > 1:
                raise ValueError(
                    f"repeats={repeats} at sampling.temperature=0{whose} draws the same completions again; "
                    "use repeats=1"
                )
        return self


class RolloutBench(EngineSettings):
    """Rollout throughput by weight format and LoRA rank (paper Tables 5 to 9), in one process."""

    kind: Literal["rollout"]
    model: str
    weights: list[WeightFormat] = ["bf16", "nf4", "mxfp4", "nvfp4"]
    ranks: list[Annotated[int, Field(ge=0)]] = [16, 32, 64]
    sequences: PositiveInt = 32
    prompt_tokens: PositiveInt = 256
    completion_tokens: PositiveInt = 2048
    repeats: PositiveInt = 3
    interleave: bool = True
    """Keep all points in memory and time them in turn, so that other load on the machine affects all alike. False times
    one point after another, each alone in memory. Large models and exact memory peaks need that."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: Seed = 0


class StepBench(Settings):
    """Seconds and peak memory of one GRPO step (paper Tables 3 and 5 to 8).

    Each arm of an experiment is timed at each point of its grid, with one seed."""

    kind: Literal["step"]
    experiment: str
    repeats: PositiveInt = 3
    interleave: bool = True
    """As in RolloutBench."""


BenchSettings = Annotated[RolloutBench | StepBench, Field(discriminator="kind")]


class GateSettings(Settings):
    """Regression gates (docs/gates.md). With them the workflow makes a verdict in place of tables."""

    file: FilePath
    """Table of the gates, one per row."""
    baselines: FilePath
    """Folder of the baselines, one file per class of machines. `qerl gate accept` writes them."""
    vectors: FilePath
    """Folder of the reference vectors for codecs, kernels and graders."""
    experiment: str
    """Experiment whose runs are compared with the baseline's, seed by seed."""
    stored: FilePath
    """Folder with one folder per trained policy. These policies are evaluated without training."""
    bench: str
    """A measurement of kind `rollout` with bf16 and one other format."""
    rounds: PositiveInt = 10
    """Number of turns of this code and of the baseline's, for rollouts and for updates."""


class DecodeGrid(Settings):
    """Decode speed of an engine on random weights of Qwen2.5's shapes.

    Each size, format, rank and prompt length is a job of its own."""

    engine: Literal["native", "vllm", "transformers"]
    sizes: NonEmpty[Name]
    """Sizes of the model: 1.5B, 3B, 7B, 14B or 32B (`qerl.random_models.architectures`)."""
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[Annotated[int, Field(ge=0)]]
    """Ranks of the adapter. 0 means no adapter."""
    sequences: NonEmpty[PositiveInt] = [1, 2, 4, 8, 32, 64, 128, 256]
    """Numbers of sequences decoded at once, one point each. A point that doesn't fit into the KV cache has no
    number."""
    prompt: NonEmpty[PositiveInt] = [128]
    """Lengths of the prompts in tokens."""
    tokens: PositiveInt = 256
    """Number of tokens decoded after the prompt."""


class StepGrid(Settings):
    """Seconds and memory of a whole GRPO step on random weights, of this project or of TRL with vLLM."""

    system: Literal["qerl", "trl"]
    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[PositiveInt] = [16]
    recompute: NonEmpty[bool | Literal["auto"]] = [True]
    """Values of gradient checkpointing. Only this project has `auto`, which decides by measured memory."""
    memory_gb: list[Annotated[float, Field(gt=0)]] = []
    """Caps on the GPU's memory in GB, one job each, for this project only. Without a cap, a job may use all memory."""
    prompts: NonEmpty[PositiveInt] = [16]
    """Numbers of prompts per step."""
    group_size: NonEmpty[PositiveInt] = [8]
    """Numbers of completions per prompt."""
    prompt: PositiveInt = 128
    """Length of each prompt in tokens."""
    tokens: PositiveInt = 1024
    """Length of each completion in tokens."""
    micro_batch: PositiveInt = 16
    """Number of completions in a forward pass of TRL, and of this project where measured memory decides what is
    recomputed. A step with fewer completions has one pass."""
    repeats: PositiveInt = 3


class ShapesSettings(Settings):
    """Speed and memory on real shapes (docs/results/h200.md).

    Tables and figures show all measured points, new and committed ones. The target `shapes_measure` measures the
    missing ones."""

    samples: Path
    """Folder of the committed points."""
    decode: list[DecodeGrid]
    steps: list[StepGrid] = []


# --- experiments -----------------------------------------------------------------------------------------------------


class Experiment(Settings):
    """Base settings, named arms that override them, and a grid over any keys (dotted: `adapter.rank`)."""

    base: dict[str, Any]
    arms: dict[Name, dict[str, Any]] = {"run": {}}
    """Settings of each arm over the base. An arm of null is left out, so that a protocol can remove one."""
    grid: dict[str, list[Any]] = {"seed": [0, 1, 2]}
    """Values of each key. Every combination is a run of every arm."""
    train: bool = True
    """False leaves training out: the runs are only timed, by measurements of kind `step`."""
    tasks: list[str] | None = None
    """Data sets of `evaluation.tasks` on which bases and trained policies are scored. None takes all. With an empty
    list, only the training curves are reported."""
    on_failure: Literal["stop", "row"] = "stop"
    """What happens to a run that is out of memory or over `time_limit`. With `stop` its job fails. With `row` the
    failure is its result, which tables show as a row, and the workflow continues. To try again on another machine,
    delete the run's folder `train/<run>` in the results."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Hours that the steps of a run may take in all attempts together, checked before each step. A start with a higher
    limit continues where the lower one stopped."""
    omitted: dict[str, str] = {}
    """Arms of the paper that this experiment leaves out, each with the reason. `qerl plan` shows them."""

    @field_validator("arms", mode="before")
    @classmethod
    def _null_is_left_out(cls, arms: Any) -> Any:
        return {name: arm for name, arm in arms.items() if arm is not None} if isinstance(arms, Mapping) else arms

    @field_validator("arms")
    @classmethod
    def _arms_are_left(cls, arms: dict[Name, dict[str, Any]]) -> dict[Name, dict[str, Any]]:
        if not arms:
            raise ValueError("no arm is left, and so no run; give at least one, or leave `arms` out for a single run")
        return arms

    @field_validator("grid")
    @classmethod
    def _grid_has_points(cls, grid: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for key, values in grid.items():
            if not values:
                raise ValueError(f"grid.{key} is empty, which leaves no run; give at least one value")
        return grid


Protocol = Literal["paper", "upstream-scripts"]


class Config(Settings):
    """A whole configuration file."""

    name: str
    """Name of the folder of results, results/NAME. It has letters, digits, - and _."""
    protocol: Protocol = "paper"
    """The source to follow where they disagree. `paper` takes the file as it stands. Another protocol lays its entry of
    `protocols` over the file and has a folder of results of its own."""
    protocols: dict[Protocol, dict[str, Any]] = {}
    """The keys in which each other protocol differs, placed as in the whole file."""
    lock: FilePath | None = None
    """File of the commits and hashes of everything from the hub. `qerl lock CONFIG` writes it."""
    models: dict[Name, ModelSettings]
    datasets: dict[Name, DatasetSettings]
    experiments: dict[Name, Experiment]
    evaluation: EvaluationSettings
    benches: dict[Name, BenchSettings] = {}
    gates: GateSettings | None = None
    shapes: ShapesSettings | None = None
    """Measurements of speed and memory. With this key, models, data sets, experiments and evaluation may be left
    out."""
    fit_to_model: bool = False
    """Choose missing settings of runs and evaluation by the size and context of each experiment's local checkpoint, and
    by whether there is a GPU. They replace the defaults below (`qerl/own.py`)."""
    model: FilePath | None = None
    """Checkpoint folder for every run. It is given on the command line."""
    problems: FilePath | None = None
    """File of problems for every run. It is given on the command line."""

    @model_validator(mode="before")
    @classmethod
    def _shapes_need_nothing_else(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not values.get("shapes"):
            return values
        return {"models": {}, "datasets": {}, "experiments": {}, "evaluation": {"tasks": []}, **values}

    @model_validator(mode="before")
    @classmethod
    def _follow_the_protocol(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("protocol", "paper") == "paper":
            return values
        protocol, parts = values["protocol"], values.get("protocols") or {}
        if not isinstance(protocol, str) or not isinstance(parts, Mapping) or "name" not in values:
            return values  # which is no configuration, as the fields will say
        if not isinstance(parts.get(protocol), Mapping):
            raise ValueError(f"protocol={protocol} is not in `protocols` ({', '.join(map(str, parts)) or 'empty'})")
        rest = {key: value for key, value in values.items() if key != "protocols"}
        return {**merged(rest, parts[protocol]), "name": f"{values['name']}-{protocol}"}

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, name: str) -> str:
        if not name.replace("-", "").replace("_", "").isalnum() or len(name.encode()) > 255:
            raise ValueError(
                f"{name!r} names a folder of results: use letters, digits, - and _ only, at most 255 bytes"
            )
        return name

    @model_validator(mode="after")
    def _names_exist(self) -> Config:
        for number, task in enumerate(self.evaluation.tasks):
            require(task.dataset, self.datasets, f"evaluation.tasks[{number}].dataset", "datasets")
            check_scored(task, self.datasets[task.dataset].format, f"evaluation.tasks[{number}]")
        asked = {task.dataset: None for task in self.evaluation.tasks}
        for name, experiment in self.experiments.items():
            for dataset in experiment.tasks or ():
                require(dataset, asked, f"experiments.{name}.tasks", "evaluation.tasks")
        for name, model in self.models.items():
            if isinstance(model, PretrainSettings):
                for dataset in model.datasets:
                    require(dataset, self.datasets, f"models.{name}.datasets", "datasets")
                    if self.datasets[dataset].answer == "tags":
                        raise ValueError(
                            f"models.{name}.datasets: pre-training imitates the solutions of {dataset!r} as they are, "
                            "without tags; give it a data set with answer: native"
                        )
        for name, bench in self.benches.items():
            if isinstance(bench, RolloutBench):
                require(bench.model, self.models, f"benches.{name}.model", "models")
            else:
                require(bench.experiment, self.experiments, f"benches.{name}.experiment", "experiments")
        if self.gates:
            require(self.gates.experiment, self.experiments, "gates.experiment", "experiments")
            require(self.gates.bench, self.benches, "gates.bench", "benches")
        return self


def merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `override` over it. Nested mappings are merged in the same way."""
    result = dict(base)
    for key, value in override.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def require(name: str, known: Mapping[str, Any], key: str, section: str) -> None:
    """Raise `ConfigError` unless the value `name` of `key` is a key of `section`."""
    if name not in known:
        among = ", ".join(known) or "empty"
        raise ConfigError(f"{key} names {name!r}, which is not in `{section}` ({among}){nearest(name, known)}")


def harness_of(record_format: RecordFormat) -> Harness:
    """The harness that has a task for a record format."""
    return next(harness for harness, formats in SCORED.items() if record_format in formats)


def check_seed(seed: int) -> None:
    """Raise `ConfigError` unless every consumer of seeds accepts `seed`."""
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"`seed` must be a whole number from 0 to {SEEDS - 1}, not {seed}")


def check_scored(task: TaskSettings, record_format: RecordFormat, where: str) -> None:
    """Raise `ConfigError` unless the task accepts records of that format."""
    if task.task and STOCK_TASKS[task.task][1] != record_format:
        raise ConfigError(
            f"{where}: task={task.task} needs records of format {STOCK_TASKS[task.task][1]}, and those of "
            f"{task.dataset!r} are {record_format}; name another data set or another task"
        )
    if record_format not in SCORED[task.harness]:
        raise ConfigError(
            f"{where}: {task.harness} has no task for {task.dataset!r}, whose format is {record_format}; "
            f"use harness: {harness_of(record_format)}"
        )


def parse(
    settings: type[S], values: Mapping[str, Any], where: str, written: Callable[[str], str] = lambda key: key
) -> S:
    """Validate `values`, or raise a `ConfigError` of one sentence that names `where`, if any, and the offending key.

    `written` turns a dotted key of `settings` into the key that the user wrote.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError((f"{where}: " if where else "") + sentence(error, settings, written)) from None


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    if not path.exists():
        raise ConfigError(f"configuration file {path} doesn't exist")
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give a configuration in YAML")
    values = parse_yaml(path.read_bytes(), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration: keys and values are expected")
    return values


def parse_yaml(text: str | bytes, where: str) -> Any:
    """The value of a YAML text. Tags make no objects. A `ConfigError` of one sentence names `where`."""
    try:
        return UniqueKeys(text).get_single_data()
    except DuplicateKey as error:
        raise ConfigError(f"{where}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply; write it with fewer levels") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}{line}: this is not valid YAML: {error.problem or error.context}") from None
    # Impossible dates, numbers of thousands of digits and bytes that are no text are mere ValueErrors.
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
