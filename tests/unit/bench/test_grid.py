"""The jobs of the speed grid, their states by the files that are there, and what is committed."""

import json
import shlex
from dataclasses import fields
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from qerl.checkpoints.shapes import QWEN, ModelShape
from qerl.cli.commands import app
from qerl.memory_model import CONTEXT, StepSettings, step_memory
from qerl.report.paper import beside, cells_of
from qerl.results.paths import measured_files
from qerl.settings.base import ConfigError, parse, read_yaml
from qerl.settings.run import RunSettings
from qerl.settings.workloads import ShapesSettings, decode_name, step_name
from qerl.workflow.plan import plan_from, point_jobs, point_parts, remaining, state
from qerl.workflow.rules import Jobs, parse_job
from tests.synthetic_results import PROVENANCE, decode_file, moved, step_file, write_json

DECODE = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "sequences": [1, 2]}
MIX = {"engine": "native", "sizes": ["tiny"], "weights": ["nvfp4"]}
STEP = {"system": "qerl", "sizes": ["tiny"], "weights": ["nvfp4"]}
TRL = STEP | {"system": "trl", "weights": ["bf16"]}


def grid(*samples, **entries) -> ShapesSettings:
    """A grid of lists of entries, with the folders of its samples."""
    return parse(ShapesSettings, {"samples": [str(folder) for folder in samples] or ["committed"], **entries}, "grid")


def jobs_of(settings):
    return point_jobs(point_parts(settings), Path("work"))


def files_of(jobs):
    return [file.stem for job in jobs.values() for file in job.files]


# --- jobs


def test_ranks_of_a_size_and_format_share_a_job_and_vllm_starts_for_each_rank():
    found = jobs_of(grid(decode=[DECODE | {"weights": ["bf16", "nvfp4"], "ranks": [0, 4]}]))
    assert list(found) == ["decode-native-tiny-bf16", "decode-native-tiny-nvfp4"]
    assert files_of(found) == [f"decode-native-tiny-{w}-r{r}-128x256" for w in ("bf16", "nvfp4") for r in (0, 4)]
    one = found["decode-native-tiny-nvfp4"]
    work = {"engine": "native", "size": "tiny", "weights": "nvfp4", "rank": 4, "kernels": "auto", "prompt": 128}
    assert one.parts[1].work.model_dump() == work | {"tokens": 256, "pack_delta_nets": False, "runs": 1}
    assert (one.parts[1].points, one.out) == ([1, 2], Path("work/decode-native-tiny-nvfp4"))
    assert one.function == "qerl.bench.native:measure_points"
    vllm = [DECODE | {"engine": "vllm", "ranks": r, "prompt": p} for r, p in (([4, 8], [8]), ([4], [16]))]
    assert {id: [part.work.prompt for part in job.parts] for id, job in jobs_of(grid(decode=vllm)).items()} == {
        "decode-vllm-tiny-bf16-r4": [8, 16],
        "decode-vllm-tiny-bf16-r8": [8],
    }


def test_numbers_of_runs_are_files_of_one_job_of_decoding_and_jobs_of_rollouts():
    found = jobs_of(grid(mixes=[MIX | {"runs": [1, 2]}], decode=[DECODE | {"runs": [1, 4]}]))
    mix, decode = "mix-native-tiny-nvfp4-r32-64x8-300to2048-seed0", "decode-native-tiny-bf16"
    assert list(found) == [mix, f"{mix}-2runs", decode]
    assert files_of(found) == [mix, f"{mix}-2runs", f"{decode}-r4-128x256", f"{decode}-r4-128x256-4runs"]
    assert [part.work.runs for job in found.values() for part in job.parts] == [1, 2, 1, 4]


def test_the_content_of_a_trace_decides_its_points(tmp_path):
    trace = tmp_path / "logged.jsonl"
    mixes = [{"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "trace": str(trace)}]
    values = {"name": "speed", "shapes": {"samples": ["committed"], "decode": [DECODE], "mixes": mixes}}
    jobs = Jobs(plan_from(values, Path("config/mini.yaml")))
    [replayed, free] = jobs.plan.points
    assert replayed == "mix-native-tiny-bf16-r32-64x8-logged-seed0"
    contents = []
    for text in ("a", "a", "b"):
        trace.write_text(text)
        contents.append(jobs.content("point", replayed))
    assert contents[0] == contents[1] != contents[2]
    assert jobs.content("point", free) == []


def test_steps_are_jobs_by_system_recomputation_and_cap():
    ours = STEP | {"recompute": [True, False, "auto"], "memory_gb": [12, 24.5], "kv_cache_gib": 1.5, "sleep": True}
    found = jobs_of(grid(steps=[ours, TRL]))
    assert [*found][:2] == [
        "step-trl-tiny-bf16-r16-16x8-128x1024-recompute",
        "step-qerl-tiny-nvfp4-r16-16x8-128x1024-recompute-12gb",
    ]
    assert len(found) == 7
    capped = found["step-qerl-tiny-nvfp4-r16-16x8-128x1024-no-recompute-24.5gb"].parts[0].settings
    assert (capped.memory_gb, capped.recompute, capped.kv_cache_gib, capped.sleep) == (24.5, False, 1.5, True)
    assert capped.micro_batch_tokens == RunSettings.model_fields["micro_batch_tokens"].default
    chosen = found["step-qerl-tiny-nvfp4-r16-16x8-128x1024-auto-12gb"].parts[0].settings
    assert (chosen.recompute, chosen.micro_batch_tokens) == ("auto", 16 * (128 + 1024))
    trl = found["step-trl-tiny-bf16-r16-16x8-128x1024-recompute"]
    assert trl.function == "qerl.bench.trl:measure_steps"
    assert (trl.parts[0].settings.micro_batch, trl.parts[0].settings.recompute) == (16, True)


def test_equal_groups_mixed_lengths_and_trl_without_its_correction_are_points_of_their_own():
    [job] = jobs_of(grid(steps=[STEP | {"equal_groups": [0, 0.5]}])).values()
    name = "step-qerl-tiny-nvfp4-r16-16x8-128x1024"
    assert [(file.stem, part.work.equal_groups) for file, part in zip(job.files, job.parts, strict=True)] == [
        (f"{name}-recompute", 0),
        (f"{name}-equal0.5-recompute", 0.5),
    ]
    assert parse_job(job.model_dump_json()) == job
    mixed = {"median": 300, "sigma": 0.5}
    found = jobs_of(grid(steps=[STEP | {"median": 300}, TRL | mixed | {"correction": [True, False]}]))
    assert files_of(found) == [
        "step-trl-tiny-bf16-r16-16x8-128x300to1024-recompute",
        "step-trl-tiny-bf16-r16-16x8-128x300to1024-recompute-no-correction",
        "step-qerl-tiny-nvfp4-r16-16x8-128x300to1024-recompute",
    ]
    [corrected], [plain], [ours] = (job.parts for job in found.values())
    assert (ours.work.median, ours.work.sigma, ours.work.tokens) == (300, 0.8, 1024)
    assert (corrected.work.sigma, corrected.settings.correction, plain.settings.correction) == (0.5, True, False)


@pytest.mark.parametrize(
    ("kind", "entry", "message"),
    [
        ("decode", DECODE | {"sizes": ["9B"]}, "size '9B' is unknown"),
        ("decode", DECODE | {"engine": "vllm", "weights": ["mxfp4"]}, "vllm doesn't support mxfp4"),
        ("steps", TRL | {"weights": ["nvfp4"]}, "trl doesn't support nvfp4"),
        ("steps", TRL | {"sizes": ["mistral-7b"]}, "trl has no random bf16 weights of mistral"),
        (
            "decode",
            DECODE | {"engine": "vllm", "sizes": ["mistral-7b"], "weights": ["nf4"]},
            "no random nf4 weights of mis",
        ),
        ("decode", DECODE | {"engine": "vllm", "kernels": ["portable"]}, "vllm has no portable kernels"),
        (
            "decode",
            DECODE | {"engine": "vllm", "runs": [2]},
            "only this project's engine has several runs; remove runs",
        ),
        ("mixes", MIX | {"engine": "vllm", "runs": [1, 2]}, "remove runs from the entry of vllm"),
        ("decode", DECODE | {"ranks": [4, 4]}, "occurs twice"),
        ("decode", DECODE | {"weights": ["nvfp4"], "pack_delta_nets": True}, "in tiny; remove pack_delta_nets there"),
        ("steps", STEP | {"pack_delta_nets": True}, "asks for .* in tiny; remove pack_delta_nets there"),
        ("steps", STEP | {"sizes": ["qwen3.5-27b"], "weights": ["bf16"], "pack_delta_nets": True}, "in bf16; remove"),
        ("steps", STEP | {"equal_groups": [0.5], "prompts": [1]}, "equal_groups=0.5 of 1 prompts is no whole number"),
        ("steps", STEP | {"correction": [False]}, "only TRL's steps have correction; remove it from the entry of qerl"),
        ("steps", TRL | {"memory_gb": [12]}, "only this project's steps have memory_gb"),
        ("steps", TRL | {"kv_cache_gib": 1.5}, "only this project's steps have kv_cache_gib"),
        ("steps", TRL | {"sleep": True}, "only this project's steps have sleep"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(kind, entry, message):
    with pytest.raises(ConfigError, match=message):
        jobs_of(grid(**{kind: [entry]}))


# --- states


def committed(folder, part, **settings):
    """A committed file of a step, with settings of the part or others."""
    made = step_file(folder, "qerl NVFP4 LoRA", part.work.size, [1.0], part.settings.recompute)
    return moved(made, "GPU", **part.settings.model_dump() | settings).rename(folder / part.file)


@pytest.mark.parametrize("other", [{"micro_batch_tokens": 1152}, {"sleep": True}, {"kv_cache_gib": 2.0}])
def test_a_committed_step_with_other_settings_is_missing(tmp_path, other):
    settings = grid(tmp_path, steps=[STEP])
    [job] = jobs_of(settings).values()
    [part] = job.parts
    committed(tmp_path, part, **other)
    assert (state(job, settings), remaining(job, settings)) == ("missing", job)
    committed(tmp_path, part, recompute=str(part.settings.recompute).lower())  # as older files have it
    assert (state(job, settings), remaining(job, settings)) == ("committed", None)


def test_steps_of_the_same_weights_are_one_job_whose_measured_files_are_left_out(tmp_path):
    steps = [STEP | {"recompute": [True, False]}, STEP | {"prompts": [2], "memory_gb": [12]}, STEP | {"prompts": [2]}]
    settings = grid(tmp_path, steps=steps)
    shared, capped = jobs_of(settings).values()
    assert [file.stem.partition("-r16-")[2] for file in (*shared.files, *capped.files)] == [
        "16x8-128x1024-recompute",
        "16x8-128x1024-no-recompute",
        "2x8-128x1024-recompute",
        "2x8-128x1024-recompute-12gb",
    ]
    committed(tmp_path, shared.parts[1])
    assert remaining(shared, settings).files == [shared.files[0], shared.files[2]]
    assert state(shared, settings) == "committed, 2 of 3 points missing"


def test_prompts_are_jobs_by_policy_and_go_by_their_calls(tmp_path):
    asked = {"sizes": ["tiny"], "weights": ["nvfp4"], "ranks": [0, 16], "points": [[1, 16], [8, 64]]}
    settings = grid(tmp_path, prompts=[asked])
    jobs = jobs_of(settings)
    [part] = jobs["prompts-tiny-nvfp4-r16"].parts
    assert (part.points, part.work.rank, part.work.repeats) == ([(1, 16), (8, 64)], 16, 7)
    point = {"prompts": 8, "tokens": 64, "first": 1.0, "samples": [1.0], "reserved_bytes": None}
    result = {"bench": "prompts", "work": {"size": "tiny", "weights": "nvfp4", "rank": 16}, "sampler": "", "gpu": None}
    write_json(tmp_path / "prompts-tiny-nvfp4-r16.json", result | {"points": [point], "provenance": PROVENANCE})
    states = {id: state(one, settings) for id, one in jobs.items()}
    missing = {"prompts-tiny-nvfp4-r0": "missing", "prompts-tiny-nvfp4-r16": "committed, 1 of 2 points missing"}
    assert states == missing


def test_points_of_this_machine_come_first_then_those_of_the_first_folder_with_the_file(tmp_path):
    own, first, second = (tmp_path / name for name in ("own", "z", "a"))
    settings = grid(first, second, decode=[DECODE | {"ranks": [0, 4, 8, 16]}])
    [(id, job)] = point_jobs(point_parts(settings), own).items()
    names = [file.name for file in job.files]
    dropped = [f"decode-dropped-{end}.json" for end in "ab"]
    (own / id).mkdir(parents=True)
    stored = {own / id: [names[1]], first: [names[0], dropped[1]], second: [*names[:3], *dropped]}
    for folder, files in stored.items():
        for name in files:
            points = {count: [100.0] for count in ((1,) if folder == own / id else (1, 2))}
            decode_file(folder, "native", "bf16", points, rank=4, size="tiny").rename(folder / name)
    others = [second / dropped[0], first / dropped[1]]  # whose jobs are no longer in the grid
    found = [first / names[0], own / id / names[1], second / names[2], *others]
    assert measured_files(settings.samples, job.files) == found
    assert state(job, settings) == "committed and measured, 3 of 8 points missing"
    left = remaining(job, settings)
    assert [file.name for file in left.files] == [names[1], names[3]]  # what is committed whole isn't measured again
    nothing = grid(decode=[DECODE]).model_copy(update={"samples": []})  # as on a GPU of which nothing is committed
    assert [state(job, nothing) for job in jobs_of(nothing).values()] == ["missing"]


def test_the_command_line_lists_jobs_and_what_is_missing(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text(json.dumps({"name": "speed", "shapes": {"samples": ["committed"], "decode": [DECODE]}}))
    shown = CliRunner().invoke(app, ["grid", str(file)])
    assert "decode-native-tiny-bf16" in shown.output
    assert "1 jobs, 1 of them missing" in shown.output
    [command] = CliRunner().invoke(app, ["grid", str(file), "--missing"]).output.splitlines()
    *rule, text = shlex.split(command)
    assert rule == ["python", "-P", "-m", "qerl", "rule"]
    job = parse_job(text)
    points = "results/speed/points/decode-native-tiny-bf16/decode-native-tiny-bf16-r4-128x256.json"
    assert (job.kind, job.parts[0].work.size, [str(file) for file in job.files]) == ("point", "tiny", [points])


# --- committed grids


def committed_grid(name="shapes"):
    return plan_from(read_yaml(Path(f"config/{name}.yaml")), Path("config/mini.yaml")).config.shapes


@pytest.mark.parametrize(
    ("name", "gpus", "whole"),
    [
        ("families", ["H200", "H100"], True),
        ("cards", ["H200"], False),
        ("shapes", ["H200"], False),
        ("peers", ["H200", "H100"], True),
    ],
)
def test_the_committed_points_are_of_these_gpus(name, gpus, whole):
    """What the README states is committed as a whole."""
    settings = committed_grid(name)
    files = measured_files(settings.samples, [file for job in jobs_of(settings).values() for file in job.files])
    labels = [json.loads(file.read_text())["provenance"]["machine"]["label"] for file in files]
    assert {label.split()[2] for label in labels} == set(gpus)
    if whole:
        assert {state(job, settings) for job in jobs_of(settings).values()} == {"committed"}


def test_the_committed_grid_has_all_that_the_papers_tables_ask_for():
    """Tables 3 and 5 to 9 and Figures 1 and 11 in both readings of a batch, by both engines."""
    parts = [(id, part) for id, job in jobs_of(committed_grid()).items() for part in job.parts]
    steps = {part.file for id, part in parts if id.startswith("step-")}
    decodes = {(part.file, count) for id, part in parts if id.startswith("decode-") for count in part.points}
    names, asked = (*(f"table{n}" for n in (3, 5, 6, 7, 8, 9)), "figure1", "figure11"), set()
    for name in names:
        for cell in beside(cells_of(name, kinds=["rollout", "step"]), []).to_dict("records"):
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


def verdict_of(part):
    """Whether a step fits under its cap, which doesn't count CUDA's context, by the memory model."""
    work = part.work
    lengths = {"group": work.group_size, "prompt_tokens": work.prompt, "max_tokens": work.tokens}
    asked = {**work.model_dump(), **lengths, **part.settings.model_dump()}
    settings = StepSettings(**{field.name: asked[field.name] for field in fields(StepSettings) if field.name in asked})
    shape = ModelShape.of(QWEN[work.size])
    return step_memory(shape, settings, part.settings.memory_gb * 1e9 + CONTEXT).verdict


def test_caps_have_settings_that_fit():
    """Each size under each cap, by settings of which the memory model says what config/cards.yaml does."""
    jobs = [job for job in jobs_of(committed_grid("cards")).values() if job.parts[0].work.bench == "grpo_step"]
    parts = [part for job in jobs for part in job.parts if part.settings.memory_gb]
    verdicts = {(part.work.size, part.settings.memory_gb): verdict_of(part) for part in parts}
    assert set(verdicts) == set(product(("1.5B", "3B", "7B", "8B", "14B"), (12, 16, 24, 32)))
    unlike = {key: verdict for key, verdict in verdicts.items() if verdict != "fits"}
    assert unlike == {("14B", 12): "doesn't fit", ("14B", 16): "tight"}
