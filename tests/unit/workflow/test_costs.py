"""The hours of runs by measured speeds."""

import csv
from pathlib import Path

import pytest

from qerl.kernels.cuda.w4a16 import MOST_STACKED_RANKS
from qerl.settings.base import ConfigError
from qerl.workflow import costs
from qerl.workflow.costs import SPEEDS, Costs, Work, sheet, totals
from tests.synthetic_results import write_evaluation, write_run
from tests.unit.workflow.test_plan import planned, values

TOKENS = 600 * 128  # completions of a run; times the longest


def rows() -> list[dict[str, str]]:
    with SPEEDS.open(newline="") as file:
        return list(csv.DictReader(file))


SEVEN = "qwen2.5-7b", "nvfp4"


def measured(model: str, weights: str, sequences: int, rank: str = "16") -> float:
    """The rate with an adapter of a measured rank; 16 is next to the paper's 32."""
    key = (model, weights, rank, "native", str(sequences))
    rates = [
        (int(r["tokens"]), float(r["rollout_tokens_per_second"]))
        for r in rows()
        if (r["model"], r["weights"], r["rank"], r["engine"], r["sequences"]) == key and r["rollout_tokens_per_second"]
    ]
    return max(rates)[1]


def measured_update(model: str, weights: str, gradient_checkpointing: str) -> float:
    """The rate of the largest batch."""
    key = (model, weights, gradient_checkpointing)
    updates = [
        (int(r["sequences"]), float(r["update_tokens_per_second"]))
        for r in rows()
        if r["update_tokens_per_second"] and (r["model"], r["weights"], r["gradient_checkpointing"]) == key
    ]
    return max(updates)[1]


def work(**changes) -> Work:
    given = {"model": "qwen2.5-7b", "weights": "nvfp4", "method": "lora", "rank": 16, "sequences": 64}
    return Work(**{**given, **changes})


def test_hours_of_runs_are_those_of_the_measured_speeds():
    """The 7B on BigMath at 128 measured sequences, and updates of the 32B, with gradient checkpointing."""
    runs = sheet(planned(values("paper")), "h200").set_index("run")
    small, large = (runs.loc[f"bigmath-{size}-nvfp4-lora-aqn-seed0"] for size in ("7b", "32b"))
    for hours, rate in (
        (small.rollout_hours, measured("qwen2.5-7b", "nvfp4", 128)),
        (small.update_hours, measured_update("qwen2.5-7b", "nvfp4", "false")),
        (large.update_hours, measured_update("qwen2.5-32b", "nvfp4", "true")),
    ):
        assert hours == pytest.approx(TOKENS * 8192 / rate / 3600)
    assert runs.loc["gsm8k-7b-mxfp4-lora-seed0"].rollout_hours == "unmeasured"


@pytest.mark.parametrize(("rank", "share"), [(MOST_STACKED_RANKS // 2, 0.78), (MOST_STACKED_RANKS // 2 + 1, 0.6)])
def test_a_cohorts_rollouts_have_the_speed_of_all_its_sequences_less_what_several_adapters_cost(rank, share):
    """Two runs of 128 completions draw like one of 256, by the part that stacked adapters cost, or others."""
    config = values("paper")
    config["experiments"]["gsm8k-7b"]["base"]["adapter"] = {"rank": rank, "alpha": 32}
    cohort, alone = (
        sheet(planned(config | {"side_by_side": runs}), "h200").set_index("run").loc["gsm8k-7b-nvfp4-lora-seed0"]
        for runs in (2, 1)
    )
    for run, speed in ((cohort, share * measured(*SEVEN, 256, "64")), (alone, measured(*SEVEN, 128, "64"))):
        assert run.rollout_hours == pytest.approx(TOKENS * 4096 / speed / 3600)
    assert cohort.update_hours == alone.update_hours


def write(monkeypatch, folder: Path, table: list[dict[str, str]]) -> None:
    path = folder / "speeds.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    monkeypatch.setattr(costs, "SPEEDS", path)


#: A measured rollout of an H200, whose values tests replace.
ROLLOUT = {
    **{
        "machine": "h200",
        "model": "qwen2.5-7b",
        "weights": "nvfp4",
        "method": "lora",
        "engine": "native",
        "rank": "16",
    },
    **{"gradient_checkpointing": "", "update_tokens_per_second": "", "source": "here", "tokens": "384"},
}


def with_rollouts(monkeypatch, folder: Path, names: str, *known: str) -> None:
    """Replace the measured speeds by rollouts, whose values of some columns are given as text."""
    write(monkeypatch, folder, [ROLLOUT | dict(zip(names.split(), row.split(), strict=True)) for row in known])


def test_the_batch_of_a_speed_counts_before_its_rank_and_the_longest_sequences_last(monkeypatch, tmp_path):
    names = "rank sequences tokens rollout_tokens_per_second"  # the last one has more sequences than the work
    known = ("32 1 500 9000", "16 64 300 7000", "16 64 2000 6000", "64 64 2000 5", "32 128 300 9999")
    with_rollouts(monkeypatch, tmp_path, names, *known)
    chosen = Costs("h200").rollout(work(rank=32, sequences=64))
    assert (chosen.rank, chosen.sequences, chosen.tokens, chosen.rate) == (16, 64, 2000, 6000)


def test_speeds_of_a_slower_gpu_bound_the_hours_where_a_gpu_has_none_as_near(monkeypatch, tmp_path):
    names = "machine sequences rollout_tokens_per_second"
    with_rollouts(monkeypatch, tmp_path, names, "h100 8 300", "h200 8 400", "h100 64 1000")
    for machine, rates in {"h100": [300, 1000], "h200": [400, 1000]}.items():
        assert [Costs(machine).rollout(work(sequences=n)).rate for n in (8, 64)] == rates


def test_a_much_smaller_batch_says_nothing_of_the_hours(monkeypatch, tmp_path):
    with_rollouts(monkeypatch, tmp_path, "sequences rollout_tokens_per_second", "8 400")
    speeds = [Costs("h200").rollout(work(sequences=count)) for count in (7, 8, 64, 65)]
    assert [speed and speed.rate for speed in speeds] == [None, 400, 400, None]


def test_updates_with_gradient_checkpointing_bound_those_without(monkeypatch, tmp_path):
    row = {**ROLLOUT, "rollout_tokens_per_second": "", "sequences": "8"}
    rates = {"true": "15000", "false": "20000"}
    write(
        monkeypatch,
        tmp_path,
        [row | {"gradient_checkpointing": name, "update_tokens_per_second": rate} for name, rate in rates.items()],
    )
    found = {name: Costs("h200").update(work(gradient_checkpointing=name)).rate for name in ("true", "false", "auto")}
    assert found == {"true": 15000, "false": 20000, "auto": 15000}
    assert Costs("h200").update(work(method="full")) is None


def test_the_hours_of_measured_runs_add_up():
    plan_ = planned(values("paper"))
    runs = sheet(plan_, "h200")
    known = [hours for hours in runs.update_hours if hours != "unmeasured"]
    said = f"updates: at most {sum(known):.1f} GPU-hours (every completion at its longest) for {len(known)} of 132 runs"
    assert f"{said} on h200" in totals(plan_, runs, "h200")


def test_an_installed_package_has_no_measured_speeds(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.workflow.costs.SPEEDS", tmp_path / "speeds.csv")
    with pytest.raises(ConfigError, match=r"speeds.csv doesn't exist: .* run in a clone"):
        Costs("h200")


def test_the_sheet_says_what_is_done(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "results/mini"
    write_evaluation(root, "main-nf4-lora-seed1", {}, "nf4", write_run(root, "nf4-lora", 1))
    write_run(root, "nf4-lora", 2)
    write_run(root, "nvfp4-lora", 0, status="out of memory")
    done = sheet(planned(values()), "h200").set_index("run").done
    assert done.pop("main-nf4-lora-seed1") == "trained, evaluated"
    assert done.pop("main-nf4-lora-seed2") == "trained"
    assert done.pop("main-nvfp4-lora-seed0") == "out of memory"
    assert set(done) == {""}
