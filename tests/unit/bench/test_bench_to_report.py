"""The report reads the files that measurements write: real files of a tiny policy, down to the cells of tables."""

import json
from itertools import product

import numpy as np
import pytest

from qerl.bench.native import bench_rollout
from qerl.bench.steps import bench_step
from qerl.data.sources import prepare
from qerl.report import paper, tables
from qerl.report_jobs import RolloutJob, StepJob, TimedRun
from qerl.results.readers import StoredResults
from qerl.results.speeds import load
from qerl.settings.base import parse
from qerl.settings.data import DatasetSettings
from qerl.settings.run import RunSettings
from qerl.settings.workflow import RolloutBench, StepBench
from tests.synthetic_results import rollout_point, step_point
from tests.tiny import tiny_bases

MODEL = "qwen2.5-7b"
RUN = {"model": MODEL, "dataset": "sums", "dtype": "float32", "steps": 4, "adapter": {"rank": 4}}
GENERATED = {"format": "gsm8k", "origin": {"source": "generated", "train": 8, "validation": 2, "test": 2}}
#: (prompts, group size, gradient checkpointing); the first two have as many completions.
GRID = [(1, 4, False), (2, 2, False), (1, 4, True)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tiny_bases(tmp_path_factory.mktemp("bases"), max_position_embeddings=1024)
    prepare(parse(DatasetSettings, GENERATED, "test"), folder / "data")
    return folder


def timed_run(bases, weights: str, prompts: int, group_size: int, again: bool) -> TimedRun:
    rollout = {"prompts": prompts, "group_size": group_size, "sampling": {"max_tokens": 3}}
    settings = {**RUN, "weights": weights, "rollout": rollout, "gradient_checkpointing": again}
    return TimedRun(
        id=f"{weights}-{prompts}-{group_size}-{again}",
        arm=f"{weights}-lora",
        varied={"rollout.group_size": group_size, "gradient_checkpointing": again, "seed": 0},
        settings=parse(RunSettings, settings, "test"),
        checkpoint=bases / weights,
        data=bases / "data",
    )


@pytest.fixture(scope="module")
def steps(bases):
    """The file of a measurement of two arms at each point of the grid."""
    runs = [timed_run(bases, weights, *point) for weights, point in product(("bf16", "nvfp4"), GRID)]
    settings = StepBench(kind="step", experiment="e", repeats=2)
    bench_step(StepJob(bench="s", settings=settings, runs=runs, out=bases / "step.json"))
    return bases / "step.json"


@pytest.fixture(scope="module")
def rollouts(bases):
    settings = RolloutBench(
        kind="rollout", model=MODEL, weights=["bf16", "nvfp4"], ranks=[0, 4], sequences=2, prompt_tokens=3,
        completion_tokens=2, repeats=2, dtype="float32",
    )  # fmt: skip
    checkpoints = {weights: bases / weights for weights in settings.weights}
    bench_rollout(RolloutJob(bench="r", settings=settings, checkpoints=checkpoints, out=bases / "rollout.json"))
    return bases / "rollout.json"


def test_each_step_is_compared_with_bf16_lora_at_its_point_of_the_grid(steps):
    raw = json.loads(steps.read_text())["points"]
    table = tables.memory_speed(load([steps], "step"), StoredResults([]).quantization)
    medians = [np.median(point["samples"]) for point in raw]
    expected = [1, 1, 1, *(medians[i] / medians[i + 3] for i in range(3))]
    assert table["speedup"].tolist() == pytest.approx(expected)
    shown = ["prompts", "group_size", "gradient_checkpointing"]
    assert list(table[shown].itertuples(index=False, name=None)) == 2 * GRID


def test_steps_join_the_paper_s_cells_by_completions_and_checkpointing(steps):
    found = list(paper.steps(load([steps], "step")))
    speedups = [result for result in found if result.metric == "step_speedup" and result.weights == "nvfp4"]
    assert {result.model for result in found} == {MODEL}
    assert [result.setting for result in speedups] == [{"bs": "4", "gc": gc} for gc in ("off", "off", "on")]
    assert all(result.status == "ok" for result in found)


def test_rollouts_join_the_paper_s_cells_by_sequences(rollouts):
    raw = json.loads(rollouts.read_text())["points"]
    found = list(paper.rollouts(load([rollouts], "rollout")))
    rates = [result for result in found if result.metric == "rollout_rate"]
    assert [(r.model, r.weights, r.rank, r.setting) for r in rates] == [
        (MODEL, weights, rank, {"bs": "2"}) for rank in (0, 4) for weights in ("bf16", "nvfp4")
    ]
    assert [result.measure().mean for result in rates] == [np.median(point["samples"]) for point in raw]
    assert all("native" in point["sampler"] for point in raw)


def test_points_out_of_memory_are_read(bases, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr("qerl.bench.steps.make_trainer", fails)
    monkeypatch.setattr("qerl.bench.native.make_sampler", fails)
    out, runs = bases / "failed.json", [timed_run(bases, "bf16", *GRID[0])]
    bench_step(StepJob(bench="s", settings=StepBench(kind="step", experiment="e"), runs=runs, out=out))
    assert load([out], "step")["status"].tolist() == ["out of memory"]
    settings = RolloutBench(kind="rollout", model=MODEL, weights=["bf16"], ranks=[4], dtype="float32")
    bench_rollout(RolloutJob(bench="r", settings=settings, checkpoints={"bf16": bases / "bf16"}, out=out))
    assert load([out], "rollout")["status"].tolist() == ["out of memory"]


def test_synthetic_points_have_the_keys_of_measured_ones(steps, rollouts):
    for file, synthetic in ((steps, step_point("bf16-lora", [1.0])), (rollouts, rollout_point("bf16", 4, [1.0]))):
        assert all(point.keys() == synthetic.keys() for point in json.loads(file.read_text())["points"])
