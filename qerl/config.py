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
    """What a user can mend, said in one sentence: one line, shortened in its middle, whatever it quotes."""

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        super().__init__(line if len(line) <= 2000 else f"{line[:1500]} ... {line[-450:]}")


class ConfigError(UserError):
    """A configuration that can't run; the message is one sentence for the user."""


class Settings(BaseModel):
    """Base of all settings: immutable; an unknown key and a number that is none, or infinite, are errors.

    Where something can be off, `off`, `none` and `false` all say so. True and false are no numbers.
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


def _can_name_a_file(path: Path) -> Path:
    """What no file system takes, said here: looking for such a file raises errors of many kinds."""
    text = str(path)
    unwritable = "\0" in text or any("\ud800" <= character <= "\udfff" for character in text)
    if unwritable or len(text) > 1024 or any(len(part.encode()) > 255 for part in path.parts):
        raise ValueError("no file has such a name: it is too long, or holds what is no character")
    return path


FilePath = Annotated[Path, AfterValidator(_can_name_a_file)]


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
    """Share of the training solutions that state the answer at once, without the steps (the other splits have
    none)."""


class LocalData(Settings):
    """A file of records (.jsonl, .json, .parquet), split by a hash of the question, or a folder with a file a split."""

    source: Literal["local"]
    path: FilePath
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2


class HubData(Settings):
    """A data set of the Hugging Face hub at a pinned revision: from the hub, its cache or a local copy."""

    source: Literal["hub"]
    repo: str
    revision: str | None = None
    """A commit. May be left out, or be a branch or tag, where a lock file (the key `lock`) says what commit it is."""
    subset: str | None = None
    """The repository's own name of it, as `main` of openai/gsm8k."""
    splits: dict[Split, str] = {"train": "train", "test": "test"}
    """The repository's split for each one here: `{test: train}` where all there is to test on is called train."""
    folder: FilePath | None = None
    """A copy of the repository, made by `hf download --repo-type dataset REPO --local-dir FOLDER`; read in the place
    of the hub."""


class FunctionData(Settings):
    """Records that a function of the user returns: a list, split by a hash of the question, or a mapping from split
    names (train, validation, test) to lists."""

    source: Literal["python"]
    function: FunctionPath
    """`module:function`, importable from the working directory or installed; called without an argument. It may also
    be a generator, or return a `datasets.Dataset`."""
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.2


Bound = Annotated[float, Field(allow_inf_nan=True)]


class FilterSettings(Settings):
    """Which training records are kept. Validation and test are never filtered."""

    max_characters: PositiveInt | None = None
    """Longer questions are dropped (the released scripts, on BigMath: 1024)."""
    levels: list[int] | None = None
    """Records of other levels (column `level`), or of none, are dropped."""
    within: dict[str, tuple[Bound, Bound]] = {}
    """Columns whose number must lie between the two bounds, inclusive, as `{llama8b_solve_rate: [0, 0.5]}`; a record
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

    Each question counts once, in the first of test, validation and train that has it; one whose answers contradict each
    other is dropped with a warning."""

    format: RecordFormat
    columns: dict[str, str] = {}
    """The records' own names of the format's columns, where they differ: `{problem: prompt, answer: solution}`."""
    filter: FilterSettings = FilterSettings()
    origin: Annotated[Generated | LocalData | HubData | FunctionData, Field(discriminator="source")]
    answer: AnswerForm = "native"
    """How completions state their answer. `native`: as the records do (`#### n`, `\\boxed{}`); `tags`:
    `<think>...</think><answer>...</answer>`, which the instruction must ask for. The records stay as they are."""
    instruction: str = Field(default_factory=_instruction_of)
    """Appended to each question, on a line of its own; it tells the policy how to state the answer. By default it asks
    for what the grader of the format reads: `#### n` (gsm8k), `\\boxed{}` (math, aime), or the tags. An empty text
    appends nothing."""
    units: list[str] = []
    """Words and signs that may follow a number without changing it, besides the built-in units such as `dollars` and
    `km/h` (docs/evaluation.md): `["%", points]`. A number with any other word after it is no answer."""

    @property
    def own_file(self) -> Path | None:
        """The user's own file or folder that it is made of."""
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
    """A miniature Qwen2 trained from scratch on worked solutions (supervised), so that RL has something to improve."""

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
    """Training stops when this share of the validation problems of the first data set is solved, checked every
    `check_every` steps; a policy that ends outside `accepted` is an error."""
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
    """A commit. A branch or tag needs a lock file (the key `lock`), which says what commit it is."""


class LockedRepo(Settings):
    """An entry of a lock file, which maps repositories of the hub (data sets as `datasets/org/name`) to these keys.
    `qerl lock CONFIG` writes it."""

    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    """The commit."""
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    """SHA-256 of each file; a download is compared with it."""


ModelSettings = Annotated[PretrainSettings | LocalModel | HubModel, Field(discriminator="source")]


# --- quantization ----------------------------------------------------------------------------------------------------


class CalibrationSettings(Settings):
    """Texts that `recipe: awq` measures activations on: training problems with their solutions in the chat template.

    The paper has 256 texts of 2,048 tokens, of another data set."""

    dataset: str | None = None
    """None: the run's own."""
    samples: PositiveInt = 256
    """How many; all, where the data set has fewer."""
    length: PositiveInt = 2048
    """Longer texts are cut to this many tokens."""
    seed: Seed = 0
    """Which ones are drawn."""


# --- a training run --------------------------------------------------------------------------------------------------


class AdapterSettings(Settings):
    """LoRA (paper Table 4 and section 4.1; alpha is not in the paper)."""

    rank: Annotated[int, Field(ge=0)] = 32
    alpha: PositiveInt = 64
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that an update leaves out. Which ones follows from seed, step, completion and
    layer, however the batch is cut or shared among processes."""
    train_norms: bool = True
    """The released scripts also train the two RMSNorms of each block."""
    targets: NonEmpty[Layer] = list(get_args(Layer))


class NoiseSettings(Settings):
    """Adaptive Quantization Noise (paper section 3.3, Eq. 7 to 12)."""

    schedule: Literal["off", "exponential", "exponential-reaching", "linear", "cosine", "logarithmic", "constant"] = (
        "off"
    )
    sigma_start: Annotated[float, Field(ge=0)] = 1e-2
    sigma_end: Annotated[float, Field(ge=0)] = 5e-4
    stages: PositiveInt = 10
    """K of Eq. 8; the first stage carries no noise. In a run of fewer steps than stages each step is a stage, and the
    last stages are left out."""
    mode: Literal["sampler", "consistent"] = "sampler"
    """`sampler`: noise in the behaviour policy only (Algorithm 1); `consistent`: the same z in the training
    forward."""

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
    """How completions are drawn. Defaults: the paper's rollout (Table 4)."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    max_tokens: PositiveInt = 4096


class VllmSettings(Settings):
    """vLLM as the sampler."""

    utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the GPU's memory for the engine (weights, cache, CUDA graphs); the trainer needs the rest."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """GiB of the KV cache, whatever `utilization` leaves; unset on a CPU: 1."""
    max_model_len: PositiveInt | None = None
    """Most tokens of a prompt and its completion together; unset: what the model was made for."""
    max_sequences: PositiveInt = 256
    """Sequences that are decoded together."""
    sleep: bool = False
    """Give the engine's memory back between rollouts: weights go to host memory, the cache is dropped."""
    eager: bool = False
    """Neither compile nor capture CUDA graphs; starts faster, runs slower."""
    tensor_parallel: PositiveInt = 1
    """GPUs of this machine that share each layer of the engine. The policy that is sampled from lies whole on the first
    of them besides."""
    url: str | None = None
    """`vllm-server`: address of the server, such as http://host:8000."""
    adapters: FilePath | None = None
    """`vllm-server`: folder for adapters, at the same path on this host and the server's."""


class NativeSettings(Settings):
    """The native engine, which samples from the trainer's own weights on a GPU."""

    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """GiB of the KV cache; unset: what the rollout can use, at most 60 % of the memory that is free before it. Where
    that is less than it could use, the cache's memory is given back after each rollout, as with `sleep`."""
    sleep: bool = False
    """Give the cache's memory back after each rollout; the next one takes about a second longer."""
    batch_invariant: bool = False
    """A completion doesn't depend on what is drawn beside it, to the bit: prompts are computed one by one, and every
    step has the size of a full batch, which costs time."""


class EngineSettings(Settings):
    """Who draws the completions."""

    engine: Literal["native", "vllm", "vllm-server"] = "native"
    """`vllm`: vLLM within this process; `vllm-server`: a running OpenAI-compatible server of vLLM."""
    native: NativeSettings = NativeSettings()
    vllm: VllmSettings = VllmSettings()

    @property
    def engine_gpus(self) -> int:
        """GPUs that sampling takes."""
        return self.vllm.tensor_parallel if self.engine == "vllm" else 1

    @model_validator(mode="after")
    def _server_is_known(self) -> EngineSettings:
        if self.engine == "vllm-server" and not (self.vllm.url and self.vllm.adapters):
            raise ValueError("engine=vllm-server needs vllm.url and vllm.adapters, a folder that both hosts see")
        return self


class RolloutSettings(EngineSettings):
    """One rollout a step: `prompts` problems, `group_size` completions of each (G of Eq. 3)."""

    prompts: PositiveInt = 16
    group_size: PositiveInt = 8
    resample: Annotated[int, Field(ge=0, lt=256)] = 0
    """DAPO's dynamic sampling: problems whose completions all earn the same are replaced by the next ones, in at most
    this many further rounds."""
    max_prompt_tokens: PositiveInt | None = None
    """Training problems whose prompt has more tokens are left out. None: all must fit into the model's context together
    with `sampling.max_tokens`."""
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
    """Values of `correct` and `format` as in the released scripts; keys given beside it win. Values only: the grading
    is this project's, because the scripts' graders are among their defects."""
    correct: float = 1.0
    format: float = 0.1
    custom: float = 1.0
    """Weight of `function`."""
    function: FunctionPath | None = None
    """A reward of your own, `module:function`, importable from the working directory or installed. It is called as
    `function(answer: qerl.rl.rewards.Answer, problem: qerl.data.records.Problem)` and returns a finite number."""
    timeout: Annotated[float, Field(gt=0)] | None = 300.0
    """Seconds that a call of `function` may take; over it, the run stops and says where the function was. A higher
    limit goes on from the last checkpoint. null: no limit."""
    overlong: Annotated[float, Field(ge=0)] = 1.0
    overlong_buffer: Annotated[int, Field(ge=0)] = 0
    """Tokens before the limit in which the soft penalty of DAPO grows from 0 to -1; 0: no penalty."""

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

    Defaults: lambda as in arXiv 1707.06347 (Tables 3 to 5), no discount, as is usual for rewards at the end of a text.
    """

    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """Lambda of the generalized advantage estimation (arXiv 1506.02438, Eq. 16)."""
    whiten: bool = True
    """Advantages with mean 0 and variance 1 over the tokens of each step's batch."""
    value_clip: Annotated[float, Field(gt=0)] = 0.2
    """How far an update counts a value's move from where it was before the first update on the rollout (as
    `clip_low`)."""
    value_coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Weight of the value's loss, which has a factor 0.5 of its own. The value shares no trained weight with the
    policy."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Of the value function, with the same schedule as the policy's: ten times the policy's default (OpenRLHF's
    defaults have a factor of nine)."""
    rank: PositiveInt = 32
    """Of the value's LoRA adapter, which has the policy's targets, no dropout and no trained norms."""
    alpha: PositiveInt = 64


class LossSettings(Settings):
    """The policy's loss (`qerl.rl.losses` has the formulas). Defaults: GRPO (paper Eq. 3), no KL term (Appendix E)."""

    name: Literal["grpo", "dapo", "dr_grpo", "gspo", "bnpo", "ppo"] = "grpo"
    """`bnpo` is what the released scripts run as DAPO; `ppo` has a value function in the place of groups."""
    clip_low: Annotated[float, Field(gt=0)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference, which is the base without the adapter."""
    scale_advantages: bool = True
    """Divide by the group's standard deviation (Eq. 4). Where it isn't given, `dr_grpo` has false."""
    mask_truncated: bool = False
    """Completions that ran into the limit carry no loss (DAPO's overlong filtering)."""
    updates_per_rollout: PositiveInt = 1
    """Passes over one rollout, each with an optimizer step (mu of Algorithm 1)."""
    correction: Literal["off", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask"] = "off"
    """Importance weights that correct for the difference between sampler and trainer; `off` as in the paper."""
    correction_cap: Annotated[float, Field(ge=1)] = 2.0
    ppo: PPOSettings = PPOSettings()
    """Used by `ppo` only."""

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
    """All that determines a training run."""

    model: str
    dataset: str
    weights: WeightFormat = "nvfp4"
    recipe: Recipe = "rtn"
    """How weights are quantized: `rtn` rounds to nearest, without data; `awq` (nvfp4 and mxfp4) scales channels by
    their activations on calibration texts first."""
    calibration: CalibrationSettings = CalibrationSettings()
    """Used by `recipe: awq` only."""
    method: Literal["full", "lora"] = "lora"
    adapter: AdapterSettings = AdapterSettings()
    noise: NoiseSettings = NoiseSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    steps: PositiveInt = 200
    micro_batch_tokens: PositiveInt = 16384
    """Tokens of one forward and backward pass, a prompt counted once for all its completions there; gradients
    accumulate over as many as needed."""
    gradient_checkpointing: bool | Literal["auto"] = False
    """Keep the input of each block only and compute the rest again in the backward pass: less memory, more time.
    `auto`: as many blocks as the memory that is free on the GPU makes necessary (on a CPU: none); where there is more,
    logits are kept instead of computed twice, and packed weights unpacked once an update instead of twice a
    micro-batch."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    checkpoint_every: PositiveInt = 10
    on_no_signal: Literal["warn", "stop"] = "warn"
    """What becomes of a run whose rewards teach nothing: no completion of its first step states an answer that can be
    read, or all completions of a problem earned the same in each of three steps. `warn` says so once, with a
    completion; `stop` ends the run."""
    processes: PositiveInt = 1
    """Data parallelism: processes that share each step's work, on as many GPUs. The result is that of one process up
    to the order in which gradients are added."""
    seed: Seed = 0

    @property
    def gpus(self) -> int:
        """GPUs that the run takes."""
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
        """The calibration of the run's checkpoint, with its data set's name; none without one."""
        if self.recipe == "rtn":
            return None
        return self.calibration.model_copy(update={"dataset": self.calibration.dataset or self.dataset})


class RunFile(RunSettings):
    """One run by hand, `qerl train run.yaml`: the keys of `RunSettings`, with model, data and outcome in place.

    Relative paths count from the working directory; they are stored as absolute ones.
    """

    model: str
    """A folder in the hub's layout, dense or quantized to `weights` already, or `org/name` of the hub, with `@revision`
    for another than its main branch."""
    dataset: DatasetSettings  # type: ignore[assignment]
    """A file or folder of records, or a mapping as under DatasetSettings."""
    out: FilePath
    """A new folder for all that the run makes. A killed run goes on from what is in it."""

    @field_validator("calibration", mode="after")
    @classmethod
    def _calibrates_on_its_own_data(cls, calibration: CalibrationSettings) -> CalibrationSettings:
        if calibration.dataset is not None:
            raise ValueError("dataset can't be given here: a run by hand is calibrated on its own data; leave it out")
        return calibration

    @field_validator("model", mode="after")
    @classmethod
    def _folder_is_absolute(cls, model: str) -> str:
        return str(path.resolve()) if (path := _can_name_a_file(Path(model))).is_dir() else model

    @field_validator("dataset", mode="before")
    @classmethod
    def _path_is_local_data(cls, dataset: Any) -> Any:
        return local_dataset(_can_name_a_file(Path(dataset))) if isinstance(dataset, (str, Path)) else dataset

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
        """What determines the run, wherever its folder lies."""
        values = {name: getattr(self, name) for name in RunSettings.model_fields}
        return RunSettings(**{**values, "dataset": "data"})


def local_dataset(path: Path, **origin: Any) -> dict[str, Any]:
    """Values of `DatasetSettings` for a file or folder of records, which tell their format themselves."""
    from qerl.data.sources import check_problem_file

    return {"format": check_problem_file(path), "origin": {"source": "local", "path": path, **origin}}


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
    """What a task samples otherwise than the evaluation; `none`: as the evaluation."""

    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    max_tokens: PositiveInt | None = None


class TaskSettings(Settings):
    """One evaluation task: the test split of a data set, scored by a harness."""

    dataset: str
    harness: Harness
    name: str = ""
    """What results call the task; empty: as the data set. It tells apart two tasks on one data set."""
    task: StockTask | None = None
    """A task of the harness itself, with its own prompt, gold answer and metric. Without one, prompts are the
    data set's (as in training) and only the metric is the harness's."""
    chat: bool = True
    """The prompt is a user's message in the chat template. A stock task may have it as bare text (false), which is
    what `lm_eval` does unless told `--apply_chat_template`."""
    fewshot: Annotated[int | None, Field(ge=0)] = None
    """Solved examples ahead of a stock task's question, from the training split; none: as many as the task has (gsm8k
    5, the others 0)."""
    repeats: PositiveInt | None = None
    """None: as the evaluation."""
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
    """Paper section 4.1: temperature 0.6, top-p 0.95, several repeats; noise-free."""

    tasks: list[TaskSettings]
    sampling: SamplingSettings = SamplingSettings(temperature=0.6, top_p=0.95)
    repeats: PositiveInt = 4
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: Seed = 0

    def sampling_of(self, task: TaskSettings) -> SamplingSettings:
        """How the completions of `task` are drawn."""
        return self.sampling.model_copy(update=task.sampling.model_dump(exclude_none=True))

    def repeats_of(self, task: TaskSettings) -> int:
        """How many completions of each problem of `task` are drawn."""
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
    """All points held in memory and timed in turn, so that ratios hold whatever else the machine does; false: one
    after another, each alone in memory, which large models need and which peaks of memory are exact with."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    seed: Seed = 0


class StepBench(Settings):
    """Seconds and peak memory of one GRPO step for each arm of an experiment and each point of its grid, seeds left
    aside (paper Tables 3 and 5 to 8)."""

    kind: Literal["step"]
    experiment: str
    repeats: PositiveInt = 3
    interleave: bool = True
    """As for RolloutBench."""


BenchSettings = Annotated[RolloutBench | StepBench, Field(discriminator="kind")]


class GateSettings(Settings):
    """Regression gates (docs/gates.md): with them the workflow's outcome is a verdict in the place of tables."""

    file: FilePath
    """The gates, a row each."""
    baselines: FilePath
    """Folder of the baselines, a file for each class of machines; `qerl gate accept` writes it."""
    vectors: FilePath
    """Folder of what codecs, kernels and graders are compared with."""
    experiment: str
    """Whose runs are compared with the baseline's, seed by seed."""
    stored: FilePath
    """Folder of trained policies, a folder each, that are evaluated as they are."""
    bench: str
    """A measurement of kind `rollout` with bf16 and one more format."""
    rounds: PositiveInt = 10
    """How often this code and the baseline's take turns, at rollouts and at updates."""


class DecodeGrid(Settings):
    """Decode speed of an engine on random weights of Qwen2.5's shapes: a job for each size, format, rank and prompt."""

    engine: Literal["native", "vllm", "transformers"]
    sizes: NonEmpty[Name]
    """1.5B, 3B, 7B, 14B or 32B (`qerl.bench.sizes`)."""
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[Annotated[int, Field(ge=0)]]
    """0 is no adapter."""
    sequences: NonEmpty[PositiveInt] = [1, 2, 4, 8, 32, 64, 128, 256]
    """Decoded at once, a point each; those that the KV cache has no room for are points without a number."""
    prompt: NonEmpty[PositiveInt] = [128]
    """Tokens of a prompt."""
    tokens: PositiveInt = 256
    """Decoded after it."""


class StepGrid(Settings):
    """Seconds and memory of a whole GRPO step on random weights, of this project or of TRL with vLLM."""

    system: Literal["qerl", "trl"]
    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[PositiveInt] = [16]
    recompute: NonEmpty[bool | Literal["auto"]] = [True]
    """Gradient checkpointing; auto by measured memory, this project's alone."""
    memory_gb: list[Annotated[float, Field(gt=0)]] = []
    """Of this project's: caps on the GPU's memory, each a job of its own; none is the whole."""
    prompts: NonEmpty[PositiveInt] = [16]
    """Of a step."""
    group_size: NonEmpty[PositiveInt] = [8]
    """Completions of a prompt."""
    prompt: PositiveInt = 128
    tokens: PositiveInt = 1024
    """Of every completion."""
    micro_batch: PositiveInt = 16
    """Completions of a forward pass, TRL's (all, where a step has fewer) and this project's where memory chooses."""
    repeats: PositiveInt = 3


class ShapesSettings(Settings):
    """Speed and memory on real shapes (docs/results/h200.md): tables and figures of all points that are measured, here
    or committed; the target `shapes_measure` measures those that are missing."""

    samples: Path
    """Folder of committed points."""
    decode: list[DecodeGrid]
    steps: list[StepGrid] = []


# --- experiments -----------------------------------------------------------------------------------------------------


class Experiment(Settings):
    """Base settings, named arms that override them, and a grid over any keys (dotted: `adapter.rank`)."""

    base: dict[str, Any]
    arms: dict[Name, dict[str, Any]] = {"run": {}}
    """An arm of null is left out: how a protocol takes one away."""
    grid: dict[str, list[Any]] = {"seed": [0, 1, 2]}
    train: bool = True
    """false: the runs are only timed, by measurements of kind `step`."""
    tasks: list[str] | None = None
    """Which of `evaluation.tasks` (names of their data sets) the bases and the trained policies are scored on; none
    given: all. An empty list leaves the curves of training only."""
    on_failure: Literal["stop", "row"] = "stop"
    """What becomes of a run that is out of memory or over `time_limit`. `stop`: its job fails; `row`: that is its
    result, which tables show as a row, and all else goes on. To try it again on another machine, delete its folder
    train/<run> of the results."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """Hours that the steps of a run may take, all attempts together; looked at before each step. A higher limit goes on
    where the lower one stopped."""
    omitted: dict[str, str] = {}
    """Arms of the paper that this experiment leaves out, each with the reason; `qerl plan` shows them."""

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
    """Results go to results/NAME: letters, digits, - and _."""
    protocol: Protocol = "paper"
    """Which of the sources to follow where they disagree. `paper` is the file as it stands; another takes the part of
    that name in `protocols` over it, and its results go to a folder of their own."""
    protocols: dict[Protocol, dict[str, Any]] = {}
    """For each other protocol: the keys that differ, placed as in the whole file."""
    lock: FilePath | None = None
    """File of commits and hashes of all that comes from the hub; `qerl lock CONFIG` writes it."""
    models: dict[Name, ModelSettings]
    datasets: dict[Name, DatasetSettings]
    experiments: dict[Name, Experiment]
    evaluation: EvaluationSettings
    benches: dict[Name, BenchSettings] = {}
    gates: GateSettings | None = None
    shapes: ShapesSettings | None = None
    """With it a configuration may have nothing else."""
    fit_to_model: bool = False
    """Settings of runs and of the evaluation that are left out are chosen by what each experiment's local checkpoint is
    (size, context) and by whether there is a GPU (`qerl/own.py`), in the place of their defaults below."""
    model: FilePath | None = None
    """Short cuts of the command line: another checkpoint folder, another file of problems, for every run."""
    problems: FilePath | None = None

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
    """`base` with the keys of `override` over it, mappings within mappings likewise."""
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
    """Raise `ConfigError` unless `seed` is one that every consumer takes."""
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"`seed` must be a whole number from 0 to {SEEDS - 1}, not {seed}")


def check_scored(task: TaskSettings, record_format: RecordFormat, where: str) -> None:
    """Raise `ConfigError` unless the task can be asked of records of that format."""
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
    """Validate `values`; a `ConfigError` of one sentence names `where`, if any, and the offending key.

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
    """The value that a YAML text states; a `ConfigError` of one sentence names `where`. Tags make no objects."""
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
