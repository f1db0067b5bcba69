"""The jobs of the speed grid: their measurements, commands and states."""

from pathlib import Path

import pytest

from qerl.jobs import parse_job
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings
from qerl.settings.workflow import ShapesSettings
from qerl.workflow.grid import point_jobs, state
from qerl.workflow.plan import plan_from
from qerl.workflow.stages import Jobs
from tests.synthetic_results import PROVENANCE, write_json

DECODE = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "sequences": [1, 2]}
STEP = {"system": "qerl", "sizes": ["tiny"], "weights": ["nvfp4"]}


def grid(*folders, **changes):
    samples = [str(folder) for folder in folders] or ["committed"]
    return parse(ShapesSettings, {"samples": samples, "decode": [DECODE | changes]}, "grid")


def jobs_of(settings):
    return point_jobs(settings, Path("work"))


def files_of(jobs):
    return [file.stem for job in jobs.values() for file in job.files]


def test_ranks_of_a_size_and_format_share_a_job():
    found = jobs_of(grid(weights=["bf16", "nvfp4"], ranks=[0, 4]))
    assert list(found) == ["decode-native-tiny-bf16", "decode-native-tiny-nvfp4"]
    assert files_of(found) == [f"decode-native-tiny-{w}-r{r}-128x256" for w in ("bf16", "nvfp4") for r in (0, 4)]
    one = found["decode-native-tiny-nvfp4"]
    lengths = {"prompt": 128, "tokens": 256}
    work = {"engine": "native", "size": "tiny", "weights": "nvfp4", "rank": 4, "kernels": "auto", **lengths}
    work["pack_delta_nets"] = False
    assert one.parts[1].work.model_dump() == work
    assert one.parts[1].sequences == [1, 2]
    assert one.out == Path("work/decode-native-tiny-nvfp4")
    assert one.function == "qerl.bench.decode:measure_points"


@pytest.mark.parametrize(("size", "weights", "told"), [("qwen3.5-27b", "bf16", "bf16"), ("tiny", "nvfp4", "in tiny")])
def test_packed_delta_nets_of_a_grid_need_some_and_a_packed_format(size, weights, told):
    for asked in ({"decode": [DECODE]}, {"steps": [STEP]}):
        [(key, [entry])] = asked.items()
        changed = entry | {"sizes": [size], "weights": [weights], "pack_delta_nets": True}
        with pytest.raises(ConfigError, match=f"pack_delta_nets asks for .*{told}; remove pack_delta_nets there"):
            jobs_of(parse(ShapesSettings, {"samples": ["committed"], key: [changed]}, "grid"))


def test_vllm_starts_for_each_rank_and_entries_share_its_jobs():
    entries = [
        DECODE | {"engine": "vllm", "ranks": ranks, "prompt": prompt} for ranks, prompt in (([4, 8], [8]), ([4], [16]))
    ]
    found = jobs_of(parse(ShapesSettings, {"samples": ["committed"], "decode": entries}, "grid"))
    assert {id: [part.work.prompt for part in job.parts] for id, job in found.items()} == {
        "decode-vllm-tiny-bf16-r4": [8, 16],
        "decode-vllm-tiny-bf16-r8": [8],
    }


def test_the_content_of_a_trace_decides_its_points(tmp_path):
    trace = tmp_path / "logged.jsonl"
    mixes = [{"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "trace": str(trace)}]
    values = {"name": "speed", "shapes": {"samples": ["committed"], "decode": [DECODE], "mixes": mixes}}
    jobs = Jobs(plan_from(values, Path("config/mini.yaml")))
    [replayed, free] = jobs.points
    assert replayed == "mix-native-tiny-bf16-r32-64x8-logged-seed0"
    contents = []
    for text in ("a", "a", "b"):
        trace.write_text(text)
        contents.append(jobs.content("point", replayed))
    assert contents[0] == contents[1] != contents[2]
    assert jobs.content("point", free) == []


def test_steps_are_jobs_by_recomputation_and_cap():
    settings = parse(
        ShapesSettings,
        {
            "samples": ["committed"],
            "decode": [],
            "steps": [
                STEP | {"recompute": [True, False, "auto"], "memory_gb": [12, 24.5]},
                STEP | {"system": "trl", "weights": ["bf16"]},
            ],
        },
        "grid",
    )
    found = jobs_of(settings)
    assert [*found][:2] == [
        "step-trl-tiny-bf16-r16-16x8-128x1024-recompute",
        "step-qerl-tiny-nvfp4-r16-16x8-128x1024-recompute-12gb",
    ]
    [capped] = found["step-qerl-tiny-nvfp4-r16-16x8-128x1024-no-recompute-24.5gb"].parts
    assert (capped.settings.memory_gb, capped.settings.recompute) == (24.5, False)
    assert capped.settings.micro_batch_tokens == RunSettings.model_fields["micro_batch_tokens"].default
    chosen = found["step-qerl-tiny-nvfp4-r16-16x8-128x1024-auto-12gb"].parts[0].settings
    assert (chosen.recompute, chosen.micro_batch_tokens) == ("auto", 16 * (128 + 1024))
    trl = found["step-trl-tiny-bf16-r16-16x8-128x1024-recompute"]
    assert trl.function == "qerl.bench.trl:measure_steps"
    assert (trl.parts[0].settings.micro_batch, trl.parts[0].settings.recompute) == (16, True)
    assert len(found) == 7


def test_steps_of_equal_groups_are_points_of_their_own():
    of = lambda **changes: parse(  # noqa: E731
        ShapesSettings, {"samples": ["committed"], "decode": [], "steps": [STEP | changes]}, "grid"
    )
    [job] = jobs_of(of(equal_groups=[0, 0.5])).values()
    whole, half = job.parts
    assert [file.stem for file in job.files] == [
        f"step-qerl-tiny-nvfp4-r16-16x8-128x1024{equal}-recompute" for equal in ("", "-equal0.5")
    ]
    assert (whole.work.equal_groups, half.work.equal_groups) == (0, 0.5)
    assert parse_job(job.model_dump_json()) == job
    assert len(jobs_of(of(equal_groups=[0.7], prompts=[10]))) == 1
    with pytest.raises(ConfigError, match=r"equal_groups=0.5 of 1 prompts is no whole number; change either"):
        jobs_of(of(equal_groups=[0.5], prompts=[1]))


def test_steps_of_mixed_lengths_and_of_trl_without_its_correction_are_points_of_their_own():
    trl = STEP | {"system": "trl", "weights": ["bf16"], "median": 300, "sigma": 0.5, "correction": [True, False]}
    steps = [STEP | {"median": 300}, trl]
    found = jobs_of(parse(ShapesSettings, {"samples": ["committed"], "steps": steps}, "grid"))
    assert [file.stem for job in found.values() for file in job.files] == [
        "step-trl-tiny-bf16-r16-16x8-128x300to1024-recompute",
        "step-trl-tiny-bf16-r16-16x8-128x300to1024-recompute-no-correction",
        "step-qerl-tiny-nvfp4-r16-16x8-128x300to1024-recompute",
    ]
    [corrected], [plain], [ours] = (job.parts for job in found.values())
    assert (ours.work.median, ours.work.sigma, ours.work.tokens) == (300, 0.8, 1024)
    assert (corrected.work.sigma, corrected.settings.correction, plain.settings.correction) == (0.5, True, False)
    refused = parse(ShapesSettings, {"samples": ["committed"], "steps": [STEP | {"correction": [False]}]}, "grid")
    with pytest.raises(ConfigError, match="only TRL's steps have correction; remove it from the entry of qerl"):
        jobs_of(refused)


@pytest.mark.parametrize("key", ["memory_gb", "kv_cache_gib", "sleep"])
def test_trl_has_no_settings_of_our_engine(key):
    value = {"memory_gb": [12], "kv_cache_gib": 1.5, "sleep": True}
    ours = parse(ShapesSettings, {"samples": ["committed"], "steps": [STEP | value]}, "grid")
    [job] = jobs_of(ours).values()
    [part] = job.parts
    assert (part.settings.memory_gb, part.settings.kv_cache_gib, part.settings.sleep) == (12, 1.5, True)
    steps = [STEP | {"system": "trl", "weights": ["bf16"], key: value[key]}]
    with pytest.raises(ConfigError, match=f"only this project's steps have {key}"):
        jobs_of(parse(ShapesSettings, {"samples": ["committed"], "steps": steps}, "grid"))


def test_prompts_are_jobs_by_policy_and_go_by_their_calls(tmp_path):
    asked = {"sizes": ["tiny"], "weights": ["nvfp4"], "ranks": [0, 16], "points": [[1, 16], [8, 64]]}
    settings = parse(ShapesSettings, {"samples": [str(tmp_path)], "prompts": [asked]}, "grid")
    jobs = jobs_of(settings)
    assert list(jobs) == ["prompts-tiny-nvfp4-r0", "prompts-tiny-nvfp4-r16"]
    job = jobs["prompts-tiny-nvfp4-r16"]
    [part] = job.parts
    assert (part.points, part.work.rank, part.work.repeats) == ([(1, 16), (8, 64)], 16, 7)
    assert job.function == "qerl.bench.decode:measure_prompts"
    point = {"prompts": 8, "tokens": 64, "first": 1.0, "samples": [1.0], "reserved_bytes": None}
    work = {"size": "tiny", "weights": "nvfp4", "rank": 16}
    result = {"bench": "prompts", "work": work, "sampler": "", "gpu": None}
    write_json(tmp_path / "prompts-tiny-nvfp4-r16.json", result | {"points": [point], "provenance": PROVENANCE})
    states = [state(one, settings) for one in jobs.values()]
    assert states == ["missing", "committed, 1 of 2 points missing"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": ["9B"]}, "size '9B' is unknown"),
        ({"engine": "vllm", "weights": ["mxfp4"]}, "vllm doesn't support mxfp4"),
        ({"engine": "transformers", "weights": ["nvfp4"]}, "transformers doesn't support nvfp4"),
        ({"engine": "transformers", "sizes": ["mistral-7b"]}, "transformers has no random bf16 weights of mistral-7b"),
        ({"engine": "vllm", "sizes": ["phi-4"], "weights": ["nf4"]}, "vllm has no random nf4 weights of phi-4"),
        ({"engine": "vllm", "kernels": ["portable"]}, "vllm has no portable kernels"),
        ({"ranks": [4, 4]}, "occurs twice"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(changes, message):
    with pytest.raises(ConfigError, match=message):
        jobs_of(grid(**changes))
