"""The workload of mixed lengths, and its rollouts by both engines on a tiny shape."""

import json
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

from qerl.bench import native
from qerl.bench.workloads import Lengths, MixEngine, measure
from qerl.results.schema import read
from qerl.results.speeds import RolloutMixResult
from qerl.rollout.eager import EagerSampler
from qerl.rollout.engine import EngineSampler
from qerl.settings.base import ConfigError
from qerl.settings.workloads import Mix
from tests.jobs import measured

WORK = {"engine": "native", "size": "tiny", "weights": "bf16", "rank": 4, "prompts": 3, "group_size": 2}
WORK |= {"prompt": (4, 9), "median": 6, "sigma": 0.8, "tokens": 16, "sequences": 4, "repeats": 2}


def mix(**changes) -> Mix:
    return Mix(**WORK | changes)


def test_lengths_are_a_function_of_the_seed_and_prompts_of_the_round():
    first, same, other = (Lengths.of(mix(seed=seed)) for seed in (0, 0, 1))
    assert first == same
    assert first.completion_tokens != other.completion_tokens
    rounds = [first.prompts(0, round_) for round_ in (0, 0, 1)]
    assert rounds[0] == rounds[1] != rounds[2]
    assert [len(prompt) for prompt in rounds[2]] == first.prompt_tokens


def test_lengths_follow_the_distribution():
    drawn = Lengths.of(mix(prompts=4000, group_size=8, median=300, tokens=2048, prompt=(128, 384)))
    lengths = np.array(drawn.completion_tokens)
    assert set(drawn.prompt_tokens) == set(range(128, 385))
    assert median(lengths.flatten().tolist()) == pytest.approx(300, rel=0.02)
    below = lengths[lengths < 300]
    # Half of a normal distribution has the root mean square of the whole.
    assert np.sqrt(np.mean(np.log(below / 300) ** 2)) == pytest.approx(0.8, rel=0.02)
    # P(z > ln(2048 / 300) / 0.8) = P(z > 2.401)
    assert np.mean(lengths == 2048) == pytest.approx(0.0082, abs=0.002)


def test_a_tail_has_uniform_lengths_in_place_of_its_share():
    work = {"prompts": 4000, "group_size": 4, "median": 250, "sigma": 0.0, "tokens": 4096, "prompt": (64, 700)}
    lengths = np.array(Lengths.of(mix(**work, tail=0.3)).completion_tokens)
    tail = lengths[lengths != 250]
    assert tail.min() >= 1024
    assert tail.max() <= 4096
    assert len(tail) / lengths.size == pytest.approx(0.3, abs=0.02)
    assert tail.mean() == pytest.approx(2560, rel=0.02)


def test_other_lengths_are_not_timed_and_an_engine_without_memory_is_a_result(tmp_path):
    out = tmp_path / "out.json"
    with pytest.raises(RuntimeError, match="of other lengths"):
        measure(mix(), out, lambda work: MixEngine("any", lambda *_: [group[::-1] for group in work.completion_tokens]))

    def without_memory(workload):
        raise torch.cuda.OutOfMemoryError("tried to allocate 1 GiB")

    measure(mix(), out, without_memory)
    stored = read(RolloutMixResult, out)
    assert (stored.status, stored.runs) == ("out of memory", ())


def rollouts(tmp_path, **changes) -> RolloutMixResult:
    assert measured(tmp_path / "out.json", mix(**changes))["bench"] == "rollout_mix"
    return read(RolloutMixResult, tmp_path / "out.json")


@pytest.fixture
def engine(monkeypatch):
    """The samplers of the GPU's engine, which runs on a CPU without graphs."""
    made = []

    def make(policy, settings, most, others):
        made.append(EngineSampler(policy, settings.native, most, others))
        return made[-1]

    monkeypatch.setattr(native, "make_sampler", make)
    return made


def test_the_engine_tells_its_phases(tmp_path, engine):
    result, workload = rollouts(tmp_path, weights="nvfp4"), Lengths.of(mix())
    assert (result.prompt_tokens, result.completion_tokens) == (workload.prompt_tokens, workload.completion_tokens)
    assert len(result.runs) == WORK["repeats"]
    for run in result.runs:
        steps = sum(round(decode.steps * decode.sequences) for decode in run.phases.decode)
        assert steps >= result.drawn - 6  # each sequence's first token is drawn behind its prompt
        assert [decode.batch for decode in run.phases.decode][-1] == 4
        assert 0 < run.phases.prefill < run.seconds


def test_runs_in_one_engine_have_the_lengths_of_one_and_prompts_of_their_own(tmp_path, engine):
    result, workload = rollouts(tmp_path, weights="nvfp4", runs=2), Lengths.of(mix())
    assert (result.prompt_tokens, result.completion_tokens) == (workload.prompt_tokens, workload.completion_tokens)
    assert result.drawn == 2 * sum(map(sum, workload.completion_tokens))
    [sampler] = engine
    assert (len(sampler.policies), sampler.max_sequences) == (2, WORK["sequences"])
    for run in result.runs:
        steps = sum(round(decode.steps * decode.sequences) for decode in run.phases.decode)
        assert steps >= result.drawn - 2 * 6
    prompts = workload.prompts(0, 1, runs=2)
    assert [len(prompt) for prompt in prompts] == 2 * workload.prompt_tokens
    assert len({str(prompt) for prompt in prompts}) == 6


def test_the_eager_sampler_has_no_batch_of_several_runs(tmp_path):
    with pytest.raises(ConfigError, match="has no batch of several runs; measure them on a GPU"):
        rollouts(tmp_path, runs=2)


# --- traces ----------------------------------------------------------------------------------------------------------

TRACE = Path("results/reference/cpu/traces/miniature.jsonl")


def test_a_trace_is_the_workload():
    work = mix(trace=TRACE, prompts=5, group_size=3, tokens=20)
    workload = Lengths.of(work)
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()[:5]]
    assert workload.prompts(0, 0) == workload.prompts(0, 1) == [row["prompt"] for row in rows]
    wanted = [[min(len(ids), 20) for ids in row["completions"][:3]] for row in rows]
    assert workload.completion_tokens == wanted


def test_a_trace_of_too_few_completions_is_an_error():
    with pytest.raises(ConfigError, match=r"miniature.jsonl has 64 prompts of 8 completions, not 65"):
        Lengths.of(mix(trace=TRACE, prompts=65, group_size=8))


def test_a_trace_is_replayed(tmp_path, monkeypatch):
    """The sampler returns the tokens of the file."""
    drawn = []
    generate = EagerSampler.generate

    def kept(self, *arguments):
        drawn.append(generate(self, *arguments))
        return drawn[-1]

    monkeypatch.setattr(EagerSampler, "generate", kept)
    result = rollouts(tmp_path, trace=TRACE, prompts=4, group_size=2, tokens=64)
    rows = [json.loads(line) for line in TRACE.read_text().splitlines()[:4]]
    assert len(drawn) == 3
    for groups in drawn:
        assert [[c.token_ids for c in group] for group in groups] == [row["completions"][:2] for row in rows]
    assert result.work.trace == TRACE
