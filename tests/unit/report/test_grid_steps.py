"""GRPO steps in the speed grid's tables: seconds, memory under caps, and failures."""

import json

import numpy as np
import pandas as pd
import pytest

from qerl.jobs import ShapesJob
from qerl.report import speed_tables
from qerl.results import speeds
from tests.synthetic_results import OUT_OF_MEMORY, step_file, write_json


def test_steps_by_hand(tmp_path):
    parts = {"weights": 5e9, "adapter": 1e9, "rest": 6e9}
    files = [
        step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [30.0, 10.0, 20.0], "auto", **parts, gradients=5e8),
        step_file(tmp_path, "TRL BF16 LoRA", "1.5B", [50.0], True, **parts, sampler_weights=3e9),
    ]
    steps = speeds.load(files, "grpo_step")
    assert list(steps["size"]) == ["1.5B", "7B"]
    assert list(steps["recompute"]) == ["true", "auto"]
    assert list(steps["step_seconds"]) == [50.0, 20.0]
    assert steps["rollout_seconds"].iloc[1] == pytest.approx(12.0)
    assert set(steps["work"]) == {"16 × 8, 128 + 1024 tokens"}
    memory = speed_tables.memory_table(steps).set_index(["size", "system"]).loc["7B", "qerl NVFP4 LoRA"]
    assert (memory["weights/gb"], memory["gradients/gb"], memory["rest/gb"]) == (5.0, 0.5, 6.0)
    assert (memory["without KV cache/gb"], memory["KV cache/gb"]) == (12.0, 8.0)
    assert pd.isna(memory["sampler weights/gb"])


def test_peaks_of_rollout_and_update_are_the_highest_of_all_steps(tmp_path):
    file = step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [1.0, 1.0], "true")
    result = json.loads(file.read_text())
    for step, rollout, update in zip(result["steps"], (19e9, 20e9), (17e9, 16e9), strict=True):
        step |= {"rollout_peak_bytes": rollout, "update_peak_bytes": update}
    file.write_text(json.dumps(result))
    memory = speed_tables.memory_table(speeds.load([file], "grpo_step")).iloc[0]
    assert (memory["rollout peak/gb"], memory["update peak/gb"]) == (20.0, 17.0)


def test_caps_tell_what_trains_and_what_it_did_without(tmp_path):
    whole = step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [10.0, 10.0], "auto")
    result, files = json.loads(whole.read_text()), [whole]
    given = {"kv_cache_bytes": 3e9, "kv_cache_wanted_bytes": 9e9, "recomputed": 28, "blocks": 28}
    limits = {"memory_gb": 12, "kv_cache_gib": 2, "sleep": True}
    for cap, told in (
        (16, {"given_up": given}),
        (12, {"given_up": given}),
        (8, {"status": OUT_OF_MEMORY, "memory": None}),
    ):
        capped = result | told | {"settings": result["settings"] | limits | {"memory_gb": cap}}
        capped |= {"steps": []} if "status" in told else {"steps": [step | {"step": 16.0} for step in result["steps"]]}
        files.append(write_json(tmp_path / f"{cap}.json", capped))
    table = speed_tables.memory_table(speeds.load(files, "grpo_step")).set_index("cap")
    assert list(table.index) == ["", "16 GB", "12 GB", "8 GB"]
    columns = ["status", "cache share", "recomputed", "micro-batch tokens", "set"]
    assert list(table.loc["12 GB", columns]) == ["ok", "33%", "28 of 28", 16384, "KV cache of 2 GiB, released"]
    assert table.loc["8 GB", "status"] == OUT_OF_MEMORY
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    assert "28 of 28" in (tmp_path / "out/memory.md").read_text()


def test_a_step_that_failed_is_a_row(tmp_path):
    file = step_file(tmp_path, "ours", "32B", [], True, rest=1.0)
    told = json.loads(file.read_text()) | {"status": "out of memory"}
    told["settings"]["memory_gb"] = 24.0
    write_json(file, {key: value for key, value in told.items() if key not in ("steps", "memory", "sampler")})
    files = [step_file(tmp_path, "ours", "7B", [2.0], True, rest=1.0), file]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    rows = speed_tables.step_table(speeds.load(files, "grpo_step")).set_index("size").T.to_dict()
    assert (rows["32B"]["status"], rows["32B"]["cap"], rows["7B"]["step_seconds"]) == ("out of memory", "24 GB", 2.0)
    assert np.isnan(rows["32B"]["step_seconds"])
    assert "out of memory" in (tmp_path / "out/memory.md").read_text()
