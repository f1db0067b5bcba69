"""The runs and the cost of each table of the paper: measured speeds and estimates are never mixed."""

import csv
import math
from pathlib import Path

import pytest
import yaml

from qerl.plan import cost_model, plan
from qerl.plan.cost_model import ASSUMED, SIZES, SPEEDS, Costs, Hours, PlannedWork
from qerl.plan.paper_costs import Needs, by_table
from qerl.results.printed import CURVE_FIGURES, NAMES, TABLES
from qerl.settings.base import ConfigError, parse
from qerl.settings.config import Config

ROOT = Path(__file__).parents[3]
SEEDS = range(3)
TOKENS = 600 * 128  # completions of a run; times the longest


@pytest.fixture(scope="module")
def papers():
    return plan(parse(Config, yaml.safe_load((ROOT / "config/paper.yaml").read_text()), "paper"))


def rows() -> list[dict[str, str]]:
    with SPEEDS.open(newline="") as file:
        return list(csv.DictReader(file))


def h200() -> dict[str, str]:
    """A row of an H200, whose values tests replace."""
    return next(row for row in rows() if row["machine"] == "h200")


def measured(model: str, weights: str, sequences: int, engine: str = "native") -> float:
    """The rate with an adapter of rank 16, which is the measured one next to the paper's 32."""
    key = (model, weights, "16", engine, str(sequences))
    rates = [
        (int(r["tokens"]), float(r["rollout_tokens_per_second"]))
        for r in rows()
        if (r["model"], r["weights"], r["rank"], r["engine"], r["sequences"]) == key and r["rollout_tokens_per_second"]
    ]
    return max(rates)[1]


def measured_update(model: str, weights: str, gradient_checkpointing: str, engine: str = "native") -> float:
    """The rate of the largest batch."""
    key = (model, weights, engine, gradient_checkpointing)
    updates = [
        (int(r["sequences"]), float(r["update_tokens_per_second"]))
        for r in rows()
        if r["update_tokens_per_second"] and (r["model"], r["weights"], r["engine"], r["gradient_checkpointing"]) == key
    ]
    return max(updates)[1]


def lowest_share(engine: str, model: str) -> float:
    """The lowest share of the peak at which a model's LoRA update by an engine was measured, with its largest batch."""
    with SIZES.open(newline="") as file:
        sizes = {row["model"]: float(row["gigabytes"]) for row in csv.DictReader(file) if row["weights"] == "bf16"}
    operations = {"true": 8, "false": 6}
    shares = {}
    for row in rows():
        checkpointing = row["gradient_checkpointing"]
        if (row["engine"], row["model"]) == (engine, model) and checkpointing in operations:
            rate = float(row["update_tokens_per_second"])
            share = operations[checkpointing] * (sizes[model] * 1e9 / 2) * rate / 989e12
            shares.setdefault((row["weights"], checkpointing), []).append((int(row["sequences"]), share))
    return min(max(of_batches)[1] for of_batches in shares.values())


def work(**changes) -> PlannedWork:
    given = {"model": "qwen2.5-7b", "weights": "nvfp4", "method": "lora", "rank": 16, "sequences": 64, "drawn": 3600.0}
    return PlannedWork(**{**given, **changes})


# --- which


def test_runs_of_a_figure_are_the_arms_that_its_series_ask_for(papers):
    ranks = [f"ranks-3b-rank-{rank}-seed{seed}" for rank in (16, 64, 128) for seed in SEEDS]
    assert Needs(papers).of("figure10").runs == {*ranks, *(f"gsm8k-3b-nvfp4-lora-aqn-seed{seed}" for seed in SEEDS)}
    decays = ("linear", "exponential", "cosine", "logarithmic")
    schedules = {f"schedules-3b-{name}-seed{seed}" for name in decays for seed in SEEDS}
    assert Needs(papers).of("figure9").runs == schedules


def test_a_table_of_scores_takes_runs_their_evaluations_and_the_bases(papers):
    need = Needs(papers).of("table1")
    assert len(need.runs) == 2 * 6 * 3
    bases = {f"base-qwen2.5-{size}-{w}" for size in ("3b", "7b") for w in ("bf16", "nf4", "mxfp4", "nvfp4")}
    assert need.evaluations == need.runs | bases
    assert not need.benches
    assert not any("consistent" in run or "bf16-lora-aqn" in run for run in need.runs)


def test_a_table_of_speeds_takes_measurements_of_its_model_and_batch(papers):
    needs = Needs(papers)
    assert needs.of("table6").benches == {"rollout-7b-2", "rollout-7b-8", "step-7b"}
    assert needs.of("table9").benches == {f"rollout-{size}-1" for size in ("3b", "7b", "14b", "32b")}
    assert not needs.of("table6").runs


def test_every_table_and_figure_has_a_row_and_everything_is_in_some_row(papers):
    table = by_table(papers, "h200").set_index("table, figure")
    assert {f"Table {n}" for n in range(1, len(TABLES) + 1)} <= set(table.index)
    assert {name.title().replace("re", "re ") for name in CURVE_FIGURES} <= set(table.index)
    needs = Needs(papers)
    taken = set().union(*(needs.of(name).runs for name in [*papers.tables, *papers.figures] if name in NAMES))
    assert table.loc["outside the paper", "runs"] == len(set(papers.runs) - taken)
    assert table.loc["all, shared work once", "runs"] == len(papers.runs)


# --- costs


def test_hours_of_a_figure_are_those_of_its_runs(papers):
    """Figure 12: NVFP4 with AQN and BF16 LoRA of the 7B on BigMath, three seeds, at 128 measured sequences.

    Figure 13 has the same of the 32B, with gradient checkpointing.
    """
    tokens = TOKENS * 8192
    rates = [measured("qwen2.5-7b", weights, 128) for weights in ("nvfp4", "bf16")]
    rollouts = 3 * sum(tokens / rate for rate in rates) / 3600
    updates = sum(3 * tokens / measured_update("qwen2.5-7b", weights, "false") / 3600 for weights in ("nvfp4", "bf16"))
    table = by_table(papers, "h200").set_index("table, figure")
    assert table.loc["Figure 12", "rollouts, h"] == f"{rollouts:.0f}"
    assert table.loc["Figure 12", "updates, h"] == f"{updates:.0f}"
    updates = sum(3 * tokens / measured_update("qwen2.5-32b", weights, "true") / 3600 for weights in ("nvfp4", "bf16"))
    assert table.loc["Figure 13", "updates, h"] == f"{updates:.0f}"


def test_the_same_runs_by_trl_and_vllm(papers):
    """Figure 12 has TRL's updates without gradient checkpointing, which aren't measured; Figure 14 has those with it.

    NVFP4 is priced by NF4's updates.
    """
    table = by_table(papers, "h200").set_index("table, figure")["runs, evaluations by TRL + vLLM, h"]
    tokens = TOKENS * 8192
    rates = [measured("qwen2.5-7b", weights, 128, "vllm") for weights in ("nvfp4", "bf16")]
    rollouts = 3 * sum(tokens / rate for rate in rates) / 3600
    updates = 2 * 3 * tokens * 6 * 15.23e9 / 2 / (lowest_share("trl", "qwen2.5-7b") * 989e12) / 3600
    assert table["Figure 12"].split(" + ")[0] == f"{rollouts:.0f}"
    assert float(table["Figure 12"].split("~")[1]) == pytest.approx(updates, abs=0.5)
    rates = [measured("qwen2.5-14b", weights, 128, "vllm") for weights in ("nvfp4", "bf16")]
    rates += [measured_update("qwen2.5-14b", weights, "true", "trl") for weights in ("nf4", "bf16")]
    assert table["Figure 14"] == f"{3 * sum(tokens / rate for rate in rates) / 3600:.0f}"


def test_an_evaluation_costs_its_problems_times_repeats_at_their_longest(papers):
    from qerl.plan.paper_costs import evaluation_work

    drawn = [w.drawn for w in evaluation_work(papers, papers.evaluations["base-qwen2.5-14b-bf16"])]
    assert drawn == [n * repeats * 4096 for n, repeats in ((500, 4), (30, 32), (30, 32), (40, 32))]


def test_estimates_are_told_from_measurements():
    assert str(Hours(12.34, 0)) == "12"
    assert str(Hours(0, 1.26) + Hours(3.0, 0)) == "3.0 + ~1.3"
    assert str(Hours(0, math.nan) + Hours(3.0, 0)) == "3.0 + unmeasured"
    assert Costs("h200").rollout(work()).estimated == 0
    assert Costs("h200").rollout(work(model="qwen2.5-1.5b")).measured == 0
    assert math.isnan(Costs("h200").rollout(work(model="miniature")).estimated)
    assert math.isnan(Costs("cpu").update(work(trained=1.0)).estimated)


#: A point that precedes the faster products with which 7B and 32B were measured. Its estimate misses the limits.
OLD = ["qwen2.5-14b", "nvfp4", "native", "64", "256"]


@pytest.mark.parametrize(
    ("model", "lengths"), [("qwen2.5-14b", "128x256"), ("qwen2.5-14b", "256x2048"), ("qwen2.5-32b", "128x256")]
)
def test_an_estimate_is_near_the_measurement_that_it_stands_for(monkeypatch, tmp_path, model, lengths):
    """Each measured speed of a model against the estimate from the others, within the limits that the page states."""
    alike = [row for row in rows() if row["source"].endswith(f"-{lengths}.json") and row["rollout_tokens_per_second"]]
    known = [row for row in alike if (row["model"], row["machine"]) == (model, "h200")]
    assert len(known) >= 12
    for row in known:
        # 7B has no NF4 at one sequence of these lengths: 32B would stand for 14B, where in plans other lengths do.
        some = rows() if (row["weights"], row["sequences"], lengths) == ("nf4", "1", "256x2048") else alike
        write(monkeypatch, tmp_path, [row for row in some if row["model"] != model])
        asked = {name: row[name] for name in ("model", "weights", "method", "engine")}
        hours = Costs("h200").rollout(work(**asked, rank=int(row["rank"]), sequences=int(row["sequences"])))
        assert hours.measured == 0
        ratio = hours.estimated * float(row["rollout_tokens_per_second"])
        if [row[name] for name in ("model", "weights", "engine", "rank", "sequences")] == OLD:
            assert round(1 - ratio, 2) == 0.23
            assert "and 23 % too short for 14B in NVFP4 with r64 at 256 sequences" in ASSUMED
        else:
            assert 0.84 < ratio < 1.4


def write(monkeypatch, folder: Path, table: list[dict[str, str]]) -> None:
    path = folder / "speeds.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    monkeypatch.setattr(cost_model, "SPEEDS", path)


def test_the_batch_of_a_speed_counts_before_its_rank_and_the_longest_sequences_last(monkeypatch, tmp_path):
    row = {**h200(), "model": "qwen2.5-7b", "weights": "nvfp4", "method": "lora", "engine": "native"}
    row |= {"gradient_checkpointing": "", "update_tokens_per_second": "", "source": "here"}
    known = [
        ("32", "1", "500", "9000"),
        ("16", "64", "300", "7000"),
        ("16", "64", "2000", "6000"),
        ("64", "64", "2000", "5"),
    ]
    known += [("32", "128", "300", "9999")]  # more than the work has
    names = ("rank", "sequences", "tokens", "rollout_tokens_per_second")
    write(monkeypatch, tmp_path, [row | dict(zip(names, one, strict=True)) for one in known])
    chosen = Costs("h200").measured_rollout(work(rank=32, sequences=64))
    assert (chosen.rank, chosen.sequences, chosen.tokens, chosen.rate) == (16, 64, 2000, 6000)
    estimated = Costs("h200").rollout(work(model="qwen2.5-14b", rank=16, sequences=64, drawn=6000 * 3600.0)).estimated
    assert estimated == pytest.approx(14.77 / 7.615, rel=0.01)


def test_speeds_of_a_slower_gpu_bound_the_hours_where_a_gpu_has_none_as_near(monkeypatch, tmp_path):
    row = {**h200(), "model": "qwen2.5-7b", "weights": "nvfp4", "method": "lora", "engine": "native", "rank": "16"}
    row |= {"gradient_checkpointing": "", "update_tokens_per_second": "", "source": "here", "tokens": "384"}
    known = [("h100", "8", "300"), ("h200", "8", "400"), ("h100", "64", "1000")]
    names = ("machine", "sequences", "rollout_tokens_per_second")
    write(monkeypatch, tmp_path, [row | dict(zip(names, one, strict=True)) for one in known])
    rates = {
        machine: [Costs(machine).measured_rollout(work(sequences=n)).rate for n in (8, 64)]
        for machine in ("h100", "h200")
    }
    assert rates == {"h100": [300, 1000], "h200": [400, 1000]}


def test_a_much_smaller_batch_says_nothing_of_the_hours(monkeypatch, tmp_path):
    row = {**h200(), "model": "qwen2.5-7b", "weights": "nvfp4", "method": "lora", "engine": "native", "rank": "16"}
    row |= {"gradient_checkpointing": "", "update_tokens_per_second": "", "source": "here", "sequences": "8"}
    write(monkeypatch, tmp_path, [row | {"rollout_tokens_per_second": "400"}])
    speeds = [Costs("h200").measured_rollout(work(sequences=count)) for count in (7, 8, 64, 65)]
    assert [speed and speed.rate for speed in speeds] == [None, 400, 400, None]
    assert math.isnan(Costs("h200").rollout(work(sequences=65)).estimated)


def test_rollouts_with_an_adapter_bound_those_without_one(monkeypatch, tmp_path):
    row = {**h200(), "model": "qwen2.5-7b", "weights": "bf16", "engine": "native", "sequences": "8", "rank": "0"}
    row |= {"gradient_checkpointing": "", "update_tokens_per_second": "", "source": "here", "tokens": "384"}
    rates = {"lora": "300", "none": "400"}
    for known in (["lora"], ["none"]):
        write(monkeypatch, tmp_path, [row | {"method": m, "rollout_tokens_per_second": rates[m]} for m in known])
        speeds = [
            Costs("h200").measured_rollout(work(weights="bf16", method=m, rank=0)) for m in ("full", "none", "lora")
        ]
        rate = float(rates[known[0]])
        assert [speed and speed.rate for speed in speeds] == [rate, rate, rate if known == ["lora"] else None]


def test_a_measured_update_takes_the_place_of_the_estimate(monkeypatch, tmp_path, papers):
    row = {**h200(), "model": "qwen2.5-7b", "weights": "nvfp4", "sequences": "8", "rollout_tokens_per_second": ""}
    row |= {"update_tokens_per_second": "20000", "gradient_checkpointing": "false", "source": "here"}
    write(monkeypatch, tmp_path, [*(r for r in rows() if not r["update_tokens_per_second"]), row])
    trained = Costs("h200").update(work(trained=7.2e7))
    assert (trained.measured, trained.estimated) == (1.0, 0.0)
    assert Costs("h200").update(work(trained=7.2e7, gradient_checkpointing="true")).measured == 0
    assert Costs("h200").rollout(work()).measured == pytest.approx(1 / measured("qwen2.5-7b", "nvfp4", 64))
    one = 3 * TOKENS * 8192 / 20000 / 3600
    said = by_table(papers, "h200").set_index("table, figure").loc["Figure 12", "updates, h"]
    assert said.startswith(f"{one:.0f} + ~")


@pytest.mark.parametrize(("engine", "system"), [("native", "qerl"), ("trl", "trl")])
def test_an_update_with_gradient_checkpointing_bounds_ours_without(monkeypatch, tmp_path, engine, system):
    row = {**h200(), "model": "qwen2.5-7b", "weights": "nf4", "sequences": "8", "rollout_tokens_per_second": ""}
    row |= {"update_tokens_per_second": "20000", "gradient_checkpointing": "true", "source": "here", "engine": engine}
    write(monkeypatch, tmp_path, [*(r for r in rows() if not r["update_tokens_per_second"]), row])
    costs = Costs("h200", system)
    bounds = [
        costs.update(work(weights="nf4", trained=7.2e7, gradient_checkpointing=checkpointing)).measured
        for checkpointing in ("true", "false", "auto")
    ]
    assert bounds == ([1.0, 1.0, 1.0] if system == "qerl" else [1.0, 0.0, 0.0])


def test_a_measured_update_says_whether_with_gradient_checkpointing(monkeypatch, tmp_path):
    row = {**h200(), "update_tokens_per_second": "20000", "gradient_checkpointing": "", "source": "here"}
    write(monkeypatch, tmp_path, [row])
    with pytest.raises(ConfigError, match="doesn't say gradient_checkpointing"):
        Costs("h200")
