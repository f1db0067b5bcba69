"""The jobs of the speed grid (`shapes` of a configuration), each of which measures some points in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from qerl.checkpoints.shapes import PUBLISHED, SIZES, has_packed_experts_alone, shape_of
from qerl.report_jobs import PointJob, measured_file
from qerl.results.paths import decode_name, step_name
from qerl.results.speeds import SCHEMAS, GrpoStepResult, Measurement
from qerl.results.store import read
from qerl.settings.base import ConfigError
from qerl.settings.models import Base
from qerl.settings.run import Kernels, RunSettings
from qerl.settings.workloads import (
    DecodeGrid,
    Decoding,
    EngineStep,
    Mix,
    MixedLengths,
    MixGrid,
    PointPart,
    PromptGrid,
    Prompting,
    ShapesSettings,
    StepGrid,
    StepLengths,
    StepWork,
    TrlStep,
    with_kernels,
)

#: The word in `state` for points that aren't measured yet.
MISSING = "missing"
#: By system, the weight formats that it doesn't support, or not with random weights. vLLM serves models whose experts
#: alone are packed.
_MISSING = {"vllm": ("mxfp4",), "transformers": ("mxfp4", "nvfp4"), "trl": ("mxfp4", "nvfp4")}
#: Systems that are timed on Qwen2.5's sizes alone.
_QWEN_ALONE = ("transformers", "trl")
#: Keys of a step that only this project has.
_ENGINE_KEYS = ("memory_gb", "kv_cache_gib", "sleep")
_MICRO_BATCH_TOKENS: int = RunSettings.model_fields["micro_batch_tokens"].default


def point_parts(settings: ShapesSettings) -> dict[str, list[PointPart]]:
    """The parts of every job by its id, in the order of measurement. Raises ConfigError for impossible points.

    Entries that share a set-up are one job, at the place of the first. This project's `steps` that do are one job
    behind those of TRL.
    """
    parts: tuple[tuple[str, str, PointPart], ...] = (
        *(part for grid in settings.mixes for part in _mixes(grid)),
        *(part for grid in settings.decode for part in _decodes(grid)),
        *(part for grid in sorted(settings.steps, key=lambda grid: grid.system != "trl") for part in _steps(grid)),
        *(part for grid in settings.prompts for part in _prompts(grid)),
    )
    shared: dict[str, dict[str, PointPart]] = {}
    for job, name, part in parts:
        others = shared.setdefault(job, {})
        if name in others:
            raise ConfigError(f"shapes: {name} occurs twice; merge the two entries and their sequences")
        others[name] = part
    return {id: [*parts.values()] for id, parts in shared.items()}


def point_jobs(parts: dict[str, list[PointPart]], folder: Path) -> dict[str, PointJob]:
    """The jobs by their ids. Each writes its files to `folder`/ID, and continues those of an earlier attempt."""
    return {id: PointJob(parts=of_job, out=folder / id) for id, of_job in parts.items()}


def state(job: PointJob, settings: ShapesSettings) -> str:
    """The state of a job as text, by the points of this machine or by committed ones."""
    missing, points = sum(_missing(job, settings).values()), sum(len(part.points) for part in job.parts)
    if missing == points:
        return MISSING
    files = [(file, measured_file(settings.samples, file)) for file in job.files]
    where = dict.fromkeys("measured" if file == one else "committed" for file, one in files if one)
    return " and ".join(where) + (f", {missing} of {points} points {MISSING}" if missing else "")


def remaining(job: PointJob, settings: ShapesSettings) -> PointJob | None:
    """The job without the files that have all its points, or None if no file is left."""
    missing = _missing(job, settings)
    left = [part for part in job.parts if missing[part.file]]
    return job.model_copy(update={"parts": left}) if left else None


def _missing(job: PointJob, settings: ShapesSettings) -> dict[str, int]:
    """How many points no file has, by the name of their file."""
    found = {part.file: measured_file(settings.samples, job.out / part.file) for part in job.parts}
    measured = {part.file: _keys(part, file) if (file := found[part.file]) else [] for part in job.parts}
    return {part.file: sum(point not in measured[part.file] for point in part.points) for part in job.parts}


# Files are named by their work; micro-batches, cache and sleep aren't in the name, so a committed step counts only with
# the settings that the grid asks for.
def _keys(part: PointPart, file: Path) -> Sequence[object]:
    """The keys of the points that a part's file has; none if its step had other settings, which no name tells."""
    result = read(SCHEMAS[part.work.bench], file)
    assert isinstance(result, Measurement)
    ours = isinstance(result, GrpoStepResult) and isinstance(part.settings, EngineStep)
    return [] if ours and result.settings != part.settings else result.keys  # type: ignore[attr-defined]


# The parts of the jobs of a grid, each with the names of its job and of its file.


def _decodes(grid: DecodeGrid) -> Iterator[tuple[str, str, PointPart[Decoding, int]]]:
    """A job for each engine with its kernels, size and format, and with vLLM for each rank, which it is started for."""
    bases = _bases(grid, grid.pack_delta_nets)
    for kernels, base, rank, prompt in product(grid.kernels, bases, grid.ranks, grid.prompt):
        _check(grid.engine, base, kernels)
        engine = with_kernels(grid.engine, kernels)
        job = f"decode-{engine}-{base.name}" + (f"-r{rank}" if grid.engine == "vllm" else "")
        name = decode_name(engine, base.model, base.weights_name, rank, prompt, grid.tokens)
        policy = _policy(base, rank)
        work = Decoding(engine=grid.engine, kernels=kernels, prompt=prompt, tokens=grid.tokens, **policy)
        yield job, name, PointPart(file=f"{name}.json", work=work, points=grid.sequences, settings=None)


def _mixes(grid: MixGrid) -> Iterator[tuple[str, str, PointPart[Mix, None]]]:
    if grid.prompt[0] > grid.prompt[1]:
        raise ConfigError(
            f"shapes: prompt {grid.prompt[0]} to {grid.prompt[1]} is an empty range; swap the two numbers"
        )
    for base, rank in product(_bases(grid), grid.ranks):
        _check(grid.engine, base)
        lengths = {name: getattr(grid, name) for name in MixedLengths.model_fields}
        work = Mix(engine=grid.engine, **_policy(base, rank), **lengths)
        drawn = grid.trace.stem if grid.trace else f"{grid.median}to{grid.tokens}"
        name = f"mix-{grid.engine}-{base.name}-r{rank}-{grid.prompts}x{grid.group_size}-{drawn}-seed{grid.seed}"
        yield name, name, PointPart(file=f"{name}.json", work=work, points=[None], settings=None)


def _prompts(grid: PromptGrid) -> Iterator[tuple[str, str, PointPart[Prompting, tuple[int, int]]]]:
    for base, rank in product(_bases(grid), grid.ranks):
        _check("native", base)
        name, work = f"prompts-{base.name}-r{rank}", Prompting(**_policy(base, rank), repeats=grid.repeats)
        yield name, name, PointPart(file=f"{name}.json", work=work, points=grid.points, settings=None)


def _steps(grid: StepGrid) -> Iterator[tuple[str, str, PointPart[StepWork, None]]]:
    """A job for each step of TRL and each cap of memory, and one for all other steps with the same weights."""
    if grid.system == "trl" and (key := next((key for key in _ENGINE_KEYS if getattr(grid, key)), None)):
        raise ConfigError(f"shapes: only this project's steps have {key}; remove it from the entry of TRL")
    if False in grid.correction and grid.system == "qerl":
        raise ConfigError("shapes: only TRL's steps have correction; remove it from the entry of qerl")
    if "auto" in grid.recompute and grid.system == "trl":
        raise ConfigError("shapes: TRL doesn't support recompute: auto; use true or false in that entry")
    caps: list[float | None] = [*grid.memory_gb] or [None]
    policies = product(_bases(grid, grid.pack_delta_nets), grid.ranks)
    batches = product(grid.prompts, grid.group_size, grid.equal_groups)
    for (base, rank), (prompts, group, equal), kernels, recompute, correction, cap in product(
        policies, batches, grid.kernels, grid.recompute, grid.correction, caps
    ):
        _check(grid.system, base, kernels)
        if abs(prompts * equal - round(prompts * equal)) > 1e-6:
            raise ConfigError(f"shapes: equal_groups={equal:g} of {prompts} prompts is no whole number; change either")
        work = StepWork(
            **_policy(base, rank),
            prompts=prompts,
            group_size=group,
            sigma=grid.sigma if grid.median else None,
            equal_groups=equal,
            **{name: getattr(grid, name) for name in StepLengths.model_fields},
        )
        system = with_kernels(grid.system, kernels)
        name = _step_name(system, work, recompute, cap) + ("" if correction else "-no-correction")
        alone = grid.system == "trl" or cap is not None
        settings: TrlStep | EngineStep
        if grid.system == "trl":
            settings = TrlStep(
                sampler="vllm",
                micro_batch=min(grid.micro_batch, work.completions),
                recompute=recompute is True,
                correction=correction,
                liger=False,
                sleep=False,
                vllm_memory=None,
                optimizer="adamw_torch_fused",
            )
        else:
            tokens = grid.micro_batch * (grid.prompt + grid.tokens) if recompute == "auto" else _MICRO_BATCH_TOKENS
            settings = EngineStep(
                kernels=kernels,
                recompute=recompute,
                micro_batch_tokens=tokens,
                kv_cache_gib=grid.kv_cache_gib,
                sleep=grid.sleep,
                memory_gb=cap,
            )
        part = PointPart(file=f"{name}.json", work=work, points=[None], settings=settings)
        yield name if alone else f"step-{system}-{base.name}-r{rank}", name, part


def _policy(base: Base, rank: int) -> dict[str, Any]:
    """The fields of a workload that state its policy."""
    return {"size": base.model, "weights": base.weights, "pack_delta_nets": base.packed_nets, "rank": rank}


def _step_name(system: str, work: StepWork, recompute: bool | str, cap: float | None) -> str:
    tokens = f"{work.median}to{work.tokens}" if work.median else work.tokens
    lengths = f"{work.prompts}x{work.group_size}-{work.prompt}x{tokens}"
    name = recompute if isinstance(recompute, str) else "recompute" if recompute else "no-recompute"
    equal = f"equal{work.equal_groups:g}-" if work.equal_groups else ""
    limit = f"-{cap:g}gb" if cap else ""
    return step_name(system, work.size, work.base.weights_name, work.rank, lengths, f"{equal}{name}{limit}")


def _bases(grid: DecodeGrid | MixGrid | PromptGrid | StepGrid, packed_nets: bool = False) -> list[Base]:
    """The base of each size and format."""
    return [Base(size, weights, packed_nets=packed_nets) for size, weights in product(grid.sizes, grid.weights)]


def _check(system: str, base: Base, kernels: Kernels = "auto") -> None:
    size, weights = base.model, base.weights
    if size not in SIZES:
        raise ConfigError(f"shapes: size {size!r} is unknown; use one of {', '.join(SIZES)}")
    if size in PUBLISHED and (system in _QWEN_ALONE or (system, weights) == ("vllm", "nf4")):
        raise ConfigError(f"shapes: {system} has no random {weights} weights of {size}; remove it from that entry")
    if weights in _MISSING.get(system, ()) and not (system == "vllm" and has_packed_experts_alone(size)):
        raise ConfigError(f"shapes: {system} doesn't support {weights}; remove it from that entry")
    if kernels != "auto" and system not in ("native", "qerl"):
        raise ConfigError(f"shapes: {system} has no {kernels} kernels; remove kernels from that entry")

    if base.packed_nets and (weights == "bf16" or shape_of(size).nets is None):
        what = "are not packed in bf16" if weights == "bf16" else f"are not in {size}"
        raise ConfigError(f"shapes: pack_delta_nets asks for delta nets that {what}; remove pack_delta_nets there")
