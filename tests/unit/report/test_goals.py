import json
from pathlib import Path

import pandas as pd
import pytest

from qerl.report.goals import goals, write_goals
from qerl.results import speed_readers
from tests.synthetic_results import OUT_OF_MEMORY, decode_file, moved, step_file

NOTHING = pd.DataFrame()
SAMPLES = Path("results/reference/h200/peers")


def reached(table: pd.DataFrame) -> dict[str, tuple]:
    return {row["goal"]: (row["reached"], row["met"]) for row in table.to_dict("records")}


@pytest.fixture
def points(tmp_path) -> pd.DataFrame:
    """Native NVFP4 with and without an adapter beside vLLM's."""
    return speed_readers.load_points(
        [
            decode_file(tmp_path, "native", "nvfp4", {1: [500.0] * 3, 8: OUT_OF_MEMORY, 64: [4500.0] * 3}),
            decode_file(tmp_path, "native", "nvfp4", {1: [540.0] * 3, 64: [5000.0] * 3}, rank=0),
            decode_file(tmp_path, "vllm", "nvfp4", {1: [200.0] * 3, 8: [1500.0] * 3, 64: [4000.0] * 3}),
            decode_file(tmp_path, "vllm", "bf16", {1: [600.0] * 3, 64: [5000.0] * 3}),
        ]
    )


def test_decode_is_over_what_each_goal_names(points):
    found = reached(goals(points, NOTHING, NOTHING))
    assert found["7B decode, 1 sequence, over vLLM's NVFP4"] == (2.5, "yes")  # BF16, here faster, isn't asked for
    assert found["7B decode, 8 sequences, over vLLM's NVFP4"] == ("native NVFP4: out of memory", "–")
    assert found["7B decode, 64 sequences, over the faster of vLLM's BF16 and NVFP4"] == (0.9, "no")
    assert found["7B decode, 128 sequences, over the faster of vLLM's BF16 and NVFP4"] == ("–", "–")
    assert found["7B decode, 512 sequences"] == ("–", "–")


def test_a_published_shape_has_its_goals(tmp_path):
    shape = "qwen3-30b-a3b"
    files = [
        decode_file(tmp_path, "native", "nvfp4", {1: [400.0] * 3, 32: [3600.0] * 3}, size=shape),
        decode_file(tmp_path, "vllm", "nvfp4", {1: [100.0] * 3}, size=shape),
        decode_file(tmp_path, "vllm", "bf16", {1: [160.0] * 3, 32: [2000.0] * 3}, size=shape),
    ]
    found = reached(goals(speed_readers.load_points(files), NOTHING, NOTHING))
    of = "over the faster of vLLM's BF16 and NVFP4"
    assert found[f"{shape} decode, 1 sequence, {of}"] == (2.5, "yes")
    assert found[f"{shape} decode, 32 sequences, {of}"] == ("–", "–")  # NVFP4 may be faster
    assert all(goal.startswith(shape) for goal in found)


def test_the_goal_of_a_hybrid_is_that_of_packed_delta_nets(tmp_path):
    made = [
        decode_file(
            tmp_path / f"{packed}", engine, weights, {1: [rate] * 3}, size="qwen3.5-27b", pack_delta_nets=packed
        )
        for engine, weights, packed, rate in (
            ("native", "nvfp4", False, 900.0),
            ("native", "nvfp4", True, 200.0),
            ("vllm", "nvfp4", True, 100.0),
            ("vllm", "nvfp4", False, 50.0),
            ("vllm", "bf16", False, 40.0),
        )
    ]
    found = reached(goals(speed_readers.load_points(made), NOTHING, NOTHING))
    goal = "qwen3.5-27b NVFP4-DELTA-NETS decode, 1 sequence, over the faster of vLLM's BF16, NVFP4 and NVFP4-DELTA-NETS"
    assert found[goal] == (2.0, "yes")


def test_an_adapter_costs_percent_of_the_speed_without(points):
    table = goals(points, NOTHING, NOTHING)
    found = reached(table)
    assert found["cost of LoRA r16, 7B decode, 1 sequence"] == (pytest.approx(100 * 40 / 540), "yes")
    assert found["cost of LoRA r16, 7B decode, 64 sequences"] == (pytest.approx(10.0), "no")
    assert found["cost of LoRA r64, 7B decode, 1 sequence"] == ("–", "–")


def test_ends_of_a_cost_are_in_order(tmp_path):
    files = [
        decode_file(tmp_path, "native", "nvfp4", {1: [90.0, 95.0, 99.0]}),
        decode_file(tmp_path, "native", "nvfp4", {1: [100.0, 101.0, 102.0]}, rank=0),
    ]
    table = goals(speed_readers.load_points(files), NOTHING, NOTHING).set_index("goal")
    row = table.loc["cost of LoRA r16, 7B decode, 1 sequence"]
    assert row["reached_low"] < row["reached"] < row["reached_high"]
    assert row["reached_high"] == pytest.approx(100 * (1 - 90 / 102), abs=2)


MIXED = ("prompt_tokens", "completion_tokens", "median", "sigma", "equal_groups")


def changed(file: Path, **values) -> Path:
    """A file of a step with other settings or work."""
    step = json.loads(file.read_text())
    for key, names in {"settings": ("memory_gb",), "work": ("weights", "group", *MIXED)}.items():
        step[key] |= {name: value for name, value in values.items() if name in names}
    to = file.with_name(f"changed-{len(list(file.parent.iterdir()))}.json")
    to.write_text(json.dumps(step))
    return to


def test_steps_are_compared_at_the_same_work(tmp_path):
    under_a_cap = changed(step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [1.0, 1.0], "auto"), memory_gb=24)
    trl = step_file(tmp_path, "TRL 1.16.0 BF16 LoRA", "7B", [19.0, 19.0], True)
    uncorrected = step_file(tmp_path, "TRL 1.16.0 BF16 LoRA without correction", "7B", [17.0, 17.0], True)
    mixed = {"prompt_tokens": 256, "completion_tokens": 2048, "median": 300, "sigma": 0.8, "equal_groups": 0.5}
    portable = step_file(tmp_path, "qerl-portable NVFP4 LoRA", "7B", [1.0, 1.0], "auto")
    others = [portable, changed(uncorrected, weights="bf16"), changed(trl, weights="bf16")]
    others += [changed(trl, weights="nf4", group=4), changed(trl, weights="bf16", **mixed)]
    others += [changed(step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [4.0, 4.0], "auto"), **mixed)]
    # An update takes 0.3 of a step in these files.
    others.append(changed(step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [5.0, 5.0], "auto"), equal_groups=0.5))
    own = step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [10.0, 10.0], "auto")
    steps = speed_readers.load_steps([under_a_cap, *reversed(others), own])
    assert [work for work in steps["work"].unique() if "equal" in work] == [
        "16 × 8, 128 + 1024 tokens, 50% of the groups equal",
        "16 × 8, 256 + 300 to 2048 tokens, 50% of the groups equal",
    ]
    found = reached(goals(NOTHING, steps, NOTHING))
    assert found["7B GRPO step, over TRL's BF16 LoRA"] == (1.9, "no")
    assert found["7B GRPO step, over TRL's BF16 LoRA without correction"] == (1.7, "no")
    assert found["7B GRPO step, over TRL's NF4 LoRA"] == ("–", "–")
    mixed_goal = "7B GRPO step of mixed lengths, 50% of the groups without a gradient, over TRL's BF16 LoRA"
    assert found[mixed_goal] == (4.75, "yes")
    assert found["7B update, 50% of the groups without a gradient, over one with all"] == (0.5, "yes")
    assert found["7B GRPO step, memory without the KV cache, all recomputed"] == ("–", "–")


def test_memory_is_that_of_a_step_that_recomputes(tmp_path):
    files = [
        step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [10.0], "true"),
        step_file(tmp_path, "qerl NVFP4 LoRA", "32B", [10.0], "true"),
    ]
    found = reached(goals(NOTHING, speed_readers.load_steps(files), NOTHING))
    assert found["7B GRPO step, memory without the KV cache, all recomputed"] == (12.0, "yes")
    assert found["32B GRPO step, memory without the KV cache, all recomputed"] == (12.0, "yes")
    assert not any(goal.startswith("14B") for goal in found)  # of which nothing is measured


@pytest.mark.parametrize("caps", [[40, 80], [80, 40], [40, 80, None]])
def test_memory_is_that_of_the_widest_cap(tmp_path, caps):
    """Under a tight one the highest peak is the rollout's, which without its cache has less than the update."""
    files = []
    for cap in caps:
        file = changed(step_file(tmp_path, "qerl NVFP4 LoRA", "32B", [10.0], "true"), memory_gb=cap)
        step = json.loads(file.read_text())
        step["memory"]["without_kv_cache_bytes"] = (cap or 100) * 1e9
        file.write_text(json.dumps(step))
        files.append(file)
    found = reached(goals(NOTHING, speed_readers.load_steps(files), NOTHING))
    assert found["32B GRPO step, memory without the KV cache, all recomputed"][0] == (100.0 if None in caps else 80.0)


def test_the_table_tells_limit_and_interval(tmp_path, points):
    write_goals(points, NOTHING, NOTHING, tmp_path / "goals")
    text = (tmp_path / "goals.md").read_text()
    for shown in ("≥ 2.50×", "2.50× [2.50×, 2.50×]", "≤ 8.0 %", "7.4 % [7.4 %, 7.4 %]"):
        assert shown in text


def test_goals_of_several_gpus_name_them(tmp_path, points):
    step = moved(step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [10.0], "true"), "1x NVIDIA H100 80GB HBM3")
    write_goals(points, NOTHING, NOTHING, tmp_path / "one")
    write_goals(points, speed_readers.load_steps([step]), NOTHING, tmp_path / "two")
    one, two = ((tmp_path / f"{name}.md").read_text() for name in ("one", "two"))
    assert "| GPU" in two
    assert "| yes   | H100 80GB HBM3 |" in two
    assert "GPU" not in one.split("\n\n")[0]
    assert set(pd.read_csv(tmp_path / "one.csv")["machine"].dropna()) == {"Test GPU"}


def test_the_rate_of_many_sequences_is_absolute(tmp_path):
    file = decode_file(tmp_path, "native", "nvfp4", {512: [36000.0, 46000.0, 45500.0]})
    points = speed_readers.load_points([file])
    assert reached(goals(points, NOTHING, NOTHING))["7B decode, 512 sequences"] == (45500.0, "yes")
    write_goals(points, NOTHING, NOTHING, tmp_path / "goals")
    assert "45,500 tokens/s" in (tmp_path / "goals.md").read_text()


def test_nothing_measured_is_no_table(tmp_path):
    other = decode_file(tmp_path, "native", "nvfp4", {1: [500.0]}, prompt=1024)
    write_goals(speed_readers.load_points([other]), NOTHING, NOTHING, tmp_path / "goals")
    assert not list(tmp_path.glob("goals*"))


def test_committed_points_have_all_of_it():
    files = sorted(SAMPLES.glob("*.json"))
    kinds = ("decode", "step", "mix")
    decode, steps, mixes = ([file for file in files if file.name.startswith(kind)] for kind in kinds)
    read = speed_readers.load_points(decode), speed_readers.load_steps(steps), speed_readers.load_mixes(mixes)
    table = goals(*read)
    assert len(table) == 37
    assert not [row["goal"] for row in table.to_dict("records") if isinstance(row["reached"], str)]
