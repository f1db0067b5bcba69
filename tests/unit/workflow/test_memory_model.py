"""The memory model against measured peaks of GRPO steps on an H200 and an H100, from 1.5B to 32B, and of mixtures."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from qerl.checkpoints.shapes import QWEN, ModelShape, shape_of
from qerl.memory_model import CONTEXT, StepSettings, step_memory, that_fit, weight_bytes
from qerl.results.schema import OK
from qerl.results.speeds import GrpoStepResult
from qerl.results.store import read
from qerl.workflow.costs import MEMORY

SAMPLES = Path(__file__).parents[3] / "results/reference"
RESULTS = {
    f"{machine}/{file.stem}": read(GrpoStepResult, file)
    for machine, folder in (("h200", "cards"), *product(("h200", "h100"), ("shapes", "peers", "families")))
    for file in sorted((SAMPLES / machine / folder).glob("step-qerl-*.json"))
}
#: The model knows no completions without a gradient.
MEASURED = {
    name: result
    for name, result in RESULTS.items()
    if result.status == OK and not result.work.equal_groups and not result.work.median
}
#: Measured before an engine gave back a cache that had all the memory it may use, so its update had the cache too.
CACHE_KEPT = "h200/step-qerl-32B-nvfp4-r16-16x8-128x1024-recompute-80gb"
OUT_OF_MEMORY = {
    "h200/step-qerl-7B-nvfp4-r16-16x8-128x1024-recompute-12gb": "tight",
    "h200/step-qerl-14B-bf16-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-14B-nvfp4-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-bf16-r16-1x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-bf16-r16-2x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-bf16-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-nvfp4-r16-1x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-nvfp4-r16-2x8-256x2048-no-recompute": "doesn't fit",
    "h200/step-qerl-32B-nvfp4-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h100/step-qerl-7B-bf16-r16-2x8-256x2048-no-recompute": "tight",
    "h100/step-qerl-7B-bf16-r16-8x8-256x2048-no-recompute": "doesn't fit",
    "h100/step-qerl-7B-nvfp4-r16-8x8-256x2048-no-recompute": "doesn't fit",
}


def model_of(result):
    """The model's answer to what a measurement did; a cap doesn't count CUDA's context."""
    work, settings = result.work, result.settings
    asked = StepSettings(
        weights=work.weights,
        rank=work.rank,
        prompts=work.prompts,
        group=work.group_size,
        prompt_tokens=work.prompt,
        max_tokens=work.tokens,
        recompute={"true": True, "false": False}.get(recompute_of(result), "auto"),
        micro_batch_tokens=settings.micro_batch_tokens,
        kv_cache_gib=settings.kv_cache_gib,
        sleep=settings.sleep,
    )
    gpu = MEMORY["h100" if "H100" in result.provenance.machine.label else "h200"]
    capacity = gpu if settings.memory_gb is None else settings.memory_gb * 1e9 + CONTEXT
    return step_memory(shape_of(work.size).with_packed_nets(work.base.packed_nets), asked, capacity)


def recompute_of(result):
    """Which blocks a step recomputed, as text."""
    return str(result.settings.recompute).lower()


def test_the_measurements_are_there():
    others = {"qwen3-30b-a3b", "qwen3.5-27b", "gpt-oss-20b", "mistral-7b"}
    assert {result.work.size for result in MEASURED.values()} == {"1.5B", "3B", "7B", "8B", "14B", "32B"} | others
    assert set(map(recompute_of, MEASURED.values())) == {"auto", "true", "false"}
    assert len(MEASURED) == 141  # docs/doctor.md states the number


@pytest.mark.parametrize("name", MEASURED)
def test_peaks_are_within_ten_percent_of_measured_ones(name):
    result, memory = MEASURED[name], model_of(MEASURED[name])
    peaks = [[getattr(step, f"{part}_peak_bytes") for step in result.steps] for part in ("rollout", "update")]
    assert memory.rollout_peak == pytest.approx(max(peaks[0]), rel=0.1)
    kept = result.memory.kv_cache_bytes if name == CACHE_KEPT else 0
    assert memory.update_peak == pytest.approx(max(peaks[1]) - kept, rel=0.1)
    assert memory.verdict in ("fits", "tight")


@pytest.mark.parametrize("name", MEASURED)
def test_parts_are_the_measured_ones(name):
    measured, memory = MEASURED[name].memory, model_of(MEASURED[name])
    shape = shape_of(MEASURED[name].work.size)
    # The kernels have experts' biases in float32, too, which aren't among the policy's tensors.
    biased = shape.mixture.experts if shape.mixture and shape.mixture.biased else 0
    biases = 4 * shape.layers * biased * sum(rows for rows, _ in shape.expert_linears)
    assert memory.weights - biases == pytest.approx(measured.parts["weights"], rel=1e-3)
    for part in ("adapter", "gradients", "optimizer"):
        assert getattr(memory, part) == measured.parts[part]
    # A cache that was released isn't there at the update's peak, so that the sampler's own size counts.
    given_up = MEASURED[name].given_up
    cache = measured.kv_cache_bytes if given_up is None else given_up.kv_cache_bytes
    capped = MEASURED[name].settings.memory_gb is not None
    assert memory.kv_cache == pytest.approx(cache, rel=0.02 if capped else 0)


def test_no_step_that_ran_out_of_memory_is_left_out():
    assert {name for name, result in RESULTS.items() if result.status != OK} == set(OUT_OF_MEMORY)


@pytest.mark.parametrize("name", OUT_OF_MEMORY)
def test_a_step_that_ran_out_of_memory_does_not_fit_or_is_tight(name):
    assert model_of(RESULTS[name]).verdict == OUT_OF_MEMORY[name]


ASKED = StepSettings("nvfp4", 16, 16, 8, 128, 1024, "auto")
SEVEN = ModelShape.of(QWEN["7B"])


def test_auto_recomputes_more_blocks_on_smaller_gpus():
    counts = [step_memory(SEVEN, ASKED, size * 1e9).recomputed for size in (180, 80, 48, 24)]
    assert counts == sorted(counts)
    assert counts[0] == 0 < counts[-1] <= SEVEN.layers


def test_a_smaller_cache_that_sleeps_makes_room_on_a_small_gpu():
    tight = replace(ASKED, micro_batch_tokens=4 * 1152)
    small = replace(tight, kv_cache_gib=1.75, sleep=True)
    ends = [step_memory(SEVEN, asked, 12e9 + CONTEXT) for asked in (tight, small, replace(small, sleep=False))]
    assert [memory.verdict for memory in ends[:2]] == ["tight", "fits"]
    assert ends[1].kv_cache == 1.75 * 2**30 < ends[0].kv_cache
    assert [memory.released for memory in ends] == [True, True, False]  # a set cache is kept
    assert ends[2].least - ends[2].resident >= ends[2].kv_cache + ends[2].graphs


def test_a_cache_in_fp8_has_a_byte_an_element_and_four_a_head():
    half, fp8 = (step_memory(SEVEN, replace(ASKED, kv_cache_dtype=dtype), 141e9) for dtype in ("auto", "fp8"))
    assert half.kv_cache / fp8.kv_cache == 2 * 128 / (128 + 4)
    assert half.resident == fp8.resident
    limited = [replace(ASKED, kv_cache_gib=1, kv_cache_dtype=dtype) for dtype in ("auto", "fp8")]
    assert len({step_memory(SEVEN, one, 141e9).kv_cache for one in limited}) == 1


def test_slower_settings_are_found_that_fit():
    whole = replace(ASKED, micro_batch_tokens=4 * 8312)  # four groups
    found = {gb: that_fit(SEVEN, whole, gb * 1e9 + CONTEXT) for gb in (7, 12, 24, 141)}
    assert found[7] is None  # weights alone take 5.9 GB
    assert found[141] == whole
    assert found[24] == replace(whole, micro_batch_tokens=8312)
    small = found[12]
    assert (small.sleep, small.micro_batch_tokens) == (True, 8312)
    for more, verdict in ((0, "fits"), (0.25, "tight")):
        cached = replace(small, kv_cache_gib=small.kv_cache_gib + more)
        assert step_memory(SEVEN, cached, 12e9 + CONTEXT).verdict == verdict


def test_tied_embeddings_exist_once_and_heads_may_be_wider_than_the_model():
    tied = {**QWEN["7B"], "tie_word_embeddings": True}
    assert weight_bytes(SEVEN, "bf16") - weight_bytes(ModelShape.of(tied), "bf16") == 152064 * 3584 * 2
    wide = ModelShape.of({**QWEN["7B"], "head_dim": 256, "model_type": "qwen3"})
    assert wide.linears[:2] == ((28 * 256, 3584), (4 * 256, 3584))
    assert not wide.biased
