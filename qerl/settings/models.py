"""Settings of models: formats of weights, where a base comes from, and the value that names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass as validated_dataclass

from qerl.settings.base import FilePath, Fraction, PositiveInt, Seed, Settings, UserError

# The formats of weights: their names, and what is known of each without torch (codecs: `qerl.formats.codecs`).

PackedFormat = Literal["nf4", "mxfp4", "nvfp4"]
WeightFormat = Literal["bf16", PackedFormat]


class FormatError(UserError):
    """A tensor, shape or checkpoint that a weight format doesn't support. The message names it."""


@dataclass(frozen=True)
class Format:
    """A 4-bit format, and the libraries that write checkpoints of it."""

    #: Weights that share one scale (NF4: bitsandbytes' block, along the flattened tensor).
    group_size: int
    #: How stock libraries deviate from a policy as it was trained on such a base.
    note: str
    #: llmcompressor's scheme of weights alone, compressed-tensors' name of the layout, and the type of its numbers;
    #: None of a format that bitsandbytes writes.
    scheme: str | None = None
    layout: str | None = None
    numbers: Literal["float", "int"] = "float"
    #: Whether stock transformers reads experts, which it stacks while it loads them.
    stock_experts: bool = False
    #: How weights are rounded; rtn: to nearest, without calibration data.
    method: str = "rtn"

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries whose versions decide a checkpoint's bytes."""
        return ("llmcompressor", "compressed-tensors") if self.scheme else ("bitsandbytes",)


_UNPACKED = "PEFT has no adapter for layers packed so: they are unpacked, "
FORMATS: dict[str, Format] = {
    # By transformers 5.17, experts in NVFP4 lose their global scales without an error, and those in NF4 fail.
    "nvfp4": Format(16, _UNPACKED + "and transformers rounds them to bfloat16.", "NVFP4A16", "nvfp4-pack-quantized"),
    "mxfp4": Format(32, _UNPACKED + "which is exact.", "MXFP4A16", "mxfp4-pack-quantized", stock_experts=True),
    "nf4": Format(
        64,
        "The base's own settings load it by bitsandbytes, which multiplies by its weights in bfloat16.",
        method="nf4-double-quant",
    ),
}

# The settings of models.

#: The formats of a policy that is merged into one checkpoint.
MergedFormat = Literal["bf16", "nvfp4"]
Recipe = Literal["rtn", "awq", "random"]


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
    """Training stops at this accuracy on the first data set's validation problems. A final accuracy outside `accepted`
    is an error."""
    accepted: tuple[float, float] = (0.30, 0.60)
    check_every: PositiveInt = 200
    seed: Seed = 0
    batch_tokens: PositiveInt | None = None
    """Tokens of a step, in place of `batch_size`. They are fresh problems of the data sets' generators, in proportion
    to the sets' training problems. No problem is drawn that validation or test has. The keys below need it."""
    row_tokens: PositiveInt = 32768
    """Tokens of a row, into which problems are packed. A process computes its rows of a step one after another."""
    held_out: list[str] = []
    """Data sets none of whose problems are drawn."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type in which passes compute. Weights, gradients and the optimizer's state are float32."""
    processes: PositiveInt = 1
    """Processes that share the rows of a step, each with its own GPU if the machine has any."""
    checkpoint_seconds: PositiveInt | None = None
    """Time between checkpoints, from which a killed pre-training continues. None writes none."""

    @property
    def all_datasets(self) -> list[str]:
        """The data sets that are read."""
        return [*self.datasets, *self.held_out]

    @model_validator(mode="after")
    def _rows_fit_the_step(self) -> PretrainSettings:
        if self.batch_tokens is None:
            streamed = ("held_out", "dtype", "processes", "checkpoint_seconds")
            defaults = {name: type(self).model_fields[name].default for name in streamed}
            if changed := [name for name in streamed if getattr(self, name) != defaults[name]]:
                raise ValueError(f"{changed[0]} needs batch_tokens; give it, or leave out {changed[0]}")
        elif self.batch_tokens % (self.row_tokens * self.processes):
            raise ValueError(
                f"batch_tokens={self.batch_tokens} must be a multiple of row_tokens={self.row_tokens} times "
                f"processes={self.processes}, so that processes have equally many rows"
            )
        return self

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
    """A commit, or a branch or tag that a lock file (`lock`) resolves to one."""


class LockedRepo(Settings):
    """An entry of a lock file (`qerl lock CONFIG`), by the name of its repository."""

    revision: Annotated[str, Field(pattern="^[0-9a-f]{40}$")]
    """The commit."""
    files: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    """SHA-256 of each file. Each download is checked against it."""


ModelSettings = Annotated[PretrainSettings | LocalModel | HubModel, Field(discriminator="source")]


class CalibrationSettings(Settings):
    """The texts on which `recipe: awq` measures activations: training problems and solutions in the chat template.

    The paper uses 256 texts of 2,048 tokens from another data set."""

    dataset: str | None = None
    """Data set of the texts. None takes the run's own."""
    samples: PositiveInt = 256
    """Number of texts."""
    length: PositiveInt = 2048
    """Longest text, in tokens. Longer ones are cut."""
    seed: Seed = 0
    """Seed of the draw of texts."""


class RandomErrorSettings(Settings):
    """The error that `recipe: random` adds to the linear layers of blocks, which stay bf16 (docs/algorithms.md)."""

    of: PackedFormat = "nvfp4"
    """The format whose rounding is imitated."""
    variance: Annotated[float, Field(gt=0)] = 1.0
    """The error's variance, in multiples of rounding's."""
    seed: Seed | None = None
    """None takes the run's, so that paired runs have different errors."""


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Base:
    """The base of a policy: a model, and how its weights are stored. Every part of the package passes it on whole.

    `calibration` (of `recipe` awq, with its data set) and `error` (of random, with its seed) are None of a base that is
    read from a result, which stores `stored` alone.
    """

    model: str
    """Its name in the configuration; of a run by hand a folder or `org/name`, and of random weights a size like 7B."""
    weights: WeightFormat
    recipe: Recipe = "rtn"
    packed_nets: bool = False
    """Whether a hybrid's delta nets are in 4 bits too."""
    calibration: CalibrationSettings | None = None
    error: RandomErrorSettings | None = None

    @property
    def weights_name(self) -> str:
        """The weight format, with a recipe other than rounding to nearest or packed delta nets: nvfp4-awq."""
        return self._packed + ("" if self.recipe == "rtn" else f"-{self.recipe}")

    @property
    def name(self) -> str:
        """The name of its folder, which no other base of a configuration has."""
        texts, error = self.calibration, self.error
        awq = f"-awq-{texts.dataset}-{texts.samples}x{texts.length}-seed{texts.seed}" if texts else ""
        times = f"-x{error.variance:g}" if error and error.variance != 1 else ""
        random = f"-random-{error.of}{times}-seed{error.seed}" if error else ""
        return f"{self.model}-{self._packed}{awq}{random}"

    @property
    def _packed(self) -> str:
        return self.weights + ("-delta-nets" if self.packed_nets else "")

    @property
    def rounded(self) -> WeightFormat:
        """The format to which its weights are rounded, or whose rounding its random error imitates."""
        return self.error.of if self.error else self.weights

    @property
    def stored(self) -> dict[str, Any]:
        """The fields by which results store it."""
        named = {"model": self.model, "weights": self.weights, "recipe": self.recipe}
        return named | {"pack_delta_nets": self.packed_nets}
