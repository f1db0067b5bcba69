"""The workloads whose speed and memory are measured, each defined once: settings, jobs and results have these models.

A size names known shapes (`qerl.checkpoints.shapes`), which have random weights. A workload names its bench and the
functions that measure it; the grid of a configuration (`shapes`) lists many at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Generic, Literal, TypeVar, get_args

from pydantic import Field

from qerl.settings.base import FilePath, Name, NonEmpty, Part, PositiveInt, Seed, Settings
from qerl.settings.models import Base, WeightFormat
from qerl.settings.run import Kernels

Engine = Literal["native", "vllm", "transformers"]
ENGINES: tuple[str, ...] = get_args(Engine)


class Workload(Part):
    """What all workloads have: a policy on random weights. Rank 0 has no adapter."""

    #: The key `bench` of its files, by which tables choose them.
    bench: ClassVar[str]
    #: The function that measures it, as `module:name`, by engine or system.
    does: ClassVar[dict[str, str]]

    size: str
    weights: WeightFormat
    rank: int
    pack_delta_nets: bool = False

    @property
    def base(self) -> Base:
        """The base, with the size as its model."""
        return Base(self.size, self.weights, packed_nets=self.pack_delta_nets)


class Decoding(Workload):
    """Decoding at several numbers of sequences. `prompt` and `tokens` (decoded) are per sequence."""

    bench: ClassVar[str] = "decode"
    does: ClassVar[dict[str, str]] = {
        "native": "qerl.bench.native:measure_points",
        "vllm": "qerl.bench.peers:decode_vllm",
        "transformers": "qerl.bench.peers:decode_transformers",
    }
    engine: Engine
    kernels: Kernels = "auto"
    """Those of this project's engine; `auto` for the other engines."""
    prompt: int
    tokens: int

    @property
    def serving(self) -> str:
        """The engine with its kernels, as tables name it."""
        return with_kernels(self.engine, self.kernels)


class Prompting(Workload):
    """Prefill in this project's engine: calls that draw one token after each prompt."""

    bench: ClassVar[str] = "prompts"
    does: ClassVar[dict[str, str]] = {"native": "qerl.bench.native:measure_prompts"}
    repeats: int = 7
    """Timed calls, besides the first."""


class MixedLengths(Settings):
    """Prompts and completions of a rollout. Lengths of completions are lognormal, lengths of prompts uniform."""

    prompts: PositiveInt = 64
    group_size: PositiveInt = 8
    """Completions per prompt."""
    prompt: tuple[PositiveInt, PositiveInt] = (128, 384)
    """Least and most tokens of a prompt."""
    median: PositiveInt = 300
    """Median length of a completion."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the logarithm of a length."""
    tokens: PositiveInt = 2048
    """Most tokens of a completion."""
    sequences: PositiveInt = 512
    """Most completions decoded together."""
    trace: FilePath | None = None
    """A file of `python -m qerl.bench.workloads`, whose tokens this project's engine replays; vLLM draws others of the
    same lengths. None draws lengths by the keys above."""
    seed: Seed = 0
    repeats: PositiveInt = 3


class Mix(Workload, MixedLengths):
    """A rollout of completions of mixed lengths, which `qerl.bench.workloads` draws."""

    bench: ClassVar[str] = "rollout_mix"
    does: ClassVar[dict[str, str]] = {
        "native": "qerl.bench.native:measure_mix",
        "vllm": "qerl.bench.peers:mix_vllm",
    }
    engine: Engine


class StepLengths(Settings):
    """Prompts and completions of a GRPO step."""

    prompt: PositiveInt = 128
    """Length of each prompt."""
    tokens: PositiveInt = 1024
    """Length of each completion, or of the longest with a `median`."""
    median: PositiveInt | None = None
    """Median of lognormal lengths of completions, equal for all systems."""
    repeats: PositiveInt = 3
    """Timed steps, besides the warm-up."""


class StepWork(Workload, StepLengths):
    """A GRPO step, which is the same for each system."""

    bench: ClassVar[str] = "grpo_step"
    does: ClassVar[dict[str, str]] = {
        "native": "qerl.bench.steps:measure_steps",
        "trl": "qerl.bench.trl:measure_steps",
    }
    prompts: int
    group_size: int
    sigma: float | None = None
    """The standard deviation of the logarithm of a length; None without a median."""
    equal_groups: float = 0.0
    """Share of each step's groups whose completions earn the same, so that they have no gradient."""

    @property
    def completions(self) -> int:
        """Number of completions per step."""
        return self.prompts * self.group_size


class EngineStep(Part):
    """This project's settings of a GRPO step."""

    kernels: Kernels = "auto"
    recompute: bool | Literal["auto"]
    """`gradient_checkpointing` of a run."""
    micro_batch_tokens: int
    kv_cache_gib: float | None
    sleep: bool = False
    """Whether the KV cache is released after each rollout."""
    memory_gb: float | None = None
    """The limit of the process's GPU memory, in 10^9 bytes; None without a limit."""


class TrlStep(Part):
    """TRL's settings of a GRPO step."""

    sampler: Literal["vllm", "transformers"]
    micro_batch: int
    """Completions per forward pass."""
    recompute: bool
    correction: bool
    """Importance weights between vLLM and the trainer, which are TRL's default and need another forward pass."""
    liger: bool
    sleep: bool
    vllm_memory: float | None
    """vLLM's share of the GPU; None is the share with which it decodes all completions at once."""
    optimizer: str

    @property
    def memory_gb(self) -> None:
        """TRL's memory isn't capped."""


W = TypeVar("W", Decoding, Prompting, Mix, StepWork)
P = TypeVar("P", int, tuple[int, int], None)


class PointPart(Part, Generic[W, P]):
    """A file of a job of the speed grid: a workload, and what tells the file's points apart."""

    file: str
    work: W
    points: list[P]
    """Numbers of sequences, or pairs of prompts and tokens of each; [None] in a file of one point."""
    settings: EngineStep | TrlStep | None
    """The system's settings of a GRPO step; None for other workloads."""


def with_kernels(system: str, kernels: Kernels) -> str:
    """An engine or a system with its kernels, unless the GPU chooses them: native or native-portable."""
    return system if kernels == "auto" else f"{system}-{kernels}"


# The grid of a configuration: each entry is many workloads.


class DecodeGrid(Settings):
    """Decode speed of an engine on random weights of known shapes.

    Each engine, size and format is a job, which measures all ranks and lengths. vLLM has a job for each rank."""

    engine: Engine
    sizes: NonEmpty[Name]
    """Sizes of Qwen2.5 (1.5B to 32B) or shapes of other families such as `mistral-7b` (`qerl.checkpoints.shapes`)."""
    weights: NonEmpty[WeightFormat]
    pack_delta_nets: bool = False
    """As `pack_delta_nets` of a run."""
    ranks: NonEmpty[Annotated[int, Field(ge=0)]]
    """Ranks of the adapter. 0 means none."""
    kernels: NonEmpty[Kernels] = ["auto"]
    """As `native.kernels` of a run, one job each."""
    sequences: NonEmpty[PositiveInt] = [1, 2, 4, 8, 32, 64, 128, 256]
    """Numbers of sequences decoded at once, one point each. A point that doesn't fit into the KV cache has no
    number."""
    prompt: NonEmpty[PositiveInt] = [128]
    """Lengths of the prompts."""
    tokens: PositiveInt = 256
    """Tokens decoded after the prompt."""


class MixGrid(MixedLengths):
    """Rollouts of completions of mixed lengths on random weights, end to end."""

    engine: Literal["native", "vllm"]
    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[Annotated[int, Field(ge=0)]] = [32]


class StepGrid(StepLengths):
    """Seconds and memory of a whole GRPO step on random weights, of this project or of TRL with vLLM."""

    system: Literal["qerl", "trl"]
    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    pack_delta_nets: bool = False
    """As `pack_delta_nets` of a run."""
    ranks: NonEmpty[PositiveInt] = [16]
    kernels: NonEmpty[Kernels] = ["auto"]
    """As `native.kernels` of a run, one job each."""
    recompute: NonEmpty[bool | Literal["auto"]] = [True]
    """Values of gradient checkpointing. Only this project has `auto`."""
    memory_gb: list[Annotated[float, Field(gt=0)]] = []
    """Caps on the GPU's memory in GB, one job each, for this project only."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """As `native.kv_cache_gib` of a run, for this project only."""
    sleep: bool = False
    """As `native.sleep` of a run, for this project only."""
    prompts: NonEmpty[PositiveInt] = [16]
    group_size: NonEmpty[PositiveInt] = [8]
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """Standard deviation of the logarithm of a length, for steps with a `median`."""
    equal_groups: NonEmpty[Annotated[float, Field(ge=0, lt=1)]] = [0.0]
    """Shares of a step's groups whose completions earn the same and thus have no gradient."""
    correction: NonEmpty[bool] = [True]
    """Whether TRL weights tokens by the ratio of its probabilities to vLLM's, its default, which takes one more forward
    pass."""
    micro_batch: PositiveInt = 16
    """Completions in a forward pass of TRL, and of this project with `recompute: auto`."""


class PromptGrid(Settings):
    """Prefill time of this project's engine on random weights: each call draws one token after each prompt."""

    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[Annotated[int, Field(ge=0)]] = [16]
    """Ranks of the adapter. 0 means none."""
    points: NonEmpty[tuple[PositiveInt, PositiveInt]] = [
        *((1, tokens) for tokens in (16, 32, 64, 128, 256, 384, 512, 768, 1024)),
        *((8, 16), (8, 64), (32, 16), (2, 250), (4, 200), (8, 256), (32, 256), (8, 4096)),
    ]
    """Pairs of the number of prompts in a call and the tokens of each."""
    repeats: PositiveInt = 7


class ShapesSettings(Settings):
    """Speed and memory on real shapes (docs/results/h200.md, docs/results/paper-speeds.md).

    The target `shapes_measure` measures all jobs; `qerl grid --missing` lists those that lack points.
    """

    samples: list[Path] = []
    """Folders of the committed points. Of files with the same name, the first folder's counts."""
    decode: list[DecodeGrid] = []
    mixes: list[MixGrid] = []
    steps: list[StepGrid] = []
    prompts: list[PromptGrid] = []
