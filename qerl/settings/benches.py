"""Settings of benches: rollouts, steps, the speed grid and the regression gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    Field,
)

from qerl.settings.base import FilePath, Name, NonEmpty, PositiveInt, Seed, Settings
from qerl.settings.models import WeightFormat
from qerl.settings.rollout import EngineSettings, Kernels
from qerl.settings.run import RunSettings


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
    """Keep all points in memory and time them round by round, so that other load on the machine affects all alike.
    False times one point after another, each alone in memory, which large models and exact memory peaks need.
    """
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
    """Regression gates (docs/gates.md). With them the workflow makes a verdict instead of tables."""

    file: FilePath
    """Table of the gates, one per row."""
    baselines: FilePath
    """Folder of the baselines, one file per machine class. `qerl gate accept` writes them."""
    vectors: FilePath
    """Folder of the reference vectors for codecs, kernels and graders."""
    experiment: str
    """Experiment whose runs are compared with the baseline's, seed by seed."""
    stored: FilePath
    """Folder with one folder per trained policy. These policies are evaluated without training."""
    bench: str
    """A bench of kind `rollout` with bf16 and one other weight format."""
    rounds: PositiveInt = 10
    """Number of rounds in which this code and the baseline's are timed, for rollouts and for updates."""


class DecodeGrid(Settings):
    """Decode speed of an engine on random weights of known shapes.

    Each engine, size and format is a job, which measures all ranks and lengths. vLLM has a job for each rank."""

    engine: Literal["native", "vllm", "transformers"]
    sizes: NonEmpty[Name]
    """Sizes of the model: 1.5B, 3B, 7B, 8B, 14B or 32B (`qerl.checkpoints.architectures`), or published shapes of
    other families such as `mistral-7b` (`qerl.checkpoints.published`)."""
    weights: NonEmpty[WeightFormat]
    pack_delta_nets: bool = RunSettings.model_fields["pack_delta_nets"].default
    """Whether 4-bit weights of a hybrid have packed delta nets (`pack_delta_nets` of a run)."""
    ranks: NonEmpty[Annotated[int, Field(ge=0)]]
    """Ranks of the adapter. 0 means no adapter."""
    kernels: NonEmpty[Kernels] = ["auto"]
    """Kernels of this project's engine (`native.kernels` of a run), one job each."""
    sequences: NonEmpty[PositiveInt] = [1, 2, 4, 8, 32, 64, 128, 256]
    """Numbers of sequences decoded at once, one point each. A point that doesn't fit into the KV cache has no
    number."""
    prompt: NonEmpty[PositiveInt] = [128]
    """Lengths of the prompts in tokens."""
    tokens: PositiveInt = 256
    """Number of tokens decoded after the prompt."""


class MixGrid(Settings):
    """Rollouts of completions of mixed lengths on random weights, end to end, of this project's engine or of vLLM.

    Lengths of completions are lognormal, those of prompts uniform. Both are functions of the seed."""

    engine: Literal["native", "vllm"]
    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[Annotated[int, Field(ge=0)]] = [32]
    prompts: PositiveInt = 64
    """Number of prompts."""
    group_size: PositiveInt = 8
    """Number of completions per prompt."""
    prompt: tuple[PositiveInt, PositiveInt] = (128, 384)
    """The least and the most tokens of a prompt."""
    median: PositiveInt = 300
    """The median length of a completion in tokens."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """The standard deviation of the logarithm of a length."""
    tokens: PositiveInt = 2048
    """The most tokens of a completion."""
    sequences: PositiveInt = 512
    """The most completions decoded together."""
    trace: FilePath | None = None
    """A file of prompts and completions that `qerl.bench.rollout_mix.trace` wrote. This project's engine replays their
    tokens, and vLLM draws others of the same lengths. None draws prompts and lengths by the keys above."""
    drafts: bool = False
    """Whether this project's engine verifies drafts (`native.drafts`). Only a trace has text that drafts can find."""
    seed: Seed = 0
    repeats: PositiveInt = 3


class StepGrid(Settings):
    """Seconds and memory of a whole GRPO step on random weights, of this project or of TRL with vLLM."""

    system: Literal["qerl", "trl"]
    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    pack_delta_nets: bool = RunSettings.model_fields["pack_delta_nets"].default
    """Whether 4-bit weights of a hybrid have packed delta nets (`pack_delta_nets` of a run)."""
    ranks: NonEmpty[PositiveInt] = [16]
    kernels: NonEmpty[Kernels] = ["auto"]
    """Kernels of this project's engine (`native.kernels` of a run), one job each."""
    recompute: NonEmpty[bool | Literal["auto"]] = [True]
    """Values of gradient checkpointing. Only this project has `auto`, which decides by measured memory."""
    memory_gb: list[Annotated[float, Field(gt=0)]] = []
    """Caps on the GPU's memory in GB, one job each, for this project only. Without a cap, a job may use all memory."""
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = None
    """`native.kv_cache_gib` of a run, for this project only."""
    sleep: bool = False
    """`native.sleep` of a run, for this project only."""
    prompts: NonEmpty[PositiveInt] = [16]
    """Numbers of prompts per step."""
    group_size: NonEmpty[PositiveInt] = [8]
    """Numbers of completions per prompt."""
    prompt: PositiveInt = 128
    """Length of each prompt in tokens."""
    tokens: PositiveInt = 1024
    """Length of each completion in tokens, or of the longest with a `median`."""
    median: PositiveInt | None = None
    """Median length of completions of mixed lengths in tokens. Lengths are lognormal and equal for all systems."""
    sigma: Annotated[float, Field(ge=0)] = 0.8
    """The standard deviation of the logarithm of a length, for steps with a `median`."""
    equal_groups: NonEmpty[Annotated[float, Field(ge=0, lt=1)]] = [0.0]
    """Shares of a step's groups whose completions earn the same, so that they have no gradient. These groups are spread
    evenly over the step."""
    correction: NonEmpty[bool] = [True]
    """Whether TRL weights tokens by the ratio of its probabilities to vLLM's. That is its default and takes one more
    forward pass. This project's steps here have no such weights."""
    micro_batch: PositiveInt = 16
    """Number of completions in a forward pass of TRL, and of this project where measured memory decides what is
    recomputed. A step with fewer completions has one pass."""
    repeats: PositiveInt = 3


class PromptGrid(Settings):
    """Prefill time of this project's engine on random weights: each call draws one token after each prompt.

    Each size, format and rank is a job of its own."""

    sizes: NonEmpty[Name]
    weights: NonEmpty[WeightFormat]
    ranks: NonEmpty[Annotated[int, Field(ge=0)]] = [16]
    """Ranks of the adapter. 0 means no adapter."""
    points: NonEmpty[tuple[PositiveInt, PositiveInt]] = [
        *((1, tokens) for tokens in (16, 32, 64, 128, 256, 384, 512, 768, 1024)),
        *((8, 16), (8, 64), (32, 16), (2, 250), (4, 200), (8, 256), (32, 256), (8, 4096)),
    ]
    """Pairs of the number of prompts in a call and the tokens of each."""
    repeats: PositiveInt = 7


class ShapesSettings(Settings):
    """Speed and memory on real shapes (docs/results/h200.md, docs/results/paper-speeds.md).

    Tables and figures show all measured points, new and committed ones. The target `shapes_measure` measures all jobs,
    and `qerl grid --missing` lists the commands of those with points that no file has."""

    samples: list[Path] = []
    """Folders of the committed points, none on a GPU that has none. Of files with the same name, that of the first
    folder counts."""
    decode: list[DecodeGrid] = []
    mixes: list[MixGrid] = []
    steps: list[StepGrid] = []
    prompts: list[PromptGrid] = []
