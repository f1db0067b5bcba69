import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qerl.jobs import ShapesJob
from qerl.report import speed_tables
from qerl.results.speeds import load
from qerl.results.store import ResultError
from tests.synthetic_results import OUT_OF_MEMORY, PROVENANCE, decode_file, step_file


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
        "prompt": 128,
        "tokens": 256,
        "sequences": 1,
        "status": "ok",
        "samples": [400.0, 500.0, 600.0],
        "rollouts": [pytest.approx(256 / (256 / rate + 2.048)) for rate in (400, 500, 600)],
        "tokens_per_second": 500.0,
        "tokens_per_second_p25": 450.0,
        "tokens_per_second_p75": 550.0,
        "step_ms": 2.0,
        "floor_ms": pytest.approx(1.0),
        "percent_of_floor": pytest.approx(50.0),
        "peak_memory_gb": 12.5,
        "machine": "Test GPU",
        "commit": PROVENANCE["commit"][:12],
        "model": "qwen2.5-7b",
        "bench": "native on Test GPU",
    }


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
    assert faster["1"] == 3.0
    assert pd.isna(faster["1_low"])  # one repeat has no interval
    assert faster["8"] == "vllm BF16: out of memory"
    assert rows["NVFP4"]["8"] == "vllm NVFP4: timeout"
    assert faster["64"] == "native NVFP4: out of memory"


def test_portable_kernels_are_beside_other_kernels_and_vllm(files, tmp_path):
    speeds = {1: [350.0, 350.0], 64: [3800.0, 3800.0], 256: [9000.0, 9000.0]}
    files = [*files, decode_file(tmp_path / "portable", "native", "nvfp4", speeds, kernels="portable")]
    rows = rows_of(speed_tables.decode_table(load(files, "decode")), "engine", "weights")
    of_one = {engine: rows[engine, "nvfp4"]["1"] for engine in ("native-portable", "native", "vllm")}
    assert of_one == {"native-portable": 350, "native": 500, "vllm": 200}
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    # Comparisons of formats and of engines are those of the GPU's own kernels.
    assert "500" in (tmp_path / "out/decode-7B-128x256.md").read_text()
    ratios = rows_of(speed_tables.ratio_table(load(files, "decode")), "weights", "against vLLM")
    assert ratios["nvfp4", "NVFP4"]["1"] == 2.5
    assert "native, portable kernels NVFP4" in texts(tmp_path / "out/decode-rank16-128x256.svg")


def test_crossover_by_engine_and_rank(files, tmp_path):
    files = [*files, decode_file(tmp_path, "transformers", "nf4", {1: [10.0]})]
    rows = rows_of(speed_tables.crossover(load(files, "decode")), "size", "engine", "rank")
    assert set(rows) == {("7B", "native", 16), ("7B", "vllm", 16)}
    native, vllm = rows["7B", "native", 16], rows["7B", "vllm", 16]
    assert (native["1"], native["64"], native["256"]) == (4.0, 1.0, "–")
    assert (vllm["1"], vllm["64"], vllm["256"]) == (2.0, 0.75, "–")
    assert vllm["64_low"] == vllm["64_high"] == 0.75


@pytest.mark.parametrize(
    ("speeds", "crosses"),
    [
        # Half way between 1.5 and 0.5, on a scale of logarithms: 2 of 1 and 4, 16 of 4 and 64.
        ({1: 150.0, 4: 50.0}, "2"),
        ({1: 150.0, 4: 50.0, 64: 150.0}, "2, 16"),
        ({1: 150.0, 4: 100.0, 64: 50.0}, "4"),
        ({1: 150.0, 4: 150.0, 64: OUT_OF_MEMORY}, "> 4"),
        ({1: 50.0, 4: 50.0}, "≤ 1"),
        ({1: OUT_OF_MEMORY, 4: OUT_OF_MEMORY}, "–"),
    ],
)
def test_where_the_ratio_passes_one(tmp_path, speeds, crosses):
    told = {count: speed if isinstance(speed, str) else [speed] for count, speed in speeds.items()}
    files = [
        decode_file(tmp_path, "native", "nvfp4", told),
        decode_file(tmp_path, "native", "bf16", {count: [100.0] for count in speeds}),
    ]
    (row,) = speed_tables.crossover(load(files, "decode")).to_dict("records")
    assert row["crosses"] == crosses


def test_an_adapter_costs_what_its_rank_loses_against_none(tmp_path):
    files = [
        decode_file(tmp_path, "native", "nvfp4", {1: [100.0, 100.0], 8: [400.0]}, rank=0),
        decode_file(tmp_path, "native", "nvfp4", {1: [90.0, 95.0], 8: OUT_OF_MEMORY}, rank=16),
        decode_file(tmp_path, "native", "nvfp4", {8: [300.0]}, rank=64),
        decode_file(tmp_path, "vllm", "nvfp4", {1: [10.0]}, rank=16),
        decode_file(tmp_path, "native", "bf16", {1: [10.0]}, rank=0),
    ]
    rows = rows_of(speed_tables.adapters(load(files, "decode")), "engine", "weights", "rank")
    assert set(rows) == {("native", "nvfp4", 16), ("native", "nvfp4", 64)}
    small, large = rows["native", "nvfp4", 16], rows["native", "nvfp4", 64]
    assert (small["1"], small["1_low"], small["1_high"]) == (0.925, 0.9, 0.95)
    assert small["8"] == "native NVFP4: out of memory"
    assert (large["1"], large["8"]) == ("–", 0.75)
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    assert "0.93× [0.90×, 0.95×]" in (tmp_path / "out" / "adapters-128x256.md").read_text()


def test_contexts_are_the_crossover_by_prompt(tmp_path):
    """At 128 tokens NVFP4 is twice as fast as BF16, then half as fast; at 4,096 1.5 times, then out of memory."""
    speeds: dict[tuple, dict] = {
        ("native", "bf16", 128): {1: [100.0], 16: [800.0]},
        ("native", "nvfp4", 128): {1: [200.0], 16: [400.0]},
        ("native", "bf16", 4096): {1: [100.0], 16: [500.0]},
        ("native", "nvfp4", 4096): {1: [150.0], 16: OUT_OF_MEMORY},
        ("vllm", "bf16", 128): {1: [100.0]},
        ("vllm", "nvfp4", 128): {1: [100.0]},
    }
    files = [
        decode_file(tmp_path / f"{prompt}", engine, weights, told, prompt=prompt)
        for (engine, weights, prompt), told in speeds.items()
    ]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    rows = pd.read_csv(tmp_path / "out/contexts-256.csv").to_dict("records")
    assert [(row["engine"], row["prompt"], row["tokens"], row["crosses"]) for row in rows] == [
        ("native", 128, 256, "6"),  # two thirds of the way from 1 to 16: 16 ** (2 / 3) = 6.3
        ("native", 4096, 256, "> 1"),
    ]
    assert [float(row["1"]) for row in rows] == [2.0, 1.5]
    assert rows[1]["16"] == "native NVFP4: out of memory"


def test_packed_delta_nets_have_rows_of_their_own_and_a_lower_floor(tmp_path):
    hybrid = {"size": "qwen3.5-27b"}
    engines = {"native": 100.0, "vllm": 50.0}
    made = [
        decode_file(tmp_path / f"{packed}", engine, "nvfp4", {1: [rate * (1 + packed)] * 3}, **hybrid, **nets)
        for packed, nets in enumerate(({}, {"pack_delta_nets": True}))
        for engine, rate in engines.items()
    ]
    made.append(decode_file(tmp_path / "dense", "vllm", "bf16", {1: [150.0] * 3}, **hybrid))
    step = step_file(tmp_path, "qerl NVFP4 LoRA, packed delta nets", "qwen3.5-27b", [1.0], "auto")
    points = load(made, "decode")
    table = speed_tables.decode_table(points)
    named = ["nvfp4", "nvfp4-delta-nets"]
    assert list(zip(table["engine"], table["weights"], table["1"], strict=True)) == [
        *(("native", name, 100.0 * count) for count, name in enumerate(named, 1)),
        ("vllm", "bf16", 150.0),
        *(("vllm", name, 50.0 * count) for count, name in enumerate(named, 1)),
    ]
    floors = points.set_index(["engine", "weights"])["floor_ms"]
    assert floors["native", "nvfp4-delta-nets"] < 0.75 * floors["native", "nvfp4"]
    ratios = rows_of(speed_tables.ratio_table(points), "weights", "against vLLM")
    assert ratios["nvfp4-delta-nets", "NVFP4-DELTA-NETS"]["1"] == pytest.approx(2.0)
    assert ratios["nvfp4-delta-nets", "faster of BF16, NVFP4, NVFP4-DELTA-NETS"]["1"] == pytest.approx(200 / 150)
    assert ratios["nvfp4", "faster of BF16, NVFP4"]["1"] == pytest.approx(100 / 150)
    speed_tables.write_shapes(ShapesJob(files=[*made, step], out=tmp_path / "out"))
    assert "NVFP4-DELTA-NETS" in (tmp_path / "out/decode-qwen3.5-27b-128x256.md").read_text()
    assert "packed delta nets" in (tmp_path / "out/steps.md").read_text()


def test_machines_are_stated_but_not_compared(tmp_path):
    files = [
        decode_file(tmp_path, "native", "nvfp4", {1: [400.0]}, machine="GPU A"),
        decode_file(tmp_path, "vllm", "nvfp4", {1: [200.0]}, machine="GPU B"),
    ]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    assert "Machine: GPU A; GPU B." in (tmp_path / "out" / "decode-7B-128x256.md").read_text()
    rows = rows_of(speed_tables.ratio_table(load(files, "decode")), "against vLLM")
    assert rows["NVFP4"]["1"] == "different machines"


def test_a_published_shape_has_floors_and_no_rows_of_the_papers_tables(tmp_path):
    file = decode_file(tmp_path, "native", "nvfp4", {1: [400.0] * 3}, size="qwen3-30b-a3b")
    speed_tables.write_shapes(ShapesJob(files=[file], out=tmp_path / "out"))
    assert {path.stem for path in (tmp_path / "out").glob("*.md")} == {
        "decode-qwen3-30b-a3b-128x256",
        "floor-qwen3-30b-a3b-128x256",
    }


def test_all_tables_and_figures_are_written(files, tmp_path):
    out = tmp_path / "out"
    steps = [step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [1.0], "auto", weights=5e9, rest=7e9)]
    speed_tables.write_shapes(ShapesJob(files=[*files, *steps], out=out))
    tables = {f"{name}-128x256" for name in ("decode-7B", "floor-7B", "ratio-7B", "crossover")}
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
    memory = (out / "memory.md").read_text()
    assert "| weights (GB)" in memory
    assert "| KV cache (GB)" in memory


def texts(svg: Path) -> set[str]:
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text()))


def test_no_points_is_one_sentence(tmp_path):
    started = decode_file(tmp_path, "native", "nvfp4", {})
    for files in ([], [started]):
        with pytest.raises(ResultError, match="no points of decode speed yet; `qerl grid`"):
            speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    with pytest.raises(ResultError, match="no GRPO steps yet"):
        load([], "grpo_step")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"size": "9B"}, "work.size '9B' is unknown"),
        ({"ceilings": {}}, "copy"),
        ({"tokens": None}, "`work.tokens`"),
    ],
)
def test_a_file_of_another_shape_is_named(tmp_path, changed, told):
    file = decode_file(tmp_path, "native", "nvfp4", {1: [1.0]}, **changed)
    with pytest.raises(ResultError, match=f"{file.name}.*{told}"):
        load([file], "decode")


def test_a_point_measured_twice_is_refused(tmp_path):
    files = [decode_file(tmp_path, "native", "nvfp4", {8: [1.0]}, machine=machine) for machine in "AB"]
    with pytest.raises(ResultError, match="native 7B nvfp4 rank 16, 8 sequences is in two decode files"):
        load(files, "decode")


def test_other_lengths_are_other_tables(tmp_path):
    files = [
        decode_file(tmp_path, "native", "nvfp4", {8: [1.0]}),
        decode_file(tmp_path, "vllm", "nvfp4", {8: [1.0]}, tokens=512),
    ]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    for engine, lengths in (("native", "128x256"), ("vllm", "128x512")):
        text = (tmp_path / f"out/decode-7B-{lengths}.md").read_text()
        assert [name for name in ("native", "vLLM", "vllm") if f"| {name}" in text] == [engine]


def test_points_at_the_papers_lengths_stand_beside_its_numbers(tmp_path):
    """Table 9 has 115.4 and 151.6 tokens/s for BF16 and NVFP4 on the 7B at rank 16: a ratio of 1.31.

    Prompts take 2.048 s here: 2,048 tokens take 20.48 + 2.048 s at 100 tokens/s and 8.192 + 2.048 s at 250.
    """
    rates = {"bf16": {1: 100.0, 8: 800.0}, "nvfp4": {1: 250.0, 8: 1600.0}}
    files = [
        decode_file(tmp_path, "native", weights, {n: [rate] * 3 for n, rate in told.items()}, prompt=256, tokens=2048)
        for weights, told in rates.items()
    ]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    for reading, ratio in (("sequences", 22.528 / 10.24), ("prompts", 22.528 / 12.288)):
        rows = pd.read_csv(tmp_path / f"out/table9-native-{reading}.csv").set_index(
            ["metric", "model", "weights", "rank"]
        )
        ours = rows.loc[("rollout_speedup", "qwen2.5-7b", "nvfp4", 16)]
        assert (float(ours["printed"]), ours["status"]) == (1.31, "ok")
        assert ours["ours"] == pytest.approx(ratio)
        assert np.isnan(rows.loc[("rollout_rate", "qwen2.5-7b", "nvfp4", 16), "difference"])
        assert "not run" in rows.loc[("rollout_rate", "qwen2.5-14b", "nvfp4", 16), "status"]
    assert not (tmp_path / "out/table9-vllm-sequences.csv").exists()
