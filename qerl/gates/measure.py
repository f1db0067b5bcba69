"""What gates measure beside the workflow's results: codecs and graders by stored vectors, and speed beside a baseline.

The vectors (vectors.safetensors, answers.jsonl in the folder `gates.vectors`) don't come from this code. Packed weights
are from compressed-tensors and bitsandbytes, products from float64 (`python -m tests.vectors`), and verdicts from a
person.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qerl.checkpoints.files import weights_format_of
from qerl.data.grading import is_correct, well_formed
from qerl.formats.codecs import PACKED_FORMATS, Packed, dequantize, from_checkpoint, quantize
from qerl.formats.layouts import Tiles
from qerl.gates.compare import NumericsResult, SpeedPairs, SpeedResult, find_baseline, machine_class
from qerl.host.console import log
from qerl.host.provenance import PACKAGE
from qerl.models.linear import PackedLinear
from qerl.report_jobs import NumericsJob, SpeedJob
from qerl.results.schema import Provenance, write
from qerl.settings.base import ConfigError

VECTORS = "vectors.safetensors"
ANSWERS = "answers.jsonl"


# Gates start from a committed policy: pre-training takes longer than all gates together, and its variation would be
# in every comparison.
def measure_numerics(job: NumericsJob) -> None:
    """Compare codecs and graders with the vectors; the result has numbers by name."""
    values = {**dict(_formats(load_file(job.vectors / VECTORS))), "graders": wrong_verdicts(job.vectors / ANSWERS)}
    write(job.out, NumericsResult(values=values, provenance=Provenance.of_now()))


def _formats(vectors: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """For each format of the vectors, the number of bytes that differ and the error of a layer's product.

    `vectors` has weight [out, in] in bfloat16 and x [rows, in] in float32. For each format it has the tensors of a
    checkpoint, the bfloat16 weight that they represent (`dense`) and x times that weight in float64 (`product`). The
    error is the largest of the float32 product, relative to the largest element of the float64 product.
    """
    for name in (each for each in PACKED_FORMATS if f"{each}/dense" in vectors):
        stored = {key.rpartition("/")[2]: tensor for key, tensor in vectors.items() if key.startswith(f"{name}/")}
        dense, product = stored.pop("dense"), stored.pop("product")
        packed = from_checkpoint(name, stored)
        yield f"codec/{name}", _differing(quantize(vectors["weight"], name), packed)
        yield f"dequantize/{name}", differing(dequantize(packed, torch.bfloat16), dense)
        with torch.no_grad():
            made = PackedLinear.from_packed(packed)(vectors["x"]).double()
        yield f"product/{name}", float((made - product).abs().max() / product.abs().max())
        if Tiles.fits(name, [packed.shape]):
            yield f"tiles/{name}", _differing(Tiles.pack([packed]).unpack(0), packed)


def _differing(made: Packed, stored: Packed) -> float:
    return sum(differing(made.tensors[key], tensor) for key, tensor in stored.tensors.items())


def differing(a: Tensor, b: Tensor) -> float:
    """The number of bytes that differ; all bytes if the shapes or dtypes differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float(b.numel() * b.element_size())
    return float((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def wrong_verdicts(file: Path) -> float:
    """The number of answers that are graded wrongly."""
    wrong = 0
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        text, answer, how = row["text"], row["answer"], (row["format"], row["form"])
        graded = is_correct(text, answer, *how), well_formed(text, *how)
        wrong += graded != (row["correct"], row["well_formed"])
    return float(wrong)


# The speed of this code, measured alternately with the code of the baseline's commit.
#
# One interpreter can't import two versions of a package, so each version has its own process. They take turns: while
# one works, the other waits for its next request. Load that lasts longer than a turn therefore slows both.

WORKLOADS = ("rollout", "update")
#: One GRPO step is 64 completions; the first step of a run is a warm-up.
TRAINING: dict[str, Any] = {
    "dataset": {
        "format": "gsm8k",
        "instruction": "Answer after ####.",
        "origin": {"source": "generated", "train": 64, "validation": 4, "test": 4},
    },
    "dtype": "float32",
    "steps": 3,
    "checkpoint_every": 3,
    "micro_batch_tokens": 2048,
    "rollout": {"prompts": 8, "group_size": 8, "sampling": {"max_tokens": 56}},
    "adapter": {"rank": 16, "alpha": 32},
}
PROMPTS = [f"Mia has {number} plums. Monday triples them. How many plums has Mia now?" for number in range(2, 34)]
#: Rollouts per request; the first is a warm-up.
ROLLOUTS = 9


def measure_speed(job: SpeedJob) -> None:
    """Time this code alternately with the baseline's; without a baseline, the result has no samples."""
    provenance = Provenance.of_now()
    baseline = find_baseline(job.baselines, job.key, provenance.machine)
    if baseline is None:
        log.warning("no baseline of %s for this workload: nothing to compare with", machine_class(provenance.machine))
    samples = compare(baseline.commit, job.checkpoint, job.rounds, Path("work/gates")) if baseline else {}
    commit = baseline.commit if baseline else None
    write(job.out, SpeedResult(baseline=commit, samples=samples, provenance=provenance))


def compare(commit: str, checkpoint: Path, rounds: int, work: Path) -> dict[str, SpeedPairs]:
    """Seconds per token of this code and of the code of `commit`, by workload, with one pair per round."""
    folders = {"now": PACKAGE.parent, "baseline": unpacked(commit, work / "code")}
    commits = {"now": os.environ.get("QERL_COMMIT"), "baseline": commit}
    samples: dict[str, dict[str, list[float]]] = {name: {"now": [], "baseline": []} for name in WORKLOADS}
    with tempfile.TemporaryDirectory(prefix="qerl-speed-") as folder, ExitStack() as stack:
        workers = {
            name: stack.enter_context(started(code, commits[name], checkpoint, Path(folder) / name))
            for name, code in folders.items()
        }
        for turn in range(rounds + 1):
            for workload in WORKLOADS:
                # The order alternates, so that neither version always runs right after the other.
                for name in sorted(workers, reverse=bool(turn % 2)):
                    seconds = workers[name](workload)
                    if turn:  # the first is a warm-up
                        # Repeats within a turn share its disturbances, so the fastest of them is one sample.
                        samples[workload][name].append(min(seconds))
            log.info("round %d of %d", turn, rounds)
    return {workload: SpeedPairs(**times) for workload, times in samples.items()}


def unpacked(commit: str, folder: Path) -> Path:
    """A folder with the package at `commit`, ready for import, which is unpacked once."""
    target = folder / commit
    if target.is_dir():
        return target.resolve()
    repository = ["git", "-C", str(PACKAGE.parent)]
    if subprocess.run([*repository, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True).returncode:
        raise ConfigError(
            f"commit {commit[:12]} of the baseline isn't in this clone; fetch it (git fetch --unshallow), "
            "or make a new baseline (qerl gate accept)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        archive, code = Path(name) / "code.zip", Path(name) / "code"
        subprocess.run([*repository, "archive", "--output", str(archive), commit, PACKAGE.name], check=True)
        shutil.unpack_archive(archive, code)
        code.rename(target)
    return target.resolve()


def answer_requests() -> None:
    """Print the seconds per token of each repeat of a workload, whose name is a line of the input, until that ends.

    Another interpreter runs the source of this function with one version of the package. The version may be older than
    this module, so the function imports what it needs, and of the package it uses only `load`, `sample`, `train` and
    the columns of metrics.jsonl.
    """
    import json
    import sys
    import time
    from pathlib import Path

    answers, sys.stdout = sys.stdout, sys.stderr  # so that libraries can't print among the answers
    given = json.loads(sys.argv[1])
    from qerl import api

    imported = Path(api.__file__).resolve().parents[1]
    if imported != Path(given["code"]).resolve():
        sys.exit(f"the imported version is in {imported}, which is not the version to be timed")
    policy = api.load(given["settings"]["model"], "float32")
    for number, line in enumerate(sys.stdin):
        taken: list[float] = []
        if line.strip() == "rollout":
            for seed in range(given["rollouts"]):
                start = time.perf_counter()
                drawn = api.sample(policy, given["prompts"], seed=seed, max_tokens=64)
                seconds = time.perf_counter() - start
                taken.append(seconds / sum(one.tokens for completions in drawn for one in completions))
        else:
            run = api.train(given["settings"], out=Path(given["folder"], str(number)))
            taken = [1 / rate for rate in run.metrics["tokens_per_second/update"]]
        print(json.dumps(taken[1:]), file=answers, flush=True)  # without the warm-up


@contextmanager
def started(code: Path, commit: str | None, checkpoint: Path, folder: Path) -> Iterator[Callable[[str], list[float]]]:
    """A context with a process that imports the package from the folder `code` and trains in `folder`.

    It is a function that returns the seconds per token of each repeat of a workload.
    """
    folder.mkdir(parents=True)
    errors = folder / "errors.txt"
    # One thread: with several that wait for each other, another program on the machine would slow all of them.
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    if commit:
        environment["QERL_COMMIT"] = commit  # unpacked code isn't in a clone from which to read its commit
    policy = {"model": str(checkpoint.resolve()), "weights": weights_format_of(checkpoint)}
    work = {"settings": {**TRAINING, **policy}, "prompts": PROMPTS, "rollouts": ROLLOUTS}
    source = f"{inspect.getsource(answer_requests)}\n{answer_requests.__name__}()"
    command = [sys.executable, "-c", source, json.dumps({"code": str(code), "folder": str(folder), **work})]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        errors.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(command, env=environment, cwd=folder, stderr=stderr, **pipes) as process,  # type: ignore[call-overload]
    ):

        def ask(workload: str) -> list[float]:
            try:
                print(workload, file=process.stdin, flush=True)
                return list(json.loads(process.stdout.readline()))
            except (BrokenPipeError, json.JSONDecodeError):
                last = " | ".join(errors.read_text(encoding="utf-8").strip().splitlines()[-5:])
                raise ConfigError(f"the timed process ended with exit code {process.wait()}: {last}") from None

        try:
            yield ask
        finally:
            process.kill()
