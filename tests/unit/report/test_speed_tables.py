"""Tables of the speed grid, with cells computed by hand: decode points, their ratios, and GRPO steps."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from qerl.report import speed_tables
from qerl.report_jobs import ShapesJob
from qerl.results.schema import ResultError
from qerl.results.speeds import byte_parts, load
from qerl.settings.models import Base
from tests.synthetic_results import (
    CEILINGS,
    OUT_OF_MEMORY,
    PROVENANCE,
    decode_file,
    mix_file,
    moved,
    step_file,
    write_json,
)

H200, H100 = "1x NVIDIA H200", "1x NVIDIA H100 80GB HBM3"


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Native NVFP4 and BF16 beside vLLM's: NVFP4 is the faster of vLLM's at 1 sequence, BF16 at 64."""
    return [
        decode_file(tmp_path, "vllm", "bf16", {1: [100.0, 100.0], 64: [4000.0, 4000.0], 256: [9000.0, 9000.0]}),
        decode_file(tmp_path, "vllm", "nvfp4", {1: [200.0, 200.0], 64: [3000.0, 3000.0]}),
        decode_file(tmp_path, "native", "nvfp4", {1: [500.0, 600.0, 400.0], 64: [6000.0, 6000.0], 256: OUT_OF_MEMORY}),
        decode_file(tmp_path, "native", "bf16", {1: [125.0, 125.0], 64: [6000.0, 6000.0]}),
    ]


def rows_of(table: pd.DataFrame, *keys: str) -> dict:
    return table.set_index(list(keys)).to_dict("index")


def test_a_point_by_hand(tmp_path):
    file = decode_file(tmp_path, "native", "nvfp4", {1: [400.0, 500.0, 600.0]}, rank=0)
    (point,) = load([file], "decode").to_dict("records")
    assert point == {
        "engine": "native",
        "size": "7B",
        "weights": "nvfp4",
        "rank": 0,
        "runs": 1,
        "prompt": 128,
        "tokens": 256,
        "sequences": 1,
        "status": "ok",
        "samples": [400.0, 500.0, 600.0],
        "rollouts": [pytest.approx(256 / (256 / rate + 2.048)) for rate in (400, 500, 600)],
        "tokens_per_second": 500.0,
        "tokens_per_second_p25": 450.0,
        "tokens_per_second_p75": 550.0,
        "floor_ms": pytest.approx(1.0),
        "percent_of_floor": pytest.approx(50.0),
        "machine": "Test GPU",
        "commit": PROVENANCE["commit"][:12],
        "model": "qwen2.5-7b",
        "bench": "native on Test GPU",
    }


def test_packed_delta_nets_have_a_lower_floor(tmp_path):
    files = [
        decode_file(tmp_path / f"{nets}", "native", "nvfp4", {1: [100.0]}, size="qwen3.5-27b", pack_delta_nets=nets)
        for nets in (False, True)
    ]
    dense, packed = load(files, "decode")["floor_ms"]
    assert packed < 0.75 * dense


def test_the_decode_table_distinguishes_failed_from_not_measured(files):
    table = speed_tables.decode_table(load(files, "decode"))
    assert table.to_dict("list") == {
        "engine": ["native", "native", "vllm", "vllm"],
        "weights": ["bf16", "nvfp4", "bf16", "nvfp4"],
        "rank": [16] * 4,
        "machine": ["Test GPU"] * 4,
        "1": [125.0, 500.0, 100.0, 200.0],
        "64": [6000.0, 6000.0, 4000.0, 3000.0],
        "256": ["–", OUT_OF_MEMORY, 9000.0, "–"],
    }


def test_native_over_the_faster_of_vllm_and_over_the_same_weights(files):
    rows = rows_of(speed_tables.ratio_table(load(files, "decode")), "weights", "against vLLM")
    faster, same = rows["nvfp4", "faster of BF16, NVFP4"], rows["nvfp4", "NVFP4"]
    assert (faster["1"], same["1"]) == (2.5, 2.5)
    assert (faster["64"], same["64"]) == (1.5, 2.0)
    assert rows["bf16", "BF16"]["64"] == 1.5
    # vLLM's repeats are alike, so that the interval is that of the native ones: within 400 to 600 over 200.
    assert 2.0 <= faster["1_low"] < 2.5 < faster["1_high"] <= 3.0
    assert faster["64_low"] == faster["64_high"] == 1.5


def test_of_two_bases_one_that_failed_is_not_the_faster(tmp_path):
    files = [
        decode_file(tmp_path, "native", "nvfp4", {1: [300.0], 8: [300.0], 64: OUT_OF_MEMORY}),
        decode_file(tmp_path, "vllm", "bf16", {1: OUT_OF_MEMORY, 8: OUT_OF_MEMORY, 64: [10.0]}),
        decode_file(tmp_path, "vllm", "nvfp4", {1: [100.0], 8: "timeout", 64: [10.0]}),
    ]
    rows = rows_of(speed_tables.ratio_table(load(files, "decode")), "against vLLM")
    faster = rows["faster of BF16, NVFP4"]
    reasons = (faster["8"], rows["NVFP4"]["8"], faster["64"])
    assert reasons == ("vllm BF16: out of memory", "vllm NVFP4: timeout", "native NVFP4: out of memory")
    assert faster["1"] == 3.0
    assert pd.isna(faster["1_low"])  # one repeat has no interval


def test_all_tables_and_figures_are_written(files, tmp_path):
    out = tmp_path / "out"
    steps = [step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [1.0], "auto", weights=5e9, rest=7e9)]
    speed_tables.write_shapes(ShapesJob(files=[*files, *steps], out=out))
    tables = {f"{name}-128x256" for name in ("decode-7B", "floor-7B", "ratio-7B")}
    tables |= {"memory", "steps"}
    figures = {"decode-rank16-128x256"}
    wanted = {f"{name}.{end}" for name in tables for end in ("csv", "md", "tex", "html", "txt")}
    wanted |= {f"{name}.{end}" for name in figures for end in ("svg", "png", "narrow.svg")}
    assert {path.name for path in out.iterdir()} == wanted
    text = (out / "decode-7B-128x256.md").read_text()
    assert re.search(r"\| native +\| NVFP4 +\| 16 +\| 500 +\| 6,000 +\| out of memory +\|", text)
    assert "prompts of 128 tokens, 256 tokens decoded" in text
    assert f"Commit: {PROVENANCE['commit'][:12]}" in text
    assert "1.50× [1.50×, 1.50×]" in (out / "ratio-7B-128x256.md").read_text()
    assert pd.read_csv(out / "decode-7B-128x256.csv")["1"].tolist() == [125.0, 500.0, 100.0, 200.0]
    assert "| weights (GB)" in (out / "memory.md").read_text()
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", (out / "decode-rank16-128x256.svg").read_text())
    assert {"native NVFP4", "vLLM BF16", "floor"} <= {*drawn}


def test_machines_are_told_apart_by_a_column_and_not_compared(tmp_path):
    ranks = {("native", 0): H100, ("native", 16): H100, ("native", 64): H200, ("vllm", 16): H100, ("vllm", 64): H100}
    files = [
        decode_file(tmp_path, engine, "nvfp4", {1: [100.0, 100.0]}, rank=rank, machine=machine)
        for (engine, rank), machine in ranks.items()
    ]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "several"))
    decoded, ratios = (pd.read_csv(tmp_path / f"several/{name}-7B-128x256.csv") for name in ("decode", "ratio"))
    assert list(decoded) == ["engine", "weights", "rank", "GPU", "1"]
    assert list(decoded["GPU"]) == ["H100 80GB HBM3"] * 2 + ["H200"] + ["H100 80GB HBM3"] * 2
    same = ratios[ratios["against vLLM"] == "NVFP4"].set_index("rank")
    assert same.loc[[16, 64], "1"].tolist() == ["1.0", "different machines"]
    assert same.loc[64, "GPU"] == "H200, H100 80GB HBM3"
    assert f"Machine: {H100}; {H200}." in (tmp_path / "several/decode-7B-128x256.txt").read_text()
    step = moved(step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [1.0], "auto", rest=1e9), H100)
    speed_tables.write_shapes(ShapesJob(files=[files[0], files[1], step], out=tmp_path / "one"))
    tables = [pd.read_csv(file) for file in (tmp_path / "one").glob("*.csv")]
    assert len(tables) == 4
    assert not any({"GPU", "machine"} & {*table} for table in tables)


@pytest.mark.parametrize(
    ("points", "changed", "words"),
    [
        ({}, {}, "no points of decode yet; `qerl grid`"),
        ({1: [1.0]}, {"size": "9B"}, "work.size '9B' is unknown"),
        ({1: [1.0]}, {"ceilings": {}}, "GPU A.json.*copy"),
        ({1: [1.0]}, {"machine": "GPU B"}, "native 7B nvfp4 rank 16, 1 sequences is in two decode files"),
    ],
)
def test_files_without_a_table_are_one_sentence(tmp_path, points, changed, words):
    files = [decode_file(tmp_path, "native", "nvfp4", points, **{"machine": "GPU A"} | changed)]
    files += [decode_file(tmp_path, "native", "nvfp4", points, machine="GPU A")] if "machine" in changed else []
    with pytest.raises(ResultError, match=words):
        speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# --- GRPO steps


def test_steps_and_their_memory_by_hand(tmp_path):
    parts = {"weights": 5e9, "adapter": 1e9, "rest": 6e9}
    ours = step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [30.0, 10.0, 20.0], "auto", **parts, gradients=5e8)
    result = json.loads(ours.read_text())
    for step, rollout, update in zip(result["steps"], (19e9, 20e9, 18e9), (17e9, 16e9, 17e9), strict=True):
        step |= {"rollout_peak_bytes": rollout, "update_peak_bytes": update}
    write_json(ours, result)
    trl = step_file(tmp_path, "TRL BF16 LoRA", "1.5B", [50.0], True, **parts, sampler_weights=3e9)
    steps = load([ours, trl], "grpo_step")
    shown = speed_tables.step_table(steps)[["size", "recompute", "step_seconds", "repeats"]]
    assert shown.to_numpy().tolist() == [["1.5B", "true", 50.0, 1], ["7B", "auto", 20.0, 3]]
    assert steps["rollout_seconds"].iloc[1] == pytest.approx(12.0)
    assert set(steps["work"]) == {"16 × 8, 128 + 1024 tokens"}
    memory = speed_tables.memory_table(steps).set_index("size").loc["7B"]
    assert memory[["weights/gb", "gradients/gb", "rest/gb"]].tolist() == [5.0, 0.5, 6.0]
    assert memory[["without KV cache/gb", "KV cache/gb"]].tolist() == [12.0, 8.0]
    assert memory[["rollout peak/gb", "update peak/gb"]].tolist() == [20.0, 17.0]  # the highest of all steps
    assert pd.isna(memory["sampler weights/gb"])


def test_caps_tell_what_trains_and_what_it_did_without(tmp_path):
    whole = step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [10.0, 10.0], "auto")
    result, files = json.loads(whole.read_text()), [whole]
    given = {"kv_cache_bytes": 3e9, "kv_cache_wanted_bytes": 9e9, "recomputed": 28, "blocks": 28}
    limits = {"kv_cache_gib": 2, "sleep": True}
    for cap, told in ((12, {"given_up": given}), (8, {"status": OUT_OF_MEMORY, "memory": None, "steps": []})):
        capped = result | told | {"settings": result["settings"] | limits | {"memory_gb": cap}}
        files.append(write_json(tmp_path / f"{cap}.json", capped))
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    memory, steps = (pd.read_csv(tmp_path / f"out/{name}.csv").set_index("cap") for name in ("memory", "steps"))
    columns = ["status", "cache share", "recomputed", "micro-batch tokens", "set"]
    assert list(memory.loc["12 GB", columns]) == ["ok", "33%", "28 of 28", 16384, "KV cache of 2 GiB, released"]
    assert (memory.loc["8 GB", "status"], steps.loc["8 GB", "status"]) == (OUT_OF_MEMORY, OUT_OF_MEMORY)
    assert pd.isna(steps.loc["8 GB", "step_seconds"])


# --- rollouts of mixed lengths


def mixes(*files: Path) -> dict:
    return rows_of(speed_tables.mix_table(load(files, "rollout_mix")), "engine", "weights")


@pytest.fixture
def mixed(tmp_path) -> list[Path]:
    seconds = {("native", "nvfp4"): [4.0, 5.0, 4.0], ("vllm", "bf16"): [8.0] * 3, ("vllm", "nvfp4"): [10.0] * 3}
    return [mix_file(tmp_path, *policy, taken) for policy, taken in seconds.items()]


def test_the_lead_is_over_the_faster_of_vllms_formats(mixed):
    rows = mixes(*mixed)
    ours = rows["native", "nvfp4"]
    assert (ours["tokens_per_second"], ours["seconds"], ours["speedup"]) == (250.0, 4.0, 2.0)
    assert ours["work"] == "2 × 2, 100 to 400 tokens, 1,000 in all"
    assert ours["speedup_low"] <= 2.0 <= ours["speedup_high"]
    assert rows["vllm", "bf16"]["tokens_per_second"] == 125.0
    assert pd.isna(rows["vllm", "bf16"]["speedup"])


def test_other_workloads_and_machines_are_not_compared_and_a_failure_is_a_row(tmp_path, mixed):
    ours, _, nvfp4 = mixed
    other = mix_file(tmp_path, "vllm", "bf16", [8.0], lengths=[[1, 2], [3, 4], [5, 6]])
    assert mixes(ours, other, nvfp4)["native", "nvfp4"]["note"] == "–"
    far = moved(mix_file(tmp_path, "vllm", "bf16", [8.0]), "another")
    assert mixes(ours, far, nvfp4)["native", "nvfp4"]["note"] == "different machines"
    failed = mix_file(tmp_path, "vllm", "bf16", [], status=OUT_OF_MEMORY, ready_seconds=None, first_seconds=None)
    rows = mixes(ours, failed, nvfp4)
    assert (rows["vllm", "bf16"]["status"], rows["native", "nvfp4"]["speedup"]) == (OUT_OF_MEMORY, 2.5)


def test_several_runs_are_compared_with_one_after_another_in_tables_of_their_own(tmp_path, mixed):
    """Rates by hand: two runs draw 2,000 tokens in 5 s, and one its 1,000 in 4 s."""
    ones = [decode_file(tmp_path, "native", "nvfp4", {8: [4000.0] * 3, 64: [9000.0]})]
    four = decode_file(tmp_path, "native", "nvfp4", {8: [10000.0] * 3}, runs=4)
    two = mix_file(tmp_path, "native", "nvfp4", [5.0] * 3, runs=2)

    def written(name, *files):
        speed_tables.write_shapes(ShapesJob(files=list(files), out=tmp_path / name))
        return {file.name: file.read_bytes() for file in (tmp_path / name).glob("*.csv")}

    before, after = written("before", *ones, *mixed), written("after", *ones, *mixed, four, two)
    assert after.keys() - before.keys() == {"cohorts-decode.csv", "cohorts-mixes.csv"}
    assert before.items() <= after.items()
    columns = ["sequences", "runs", "tokens_per_second", "speedup"]
    tables = [pd.read_csv(tmp_path / f"after/cohorts-{name}.csv") for name in ("decode", "mixes")]
    decode, mix = (table[columns].fillna(0).to_numpy().tolist() for table in tables)
    assert decode == [[8, 1, 4000, 0], [8, 4, 10000, 2.5]]
    assert mix == [[4, 1, 250, 0], [4, 2, 400, 1.6]]
    speed_tables.write_shapes(ShapesJob(files=[four], out=tmp_path / "alone"))
    [row] = pd.read_csv(tmp_path / "alone/cohorts-decode.csv").to_dict("records")
    assert (row["runs"], row["note"]) == (4, "–")


def test_the_floor_of_several_runs_reads_the_base_once(tmp_path):
    """Besides the adapters, the bytes of 4 runs of 8 sequences are those of 32 sequences."""
    files = [decode_file(tmp_path, "native", "nvfp4", {count: [1.0]}, runs=runs) for count, runs in ((8, 4), (32, 1))]
    one, four = load(files, "decode").sort_values("runs")["floor_ms"]
    adapter = byte_parts(Base("7B", "nvfp4"), 16, 1, 0)["adapter"]
    assert four - one == pytest.approx(1e3 * 3 * adapter / CEILINGS["copy_bytes_per_second"])


def test_phases_add_up_to_the_rollout(mixed):
    table = speed_tables.phase_table(load(mixed, "rollout_mix")).set_index("phase")
    assert table["share"].sum() == pytest.approx(100.0)
    assert table.loc["before and after", "seconds"] == pytest.approx(4.0 - 3.75)
    assert table.loc["decode, batch of 4", "ms/step"] == pytest.approx(1e3 * 2 / 300)
    assert table.loc["prefill and first tokens", "ms/step"] == pytest.approx(250.0)
    assert list(table.index[:3]) == ["prefill and first tokens", "decode, batch of 4", "decode, batch of 2"]
    assert table.loc["host waits during these", "seconds"] == 2.5
