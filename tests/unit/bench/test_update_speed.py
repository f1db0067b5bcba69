"""The measurement of the update on a tiny shape."""

import json

import pytest

from qerl.bench.update_speed import main


@pytest.mark.parametrize(("recompute", "blocks"), [("true", 2), ("auto", 0)])
def test_update_speed_counts_tokens_and_times_parts(tmp_path, monkeypatch, recompute, blocks):
    monkeypatch.setenv("QERL_COMMIT", "test")
    out = tmp_path / "out.json"
    sizes = {"prompts": 2, "group_size": 3, "prompt_tokens": 9, "mean_tokens": 20, "micro_batch_tokens": 80}
    main(out, "tiny", ["nvfp4"], **sizes, rank=4, recompute=recompute, repeats=2)
    [point] = json.loads(out.read_text())["points"]
    assert point["sequences"] == 6
    assert point["tokens"] == point["completion_tokens"] + 6 * 9
    # Both groups are of at most 9 + 3 * 29 tokens; each prompt is there once where its group is whole.
    assert point["packed_tokens"] >= point["completion_tokens"] - 6 + 2 * 9
    assert point["packed_tokens"] < point["tokens"]
    assert len(point["seconds"]) == 2
    assert point["tokens_per_second"] == [point["tokens"] / seconds for seconds in point["seconds"]]
    assert point["parts"]["recomputed_blocks"] == blocks
    assert all(point["parts"][name]["seconds"] > 0 for name in ("blocks", "logprobs_backward", "blocks_backward"))
    assert point["grad_norm"] > 0
