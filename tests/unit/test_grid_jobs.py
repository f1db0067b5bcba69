"""The jobs of the speed grid: what is measured, by which command, and how far it is."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.bench.grid import jobs, measured_files, state
from qerl.cli import app
from qerl.config import Config, ConfigError, ShapesSettings, parse, read_yaml
from qerl.plan import plan_from

DECODE = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "sequences": [1, 2]}
STEP = {"system": "qerl", "sizes": ["tiny"], "weights": ["nvfp4"]}


def grid(folder="committed", **changes):
    return parse(ShapesSettings, {"samples": str(folder), "decode": [DECODE | changes]}, "grid")


def test_a_job_for_each_size_format_and_rank():
    found = jobs(grid(weights=["bf16", "nvfp4"], ranks=[0, 4]))
    assert list(found) == [f"decode-native-tiny-{w}-r{r}-128x256" for w in ("bf16", "nvfp4") for r in (0, 4)]
    assert found["decode-native-tiny-nvfp4-r4-128x256"].command == (
        "qerl.bench.decode --size tiny --weights nvfp4 --rank 4 --prompt 128 --tokens 256 --sequences 1 --sequences 2"
    )


def test_steps_are_jobs_by_recomputation_and_cap():
    settings = parse(
        ShapesSettings,
        {
            "samples": "committed",
            "decode": [],
            "steps": [
                STEP | {"recompute": [True, False], "memory_gb": [12, 24.5]},
                STEP | {"system": "trl", "weights": ["bf16"]},
            ],
        },
        "grid",
    )
    found = jobs(settings)
    assert next(iter(found)) == "step-qerl-tiny-nvfp4-r16-recompute-12gb"
    assert found["step-qerl-tiny-nvfp4-r16-no-recompute-24.5gb"].command.endswith("--memory-gb 24.5 --recompute false")
    assert found["step-trl-tiny-bf16-r16-recompute"].command.endswith("--recompute")
    assert len(found) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ["8B"]}, "no size '8B'"),
        ({"engine": "vllm", "weights": ["mxfp4"]}, "vllm has no mxfp4"),
        ({"engine": "transformers", "weights": ["nvfp4"]}, "transformers has no nvfp4"),
        ({"ranks": [4, 4]}, "asked for twice"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(changes, message):
    with pytest.raises(ConfigError, match=message):
        jobs(grid(**changes))


def test_an_empty_list_is_an_error():
    with pytest.raises(ConfigError, match="sizes"):
        grid(sizes=[])


def test_points_of_this_machine_come_before_committed_ones(tmp_path):
    own, committed = tmp_path / "own", tmp_path / "committed"
    settings = grid(committed, ranks=[0, 4, 8])
    names = [job.file for job in jobs(settings).values()]
    for folder, files in ((own, names[1:2]), (committed, names[:2])):
        folder.mkdir()
        for name in files:
            points = [{"sequences": 1}, {"sequences": 2}][: 1 if folder == own else 2]
            (folder / name).write_text(json.dumps({"points": points}))
    assert measured_files(settings, own) == [committed / names[0], own / names[1]]
    states = [state(job, settings, own) for job in jobs(settings).values()]
    assert states == ["committed", "measured, 1 of 2 points missing", "missing"]


def test_the_committed_grid_is_whole():
    """What the issue of the speed tables names is among the jobs of config/shapes.yaml."""
    found = jobs(plan_from(read_yaml(Path("config/shapes.yaml")), Path("config/mini.yaml")).config.shapes)
    for engine in ("native", "vllm"):
        for size in ("7B", "14B", "32B"):
            for weights in ("bf16", "nf4", "nvfp4"):
                for rank in (16, 64):
                    command = found[f"decode-{engine}-{size}-{weights}-r{rank}-128x256"].command
                    assert all(f"--sequences {n}" in command for n in (1, 8, 32, 64, 256))
    assert "step-qerl-32B-nvfp4-r16-recompute-80gb" in found


def test_a_configuration_of_shapes_needs_nothing_else():
    config = parse(Config, {"name": "speed", "shapes": {"samples": "committed", "decode": [DECODE]}}, "file")
    assert config.shapes
    with pytest.raises(ConfigError, match="models"):
        parse(Config, {"name": "speed"}, "file")


def test_the_command_line_lists_jobs_and_what_is_missing(tmp_path, monkeypatch):
    file = tmp_path / "grid.yaml"
    file.write_text(json.dumps({"name": "speed", "shapes": {"samples": "committed", "decode": [DECODE]}}))
    shown = CliRunner().invoke(app, ["grid", str(file)])
    assert "decode-native-tiny-bf16-r4-128x256" in shown.output
    assert "missing" in shown.output
    commands = CliRunner().invoke(app, ["grid", str(file), "--missing"]).output.splitlines()
    [command] = commands
    assert command.startswith("python -m qerl.bench.decode --size tiny")
    assert command.endswith("results/speed/points/decode-native-tiny-bf16-r4-128x256.json")
