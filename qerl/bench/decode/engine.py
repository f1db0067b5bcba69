"""Decode speed of the native engine on random weights of known shapes, in tokens/s by number of sequences.

`qerl.bench.decode.points` does the timing and writes the result. Weights are never written to disk.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

from qerl.bench.decode.points import DecodePoints, Measure, timed
from qerl.host.profiling import peak_memory_bytes, seconds
from qerl.jobs.shapes import DecodeJob, Decoding
from qerl.policy.policy import Policy, choose_device, weight_bytes
from qerl.random_models.policy import random_policy, with_random_adapter
from qerl.results.schema.speed import DecodePoint
from qerl.rollout.engine.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.rollout import Kernels, NativeSettings

#: GiB of the KV cache, which no point reaches, so a point whose sequences don't fit is out of memory. With a bound,
#: sequences would queue, and the point would measure a smaller batch.
_UNBOUNDED = 2.0**20


def measure(policy: Policy, sequences: int, prompt: int, tokens: int, kernels: Kernels) -> DecodePoint:
    """Measure the point with this number of sequences."""
    sampler = EngineSampler(policy, NativeSettings(kv_cache_gib=_UNBOUNDED, kernels=kernels), sequences)

    def draw(prompts: list[list[int]], count: int, seed: int) -> int:
        # A shorter warm-up has room for as many tokens as the timed runs, because the kernels depend on it.
        shorter = 1 < count <= tokens
        lengths = ((count,),) * len(prompts) if shorter else None
        room = tokens + 1 if shorter else count
        groups = sampler.generate(prompts, SamplingParams(max_tokens=room, lengths=lengths, seed=seed, ignore_eos=True))
        return sum(len(completion.token_ids) for group in groups for completion in group)

    timing = timed(draw, sequences, prompt, tokens, policy.lm.config.vocab_size)
    sampler.release()
    return timing.point(sequences, sampler.served, weight_bytes(policy), peak_memory_bytes())


def sync_seconds(policy: Policy, kernels: Kernels, count: int = 20) -> list[float]:
    """Seconds of each of `count` syncs after a first one, which also sets up buffers."""
    sampler = EngineSampler(policy, NativeSettings(kernels=kernels), 1)
    taken = []
    for _ in range(count + 1):
        with seconds() as one:
            sampler.sync()
        taken.append(one.value)
    return taken[1:]


def measure_points(job: DecodeJob) -> None:
    """Measure the points that the job's files lack, and write a file after each. All ranks share one base."""
    first = job.parts[0].work
    base = cache(lambda: random_policy(first.size, first.weights, 0, choose_device(), first.pack_delta_nets))
    for part in job.parts:
        work, points = part.work, DecodePoints(job.out / part.file, part.work)
        with ExitStack() as adapted:

            def load(work: Decoding = work, points: DecodePoints = points, adapted: ExitStack = adapted) -> Measure:
                policy = adapted.enter_context(with_random_adapter(base(), work.rank))
                points.note_syncs(sync_seconds(policy, work.kernels) if work.rank else [])
                return lambda count: measure(policy, count, work.prompt, work.tokens, work.kernels)

            points.run(part.sequences, load)
