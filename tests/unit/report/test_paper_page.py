"""The page with every number of the paper's speed tables: its numbers by their samples."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from qerl.jobs import ShapesJob
from qerl.report.grid import write_shapes
from qerl.report.paper_page import paper_page
from qerl.results.paths import decode_name
from qerl.results.speed_readers import load
from qerl.settings.base import read_yaml
from qerl.workflow.grid import committed_files
from tests.synthetic_results import OUT_OF_MEMORY, decode_file

ROOT = Path(__file__).parents[3]
LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")
#: Sequences of a batch of one, by the heading of a reading.
READINGS = {"concurrent sequences": 1, "prompts of 8 completions": 8}


def rows(text):
    """Each row of a table by its columns, with its reading's factor and the table's title."""
    for section in text.split("\n## ")[1:]:
        factor = READINGS[section.splitlines()[0].removeprefix("Batch size read as ")]
        for table in section.split("\n### ")[1:]:
            title, *lines = [line for line in table.splitlines() if line]
            names, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            for row in cells:
                yield factor, title, dict(zip(names, row, strict=True))


def expected(file, batch, factor):
    """The number of a file of samples: tokens/s of a rollout with its prompts, or seconds of a step."""
    content = json.loads(file.read_text())
    if content["bench"] == "decode":
        [point] = [point for point in content["points"] if point["sequences"] == batch * factor]
        drawn = batch * factor * content["work"]["tokens"]
        return drawn / (drawn / median(point["samples"]) + point["prompt_seconds"])
    work = content["work"]
    assert (work["prompts"], work["group_size"]) == ((1, batch) if factor == 1 else (batch, factor))
    return OUT_OF_MEMORY if content["status"] == OUT_OF_MEMORY else median(step["step"] for step in content["steps"])


def test_every_number_is_that_of_its_committed_samples(tmp_path):
    files = committed_files([ROOT / folder for folder in read_yaml(ROOT / "config/shapes.yaml")["shapes"]["samples"]])
    decode, steps = ([file for file in files if file.name.startswith(kind)] for kind in ("decode-", "step-"))
    page = paper_page(load(decode, "decode"), load(steps, "grpo_step"), files, tmp_path)
    seen = set()
    for factor, title, row in rows(page):
        for cell in row.values():
            for text, link in LINK.findall(cell):
                number = expected(tmp_path / link, int(row["batch"]), factor)
                shown = text if number == OUT_OF_MEMORY else float(text.partition(" ")[0].replace(",", ""))
                assert shown == (number if number == OUT_OF_MEMORY else pytest.approx(number, rel=6e-3)), (title, row)
                seen.add(title)
    names = [f"Table {number}: {what}" for what in ("rollouts", "GRPO steps") for number in range(5, 9)]
    assert seen == {*names, "Table 3: GRPO steps", "Table 9: rollouts", "Figure 1: rollouts", "Figure 11: rollouts"}


def named(folder, engine, weights, points, **changed):
    file = decode_file(folder, engine, weights, points, prompt=256, tokens=2048, **changed)
    return file.rename(folder / f"{decode_name(engine, '7B', weights, 16, 256, 2048)}.json")


def test_vllm_and_other_machines_stand_beside_ours(tmp_path):
    """100 tokens/s are 90.9 with the prompts' 2.048 s; the second machine is the rarer one."""
    files = [
        named(tmp_path, "native", "bf16", {1: [100.0]}),
        named(tmp_path, "native", "nvfp4", {1: [400.0], 8: OUT_OF_MEMORY}),
        named(tmp_path, "vllm", "nvfp4", {1: [200.0]}),
        named(tmp_path, "vllm", "bf16", {1: [50.0]}, machine="1x NVIDIA H100 80GB"),
    ]
    write_shapes(ShapesJob(files=files, out=tmp_path / "tables"))
    found = {
        (factor, row["weights"]): row
        for factor, title, row in rows((tmp_path / "tables/paper-tables.md").read_text(encoding="utf-8"))
        if title == "Table 9: rollouts" and (row["model"], row["rank"]) == ("7B", "16")
    }
    bf16, nvfp4 = found[1, "BF16"], found[1, "NVFP4"]
    assert bf16["paper, tokens/s"] == "115.4*"  # Table 6 prints it for a batch of 2
    assert bf16["ours, tokens/s"] == "[90.9](../decode-native-7B-bf16-r16-256x2048.json)"
    assert bf16["vLLM, tokens/s"] == "[47.6](../decode-vllm-7B-bf16-r16-256x2048.json) (H100)"
    assert bf16["ours over vLLM"] == "different machines"
    assert nvfp4["ours over vLLM"] == f"{(2048 / (5.12 + 2.048)) / (2048 / (10.24 + 2.048)):.2f}×"
    assert (nvfp4["over BF16: paper"], nvfp4["over BF16: vLLM"]) == ("1.31", "different machines")
    assert nvfp4["over BF16: ours"].startswith(f"{(2048 / (5.12 + 2.048)) / (2048 / (20.48 + 2.048)):.2f}×")
    assert found[8, "NVFP4"]["ours, tokens/s"] == "[out of memory](../decode-native-7B-nvfp4-r16-256x2048.json)"
    assert found[8, "NVFP4"]["vLLM, tokens/s"] == "not run"


def test_points_of_other_lengths_make_no_page(tmp_path):
    write_shapes(ShapesJob(files=[decode_file(tmp_path, "native", "bf16", {1: [100.0]})], out=tmp_path / "tables"))
    assert not (tmp_path / "tables/paper-tables.md").exists()
