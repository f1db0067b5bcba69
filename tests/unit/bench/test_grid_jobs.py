"""The jobs of the speed grid: their measurements, commands and states."""

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qerl.cli.commands import app
from qerl.jobs.dispatch import function_of, parse_job
from qerl.plan import plan_from
from qerl.plan.jobs import Jobs
from qerl.plan.shapes import file_of, measured_files, point_jobs, state
from qerl.settings.base import ConfigError, parse
from qerl.settings.benches import ShapesSettings
from qerl.settings.config import Config
from qerl.settings.reading import read_yaml
from qerl.settings.run import RunSettings
from tests.synthetic_results import PROVENANCE, decode_file, write_json

DECODE = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "sequences": [1, 2]}
STEP = {"system": "qerl", "sizes": ["tiny"], "weights": ["nvfp4"]}


def grid(folder="committed", **changes):
    return parse(ShapesSettings, {"samples": str(folder), "decode": [DECODE | changes]}, "grid")


def jobs_of(settings):
    return point_jobs(settings, Path("work"))


def test_a_job_for_each_size_format_and_rank():
    found = jobs_of(grid(weights=["bf16", "nvfp4"], ranks=[0, 4]))
    assert list(found) == [f"decode-native-tiny-{w}-r{r}-128x256" for w in ("bf16", "nvfp4") for r in (0, 4)]
    one = found["decode-native-tiny-nvfp4-r4-128x256"]
    lengths = {"prompt": 128, "tokens": 256}
    assert one.work.model_dump() == {"engine": "native", "size": "tiny", "weights": "nvfp4", "rank": 4, **lengths}
    assert one.sequences == [1, 2]
    assert one.out == Path("work/decode-native-tiny-nvfp4-r4-128x256/points.json")
    assert function_of(one) == ("qerl.bench.decode.engine", "measure_points")


def test_rollouts_of_mixed_lengths_are_jobs_by_engine_and_format():
    mixes = [{"engine": engine, "sizes": ["tiny"], "weights": ["bf16", "nvfp4"]} for engine in ("native", "vllm")]
    found = jobs_of(parse(ShapesSettings, {"samples": "committed", "mixes": mixes}, "grid"))
    ids = [f"mix-{e}-tiny-{w}-r32-64x8-300to2048-seed0" for e in ("native", "vllm") for w in ("bf16", "nvfp4")]
    assert list(found) == ids
    ours, theirs = found[ids[1]], found[ids[3]]
    assert {**ours.work.model_dump(), "engine": "vllm"} == theirs.work.model_dump()
    assert function_of(ours) == ("qerl.bench.rollout_mix.engine", "measure_mix")
    assert function_of(theirs) == ("qerl.bench.rollout_mix.vllm", "measure_mix")
    assert parse_job(ours.model_dump_json()) == ours


def test_the_content_of_a_trace_decides_its_points(tmp_path):
    trace = tmp_path / "logged.jsonl"
    mixes = [{"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "trace": str(trace)}]
    values = {"name": "speed", "shapes": {"samples": "committed", "decode": [DECODE], "mixes": mixes}}
    jobs = Jobs(plan_from(values, Path("config/mini.yaml")))
    [replayed, free] = jobs.points
    assert replayed == "mix-native-tiny-bf16-r32-64x8-logged-seed0"
    contents = []
    for text in ("a", "a", "b"):
        trace.write_text(text)
        contents.append(jobs.content("point", replayed))
    assert contents[0] == contents[1] != contents[2]
    assert jobs.content("point", free) == []


def test_prompts_of_no_length_are_an_error():
    mixes = [{"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "prompt": [8, 4]}]
    with pytest.raises(ConfigError, match="swap the two numbers"):
        jobs_of(parse(ShapesSettings, {"samples": "committed", "mixes": mixes}, "grid"))


def test_steps_are_jobs_by_recomputation_and_cap():
    settings = parse(
        ShapesSettings,
        {
            "samples": "committed",
            "decode": [],
            "steps": [
                STEP | {"recompute": [True, False, "auto"], "memory_gb": [12, 24.5]},
                STEP | {"system": "trl", "weights": ["bf16"]},
            ],
        },
        "grid",
    )
    found = jobs_of(settings)
    assert next(iter(found)) == "step-qerl-tiny-nvfp4-r16-16x8-128x1024-recompute-12gb"
    capped = found["step-qerl-tiny-nvfp4-r16-16x8-128x1024-no-recompute-24.5gb"]
    assert (capped.settings.memory_gb, capped.settings.recompute) == (24.5, False)
    assert capped.settings.micro_batch_tokens == RunSettings.model_fields["micro_batch_tokens"].default
    chosen = found["step-qerl-tiny-nvfp4-r16-16x8-128x1024-auto-12gb"].settings
    assert (chosen.recompute, chosen.micro_batch_tokens) == ("auto", 16 * (128 + 1024))
    trl = found["step-trl-tiny-bf16-r16-16x8-128x1024-recompute"]
    assert (trl.kind, trl.settings.micro_batch, trl.settings.recompute) == ("trl_step", 16, True)
    assert len(found) == 7


def test_steps_of_equal_groups_are_points_of_their_own():
    of = lambda **changes: parse(  # noqa: E731
        ShapesSettings, {"samples": "committed", "decode": [], "steps": [STEP | changes]}, "grid"
    )
    found = jobs_of(of(equal_groups=[0, 0.5]))
    whole, half = found.values()
    assert list(found) == [f"step-qerl-tiny-nvfp4-r16-16x8-128x1024{equal}-recompute" for equal in ("", "-equal0.5")]
    assert (whole.work.equal_groups, half.work.equal_groups) == (0, 0.5)
    assert parse_job(half.model_dump_json()) == half
    assert len(jobs_of(of(equal_groups=[0.7], prompts=[10]))) == 1
    with pytest.raises(ConfigError, match=r"equal_groups=0.5 of 1 prompts is no whole number; change either"):
        jobs_of(of(equal_groups=[0.5], prompts=[1]))


def test_trl_does_not_choose_what_it_recomputes():
    steps = [STEP | {"system": "trl", "weights": ["bf16"], "recompute": ["auto"]}]
    with pytest.raises(ConfigError, match="doesn't support recompute: auto"):
        jobs_of(parse(ShapesSettings, {"samples": "committed", "decode": [], "steps": steps}, "grid"))


def test_steps_are_jobs_by_their_work():
    """TRL's forward pass takes no more completions than a step has."""
    work = {"weights": ["bf16"], "prompts": [1, 2], "group_size": [4, 8], "micro_batch": 8}
    settings = parse(
        ShapesSettings,
        {"samples": "committed", "decode": [], "steps": [STEP | work | {"system": "trl", "prompt": 256}]},
        "grid",
    )
    found = jobs_of(settings)
    assert list(found) == [f"step-trl-tiny-bf16-r16-{w}-256x1024-recompute" for w in ("1x4", "1x8", "2x4", "2x8")]
    batches = [(job.work.prompts, job.work.group, job.settings.micro_batch) for job in found.values()]
    assert batches == [(1, 4, 4), (1, 8, 8), (2, 4, 8), (2, 8, 8)]


def test_prompts_are_jobs_by_policy_and_go_by_their_calls(tmp_path):
    asked = {"sizes": ["tiny"], "weights": ["nvfp4"], "ranks": [0, 16], "points": [[1, 16], [8, 64]]}
    settings = parse(ShapesSettings, {"samples": str(tmp_path), "prompts": [asked]}, "grid")
    jobs = jobs_of(settings)
    assert list(jobs) == ["prompts-tiny-nvfp4-r0", "prompts-tiny-nvfp4-r16"]
    job = jobs["prompts-tiny-nvfp4-r16"]
    assert (job.points, job.work.rank, job.repeats) == ([(1, 16), (8, 64)], 16, 7)
    assert function_of(job) == ("qerl.bench.prompts", "measure_prompts")
    point = {"prompts": 8, "tokens": 64, "first": 1.0, "samples": [1.0], "reserved_bytes": None}
    result = {"bench": "prompts", "size": "tiny", "weights": "nvfp4", "rank": 16, "sampler": "", "gpu": None}
    write_json(tmp_path / "prompts-tiny-nvfp4-r16.json", result | {"points": [point], "provenance": PROVENANCE})
    states = [state(id, one, settings, tmp_path / "none") for id, one in jobs.items()]
    assert states == ["missing", "committed, 1 of 2 points missing"]


def test_prompts_of_several_lengths_are_jobs():
    found = jobs_of(grid(prompt=[1024, 16384]))
    assert list(found) == ["decode-native-tiny-bf16-r4-1024x256", "decode-native-tiny-bf16-r4-16384x256"]
    assert found["decode-native-tiny-bf16-r4-16384x256"].work.prompt == 16384


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ["8B"]}, "size '8B' is unknown"),
        ({"engine": "vllm", "weights": ["mxfp4"]}, "vllm doesn't support mxfp4"),
        ({"engine": "transformers", "weights": ["nvfp4"]}, "transformers doesn't support nvfp4"),
        ({"ranks": [4, 4]}, "occurs twice"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(changes, message):
    with pytest.raises(ConfigError, match=message):
        jobs_of(grid(**changes))


def test_an_empty_list_is_an_error():
    with pytest.raises(ConfigError, match="sizes"):
        grid(sizes=[])


def test_points_of_this_machine_come_before_committed_ones(tmp_path):
    own, committed = tmp_path / "own", tmp_path / "committed"
    settings = grid(committed, ranks=[0, 4, 8])
    names = [file_of(id) for id in jobs_of(settings)]
    for folder, files in ((own, names[1:2]), (committed, names[:2])):
        folder.mkdir()
        for name in files:
            points = {count: [100.0] for count in ((1,) if folder == own else (1, 2))}
            decode_file(folder, "native", "bf16", points, rank=4, size="tiny").rename(folder / name)
    assert measured_files(settings, own) == [committed / names[0], own / names[1]]
    states = [state(id, job, settings, own) for id, job in jobs_of(settings).items()]
    assert states == ["committed", "measured, 1 of 2 points missing", "missing"]


def test_the_committed_grid_is_whole():
    """What the issue of the speed tables names is among the jobs of config/shapes.yaml."""
    found = jobs_of(plan_from(read_yaml(Path("config/shapes.yaml")), Path("config/mini.yaml")).config.shapes)
    for engine in ("native", "vllm"):
        for size in ("7B", "14B", "32B"):
            for weights in ("bf16", "nf4", "nvfp4"):
                for rank in (16, 64):
                    job = found[f"decode-{engine}-{size}-{weights}-r{rank}-128x256"]
                    assert {1, 8, 32, 64, 256} <= set(job.sequences)
    assert "step-qerl-32B-nvfp4-r16-16x8-128x1024-recompute-80gb" in found


def test_the_committed_grid_begins_with_rollouts_of_mixed_lengths():
    found = jobs_of(plan_from(read_yaml(Path("config/shapes.yaml")), Path("config/mini.yaml")).config.shapes)
    assert [id.partition("-r32")[0] for id in [*found][:2]] == ["mix-native-7B-nvfp4", "mix-native-7B-bf16"]
    assert {"mix-vllm-7B-bf16", "mix-vllm-7B-nvfp4"} <= {id.partition("-r32")[0] for id in found}


def test_the_committed_grid_has_the_contexts_early_and_the_papers_steps():
    found = jobs_of(plan_from(read_yaml(Path("config/shapes.yaml")), Path("config/mini.yaml")).config.shapes)
    names = list(found)
    contexts = [f"decode-native-7B-{w}-r16-{prompt}x256" for w in ("nvfp4", "bf16") for prompt in (1024, 8192, 16384)]
    contexts += [f"decode-vllm-7B-{w}-r16-{prompt}x256" for w in ("nvfp4", "bf16") for prompt in (1024, 8192)]
    later = names.index("decode-native-7B-nvfp4-r0-128x256")
    assert max(map(names.index, contexts)) < later
    assert min(map(names.index, contexts)) > names.index("decode-transformers-7B-nf4-r64-128x256")
    # Tables 3 and 5 to 8, a batch of 8 in both readings.
    for work in ("1x8", "8x8"):
        for size, weights in (("7B", "nf4"), ("14B", "nf4"), ("3B", "bf16"), ("32B", "bf16"), ("32B", "nvfp4")):
            for recompute in ("recompute", "no-recompute"):
                assert f"step-qerl-{size}-{weights}-r16-{work}-256x2048-{recompute}" in found


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
    *rule, text = shlex.split(commands[0])
    assert (len(commands), rule) == (1, ["python", "-m", "qerl", "rule"])
    job = parse_job(text)
    assert (job.kind, job.work.size) == ("decode", "tiny")
    assert str(job.out) == "results/speed/points/decode-native-tiny-bf16-r4-128x256.json"
