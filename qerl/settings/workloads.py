"""The workloads whose speed and memory are measured, each defined once: settings, jobs and results have these models.

A size names known shapes (`qerl.checkpoints.shapes`), which have random weights. A workload names its bench and the
functions that measure it; the grid of a configuration (`shapes`) lists many at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

from pydantic import Field

from qerl.settings.base import ConfigError, FilePath, Name, NonEmpty, Part, PositiveInt, Seed, Settings
from qerl.settings.models import Base, WeightFormat
from qerl.settings.run import Kernels, RunSettings

Engine = Literal["native", "vllm"]
ENGINES: tuple[str, ...] = get_args(Engine)


class Workload(Part):
    """What all workloads have: a policy on random weights. Rank 0 has no adapter."""

    #: The key `bench` of its files, by which tables choose them.
    bench: ClassVar[str]
    #: The function that measures it, as `module:name`, by engine or system.
    does: ClassVar[dict[str, str]]

    size: str
    weights: WeightFormat
    rank: Annotated[int, Field(ge=0)]
    pack_delta_nets: bool = False

    @property
    def base(self) -> Base:
        """The base, with the size as its model."""
        return Base(self.size, self.weights, packed_nets=self.pack_delta_nets)


class Decoding(Workload):
    """Decoding at several numbers of sequences of each run. `prompt` and `tokens` (decoded) are per sequence."""

    bench: ClassVar[str] = "decode"
    does: ClassVar[dict[str, str]] = {
        "native": "qerl.bench.native:measure_points",
        "vllm": "qerl.bench.peers:decode_vllm",
    }
    engine: Engine
    kernels: Kernels = "auto"
    """Those of this project's engine; `auto` for the other engines."""
    prompt: PositiveInt
    tokens: PositiveInt
    runs: PositiveInt = 1
    """Runs with an adapter each on one base, whose sequences one engine decodes together."""

    @property
    def serving(self) -> str:
        """The engine with its kernels, as tables name it."""
        return with_kernels(self.engine, self.kernels)


class Prompting(Workload):
    """Prefill in this project's engine: calls that draw one token after each prompt."""

    bench: ClassVar[str] = "prompts"
    does: ClassVar[dict[str, str]] = {"native": "qerl.bench.native:measure_prompts"}
    repeats: PositiveInt = 7
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
    tail: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of completions, drawn at random, whose lengths are uniform from a quarter of `tokens` to `tokens`."""
    sequences: PositiveInt = 512
    """Most completions decoded together."""
    trace: FilePath | None = None
    """A file of token ids that this project's engine replays; vLLM draws others of the same lengths. Each line is a
    prompt: `{"prompt": [...], "completions": [[...], ...]}`. None draws lengths by the keys above."""
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
    runs: PositiveInt = 1
    """Runs with an adapter each on one base in one engine. Each has the lengths, and prompts of its own; `sequences`
    bounds all together, as in a cohort.
    """


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
    prompts: PositiveInt
    group_size: PositiveInt
    sigma: float | None = None
    """The standard deviation of the logarithm of a length; None without a median."""
    equal_groups: float = 0.0
    """Share of each step's groups whose completions earn the same, so that they have no gradient."""

    @property
    def completions(self) -> int:
        """Number of completions per step."""
        return self.prompts * self.group_size

    @property
    def equal_prompts(self) -> int:
        """The number of a step's prompts whose completions earn the same."""
        return round(self.equal_groups * self.prompts)

    def is_equal(self, number: int) -> bool:
        """Whether the completions of the question `number`, counted over all steps, earn the same; evenly spread."""
        place = number % self.prompts
        return (place + 1) * self.equal_prompts // self.prompts > place * self.equal_prompts // self.prompts


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

    @property
    def system(self) -> str:
        """What measures it: an engine, or TRL."""
        return "trl" if isinstance(self.settings, TrlStep) else getattr(self.work, "engine", "native")


def with_kernels(system: str, kernels: Kernels) -> str:
    """An engine or a system with its kernels, unless the GPU chooses them: native or native-portable."""
    return system if kernels == "auto" else f"{system}-{kernels}"


def with_runs(name: str, runs: int) -> str:
    """The name of a file with its number of runs, unless there is one."""
    return name if runs == 1 else f"{name}-{runs}runs"


# The grid of a configuration: each entry is many workloads, and makes the parts of their jobs.

#: A part with the names of its job and of its file; parts with one job share a set-up.
GridPart = tuple[str, str, PointPart[Any, Any]]


def decode_name(engine: str, size: str, weights: str, rank: int, prompt: int, tokens: int) -> str:
    """The name of a file of decode points; prompt and decoded tokens are per sequence.

    engine: with its kernels, by `with_kernels`.
    """
    return f"decode-{engine}-{size}-{weights}-r{rank}-{prompt}x{tokens}"


def step_name(system: str, size: str, weights: str, rank: int, work: str, variant: str) -> str:
    """The name of a file of GRPO steps.

    system: with its kernels, by `with_kernels`. work: prompts, completions of each, and their tokens, as in
    "1x8-256x2048". variant: what is recomputed, and limits.
    """
    return f"step-{system}-{size}-{weights}-r{rank}-{work}-{variant}"


def _check_own(system: str, kernels: Kernels = "auto", runs: int = 1) -> None:
    if system in ("native", "qerl"):
        return
    if kernels != "auto":
        raise ConfigError(f"shapes: {system} has no {kernels} kernels; remove kernels from that entry")
    if runs > 1:
        raise ConfigError(
            f"shapes: only this project's engine has several runs; remove runs from the entry of {system}"
        )


class PolicyGrid(Settings):
    """Policies on random weights of known shapes."""

    sizes: NonEmpty[Name]
    """Sizes of Qwen2.5 (1.5B to 32B) or shapes of other families such as `mistral-7b` (`qerl.checkpoints.shapes`)."""
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[Annotated[int, Field(ge=0)]] = [16]
    """Ranks of the adapter. 0 means none."""

    def policies(self, packed_nets: bool = False) -> Iterator[tuple[Base, dict[str, Any]]]:
        """The base of each size and format with each rank, and the fields of a workload that state them."""
        for size, weights, rank in product(self.sizes, self.weights, self.ranks):
            fields = {"size": size, "weights": weights, "pack_delta_nets": packed_nets, "rank": rank}
            yield Base(size, weights, packed_nets=packed_nets), fields


class DecodeGrid(PolicyGrid):
    """Decode speed of an engine on random weights of known shapes.

    Each engine, size and format is a job, which measures all ranks and lengths. vLLM has a job for each rank."""

    engine: Engine
    pack_delta_nets: bool = False
    """As `pack_delta_nets` of a run."""
    kernels: NonEmpty[Kernels] = ["auto"]
    """As `native.kernels` of a run, one job each."""
    sequences: NonEmpty[PositiveInt] = [1, 2, 4, 8, 32, 64, 128, 256]
    """Numbers of sequences of a run decoded at once, one point each. A point that doesn't fit into the KV cache has no
    number."""
    runs: NonEmpty[PositiveInt] = [1]
    """Numbers of runs with an adapter each in one engine, for this project only."""
    prompt: NonEmpty[PositiveInt] = [128]
    """Lengths of the prompts."""
    tokens: PositiveInt = 256
    """Tokens decoded after the prompt."""

    def parts(self) -> Iterator[GridPart]:
        """A job for each engine with its kernels, size and format, and with vLLM for each rank, which it is started
        for.
        """
        policies = self.policies(self.pack_delta_nets)
        for kernels, (base, policy), prompt, runs in product(self.kernels, policies, self.prompt, self.runs):
            _check_own(self.engine, kernels, runs)
            lengths = {"prompt": prompt, "tokens": self.tokens}
            work = Decoding(engine=self.engine, kernels=kernels, runs=runs, **lengths, **policy)
            job = f"decode-{work.serving}-{base.name}" + (f"-r{work.rank}" if self.engine == "vllm" else "")
            name = with_runs(decode_name(work.serving, work.size, base.weights_name, work.rank, **lengths), runs)
            yield job, name, PointPart(file=f"{name}.json", work=work, points=self.sequences, settings=None)


class MixGrid(PolicyGrid, MixedLengths):
    """Rollouts of completions of mixed lengths on random weights, end to end."""

    engine: Engine
    ranks: NonEmpty[Annotated[int, Field(ge=0)]] = [32]
    runs: NonEmpty[PositiveInt] = [1]
    """Numbers of runs with an adapter each in one engine, for this project only. Prompts and lengths are of each."""

    def parts(self) -> Iterator[GridPart]:
        """A job for each policy and number of runs."""
        if self.prompt[0] > self.prompt[1]:
            raise ConfigError(
                f"shapes: prompt {self.prompt[0]} to {self.prompt[1]} is an empty range; swap the two numbers"
            )
        lengths = {name: getattr(self, name) for name in MixedLengths.model_fields}
        tail = f"-tail{self.tail:g}" if self.tail else ""
        drawn = self.trace.stem if self.trace else f"{self.median}to{self.tokens}{tail}"
        for (base, policy), runs in product(self.policies(), self.runs):
            _check_own(self.engine, runs=runs)
            work = Mix(engine=self.engine, runs=runs, **policy, **lengths)
            shape = f"{self.prompts}x{self.group_size}-{drawn}-seed{self.seed}"
            name = with_runs(f"mix-{self.engine}-{base.name}-r{work.rank}-{shape}", runs)
            yield name, name, PointPart(file=f"{name}.json", work=work, points=[None], settings=None)


#: Keys of a step that only this project has.
_ENGINE_KEYS = ("memory_gb", "kv_cache_gib", "sleep")
_MICRO_BATCH_TOKENS: int = RunSettings.model_fields["micro_batch_tokens"].default


class StepGrid(PolicyGrid, StepLengths):
    """Seconds and memory of a whole GRPO step on random weights, of this project or of TRL with vLLM."""

    system: Literal["qerl", "trl"]
    ranks: NonEmpty[PositiveInt] = [16]
    pack_delta_nets: bool = False
    """As `pack_delta_nets` of a run."""
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

    def parts(self) -> Iterator[GridPart]:
        """A job for each step of TRL and each cap of memory, and one for all other steps with the same weights."""
        if self.system == "trl" and (key := next((key for key in _ENGINE_KEYS if getattr(self, key)), None)):
            raise ConfigError(f"shapes: only this project's steps have {key}; remove it from the entry of TRL")
        if False in self.correction and self.system == "qerl":
            raise ConfigError("shapes: only TRL's steps have correction; remove it from the entry of qerl")
        if "auto" in self.recompute and self.system == "trl":
            raise ConfigError("shapes: TRL doesn't support recompute: auto; use true or false in that entry")
        caps: list[float | None] = [*self.memory_gb] or [None]
        batches = product(self.prompts, self.group_size, self.equal_groups)
        policies = self.policies(self.pack_delta_nets)
        lengths = {name: getattr(self, name) for name in StepLengths.model_fields}
        for (base, policy), (prompts, group, equal), kernels, recompute, correction, cap in product(
            policies, batches, self.kernels, self.recompute, self.correction, caps
        ):
            _check_own(self.system, kernels)
            if abs(prompts * equal - round(prompts * equal)) > 1e-6:
                raise ConfigError(
                    f"shapes: equal_groups={equal:g} of {prompts} prompts is no whole number; change either"
                )
            sigma = self.sigma if self.median else None
            batch = {"prompts": prompts, "group_size": group, "sigma": sigma, "equal_groups": equal}
            work = StepWork(**policy, **batch, **lengths)
            settings: TrlStep | EngineStep
            if self.system == "trl":
                settings = TrlStep(
                    sampler="vllm",
                    micro_batch=min(self.micro_batch, work.completions),
                    recompute=recompute is True,
                    correction=correction,
                    liger=False,
                    sleep=False,
                    vllm_memory=None,
                    optimizer="adamw_torch_fused",
                )
            else:
                tokens = self.micro_batch * (self.prompt + self.tokens) if recompute == "auto" else _MICRO_BATCH_TOKENS
                settings = EngineStep(
                    kernels=kernels,
                    recompute=recompute,
                    micro_batch_tokens=tokens,
                    kv_cache_gib=self.kv_cache_gib,
                    sleep=self.sleep,
                    memory_gb=cap,
                )
            system = with_kernels(self.system, kernels)
            longest = f"{work.median}to{work.tokens}" if work.median else work.tokens
            shape = f"{prompts}x{group}-{work.prompt}x{longest}"
            how = recompute if isinstance(recompute, str) else "recompute" if recompute else "no-recompute"
            variant = (f"equal{equal:g}-" if equal else "") + how + (f"-{cap:g}gb" if cap else "")
            name = step_name(system, work.size, base.weights_name, work.rank, shape, variant)
            name += "" if correction else "-no-correction"
            alone = self.system == "trl" or cap is not None
            part = PointPart(file=f"{name}.json", work=work, points=[None], settings=settings)
            yield name if alone else f"step-{system}-{base.name}-r{work.rank}", name, part


class PromptGrid(PolicyGrid):
    """Prefill time of this project's engine on random weights: each call draws one token after each prompt."""

    points: NonEmpty[tuple[PositiveInt, PositiveInt]] = [
        *((1, tokens) for tokens in (16, 32, 64, 128, 256, 384, 512, 768, 1024)),
        *((8, 16), (8, 64), (32, 16), (2, 250), (4, 200), (8, 256), (32, 256), (8, 4096)),
    ]
    """Pairs of the number of prompts in a call and the tokens of each."""
    repeats: PositiveInt = 7

    def parts(self) -> Iterator[GridPart]:
        """A job for each policy."""
        for base, policy in self.policies():
            name, work = f"prompts-{base.name}-r{policy['rank']}", Prompting(**policy, repeats=self.repeats)
            yield name, name, PointPart(file=f"{name}.json", work=work, points=self.points, settings=None)


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

    @property
    def grids(self) -> list[MixGrid | DecodeGrid | StepGrid | PromptGrid]:
        """All entries in the order of measurement: this project's steps follow TRL's."""
        steps = sorted(self.steps, key=lambda grid: grid.system != "trl")
        return [*self.mixes, *self.decode, *steps, *self.prompts]
