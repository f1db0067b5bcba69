"""GRPO steps: seconds of sync, rollout and update, and memory by part, on random weights or by arm (paper Table 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoTokenizer

from qerl.bench import workloads
from qerl.bench.timing import WARM_UP, Point, nbytes, optimizer_bytes, run_points, unmeasured
from qerl.checkpoints.shapes import vocabulary
from qerl.host.console import log
from qerl.host.gpus import cap_memory, free_memory, peak_memory_bytes, reset_peak_memory
from qerl.models.policy import Policy, choose_device, weight_bytes
from qerl.models.random import TEXTS, random_policy, with_random_adapter, write_tokenizer
from qerl.report_jobs import PointJob, StepJob, TimedRun
from qerl.results.schema import Provenance, write
from qerl.results.speeds import SECONDS, GivenUp, StepBenchResult, StepMemory, StepPoint, TimedStep
from qerl.rl.passes import blocks
from qerl.rl.rollouts import Task, problem_index
from qerl.rl.train import Trainer, make_trainer, prepared
from qerl.rollout.engine import EngineSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import Completion, Sampler, SamplingParams
from qerl.settings.base import parse
from qerl.settings.run import RunSettings
from qerl.settings.workloads import EngineStep, PointPart, StepWork, with_kernels

# A GRPO step of this project on random weights: seconds of sync, rollout and update, and memory by part.
#
# `qerl.bench.trl` gives TRL the same work. Nothing is downloaded, and weights are never written to disk. The steps are
# those of `qerl.rl.train`; completions end only at their token limit.


@dataclass
class _Watched:
    """The policy's sampler without stop tokens. It records the memory peaks of syncs and rollouts, and resets the peak
    before the update.

    `lengths` has the completions' if they are mixed. Otherwise, in a `warm_up` the engine draws no more than
    `WARM_UP` tokens of a completion, and repeats them up to its length: the update has all of its tokens.
    """

    sampler: Sampler
    lengths: tuple[tuple[int, ...], ...] | None
    warm_up: bool = False
    peaks: list[int] = field(default_factory=list)

    @property
    def max_sequences(self) -> int:
        """The largest number of sequences that the measured sampler decodes together."""
        return self.sampler.max_sequences

    @property
    def served(self) -> str:
        """Description of the measured sampler."""
        return self.sampler.served

    def cache_bytes(self, part: str) -> int:
        """Bytes of the engine's KV cache during a part of a step; 0 once it is released for the update."""
        if not isinstance(self.sampler, EngineSampler) or (part == "update" and self.sampler.released):
            return 0
        return self.sampler.cache_bytes

    def sync(self) -> None:
        reset_peak_memory(collect=False)
        self.sampler.sync()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        short = self.warm_up and not self.lengths and isinstance(self.sampler, EngineSampler)
        # `max_tokens` stays, because the engine's CUDA graphs depend on it.
        lengths = ((WARM_UP,) * params.count,) * len(prompts) if short else self.lengths
        groups = self.sampler.generate(prompts, replace(params, ignore_eos=True, lengths=lengths))
        self.peaks.append(peak_memory_bytes())
        reset_peak_memory(collect=False)
        return [[_repeated(one, params.max_tokens) for one in group] for group in groups] if short else groups


def _repeated(completion: Completion, tokens: int) -> Completion:
    """A completion of so many tokens, which repeats another one's."""
    times = -(-tokens // len(completion.token_ids))
    token_ids, logprobs = (completion.token_ids * times)[:tokens], (completion.logprobs * times)[:tokens]
    return replace(completion, token_ids=token_ids, logprobs=logprobs)


def run_settings(work: StepWork, asked: EngineStep) -> RunSettings:
    """The settings of a run whose steps do the work."""
    run = {
        **work.base.stored,
        "dataset": "random",
        "adapter": {"rank": work.rank, "alpha": work.rank, "train_norms": False},
        "rollout": {
            "prompts": work.prompts,
            "group_size": work.group_size,
            "sampling": {"max_tokens": work.tokens},
            "native": {"kv_cache_gib": asked.kv_cache_gib, "sleep": asked.sleep, "kernels": asked.kernels},
        },
        "reward": {"correct": 0.0, "format": 0.0, "function": "qerl.bench.workloads:reward"},
        "steps": workloads.steps_of(work),
        "micro_batch_tokens": asked.micro_batch_tokens,
        "gradient_checkpointing": asked.recompute,
    }
    return parse(RunSettings, run, "grpo_step")


def _step(trainer: Trainer, watched: _Watched, work: StepWork, number: int) -> TimedStep:
    row = trainer.step(number, (number - 1) * work.prompts)
    workloads.check_drawn(work, int(row["completion_tokens"]))
    if row["silent/completions"] < work.equal_prompts * work.group_size:
        raise RuntimeError(f"fewer than {work.equal_prompts} groups of a step had no gradient: its time says nothing")
    if not row["grad_norm"]:
        raise RuntimeError("the update had no gradient: rewards didn't differ within any group; use larger groups")
    taken = {name: row[f"seconds/{name}"] for name in SECONDS}
    log.info("step %d: %s", number, taken)
    return TimedStep(
        **taken,
        rollout_peak_bytes=watched.peaks[-1],
        update_peak_bytes=row["memory_bytes"],
        grad_norm=row["grad_norm"],
        mismatch_kl=row["mismatch/kl"],
    )


def _memory(trainer: Trainer, peak: float, cache: int) -> StepMemory:
    trained = [parameter for _, parameter in trainer.policy.trainable()]
    parts = {
        "weights": weight_bytes(trainer.policy) - nbytes(trained),
        "adapter": nbytes(trained),
        "gradients": nbytes([p.grad for p in trained if p.grad is not None]),
        "optimizer": optimizer_bytes(trainer.updater.optimizer),
    }
    return workloads.memory_of(peak, cache, parts)


def _given_up(trainer: Trainer, sampler: Sampler) -> GivenUp | None:
    """What the steps did without; None for the eager sampler, which has no cache to bound."""
    if not isinstance(sampler, EngineSampler):
        return None
    count, chosen = len(blocks(trainer.policy.lm)), trainer.updater.recomputation
    everything = trainer.settings.gradient_checkpointing is True
    return GivenUp(
        kv_cache_bytes=sampler.cache_bytes,
        kv_cache_wanted_bytes=sampler.cache_wanted_bytes,
        recomputed=chosen.most if chosen else count * everything,
        blocks=count,
    )


def steps_with(base: Policy, work: StepWork, settings: RunSettings, folder: Path) -> dict[str, Any]:
    """The timed steps of a policy whose adapter has no trained norms, as fields of the result."""
    write_tokenizer(folder, TEXTS, vocabulary(settings.model))  # of digits, with the policy's ids
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    policy = prepared(replace(base, tokenizer=tokenizer), settings)
    drawn = workloads.questions(tokenizer, workloads.steps_of(work) * work.prompts, work.prompt)
    # A run takes problems by a permutation.
    places = [problem_index(len(drawn), settings.seed, number) for number in range(len(drawn))]
    equal = {place for number, place in enumerate(places) if work.is_equal(number)}
    problems = [workloads.problem(question, number, number in equal) for number, question in enumerate(drawn)]
    watched = _Watched(
        make_sampler(policy, settings.rollout), workloads.completion_lengths(work) if work.median else None
    )
    trainer = Trainer(settings, policy, watched, Task(problems, "gsm8k", ""), folder)
    steps = []
    for number in range(1, 1 + workloads.steps_of(work)):
        watched.warm_up = number <= workloads.WARMUP
        steps.append(_step(trainer, watched, work, number))
    timed = steps[workloads.WARMUP :]
    peak, part = max((getattr(step, f"{part}_peak_bytes"), part) for step in timed for part in ("rollout", "update"))
    memory = _memory(trainer, peak, watched.cache_bytes(part))
    given_up = _given_up(trainer, watched.sampler)
    return {"sampler": watched.served, "steps": tuple(timed), "memory": memory, "given_up": given_up}


def measure_steps(job: PointJob[StepWork, None]) -> None:
    """Measure the parts that have no file yet, and write a file after each. All parts share one base."""
    settings = job.parts[0].settings
    if settings and settings.memory_gb is not None:
        cap_memory(settings.memory_gb)
    base = cache(lambda: random_policy(job.parts[0].work.base, 0, choose_device()))
    for part in unmeasured(job):
        _measure_part(base, part, job.out / part.file)
        free_memory()


def _measure_part(base: Callable[[], Policy], part: PointPart[StepWork, None], out: Path) -> None:
    """Time the steps after one warm-up step, and write the result. Running out of memory is a result, too."""
    work, asked = part.work, part.settings
    assert isinstance(asked, EngineStep)
    nets = ", packed delta nets" if work.base.packed_nets else ""
    system = f"{with_kernels('qerl', asked.kernels)} {work.weights.upper()} LoRA{nets}"

    def measure() -> dict[str, Any]:
        shared = base()
        torch.manual_seed(0)  # a part has the same adapters wherever it runs
        with TemporaryDirectory() as folder, with_random_adapter(shared, work.rank, train_norms=False) as policy:
            try:
                return steps_with(policy, work, run_settings(work, asked), Path(folder))
            finally:  # the next part's steps decide for themselves which blocks recompute their activations
                policy.lm.gradient_checkpointing_disable()

    workloads.write_steps(out, system, work, asked, measure)


# Seconds and memory of a GRPO step by arm (paper Table 3).


def _measure(run: TimedRun, work: Path) -> Callable[[int], dict[str, float]]:
    trainer = make_trainer(run.settings, run.checkpoint, run.data, work)
    weights_bytes = weight_bytes(trainer.policy)

    def once(round_: int) -> dict[str, float]:
        metrics = trainer.step(round_ + 1, round_ * run.settings.rollout.prompts)
        return {
            **{part: metrics[f"seconds/{part}"] for part in ("step", "rollout", "update")},
            "weight_bytes": weights_bytes,
        }

    return once


def bench_step(job: StepJob) -> None:
    """Time repeated steps of each run, round by round."""
    with TemporaryDirectory() as work:
        points = [Point(_label(run), partial(_measure, run, Path(work) / run.id)) for run in job.runs]
        run_points(points, job.settings.repeats, job.settings.interleave)
    rows = [
        StepPoint(
            **point.label,
            samples=[sample["step"] for sample in point.samples],
            rollout_seconds=[sample["rollout"] for sample in point.samples],
            update_seconds=[sample["update"] for sample in point.samples],
            weight_bytes=point.samples[0]["weight_bytes"] if point.samples else None,
            peak_memory_bytes=point.peak_memory_bytes or None,
            status=point.status,
        )
        for point in points
    ]
    write(job.out, StepBenchResult(bench=job.bench, kind="step", points=rows, provenance=Provenance.of_now()))


def _label(run: TimedRun) -> dict[str, Any]:
    settings = run.settings
    return {
        **settings.base.stored,
        "arm": run.arm,
        "varied": run.varied,
        "method": settings.method,
        "rank": settings.adapter.rank if settings.method == "lora" else 0,
        "prompts": settings.rollout.prompts,
        "group_size": settings.rollout.group_size,
        "gradient_checkpointing": settings.gradient_checkpointing,
    }
