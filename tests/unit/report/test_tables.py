import json

import numpy as np
import pandas as pd
import pytest

from qerl.report import tables
from qerl.report.format import by_dataset, present
from qerl.results.readers import StoredResults
from qerl.results.schema import ResultError
from qerl.results.speeds import load
from tests.synthetic_results import (
    NO_METRICS,
    rollout_point,
    step_point,
    write_bench,
    write_evaluation,
    write_json,
    write_quantization,
    write_run,
)


def column(values: list[int]) -> np.ndarray:
    """Answers of one repeat, [problems, 1]."""
    return np.array(values)[:, None]


def cells_of(evaluations: list, runs: list) -> pd.DataFrame:
    return tables.accuracy_cells(StoredResults([*evaluations, *runs]))


def table_of(evaluations: list, runs: list) -> pd.DataFrame:
    return tables.accuracy(StoredResults([*evaluations, *runs]))


@pytest.fixture
def small(tmp_path):
    """Four problems: BF16 base 2/4, NVFP4 base 1/4, NVFP4 LoRA 3/4 and 4/4 over two seeds."""
    runs = [write_run(tmp_path, "nvfp4-lora", seed) for seed in (0, 1)]
    evaluations = [
        write_evaluation(tmp_path, "base-bf16", {"gsm8k": column([1, 1, 0, 0])}, "bf16"),
        write_evaluation(tmp_path, "base-nvfp4", {"gsm8k": column([1, 0, 0, 0])}, "nvfp4"),
        write_evaluation(tmp_path, "arm-0", {"gsm8k": column([1, 1, 1, 0])}, "nvfp4", runs[0]),
        write_evaluation(tmp_path, "arm-1", {"gsm8k": column([1, 1, 1, 1])}, "nvfp4", runs[1]),
    ]
    return evaluations, runs


def test_accuracy_and_differences_by_hand(small):
    table = table_of(*small)
    assert list(zip(table["weights"], table["training"], strict=True)) == [
        ("bf16", "none"),
        ("nvfp4", "none"),
        ("nvfp4", "lora"),
    ]
    assert list(table["gsm8k/accuracy"]) == [0.5, 0.25, 0.875]
    assert list(table["gsm8k/delta_bf16"])[1:] == [-0.25, 0.375]
    assert table["gsm8k/delta_format"].iloc[2] == 0.625
    assert table["gsm8k/delta_bf16"].isna().tolist() == [True, False, False]
    assert list(table["gsm8k/seeds"]) == [0, 0, 2]
    assert (table["gsm8k/accuracy_low"] <= table["gsm8k/accuracy"]).all()
    assert (table["gsm8k/accuracy_high"] >= table["gsm8k/accuracy"]).all()


def test_a_cell_not_run_says_so(small, tmp_path):
    evaluations, runs = small
    evaluations = [*evaluations, write_evaluation(tmp_path, "base-nf4", {"aime": column([0, 1])}, "nf4")]
    table = table_of(evaluations, runs).set_index(["weights", "training"])
    assert np.isnan(table.loc[("nf4", "none"), "gsm8k/accuracy"])
    assert table.loc[("nf4", "none"), "gsm8k/note"] == "not run"
    assert table.loc[("nf4", "none"), "aime/note"] == "untrained bf16 base not run"
    assert table.loc[("nvfp4", "lora"), "aime/note"] == "not run"


def test_a_table_by_data_set_has_the_experiments_that_are_scored_on_it(tmp_path):
    evaluations = [write_evaluation(tmp_path, "base", {"gsm8k": column([0, 1]), "aime": column([0, 1])}, "bf16")]
    runs = []
    for experiment, dataset in (("first", "gsm8k"), ("second", "aime")):
        runs.append(write_run(tmp_path, "bf16-lora", 0, experiment=experiment))
        evaluations.append(write_evaluation(tmp_path, experiment, {dataset: column([1, 1])}, "bf16", runs[-1]))
    shown = by_dataset(table_of(evaluations, runs))
    for dataset in ("gsm8k", "aime"):
        assert shown[dataset]["training"].tolist() == ["none", "lora"], dataset
        assert shown[dataset]["accuracy"].tolist() == [0.5, 1.0], dataset


def test_runs_that_failed_are_rows_or_notes(small, tmp_path):
    evaluations, runs = small
    lost = [
        write_run(tmp_path, "nvfp4-lora", 2, status="timeout of 2 h after 7 of 9 steps"),
        *(write_run(tmp_path, "bf16-full", seed, status="out of memory after 0 of 9 steps") for seed in (0, 1)),
    ]
    evaluations += [write_evaluation(tmp_path, run.parent.name, {}, "bf16", run) for run in lost[1:]]
    table = table_of(evaluations, [*runs, *lost]).set_index(["weights", "training"])
    survived = table.loc[("nvfp4", "lora")]
    assert (survived["gsm8k/accuracy"], survived["gsm8k/seeds"]) == (0.875, 2)
    assert survived["gsm8k/note"] == "seed 2: timeout of 2 h after 7 of 9 steps"
    none = table.loc[("bf16", "full")]
    assert np.isnan(none["gsm8k/accuracy"])
    assert none["gsm8k/note"] == "; ".join(f"seed {seed}: out of memory after 0 of 9 steps" for seed in (0, 1))


def test_arms_that_differ_in_a_setting_stay_apart(tmp_path):
    runs = [write_run(tmp_path, "nvfp4-lora", 0, steps=steps) for steps in (5, 20)]
    evaluations = [
        write_evaluation(tmp_path, f"arm-{index}", {"gsm8k": column([1, index])}, "nvfp4", run)
        for index, run in enumerate(runs)
    ]
    table = table_of(evaluations, runs)
    assert dict(zip(table["variant"], table["gsm8k/accuracy"], strict=True)) == {"steps=5": 0.5, "steps=20": 1.0}
    assert table["gsm8k/note"].iloc[0] == "untrained bf16 base not run; untrained nvfp4 base not run"


def test_awq_is_a_separate_format_with_its_own_base(small, tmp_path):
    evaluations, runs = small
    runs = [*runs, write_run(tmp_path, "nvfp4-lora", 0, experiment="awq", base={"recipe": "awq"})]
    evaluations = [
        *evaluations,
        write_evaluation(tmp_path, "base-awq", {"gsm8k": column([1, 1, 1, 0])}, "nvfp4", recipe="awq"),
        write_evaluation(tmp_path, "awq-0", {"gsm8k": column([1, 1, 1, 1])}, "nvfp4", runs[2], recipe="awq"),
    ]
    table = table_of(evaluations, runs).set_index(["weights", "training"])
    assert table.loc[("nvfp4-awq", "none"), "gsm8k/accuracy"] == 0.75
    assert table.loc[("nvfp4-awq", "lora"), "gsm8k/delta_format"] == 0.25
    assert table.loc[("nvfp4", "lora"), "gsm8k/delta_format"] == 0.625
    assert {"NVFP4", "NVFP4-AWQ"} < set(present(table.reset_index())["weights"])


def test_throughput_by_hand(tmp_path):
    points = [
        rollout_point("bf16", 16, [100, 110, 90]),
        rollout_point("nvfp4", 16, [150, 160, 130, 140]),
        rollout_point("bf16", 32, []),
        rollout_point("nvfp4", 32, [120]),
        rollout_point("nf4", 16, [50, 60, 70]),
    ]
    points[2]["status"] = "out of memory"
    bench = write_bench(tmp_path, "rollout", "rollout", points)
    table = tables.throughput(load([bench], "rollout")).set_index(["weights", "rank"])
    nvfp4 = table.loc[("nvfp4", 16)]
    assert nvfp4["tokens_per_second"] == 145
    assert (nvfp4["tokens_per_second_p25"], nvfp4["tokens_per_second_p75"]) == (137.5, 152.5)
    assert nvfp4["ratio_bf16"] == pytest.approx(1.45)
    assert table.loc[("nf4", 16), "ratio_bf16"] == pytest.approx(0.6)
    assert table.loc[("bf16", 32), "status"] == "out of memory"
    assert np.isnan(table.loc[("nvfp4", 32), "ratio_bf16"])
    assert table.loc[("nf4", 32), "status"] == "not run"
    assert [key[0] for key in table.index] == ["bf16", "bf16", "nf4", "nf4", "nvfp4", "nvfp4"]


def test_memory_and_speed_by_hand(tmp_path):
    steps = [
        step_point("bf16-full", [4.0, 4.0]),
        step_point("bf16-lora", [3.0, 2.0, 2.5]),
        step_point("bf16-lora", [5.0], rank=64),
        step_point("nvfp4-lora", [2.0, 1.0, 1.5]),
        step_point("nvfp4-lora-aqn", [2.5], rank=64),
        step_point("nf4-lora", [], "out of memory"),
    ]
    bench = write_bench(tmp_path, "step", "step", steps)
    report = write_quantization(tmp_path, "nvfp4", 4.5, {"q_proj": 0.08, "up_proj": 0.10})
    points, reports = load([bench], "step"), StoredResults([report]).quantization
    table = tables.memory_speed(points, reports)
    assert table["speedup"].tolist()[:5] == pytest.approx([2.5 / 4, 1, 1, 2.5 / 1.5, 2.0])
    nvfp4 = table.iloc[3]
    assert (nvfp4["bits_per_weight"], nvfp4["step_seconds"]) == (4.5, 1.5)
    assert nvfp4["relative_error"] == pytest.approx(0.09)
    assert (nvfp4["rollout_seconds"], nvfp4["update_seconds"]) == pytest.approx((1.125, 0.375))
    failed = table.iloc[5]
    assert failed["status"] == "out of memory"
    assert np.isnan(failed["step_seconds"])
    assert failed["note"] == "no quantization report of mini"


@pytest.mark.parametrize(
    "other", [{"model": "else"}, {"prompts": 2}, {"group_size": 4}, {"gradient_checkpointing": True}]
)
def test_steps_of_different_settings_are_not_compared(tmp_path, other):
    steps = [step_point("bf16-lora", [8.0]), step_point("nvfp4-lora", [1.0], **other), step_point("nvfp4-lora", [4.0])]
    alone = write_bench(tmp_path, "alone", "step", steps)
    both = write_bench(tmp_path, "both", "step", [*steps, step_point("bf16-lora", [3.0], **other)])
    points = load([alone, both], "step")
    table = tables.memory_speed(points, StoredResults([]).quantization).set_index("bench")
    assert table.loc["alone", "speedup"].tolist() == pytest.approx([1, np.nan, 2], nan_ok=True)
    assert table.loc["alone", "speedup_base"].tolist() == ["bf16-lora", "no BF16 LoRA", "bf16-lora"]
    assert table.loc["both", "speedup"].tolist() == [1, 3, 2, 1]
    failed = write_bench(tmp_path, "failed", "step", [step_point("bf16-lora", [], "out of memory"), steps[2]])
    row = tables.memory_speed(load([failed], "step"), StoredResults([]).quantization).iloc[1]
    assert (np.isnan(row["speedup"]), row["speedup_base"]) == (True, "bf16-lora (out of memory)")


def test_quantization_by_type_of_layer(tmp_path):
    paths = [
        write_quantization(tmp_path, "nvfp4", 4.5, {"q_proj": 0.08}),
        write_quantization(tmp_path, "nf4", 4.13, {"q_proj": 0.09, "o_proj": 0.07}),
        write_quantization(tmp_path, "nvfp4", 4.5, {"q_proj": 0.1}, method="awq"),
    ]
    table = tables.quantization(StoredResults(paths).quantization)
    assert table["weights"].tolist() == ["nf4", "nvfp4", "nvfp4-awq"]
    assert table["method"].tolist() == ["rtn", "rtn", "awq"]
    assert table["q_proj/relative_error"].tolist() == [0.09, 0.08, 0.1]
    assert np.isnan(table["o_proj/relative_error"].iloc[1])


def test_results_that_contradict_each_other_are_one_sentence(small, tmp_path):
    evaluations, runs = small
    other = write_evaluation(tmp_path / "other", "base-bf16", {"gsm8k": column([1, 1, 0])}, "bf16")
    with pytest.raises(ResultError, match="nvfp4 and its untrained base saw different problems of gsm8k"):
        cells_of([other, *evaluations[1:]], runs)
    again = write_evaluation(tmp_path, "again", {"gsm8k": column([1, 1, 1, 0])}, "nvfp4", runs[0])
    with pytest.raises(ResultError, match="evaluated twice on gsm8k"):
        cells_of([*evaluations, again], runs)
    with pytest.raises(ResultError, match=r"arm-1/result.json evaluates run 'main-nvfp4-lora-seed1'"):
        StoredResults([*evaluations, *runs[:1]]).evaluations  # noqa: B018
    lines = (evaluations[1].parent / "samples.jsonl").read_text().splitlines(keepends=True)
    (evaluations[1].parent / "samples.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ResultError, match="3 samples of gsm8k"):
        StoredResults(evaluations[1:]).samples  # noqa: B018
    result = json.loads(evaluations[0].read_text())
    result["tasks"]["gsm8k"]["accuracy"] = 0.75
    write_json(evaluations[0], result)
    with pytest.raises(ResultError, match=r"an accuracy of 0\.5000, but its result\.json 0\.7500"):
        StoredResults(evaluations).samples  # noqa: B018


def test_a_file_of_another_shape_names_itself(tmp_path):
    run = write_run(tmp_path, "bf16-lora", 0, metrics=[{k: v for k, v in NO_METRICS.items() if k != "entropy"}])
    with pytest.raises(ResultError, match=r"metrics.jsonl, line 1: `entropy` is missing"):
        StoredResults([run]).metrics  # noqa: B018
    write_json(run, json.loads(run.read_text()) | {"summary": {}})
    with pytest.raises(ResultError, match=rf"{run} is not a RunResult: `summary.steps`"):
        StoredResults([run]).runs  # noqa: B018
    with pytest.raises(ResultError, match=r"run.json doesn't exist"):
        StoredResults([tmp_path / "run.json"]).runs  # noqa: B018
    bench = write_bench(tmp_path, "b", "rollout", [rollout_point("bf16", 16, [])])
    with pytest.raises(ResultError, match="status ok needs samples"):
        load([bench], "rollout")
