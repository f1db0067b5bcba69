"""The jobs of the speed grid (`shapes` of a configuration), each of which measures some points in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

from qerl.checkpoints.shapes import PUBLISHED, SIZES, has_packed_experts_alone, shape_of
from qerl.jobs import (
    DecodeJob,
    DecodePart,
    GrpoStepJob,
    PointJob,
    PromptsJob,
    RolloutMixJob,
    StepPart,
    TrlStepJob,
)
from qerl.results.paths import decode_name, step_name
from qerl.results.speeds import DecodeResult, GrpoStepResult, PromptsResult
from qerl.results.store import read
from qerl.settings.base import ConfigError
from qerl.settings.models import Base
from qerl.settings.run import Kernels, RunSettings
from qerl.settings.workflow import DecodeGrid, MixGrid, PromptGrid, ShapesSettings, StepGrid
from qerl.settings.workloads import (
    Decoding,
    EngineStep,
    Mix,
    MixedLengths,
    Prompting,
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


def point_jobs(settings: ShapesSettings, folder: Path) -> dict[str, PointJob]:
    """Every job by its id, in the order of measurement. Raises ConfigError for points that can't be measured.

    A job writes its files to `folder`/ID, and continues those of an earlier attempt. The entries of `decode` that share
    a set-up are one job, at the place of the first. This project's `steps` that do are one job behind those of TRL.
    """
    by_id: dict[str, PointJob] = {}
    for id, job in (
        *(j for grid in settings.mixes for j in _mixes(grid, folder)),
        *_decodes(settings.decode, folder),
        *_steps(settings.steps, folder),
        *(j for grid in settings.prompts for j in _prompts(grid, folder)),
    ):
        if id in by_id:
            raise _twice(id)
        by_id[id] = job
    return by_id


def _twice(id: str) -> ConfigError:
    return ConfigError(f"shapes: {id} occurs twice; merge the two entries and their sequences")


def _file_of(id: str) -> str:
    return f"{id}.json"


def measured_files(settings: ShapesSettings, points: Path) -> list[Path]:
    """The existing result files: those of the grid's jobs, this machine's in `points` or else committed ones.

    They are followed by other committed files, whose jobs are no longer in the grid.
    """
    files = [file for job in point_jobs(settings, points).values() for file in job.files]
    existing = (_measured(file, settings) for file in files)
    names = {file.name for file in files}
    others = [file for file in committed_files(settings.samples) if file.name not in names]
    return [*(file for file in existing if file), *others]


# The first folder with a file counts; ratios are of points of one kind of GPU, and tables name the GPU where it
# differs.
def committed_files(folders: Sequence[Path]) -> list[Path]:
    """The result files of the folders, sorted by name. Of files with the same name, that of the first folder counts."""
    named = {file.name: file for folder in reversed(folders) for file in folder.glob("*.json")}
    return [named[name] for name in sorted(named)]


def _measured(file: Path, settings: ShapesSettings) -> Path | None:
    """A file of a job, if it is measured on this machine, or else the committed one."""
    places = (file, *(folder / file.name for folder in settings.samples))
    return next((one for one in places if one.is_file()), None)


def state(job: PointJob, settings: ShapesSettings) -> str:
    """The state of a job as text, by the points of this machine or by committed ones."""
    missing, asked = len(_missing(job, settings)), len([*_asked(job)])
    if missing == asked:
        return MISSING
    files = [(file, _measured(file, settings)) for file in job.files]
    where = dict.fromkeys("measured" if file == one else "committed" for file, one in files if one)
    return " and ".join(where) + (f", {missing} of {asked} points {MISSING}" if missing else "")


def remaining(job: PointJob, settings: ShapesSettings) -> PointJob | None:
    """The job without the files that have all its points, or None if no file is left."""
    left = {file for file, _ in _missing(job, settings)}
    if isinstance(job, DecodeJob | GrpoStepJob) and left:
        return job.model_copy(update={"parts": [part for part in job.parts if job.out / part.file in left]})
    return job if left else None


def _missing(job: PointJob, settings: ShapesSettings) -> list[tuple[Path, object]]:
    """The points of a job that no file has, each with its file."""
    done = {(file, key) for file in job.files if (one := _measured(file, settings)) for key in _keys(job, one)}
    return [point for point in _asked(job) if point not in done]


def _asked(job: PointJob) -> Iterator[tuple[Path, object]]:
    """The points of a job, each with its file and its key in there. Steps and rollouts have one without a key."""
    if isinstance(job, GrpoStepJob):
        yield from ((file, None) for file in job.files)
    elif isinstance(job, DecodeJob):
        yield from ((job.out / part.file, count) for part in job.parts for count in part.sequences)
    else:
        yield from ((job.out, key) for key in (job.points if isinstance(job, PromptsJob) else [None]))


# Files are named by their work; micro-batches, cache and sleep aren't in the name, so a committed step counts only with
# the settings that the grid asks for.
def _keys(job: PointJob, file: Path) -> list[object]:
    """The keys of the points that a job's file has; none if its step had other settings, which no name tells."""
    if isinstance(job, GrpoStepJob):
        [asked] = (part.settings for part in job.parts if part.file == file.name)
        return [None] if read(GrpoStepResult, file).settings == asked else []
    if isinstance(job, DecodeJob):
        return [point.sequences for point in read(DecodeResult, file).points]
    if isinstance(job, PromptsJob):
        return [(point.prompts, point.tokens) for point in read(PromptsResult, file).points]
    return [None]


def _out(folder: Path, id: str) -> Path:
    return folder / id / _file_of(id)


def _decodes(grids: Sequence[DecodeGrid], folder: Path) -> Iterator[tuple[str, DecodeJob]]:
    """A job for each engine with its kernels, size and format, and with vLLM for each rank, which it is started for."""
    parts: dict[str, dict[str, DecodePart]] = {}
    for grid in grids:
        bases = _bases(grid, grid.pack_delta_nets)
        for kernels, base, rank, prompt in product(grid.kernels, bases, grid.ranks, grid.prompt):
            _check(grid.engine, base, kernels)
            engine = with_kernels(grid.engine, kernels)
            policy = f"decode-{engine}-{base.name}"
            id = decode_name(engine, base.model, base.weights_name, rank, prompt, grid.tokens)
            shared = parts.setdefault(f"{policy}-r{rank}" if grid.engine == "vllm" else policy, {})
            if id in shared:
                raise _twice(id)
            work = Decoding(
                engine=grid.engine,
                size=base.model,
                weights=base.weights,
                pack_delta_nets=base.packed_nets,
                rank=rank,
                kernels=kernels,
                prompt=prompt,
                tokens=grid.tokens,
            )
            shared[id] = DecodePart(file=_file_of(id), work=work, sequences=grid.sequences)
    for id, shared in parts.items():
        yield id, DecodeJob(parts=[*shared.values()], out=folder / id)


def _mixes(grid: MixGrid, folder: Path) -> Iterator[tuple[str, RolloutMixJob]]:
    if grid.prompt[0] > grid.prompt[1]:
        raise ConfigError(
            f"shapes: prompt {grid.prompt[0]} to {grid.prompt[1]} is an empty range; swap the two numbers"
        )
    if grid.drafts and (grid.engine != "native" or grid.trace is None):
        raise ConfigError("shapes: drafts need engine native and a trace, whose text they repeat; remove drafts")
    for base, rank in product(_bases(grid), grid.ranks):
        _check(grid.engine, base)
        policy: dict[str, Any] = {"engine": grid.engine, "size": base.model, "weights": base.weights, "rank": rank}
        asked = Mix(**policy, **{name: getattr(grid, name) for name in MixedLengths.model_fields})
        lengths = grid.trace.stem if grid.trace else f"{grid.median}to{grid.tokens}"
        id = f"mix-{grid.engine}-{base.name}-r{rank}-{grid.prompts}x{grid.group_size}-{lengths}-seed{grid.seed}"
        id += "-drafts" if grid.drafts else ""
        yield id, RolloutMixJob(work=asked, out=_out(folder, id))


def _prompts(grid: PromptGrid, folder: Path) -> Iterator[tuple[str, PromptsJob]]:
    for base, rank in product(_bases(grid), grid.ranks):
        _check("native", base)
        id = f"prompts-{base.name}-r{rank}"
        asked = Prompting(size=base.model, weights=base.weights, rank=rank)
        yield id, PromptsJob(work=asked, points=grid.points, repeats=grid.repeats, out=_out(folder, id))


def _steps(grids: Sequence[StepGrid], folder: Path) -> Iterator[tuple[str, GrpoStepJob | TrlStepJob]]:
    """A job for each step of TRL and each cap of memory, and one for all other steps with the same weights."""
    shared: dict[str, dict[str, StepPart]] = {}
    for grid in grids:
        for id, one in _steps_of(grid, folder):
            if isinstance(one, TrlStepJob):
                yield id, one
                continue
            system = with_kernels("qerl", one.settings.kernels)
            policy = f"step-{system}-{one.work.base.name}-r{one.work.rank}"
            parts = shared.setdefault(policy if one.settings.memory_gb is None else id, {})
            if id in parts:
                raise _twice(id)
            parts[id] = one
    for id, of_job in shared.items():
        yield id, GrpoStepJob(parts=[*of_job.values()], out=folder / id)


def _steps_of(grid: StepGrid, folder: Path) -> Iterator[tuple[str, StepPart | TrlStepJob]]:
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
        asked = StepWork(
            size=base.model,
            weights=base.weights,
            pack_delta_nets=base.packed_nets,
            rank=rank,
            prompts=prompts,
            group_size=group,
            sigma=grid.sigma if grid.median else None,
            equal_groups=equal,
            **{name: getattr(grid, name) for name in StepLengths.model_fields},
        )
        id = _step_id(with_kernels(grid.system, kernels), asked, recompute, cap)
        id += "" if correction else "-no-correction"
        if grid.system == "qerl":
            yield id, StepPart(file=_file_of(id), work=asked, settings=_own(grid, kernels, recompute, cap))
        else:
            settings = _trl(grid, asked, recompute is True, correction)
            yield id, TrlStepJob(work=asked, settings=settings, out=_out(folder, id))


def _step_id(system: str, work: StepWork, recompute: bool | str, cap: float | None) -> str:
    tokens = f"{work.median}to{work.tokens}" if work.median else work.tokens
    lengths = f"{work.prompts}x{work.group_size}-{work.prompt}x{tokens}"
    name = recompute if isinstance(recompute, str) else "recompute" if recompute else "no-recompute"
    equal = f"equal{work.equal_groups:g}-" if work.equal_groups else ""
    limit = f"-{cap:g}gb" if cap else ""
    return step_name(system, work.size, work.base.weights_name, work.rank, lengths, f"{equal}{name}{limit}")


def _bases(grid: DecodeGrid | MixGrid | PromptGrid | StepGrid, packed_nets: bool = False) -> list[Base]:
    """The base of each size and format."""
    return [Base(size, weights, packed_nets=packed_nets) for size, weights in product(grid.sizes, grid.weights)]


def _own(grid: StepGrid, kernels: Kernels, recompute: bool | Literal["auto"], cap: float | None) -> EngineStep:
    default: int = RunSettings.model_fields["micro_batch_tokens"].default
    tokens = grid.micro_batch * (grid.prompt + grid.tokens) if recompute == "auto" else default
    return EngineStep(
        kernels=kernels,
        recompute=recompute,
        micro_batch_tokens=tokens,
        kv_cache_gib=grid.kv_cache_gib,
        sleep=grid.sleep,
        memory_gb=cap,
    )


def _trl(grid: StepGrid, work: StepWork, recompute: bool, correction: bool) -> TrlStep:
    return TrlStep(
        sampler="vllm",
        micro_batch=min(grid.micro_batch, work.completions),
        recompute=recompute,
        correction=correction,
        liger=False,
        sleep=False,
        vllm_memory=None,
        optimizer="adamw_torch_fused",
    )


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
