"""The jobs of the speed grid (`shapes` of a configuration): each measures some points in a process of its own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from qerl.random_models.architectures import ARCHITECTURES
from qerl.settings.base import ConfigError
from qerl.settings.benches import DecodeGrid, ShapesSettings, StepGrid

_DECODE = {"native": "qerl.bench.decode", "vllm": "qerl.bench.decode_vllm", "transformers": "qerl.bench.decode_hf"}
_STEP = {"qerl": "qerl.bench.grpo_step", "trl": "qerl.bench.grpo_step_trl"}
#: In what `state` says of a job that isn't finished.
MISSING = "missing"
#: Formats that others than this project can't run, or not from random weights.
_MISSING = {"vllm": ("mxfp4",), "transformers": ("mxfp4", "nvfp4"), "trl": ("mxfp4", "nvfp4")}


@dataclass(frozen=True)
class Job:
    """A process that writes one file of points; it goes on with a file that an earlier one left."""

    id: str
    module: str
    options: tuple[str, ...]
    #: Numbers of sequences of a decode job, one point each.
    sequences: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.id}.json"

    @property
    def command(self) -> str:
        """What to type behind `python -m`, less the file."""
        return shlex.join([self.module, *self.options])


def jobs(settings: ShapesSettings) -> dict[str, Job]:
    """Every job by its id, in the order in which they are to be measured; a `ConfigError` for what can't be."""
    found: dict[str, Job] = {}
    for job in (
        *(j for grid in settings.decode for j in _decodes(grid)),
        *(j for g in settings.steps for j in _steps(g)),
    ):
        if job.id in found:
            raise ConfigError(f"shapes: {job.id} is asked for twice; merge the two entries, sequences included")
        found[job.id] = job
    return found


def measured_files(settings: ShapesSettings, own: Path) -> list[Path]:
    """The files there are of the grid's jobs: those of this machine in `own`, else committed ones."""
    found = []
    for job in jobs(settings).values():
        here = [folder / job.file for folder in (own, settings.samples) if (folder / job.file).is_file()]
        found += here[:1]
    return found


def state(job: Job, settings: ShapesSettings, own: Path) -> str:
    """How far a job is, in words, by this machine's or by committed points."""
    for folder, where in ((own, "measured"), (settings.samples, "committed")):
        file = folder / job.file
        if file.is_file():
            there = {point["sequences"] for point in json.loads(file.read_text()).get("points", [])}
            left = [count for count in job.sequences if count not in there]
            return f"{where}, {len(left)} of {len(job.sequences)} points {MISSING}" if left else where
    return MISSING


def decode_id(engine: str, size: str, weights: str, rank: int, prompt: int, tokens: int) -> str:
    """The id of a decode job."""
    return f"decode-{engine}-{size}-{weights}-r{rank}-{prompt}x{tokens}"


def _decodes(grid: DecodeGrid) -> Iterator[Job]:
    for size, weights, rank, prompt in product(grid.sizes, grid.weights, grid.ranks, grid.prompt):
        _check(grid.engine, size, weights)
        options = {"size": size, "weights": weights, "rank": rank, "prompt": prompt, "tokens": grid.tokens}
        sequences = [option for number in grid.sequences for option in ("--sequences", str(number))]
        id = decode_id(grid.engine, size, weights, rank, prompt, grid.tokens)
        yield Job(id, _DECODE[grid.engine], (*_options(options), *sequences), tuple(grid.sequences))


def _steps(grid: StepGrid) -> Iterator[Job]:
    if grid.memory_gb and grid.system == "trl":
        raise ConfigError("shapes: TRL's memory can't be capped here; leave memory_gb out of that entry")
    if "auto" in grid.recompute and grid.system == "trl":
        raise ConfigError("shapes: TRL recomputes or doesn't; leave recompute: auto out of that entry")
    caps: list[float | None] = [*grid.memory_gb] or [None]
    policies, works = product(grid.sizes, grid.weights, grid.ranks), product(grid.prompts, grid.group_size)
    for policy, work, recompute, cap in product(policies, works, grid.recompute, caps):
        yield _step(grid, policy, work, recompute, cap)


def _step(
    grid: StepGrid, policy: tuple[str, str, int], work: tuple[int, int], recompute: bool | str, cap: float | None
) -> Job:
    (size, weights, rank), (prompts, group) = policy, work
    _check(grid.system, size, weights)
    options = {
        "shape": size,
        "weights": weights,
        "rank": rank,
        "prompts": prompts,
        "group": group,
        "prompt-tokens": grid.prompt,
        "completion-tokens": grid.tokens,
        "repeats": grid.repeats,
    } | ({"memory-gb": f"{cap:g}"} if cap else {})
    name = recompute if isinstance(recompute, str) else "recompute" if recompute else "no-recompute"
    # TRL's is a switch, ours has a third value.
    own = ["--recompute", str(recompute).lower()]
    if recompute == "auto":
        own += ["--micro-batch-tokens", str(grid.micro_batch * (grid.prompt + grid.tokens))]
    if grid.system == "trl":
        own = ["--micro-batch", str(min(grid.micro_batch, prompts * group)), f"--{name}"]
    lengths = f"{prompts}x{group}-{grid.prompt}x{grid.tokens}"
    id = f"step-{grid.system}-{size}-{weights}-r{rank}-{lengths}-{name}" + (f"-{cap:g}gb" if cap else "")
    return Job(id, _STEP[grid.system], (*_options(options), *own))


def _options(values: dict[str, object]) -> list[str]:
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def _check(system: str, size: str, weights: str) -> None:
    if size not in ARCHITECTURES:
        raise ConfigError(f"shapes: there is no size {size!r}; use one of {', '.join(ARCHITECTURES)}")
    if weights in _MISSING.get(system, ()):
        raise ConfigError(f"shapes: {system} has no {weights} here; leave it out of that entry")
