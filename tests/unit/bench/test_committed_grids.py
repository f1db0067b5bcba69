"""The committed speed grids: their points, hours, and what they measure for the paper's tables and under caps."""

import json
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

from qerl.checkpoints.model_shape import ModelShape
from qerl.checkpoints.published import shape_of
from qerl.plan import plan_from
from qerl.plan.cost_model import total
from qerl.plan.grid_costs import GridCosts
from qerl.plan.memory_model import CONTEXT, StepSettings, step_memory
from qerl.plan.shapes import measured_files, point_jobs, state
from qerl.random_models.checkpoint import model_config
from qerl.results.printed import FOLDER, read_cells
from qerl.settings.reading import read_yaml


def jobs_of(settings):
    return point_jobs(settings, Path("work"))


def committed_grid(name="shapes"):
    return plan_from(read_yaml(Path(f"config/{name}.yaml")), Path("config/mini.yaml")).config.shapes


def test_the_committed_grid_takes_four_hours():
    jobs = jobs_of(committed_grid())
    costs = GridCosts(committed_grid().samples)
    whole = total(map(costs.hours, jobs.values()))
    assert 3 < whole.measured + whole.estimated <= 4


@pytest.mark.parametrize(
    ("name", "gpus"), [("families", ["H200", "H100"]), ("cards", ["H200"]), ("shapes", ["H200", "H100"])]
)
def test_the_committed_points_are_of_these_gpus(name, gpus):
    files = measured_files(committed_grid(name), Path("work"))
    labels = [json.loads(file.read_text())["provenance"]["machine"]["label"] for file in files]
    assert {label.split()[2] for label in labels} == set(gpus)


def test_families_are_decoded_by_committed_points():
    settings = committed_grid("families")
    jobs = {id: job for id, job in jobs_of(settings).items() if job.kind == "decode"}
    assert not [id for id, job in jobs.items() if state(job, settings) != "committed"]


def test_a_hybrid_with_packed_delta_nets_has_a_step_that_fits():
    jobs = [job for job in jobs_of(committed_grid("families")).values() if job.kind == "grpo_step"]
    [part] = [part for job in jobs for part in job.parts if part.work.pack_delta_nets]
    assert memory_of(part, shape_of(part.work.size, pack_delta_nets=True)).verdict == "fits"


def memory_of(part, shape):
    """The predicted memory of a step under its cap, which doesn't count CUDA's context."""
    asked = {**part.work.model_dump(), **part.settings.model_dump(), "max_tokens": part.work.completion_tokens}
    names = {field.name for field in fields(StepSettings)}
    settings = StepSettings(**{key: value for key, value in asked.items() if key in names})
    return step_memory(shape, settings, part.settings.memory_gb * 1e9 + CONTEXT)


def test_the_committed_grid_has_the_papers_rollouts_in_both_readings():
    """Table 9: every rank at a batch of 1. Tables 5 to 8: batches of 2 and 8 sequences or prompts of 8 completions."""
    parts = [part for job in jobs_of(committed_grid()).values() if job.kind == "decode" for part in job.parts]
    asked = {
        (w.engine, w.size, w.weights, w.rank, n) for p in parts if (w := p.work).tokens == 2048 for n in p.sequences
    }
    for cell in read_cells(FOLDER / "table9.csv"):
        assert ("native", cell.model.removeprefix("qwen2.5-").upper(), cell.weights, cell.rank, 1) in asked
    for engine, size, weights in product(("native", "vllm"), ("3B", "7B", "14B", "32B"), ("bf16", "nvfp4")):
        assert {n for *policy, n in asked if policy == [engine, size, weights, 16]} == {1, 2, 8, 16, 64}


def test_caps_have_settings_that_fit():
    """Each size under each cap, by settings of which the memory model says what config/cards.yaml does."""
    jobs = [
        part
        for job in jobs_of(committed_grid("cards")).values()
        if job.kind == "grpo_step"
        for part in job.parts
        if part.settings.memory_gb
    ]
    verdicts = {}
    for job in jobs:
        memory = memory_of(job, ModelShape.of(model_config(job.work.size, "bf16")))
        verdicts[job.work.size, job.settings.memory_gb] = memory.verdict
    assert set(verdicts) == set(product(("1.5B", "3B", "7B", "8B", "14B"), (12, 16, 24, 32)))
    assert {key: verdict for key, verdict in verdicts.items() if verdict != "fits"} == {
        ("14B", 12): "doesn't fit",
        ("14B", 16): "tight",
    }


def test_the_committed_grid_begins_with_rollouts_and_has_the_papers_steps():
    jobs = jobs_of(committed_grid())
    names = {file.stem for job in jobs.values() for file in job.files}
    assert [id.partition("-r32")[0] for id in [*jobs][:2]] == ["mix-native-7B-nvfp4", "mix-native-7B-bf16"]
    for table in ("table3", "table5", "table6", "table7"):
        for cell in read_cells(FOLDER / f"{table}.csv"):
            if cell.kind == "step":
                batch, gc = cell.setting["bs"], cell.setting.get("gc", "on")
                size = cell.model.removeprefix("qwen2.5-").upper()
                recompute = "recompute" if gc == "on" else "no-recompute"
                assert f"step-qerl-{size}-{cell.weights}-r16-1x{batch}-256x2048-{recompute}" in names
