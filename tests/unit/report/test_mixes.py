"""Tables of rollouts of mixed lengths, with cells computed by hand."""

import pandas as pd
import pytest

from qerl.report import speed_tables
from qerl.results import speeds
from tests.synthetic_results import MACHINE, PROVENANCE, write_json

#: 1,000 tokens in all.
LENGTHS = [[100, 200], [300, 400]]
PHASES = {
    "prefill": 1.0,
    "prefills": 4,
    "decode": [
        {"batch": 2, "steps": 100, "sequences": 1.5, "seconds": 0.5},
        {"batch": 4, "steps": 300, "sequences": 3.5, "seconds": 2.0},
    ],
    "between": 0.25,
    "host_wait": 2.5,
}


def mix_file(root, engine, weights, seconds, lengths=LENGTHS, trace=None, **changes):
    """A file of 7B at rank 32; `seconds` of each rollout, of which the native engine tells its phases."""
    work = {"engine": engine, "size": "7B", "weights": weights, "rank": 32, "prompts": 2, "group_size": 2}
    work |= {
        "prompt": [8, 16],
        "median": 300,
        "sigma": 0.8,
        "tokens": 400,
        "sequences": 4,
        "seed": 0,
        "trace": trace,
    }
    phases = PHASES if engine == "native" else None
    value = {
        "bench": "rollout_mix",
        "work": work | {"repeats": max(1, len(seconds))},
        "prompt_tokens": [8, 16],
        "completion_tokens": lengths,
        "status": "ok",
        "sampler": "any",
        "ready_seconds": 3.0,
        "first_seconds": 9.0,
        "runs": [{"seconds": one, "phases": phases} for one in seconds],
        "gpu": None,
        "provenance": PROVENANCE,
    } | changes
    return write_json(root / f"{engine}-{weights}-{len(lengths)}.json", value)


@pytest.fixture
def files(tmp_path):
    return [
        mix_file(tmp_path, "native", "nvfp4", [4.0, 5.0, 4.0]),
        mix_file(tmp_path, "vllm", "bf16", [8.0, 8.0, 8.0]),
        mix_file(tmp_path, "vllm", "nvfp4", [10.0, 10.0, 10.0]),
    ]


def by_engine(table: pd.DataFrame) -> dict:
    return table.set_index(["engine", "weights"]).to_dict("index")


def test_the_lead_is_over_the_faster_of_vllms_formats(files):
    rows = by_engine(speed_tables.mix_table(speeds.load(files, "rollout_mix")))
    ours = rows[("native", "nvfp4")]
    assert (ours["tokens_per_second"], ours["seconds"], ours["speedup"]) == (250.0, 4.0, 2.0)
    assert ours["work"] == "2 × 2, 100 to 400 tokens, 1,000 in all"
    assert ours["speedup_low"] <= 2.0 <= ours["speedup_high"]
    assert rows[("vllm", "bf16")]["tokens_per_second"] == 125.0
    assert pd.isna(rows[("vllm", "bf16")]["speedup"])


def test_other_workloads_and_machines_are_not_compared(tmp_path, files):
    other = mix_file(tmp_path, "vllm", "bf16", [8.0], lengths=[[1, 2], [3, 4], [5, 6]])
    rows = by_engine(speed_tables.mix_table(speeds.load([files[0], other, files[2]], "rollout_mix")))
    assert (rows[("native", "nvfp4")]["note"], rows[("native", "nvfp4")]["repeats"]) == ("–", 3)
    elsewhere = PROVENANCE | {"machine": MACHINE | {"label": "another"}}
    far = mix_file(tmp_path, "vllm", "bf16", [8.0], provenance=elsewhere)
    rows = by_engine(speed_tables.mix_table(speeds.load([files[0], far, files[2]], "rollout_mix")))
    assert rows[("native", "nvfp4")]["note"] == "different machines"


def test_phases_add_up_to_the_rollout(files):
    table = speed_tables.phase_table(speeds.load(files, "rollout_mix")).set_index("phase")
    assert table["share"].sum() == pytest.approx(100.0)
    assert table.loc["before and after", "seconds"] == pytest.approx(4.0 - 3.75)
    assert table.loc["decode, batch of 4", "ms/step"] == pytest.approx(1e3 * 2 / 300)
    assert table.loc["prefill and first tokens", "ms/step"] == pytest.approx(250.0)
    assert list(table.index[:3]) == ["prefill and first tokens", "decode, batch of 4", "decode, batch of 2"]
    assert table.loc["host waits during these", "seconds"] == 2.5


def test_a_rollout_out_of_memory_is_a_row(tmp_path, files):
    failed = mix_file(tmp_path, "vllm", "bf16", [], status="out of memory", ready_seconds=None, first_seconds=None)
    rows = by_engine(speed_tables.mix_table(speeds.load([files[0], failed, files[2]], "rollout_mix")))
    assert rows[("vllm", "bf16")]["status"] == "out of memory"
    assert rows[("native", "nvfp4")]["speedup"] == 2.5
