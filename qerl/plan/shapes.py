"""The jobs of the speed grid (`shapes` of a configuration), each of which measures some points in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Literal

from qerl.checkpoints.architectures import ARCHITECTURES
from qerl.jobs.shapes import (
    DecodeJob,
    Decoding,
    GrpoStep,
    GrpoStepJob,
    Mix,
    PointJob,
    Prompting,
    PromptsJob,
    RolloutMixJob,
    TrlStep,
    TrlStepJob,
    Work,
)
from qerl.results.files import read
from qerl.results.schema.speed import DecodeResult, PromptsResult
from qerl.settings.base import ConfigError
from qerl.settings.benches import DecodeGrid, MixGrid, PromptGrid, ShapesSettings, StepGrid
from qerl.settings.run import RunSettings

#: The word in `state` for points that aren't measured yet.
MISSING = "missing"
#: By system, the weight formats that it doesn't support, or not with random weights.
_MISSING = {"vllm": ("mxfp4",), "transformers": ("mxfp4", "nvfp4"), "trl": ("mxfp4", "nvfp4")}


def point_jobs(settings: ShapesSettings, work: Path) -> dict[str, PointJob]:
    """Every job by its id, in the order of measurement. Raises ConfigError for points that can't be measured.

    Each job writes `work`/ID/points.json, and continues the file of an earlier attempt.
    """
    by_id: dict[str, PointJob] = {}
    for id, job in (
        *(j for grid in settings.mixes for j in _mixes(grid, work)),
        *(j for grid in settings.decode for j in _decodes(grid, work)),
        *(j for grid in settings.steps for j in _steps(grid, work)),
        *(j for grid in settings.prompts for j in _prompts(grid, work)),
    ):
        if id in by_id:
            raise ConfigError(f"shapes: {id} occurs twice; merge the two entries and their sequences")
        by_id[id] = job
    return by_id


def file_of(id: str) -> str:
    """The name of a job's file among results."""
    return f"{id}.json"


def measured_files(settings: ShapesSettings, points: Path) -> list[Path]:
    """The existing result files of the grid's jobs: this machine's in `points`, or else committed ones."""
    files = []
    for id in point_jobs(settings, Path()):
        here = [folder / file_of(id) for folder in (points, settings.samples) if (folder / file_of(id)).is_file()]
        files += here[:1]
    return files


def state(id: str, job: PointJob, settings: ShapesSettings, points: Path) -> str:
    """The state of a job as text, by this machine's or by committed points."""
    for folder, where in ((points, "measured"), (settings.samples, "committed")):
        file = folder / file_of(id)
        if file.is_file():
            asked, measured = _points(job, file)
            left = [point for point in asked if point not in measured]
            return f"{where}, {len(left)} of {len(asked)} points {MISSING}" if left else where
    return MISSING


def _points(job: PointJob, file: Path) -> tuple[Sequence[object], set[object]]:
    """The points that a job requests, and those in its file. Steps have none."""
    if isinstance(job, DecodeJob):
        return job.sequences, {point.sequences for point in read(DecodeResult, file).points}
    if isinstance(job, PromptsJob):
        return job.points, {(point.prompts, point.tokens) for point in read(PromptsResult, file).points}
    return [], set()


def _out(work: Path, id: str) -> Path:
    return work / id / "points.json"


def _decodes(grid: DecodeGrid, work: Path) -> Iterator[tuple[str, DecodeJob]]:
    for size, weights, rank, prompt in product(grid.sizes, grid.weights, grid.ranks, grid.prompt):
        _check(grid.engine, size, weights)
        id = f"decode-{grid.engine}-{size}-{weights}-r{rank}-{prompt}x{grid.tokens}"
        asked = Decoding(engine=grid.engine, size=size, weights=weights, rank=rank, prompt=prompt, tokens=grid.tokens)
        yield id, DecodeJob(work=asked, sequences=grid.sequences, out=_out(work, id))


def _mixes(grid: MixGrid, work: Path) -> Iterator[tuple[str, RolloutMixJob]]:
    if grid.prompt[0] > grid.prompt[1]:
        raise ConfigError(
            f"shapes: prompt {grid.prompt[0]} to {grid.prompt[1]} is an empty range; swap the two numbers"
        )
    for size, weights, rank in product(grid.sizes, grid.weights, grid.ranks):
        _check(grid.engine, size, weights)
        asked = Mix(
            engine=grid.engine,
            size=size,
            weights=weights,
            rank=rank,
            prompts=grid.prompts,
            group=grid.group_size,
            prompt_tokens=grid.prompt,
            median=grid.median,
            sigma=grid.sigma,
            longest=grid.tokens,
            sequences=grid.sequences,
            trace=grid.trace,
            seed=grid.seed,
            repeats=grid.repeats,
        )
        lengths = grid.trace.stem if grid.trace else f"{grid.median}to{grid.tokens}"
        id = f"mix-{grid.engine}-{size}-{weights}-r{rank}-{grid.prompts}x{grid.group_size}-{lengths}-seed{grid.seed}"
        yield id, RolloutMixJob(work=asked, out=_out(work, id))


def _prompts(grid: PromptGrid, work: Path) -> Iterator[tuple[str, PromptsJob]]:
    for size, weights, rank in product(grid.sizes, grid.weights, grid.ranks):
        _check("native", size, weights)
        id = f"prompts-{size}-{weights}-r{rank}"
        asked = Prompting(size=size, weights=weights, rank=rank)
        yield id, PromptsJob(work=asked, points=grid.points, repeats=grid.repeats, out=_out(work, id))


def _steps(grid: StepGrid, work: Path) -> Iterator[tuple[str, GrpoStepJob | TrlStepJob]]:
    if grid.memory_gb and grid.system == "trl":
        raise ConfigError("shapes: memory_gb can't cap TRL's memory; remove memory_gb from that entry")
    if "auto" in grid.recompute and grid.system == "trl":
        raise ConfigError("shapes: TRL doesn't support recompute: auto; use true or false in that entry")
    caps: list[float | None] = [*grid.memory_gb] or [None]
    policies = product(grid.sizes, grid.weights, grid.ranks)
    batches = product(grid.prompts, grid.group_size, grid.equal_groups)
    for (size, weights, rank), (prompts, group, equal), recompute, cap in product(
        policies, batches, grid.recompute, caps
    ):
        _check(grid.system, size, weights)
        if abs(prompts * equal - round(prompts * equal)) > 1e-6:
            raise ConfigError(f"shapes: equal_groups={equal:g} of {prompts} prompts is no whole number; change either")
        asked = Work(
            size=size,
            weights=weights,
            prompts=prompts,
            group=group,
            prompt_tokens=grid.prompt,
            completion_tokens=grid.tokens,
            rank=rank,
            equal_groups=equal,
            repeats=grid.repeats,
        )
        id = _step_id(grid.system, asked, recompute, cap)
        if grid.system == "qerl":
            yield id, GrpoStepJob(work=asked, settings=_own(grid, recompute, cap), out=_out(work, id))
        else:
            yield id, TrlStepJob(work=asked, settings=_trl(grid, asked, recompute is True), out=_out(work, id))


def _step_id(system: str, work: Work, recompute: bool | str, cap: float | None) -> str:
    lengths = f"{work.prompts}x{work.group}-{work.prompt_tokens}x{work.completion_tokens}"
    name = recompute if isinstance(recompute, str) else "recompute" if recompute else "no-recompute"
    equal = f"-equal{work.equal_groups:g}" if work.equal_groups else ""
    limit = f"-{cap:g}gb" if cap else ""
    return f"step-{system}-{work.size}-{work.weights}-r{work.rank}-{lengths}{equal}-{name}{limit}"


def _own(grid: StepGrid, recompute: bool | Literal["auto"], cap: float | None) -> GrpoStep:
    default: int = RunSettings.model_fields["micro_batch_tokens"].default
    tokens = grid.micro_batch * (grid.prompt + grid.tokens) if recompute == "auto" else default
    return GrpoStep(recompute=recompute, micro_batch_tokens=tokens, kv_cache_gib=None, memory_gb=cap)


def _trl(grid: StepGrid, work: Work, recompute: bool) -> TrlStep:
    return TrlStep(
        sampler="vllm",
        micro_batch=min(grid.micro_batch, work.completions),
        recompute=recompute,
        correction=True,
        liger=False,
        sleep=False,
        vllm_memory=None,
        optimizer="adamw_torch_fused",
    )


def _check(system: str, size: str, weights: str) -> None:
    if size not in ARCHITECTURES:
        raise ConfigError(f"shapes: size {size!r} is unknown; use one of {', '.join(ARCHITECTURES)}")
    if weights in _MISSING.get(system, ()):
        raise ConfigError(f"shapes: {system} doesn't support {weights}; remove it from that entry")
