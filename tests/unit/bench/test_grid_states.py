"""The state of the speed grid's jobs by the files that are there, and their price by committed points."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from qerl.cli.commands import app
from qerl.jobs import parse_job
from qerl.settings.base import ConfigError, parse
from qerl.settings.workflow import ShapesSettings
from qerl.workflow.grid import measured_files, point_jobs, remaining, state
from tests.synthetic_results import decode_file, moved, step_file
from tests.unit.bench.test_grid_jobs import DECODE, STEP, grid, jobs_of

# --- states


def committed(folder, part, **settings):
    """A committed file of a step, with settings of the part or others."""
    made = step_file(folder, "qerl NVFP4 LoRA", part.work.size, [1.0], part.settings.recompute)
    return moved(made, "GPU", **part.settings.model_dump() | settings).rename(folder / part.file)


def test_without_samples_everything_is_missing(tmp_path):
    """As on a GPU of which nothing is committed."""
    settings = parse(ShapesSettings, {"decode": [DECODE]}, "grid")
    jobs = point_jobs(settings, tmp_path)
    assert {state(job, settings) for job in jobs.values()} == {"missing"}
    assert measured_files(settings, tmp_path) == []


@pytest.mark.parametrize("other", [{"micro_batch_tokens": 1152}, {"sleep": True}, {"kv_cache_gib": 2.0}])
def test_a_committed_step_with_other_settings_is_missing(tmp_path, other):
    settings = parse(ShapesSettings, {"samples": [str(tmp_path)], "steps": [STEP]}, "grid")
    [job] = jobs_of(settings).values()
    [part] = job.parts
    committed(tmp_path, part, **other)
    assert (state(job, settings), remaining(job, settings)) == ("missing", job)
    committed(tmp_path, part, recompute=str(part.settings.recompute).lower())  # as older files have it
    assert (state(job, settings), remaining(job, settings)) == ("committed", None)


def test_steps_of_the_same_weights_are_one_job_whose_measured_files_are_left_out(tmp_path):
    steps = [STEP | {"recompute": [True, False]}, STEP | {"prompts": [2], "memory_gb": [12]}, STEP | {"prompts": [2]}]
    settings = parse(ShapesSettings, {"samples": [str(tmp_path)], "steps": steps}, "grid")
    shared, capped = jobs_of(settings).values()
    assert [file.stem.partition("-r16-")[2] for file in shared.files] == [
        "16x8-128x1024-recompute",
        "16x8-128x1024-no-recompute",
        "2x8-128x1024-recompute",
    ]
    assert [file.stem for file in capped.files] == ["step-qerl-tiny-nvfp4-r16-2x8-128x1024-recompute-12gb"]
    committed(tmp_path, shared.parts[1])
    assert remaining(shared, settings).files == [shared.files[0], shared.files[2]]
    assert state(shared, settings) == "committed, 2 of 3 points missing"
    with pytest.raises(ConfigError, match="step-qerl-tiny-nvfp4-r16-16x8-128x1024-recompute occurs twice"):
        jobs_of(parse(ShapesSettings, {"samples": ["committed"], "steps": [STEP, STEP]}, "grid"))


def test_points_of_this_machine_come_before_committed_ones(tmp_path):
    own, committed = tmp_path / "own", tmp_path / "committed"
    settings = grid(committed, ranks=[0, 4, 8])
    [(id, job)] = point_jobs(settings, own).items()
    names = [file.name for file in job.files]
    (own / id).mkdir(parents=True)
    committed.mkdir()
    for folder, files in ((own / id, names[1:2]), (committed, [*names[:2], "decode-dropped.json"])):
        for name in files:
            points = {count: [100.0] for count in ((1,) if folder.parent == own else (1, 2))}
            decode_file(folder, "native", "bf16", points, rank=4, size="tiny").rename(folder / name)
    others = [committed / "decode-dropped.json"]
    assert measured_files(settings, own) == [committed / names[0], own / id / names[1], *others]
    assert state(job, settings) == "committed and measured, 3 of 6 points missing"
    left = remaining(job, settings)
    assert [file.name for file in left.files] == names[1:]  # what is committed whole isn't measured again
    assert (left.out, left.parts[0].sequences) == (own / id, [1, 2])


def test_the_first_folder_with_a_file_counts(tmp_path):
    first, second = tmp_path / "z", tmp_path / "a"
    settings = grid(first, second, ranks=[0, 4, 8], sequences=[1])
    [job] = jobs_of(settings).values()
    names = [file.name for file in job.files]
    dropped = [f"decode-dropped-{end}.json" for end in "ab"]
    for folder, files in ((first, [names[0], dropped[1]]), (second, [*names[:2], *dropped])):
        for name in files:
            decode_file(folder, "native", "bf16", {1: [100.0]}, size="tiny").rename(folder / name)
    others = [second / dropped[0], first / dropped[1]]
    assert measured_files(settings, tmp_path / "own") == [first / names[0], second / names[1], *others]
    assert state(job, settings) == "committed, 1 of 3 points missing"
    assert [file.name for file in remaining(job, settings).files] == names[2:]


def test_the_command_line_lists_jobs_and_what_is_missing(tmp_path, monkeypatch):
    file = tmp_path / "grid.yaml"
    file.write_text(json.dumps({"name": "speed", "shapes": {"samples": ["committed"], "decode": [DECODE]}}))
    shown = CliRunner().invoke(app, ["grid", str(file)])
    assert "decode-native-tiny-bf16" in shown.output
    assert "missing" in shown.output
    assert "1 jobs, 1 of them missing" in shown.output
    commands = CliRunner().invoke(app, ["grid", str(file), "--missing"]).output.splitlines()
    *rule, text = shlex.split(commands[0])
    assert (len(commands), rule) == (1, ["python", "-P", "-m", "qerl", "rule"])
    job = parse_job(text)
    assert (job.kind, job.parts[0].work.size) == ("decode", "tiny")
    assert [str(file) for file in job.files] == [
        "results/speed/points/decode-native-tiny-bf16/decode-native-tiny-bf16-r4-128x256.json"
    ]
