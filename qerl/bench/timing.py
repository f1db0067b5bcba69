"""Timing of points in one process, beside the GPU's ceilings and its memory, and the files of decode points."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from qerl.checkpoints.shapes import prompt_id_range, vocabulary
from qerl.host.console import log, track
from qerl.host.gpus import free_memory, peak_memory_bytes, reset_peak_memory, seconds
from qerl.models.policy import choose_device
from qerl.report_jobs import PointJob
from qerl.results.schema import NO_MEMORY, OK, Provenance, read, write
from qerl.results.speeds import SCHEMAS, Ceilings, DecodePoint, DecodeResult, GpuState, GpuStates, Measurement
from qerl.settings.workloads import Decoding, P, PointPart, W

T = TypeVar("T")


def nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return nbytes([value for value in states if isinstance(value, torch.Tensor)])


def unless_out_of_memory(action: Callable[[], T]) -> T | None:
    """The return value of `action`, or None if it runs out of memory; its memory is then released."""
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        log.warning("%s: %s", NO_MEMORY, str(error))  # only its text, since a log may keep the error and its frames
    # The error has been deleted, and with it the frames that referenced tensors.
    free_memory()
    return None


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one in its chain of causes, means that memory ran out."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        error = error.__cause__
    return False


# The GPU's highest measured bandwidth and FLOP rate, as ceilings for speeds; its clocks, temperature and power.

#: Bytes of each of the copy's two buffers, larger than any cache.
COPY_BYTES = 4 * 10**9
#: Rows and columns of both square matrices of the product.
MATMUL_SIZE = 8192
_WARMUP, _REPEATS = 2, 5
#: A field of `gpu_state` and its name in nvidia-smi.
_FIELDS = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu", "watts": "power.draw"}


def ceilings(device: torch.device) -> Ceilings | None:
    """Bytes/s that a copy within the GPU reads and writes, and FLOP/s of a bfloat16 matrix product; None on a CPU.

    The measurement takes less than a second and allocates 2 * `COPY_BYTES` on the GPU.
    """
    if device.type != "cuda":
        return None
    measured = Ceilings(copy_bytes_per_second=_copy(device), matmul_flops_per_second=_matmul(device))
    torch.cuda.empty_cache()
    return measured


def _copy(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES // 8, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(lambda: target.copy_(source))


def _matmul(device: torch.device) -> float:
    # Zeros would draw less power, and the clocks would stay higher than with real products.
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * MATMUL_SIZE**3 / _seconds(lambda: torch.matmul(left, right, out=out))


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    """Median seconds of repeated calls, timed by CUDA events."""
    for _ in range(_WARMUP):
        work()
    taken = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(1e-3 * start.elapsed_time(end))
    return median(taken)


def gpu_state() -> GpuState | None:
    """Current clocks (MHz), temperature (Celsius) and power (W) of this process's GPU; None without a GPU.

    A value that the driver does not report is None.
    """
    if not torch.cuda.is_available():
        return None
    # By UUID: CUDA_VISIBLE_DEVICES renumbers GPUs for CUDA, but not for nvidia-smi.
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = ["nvidia-smi", f"--id=GPU-{gpu}", f"--query-gpu={','.join(_FIELDS.values())}"]
    answer = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    values = dict(zip(_FIELDS, map(str.strip, answer.stdout.split(",")), strict=True))
    missing = {name for name, value in values.items() if value.startswith("[") or value == "N/A"}
    return GpuState(**{name: None if name in missing else float(value) for name, value in values.items()})


# Points that are timed in turn: the arms of a configuration's bench.


@dataclass
class Point:
    """One combination to time. `make` returns a function that runs a round and returns what it found.

    `label` identifies the point in results. The first round, which compiles and captures, is no sample.
    """

    label: dict[str, Any]
    make: Callable[[], Callable[[int], Any]]
    samples: list[Any] = field(default_factory=list)
    peak_memory_bytes: int = 0
    status: str = OK


# In turn, because ratios then hold on a machine with other load. One after another where several policies don't fit
# into a GPU together, and for peaks of memory.
def run_points(points: Sequence[Point], repeats: int, interleave: bool = True) -> list[Point]:
    """Time every point `repeats` times, after one untimed warm-up.

    With `interleave`, all points are in memory and timed round by round; otherwise one after another, each alone in
    memory. A point that runs out of memory stays in the list with that status.
    """
    for group in [list(points)] if interleave else [[point] for point in points]:
        _run_together(group, repeats)
        free_memory()  # a policy's modules refer to each other in cycles
    return list(points)


def _run_together(points: Sequence[Point], repeats: int) -> None:
    measures = [unless_out_of_memory(point.make) for point in points]
    rounds = [(round_, *both) for round_ in range(repeats + 1) for both in zip(points, measures, strict=True)]
    for round_, point, measure in track(rounds, len(rounds), "measurements"):
        found = None
        if measure is not None and point.status == OK:
            reset_peak_memory()
            found = unless_out_of_memory(partial(measure, round_))
        if found is None:
            point.status = NO_MEMORY
            continue
        point.peak_memory_bytes = max(point.peak_memory_bytes, peak_memory_bytes())
        if round_:
            point.samples.append(found)


# Files of the speed grid that this machine lacks.


def unmeasured(job: PointJob[W, P]) -> Iterator[PointPart[W, P]]:
    """The parts of a job that this machine hasn't measured whole. A job that was killed goes on with them."""
    for part in job.parts:
        out = job.out / part.file
        if (stored := measured_here(part, out)) and not stored.lacking(part):
            log.info("%s is measured; delete it to measure it again", out)
        else:
            yield part


def measured_here(part: PointPart[Any, Any], out: Path) -> Measurement | None:
    """The file of a part, if this code measured the same work on this machine."""
    if not out.exists():
        return None
    stored: Measurement = read(SCHEMAS[part.work.bench], out)
    made, now = stored.provenance, Provenance.of_now()
    alike = (made.machine.label, made.files) == (now.machine.label, now.files) and stored.work == part.work
    return stored if alike else None


# Points of decode speed: timing and the result file, shared by all engines of `qerl.bench`.
#
# A file is of one engine, shape, weight format and rank; a point is a number of sequences. The prompts' time, in which
# one token is drawn, is subtracted.

#: Takes prompts of one length, the number of tokens to draw for each, and a seed; returns the total number drawn.
Draw = Callable[[list[list[int]], int, int], int]


class Engine(NamedTuple):
    """An engine that is ready to decode a number of sequences of each run together, and what a point states of it."""

    draw: Draw
    sampler: str
    weight_bytes: Callable[[], int]
    has_peak: bool = True
    """Whether its memory isn't a fixed share of the GPU."""
    release: Callable[[], None] = lambda: None


#: Makes the engine for a number of sequences.
Start = Callable[[int], Engine]


def measure_decoding(
    part: PointPart[Decoding, int], out: Path, engines: AbstractContextManager[tuple[Start, dict[str, Any]]]
) -> None:
    """Measure the points that a part's file lacks, and write the file after each.

    `engines` loads weights, and gives what makes engines and what the file states of them. If it runs out of memory,
    all points are stored with that status, and else those that do.
    """
    work, before, rates, stored = part.work, gpu_state(), ceilings(choose_device()), measured_here(part, out)
    points: list[DecodePoint] = [*stored.points] if isinstance(stored, DecodeResult) else []
    missing = sorted({*part.points} - {point.sequences for point in points})
    with ExitStack() as running:
        start, stated = unless_out_of_memory(partial(running.enter_context, engines)) or (None, {})
        for count in track(missing, len(missing), "points"):
            reset_peak_memory()
            point = unless_out_of_memory(partial(timed, start, work, count)) if start else None
            points.append(point or DecodePoint(sequences=count, status=NO_MEMORY))
            speed = f"{median(point.samples):.1f} tokens a second" if point else NO_MEMORY
            log.info("%s, %d sequences: %s", work, count, speed)
            states = GpuStates(before=before, after=gpu_state()) if before else None
            measured = {"ceilings": rates, "gpu": states, "points": points, "provenance": Provenance.of_now(), **stated}
            write(out, DecodeResult(bench=work.bench, work=work, **measured))


def check_room(pages: int, page: int, sequences: int, length: int) -> None:
    """Raise OutOfMemoryError if a KV cache of `pages` of `page` tokens can't hold these sequences of `length`.

    Otherwise the engine would queue some of them, and the point would measure a smaller batch.
    """
    needed = sequences * -(-length // page)
    if pages < needed:
        raise torch.cuda.OutOfMemoryError(f"the KV cache has {pages} pages, and the sequences need {needed}")


#: The most tokens of each sequence that the warm-up of a decode point, or of a step of equal lengths, decodes.
WARM_UP = 256


def enough_runs(seconds: Sequence[float]) -> bool:
    """Whether a decode point has enough timed runs, by their seconds.

    It has three. Short ones are repeated, up to nine times or until they took 5 s in total. A first run of 10 s or
    more is enough: three of that length differed by 0.25 % in the median on an H200, and by at most 1.8 %.
    """
    if not seconds or seconds[0] >= 10:
        return bool(seconds)
    return len(seconds) >= 9 or (len(seconds) >= 3 and sum(seconds) >= 5)


def timed(start: Start, work: Decoding, sequences: int) -> DecodePoint:
    """The speed of decoding and the prompts' time, after a warm-up of at most `WARM_UP` tokens.

    `sequences` are of each run, and the speed is of all. The median time of the prompts alone is subtracted.
    """
    engine, tokens, ids = start(sequences), work.tokens, prompt_id_range(vocabulary(work.size))
    together = work.runs * sequences

    def taken(count: int, round_: int) -> float:
        numbers = np.random.default_rng([sequences, round_])
        prompts = numbers.integers(*ids, size=(together, work.prompt)).tolist()
        with seconds() as elapsed:
            drawn = engine.draw(prompts, count, round_)
        if drawn != together * count:
            raise RuntimeError(f"{drawn} tokens were drawn instead of {together * count}: their time says nothing")
        return elapsed.value

    taken(min(tokens, WARM_UP) + 1, 0)
    # Alternately, so that a busy CPU, which launches the prompts, slows both kinds of samples alike.
    both: list[tuple[float, float]] = []
    while not enough_runs([whole for _, whole in both]):
        both.append((taken(1, 100 + len(both)), taken(tokens + 1, 1 + len(both))))
    alone = [one for one, _ in both]
    prompts = median(alone)
    decoding = [whole - prompts for _, whole in both]
    if min(decoding) <= 0:
        raise RuntimeError(f"{tokens} tokens take no longer than the prompts' own time varies; decode more of them")
    engine.release()
    return DecodePoint(
        sequences=sequences,
        status=OK,
        samples=[together * tokens / one for one in decoding],
        prompt_seconds=prompts,
        prompt_samples=alone,
        sampler=engine.sampler,
        weight_bytes=engine.weight_bytes(),
        peak_memory_bytes=peak_memory_bytes() if engine.has_peak else None,
    )
