"""The committed speed grids: their points, and what they measure for the paper's tables and under caps."""

import json
from dataclasses import fields
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from qerl.checkpoints.shapes import QWEN, ModelShape
from qerl.memory_model import CONTEXT, StepSettings, step_memory
from qerl.report.paper_speeds import beside_printed
from qerl.results.paths import decode_name, step_name
from qerl.settings.base import read_yaml
from qerl.workflow.grid import measured_files, point_jobs, state
from qerl.workflow.plan import plan_from


def jobs_of(settings):
    return point_jobs(settings, Path("work"))


def committed_grid(name="shapes"):
    return plan_from(read_yaml(Path(f"config/{name}.yaml")), Path("config/mini.yaml")).config.shapes


@pytest.mark.parametrize(
    ("name", "gpus"),
    [("families", ["H200", "H100"]), ("cards", ["H200"]), ("shapes", ["H200"]), ("peers", ["H200", "H100"])],
)
def test_the_committed_points_are_of_these_gpus(name, gpus):
    files = measured_files(committed_grid(name), Path("work"))
    labels = [json.loads(file.read_text())["provenance"]["machine"]["label"] for file in files]
    assert {label.split()[2] for label in labels} == set(gpus)


@pytest.mark.parametrize("name", ["families", "peers"])
def test_what_readme_states_is_committed(name):
    settings = committed_grid(name)
    assert not [id for id, job in jobs_of(settings).items() if state(job, settings) != "committed"]


def memory_of(part, shape):
    """The predicted memory of a step under its cap, which doesn't count CUDA's context."""
    work = part.work
    lengths = {"group": work.group_size, "prompt_tokens": work.prompt, "max_tokens": work.tokens}
    asked = {**work.model_dump(), **lengths, **part.settings.model_dump()}
    names = {field.name for field in fields(StepSettings)}
    settings = StepSettings(**{key: value for key, value in asked.items() if key in names})
    return step_memory(shape, settings, part.settings.memory_gb * 1e9 + CONTEXT)


def test_the_committed_grid_has_all_that_the_papers_tables_ask_for():
    """Tables 3 and 5 to 9 and Figures 1 and 11 in both readings of a batch, by both engines."""
    parts = [(id, part) for id, job in jobs_of(committed_grid()).items() for part in job.parts]
    steps = {part.file for id, part in parts if id.startswith("step-")}
    decodes = {(part.file, count) for id, part in parts if id.startswith("decode-") for count in part.sequences}
    names, asked = (*(f"table{n}" for n in (3, 5, 6, 7, 8, 9)), "figure1", "figure11"), set()
    for name in names:
        for cell in beside_printed([name], ["rollout", "step"], []).to_dict("records"):
            size, setting = cell["model"].removeprefix("qwen2.5-").upper(), cell["setting"]
            batch = int(setting.partition("bs=")[2].partition(";")[0])
            for factor, engine in product((1, 8), ("native", "vllm")):
                if cell["metric"] == "rollout_rate":
                    rank = 16 if pd.isna(cell["rank"]) else int(cell["rank"])
                    file = decode_name(engine, size, cell["weights"], rank, 256, 2048)
                    assert (f"{file}.json", batch * factor) in decodes, cell
                elif cell["metric"] == "step_seconds":
                    work = f"1x{batch}" if factor == 1 else f"{batch}x{factor}"
                    recompute = "no-recompute" if "gc=off" in setting else "recompute"
                    file = step_name("qerl", size, cell["weights"], 16, f"{work}-256x2048", recompute)
                    assert f"{file}.json" in steps, cell
                asked.add(name)
    assert asked == {*names}


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
        memory = memory_of(job, ModelShape.of(QWEN[job.work.size]))
        verdicts[job.work.size, job.settings.memory_gb] = memory.verdict
    assert set(verdicts) == set(product(("1.5B", "3B", "7B", "8B", "14B"), (12, 16, 24, 32)))
    assert {key: verdict for key, verdict in verdicts.items() if verdict != "fits"} == {
        ("14B", 12): "doesn't fit",
        ("14B", 16): "tight",
    }
