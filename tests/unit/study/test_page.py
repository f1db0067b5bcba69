"""The page of a study from synthetic Parquet files with a known truth."""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from qerl.jobs import PageJob, RealArm
from qerl.results.printed import FOLDER, read_cells
from qerl.results.store import ResultError
from qerl.results.study_data import read_studies, write_study
from qerl.study import outcomes
from qerl.study import page as text
from qerl.study.arms import arm_table, equal_rate_table, pilots, power_table, rate_table, run_table
from qerl.study.comparisons import (
    CLAIMS,
    all_outcomes,
    calibration_table,
    claim_table,
    comparison_table,
    decision_table,
    follower_table,
    is_unstable,
    pair_table,
    printed_difference,
)
from qerl.study.outcomes import PRIMARY, chosen_rates
from qerl.study.page import comparisons_section, write_page
from tests.unit.study.studies import ARMS, study

ROOT = Path(__file__).parents[3]
REAL = [
    RealArm(
        experiment="gsm8k-7b",
        model="qwen2.5-7b",
        arm=arm,
        number=number,
        seeds=3,
        hours={1: "~9", 3: "~27", 12: "~108"},
    )
    for arm, number in (("bf16-lora", "1"), ("nvfp4-lora", "2"), ("nvfp4-lora-aqn", "5"))
]


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch):
    monkeypatch.setattr(outcomes, "_DRAWS", 400)


def decided(effects, **options) -> dict[tuple[str, str], list[str]]:
    """The verdicts by size and measure."""
    frame = decision_table(all_outcomes(study(effects, **options)))
    return {key: list(rows["verdict"]) for key, rows in frame.groupby(["size", "measure"])}


def small(effects, **options):
    return study(effects, **{"sizes": ("3m",), **options})


# --- a known truth ---------------------------------------------------------------------------------------------------


def test_five_points_of_noise_in_arms_2_and_5_are_exploration():
    """Arm 2 is 5 points above its thermostat, and arm 5 as much above its own, and so above arm 2 by 5 more."""
    found = decided({"nvfp4": 0.05, "nvfp4-thermostat": 0.05, "nvfp4-aqn": 0.10, "nvfp4-aqn-truncated": 0.10,
                     "nvfp4-aqn-consistent": 0.10}, sizes=("3m",), noise=0.002)  # fmt: skip
    assert found["3m", "pass@1"] == ["exploration", "recovers what quantization lost"]


def test_a_gain_that_a_correction_takes_away_is_mismatch():
    found = decided({"nvfp4-aqn": 0.05, "bf16-aqn": 0.05}, sizes=("3m",), noise=0.002)
    assert found["3m", "pass@1"] == ["mismatch"]


def test_no_effect_is_none_and_a_noisy_one_undecided():
    assert decided({}, sizes=("3m",), noise=0.003)["3m", "pass@1"] == ["none"]
    assert decided({"nvfp4": 0.02}, sizes=("3m",), noise=0.06)["3m", "pass@1"] == ["undecided"]


def test_sizes_are_decided_apart_and_an_arm_that_was_not_run_leaves_them_open():
    both = decided({}, noise=0.002)
    assert both["3m", "pass@1"] == both["25m", "pass@1"] == ["none"]
    without = [arm for arm in ARMS if arm != "nvfp4-thermostat"]
    assert decided({}, sizes=("3m",), arms=without)["3m", "pass@1"] == ["incomplete"]


def test_the_difference_is_the_planted_one_and_its_interval_of_the_runs_spread():
    """The interval against Student's t over the pairs, whose differences vary by run alone here."""
    made = small({"nvfp4": 0.05}, noise=0.01, seeds=4, problems=400, drawn=256)
    [one] = [outcome for outcome in all_outcomes(made) if outcome.k == 1]
    interval = one.comparisons["2-1"].interval
    pairs = pair_table(one).query("comparison == '2-1'")["difference"]
    t = stats.ttest_1samp(pairs, 0).confidence_interval()
    assert interval.mean == pytest.approx(0.05, abs=0.012)
    assert interval.mean == pytest.approx(pairs.mean())
    assert interval.high - interval.low == pytest.approx(t.high - t.low, rel=0.5)
    assert interval.low < 0.05 < interval.high


def test_holm_is_by_the_formula_on_the_tables_own_p():
    frame = comparison_table(all_outcomes(small({"nvfp4": 0.02}, noise=0.02)), small({}).runs)
    primary = frame[(frame["measure"] == "pass@1") & frame["p_holm"].notna()].sort_values("p")
    factors = [5 - rank for rank in range(5)]
    expected = np.minimum(1, np.maximum.accumulate(primary["p"].to_numpy() * factors))
    np.testing.assert_allclose(primary["p_holm"], expected)
    assert set(frame[frame["p_holm"].isna()]["comparison"]) == {"6-2", "7-2"}


def test_claims_of_entropy_are_separate_from_those_of_scores():
    """Rounding raises the entropy by 0.05 and teaches nothing; both stand beside what the paper printed."""
    made = small({}, entropy={"nvfp4": 0.05}, noise=0.002)
    frame = claim_table(made, all_outcomes(made)).set_index("claim")
    assert frame.loc["Rounding to 4 bits raises the entropy", "says"] == "holds here"
    assert frame.loc["Rounding to 4 bits raises the entropy", "difference"] == pytest.approx(0.05, abs=0.002)
    assert frame.loc["AQN raises the entropy of what is sampled", "says"] == "the opposite holds here"
    assert frame.loc["NVFP4 ends above BF16", "says"] == "no difference of 2 points here"
    assert "At the paper's two rates, NVFP4 with AQN ends above BF16" not in frame.index


def test_a_follower_with_another_entropy_is_named_and_its_comparisons_support_nothing():
    """Arm 3 has 0.05 nats less than arm 2's 0.25, arm 9 has arm 5's 0.2."""
    made = small({}, entropy={"nvfp4": 0.05}, noise=0.002)
    frame = follower_table(made).set_index("arm")
    assert frame.loc["bf16-thermostat", "ratio"] == pytest.approx(0.2 / 0.25, rel=0.01)
    assert frame.loc["nvfp4-thermostat", "ratio"] == pytest.approx(1, rel=0.01)
    assert frame["follows"].to_dict() == {"bf16-thermostat": False, "nvfp4-thermostat": True}
    assert (frame["pairs"] == 12).all()
    assert decided({}, sizes=("3m",), entropy={"nvfp4": 0.05}, noise=0.002)["3m", "pass@1"] == ["undecided"]
    assert set(decision_table(all_outcomes(made))["astray"]) == {"3"}
    compared = comparison_table(all_outcomes(made), made.runs)
    assert set(compared.loc[compared["controlled"].eq(False), "comparison"]) == {"2-3"}
    says = claim_table(made, all_outcomes(made)).set_index("claim")["says"]
    assert says["The gain of NVFP4 is exploration, more than its entropy"] == "open: the control's entropy is off"
    assert says["The gain of AQN is exploration, more than its entropy"] == "no difference of 2 points here"


def test_arms_whose_chosen_rates_differ_are_compared_at_equal_rates():
    """The rate 2e-3 adds 0.2, and arm 3 has no run at it: its best rate teaches less than that of arm 2."""
    made = small({"nvfp4": 0.05}, pilot={1e-3: 0.0, 2e-3: 0.2}, problems=200)
    lacking = (made.runs["arm"] == "bf16-thermostat") & (made.runs["rate"] == 2e-3)
    runs = made.runs[~lacking]
    made = type(made)(made.header, runs, made.steps, made.outcomes[made.outcomes["run"].isin(runs["run"])])
    assert len(set(rate_table(made).query("chosen")["rate"])) == 2
    frame = equal_rate_table(made).set_index(["pilot", "measure", "comparison"]).loc["pilot-3m", "pass@1"]
    assert frame["difference"].to_dict() == pytest.approx(
        {"2-1": 0.05, "2-3": 0.05, "5-2": -0.05, "5-9": 0.0, "8-1": 0.0}, abs=1e-3
    )
    assert frame["pairs"].to_dict() == {"2-1": 6, "2-3": 3, "5-2": 6, "5-9": 6, "8-1": 6}


def test_a_difference_below_zero_is_the_opposite_and_the_smaller_size_comes_first():
    made = study({"nvfp4": -0.05}, sizes=("25m", "3m"), problems=200)
    rows = comparisons_section(comparison_table(all_outcomes(made), made.runs), rate_table(made)).splitlines()
    listed = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows if row.startswith("| ")][1:]
    assert [row[0] for row in listed if row[2:4] == ["pass@1", "2−1"]] == ["3m", "25m"]
    said = {row[3]: row[9] for row in listed if row[2] == "pass@1" and row[9] != "–"}
    assert said == {"2−1": "no, the opposite", "2−3": "no, the opposite", "5−2": "yes", "5−9": "no", "8−1": "no"}


def test_printed_differences_are_those_of_table_1():
    cells = read_cells(FOLDER / "table1.csv")
    said = {claim.text: printed_difference(claim, cells) for claim in CLAIMS}
    assert said["NVFP4 ends above BF16"] == "3B: +7.2, 7B: +0.4"  # 83.3 - 76.1, 88.5 - 88.1
    assert said["AQN ends above NVFP4 without it"] == "3B: +0.4, 7B: +2.3"
    assert said["At the paper's two rates, NVFP4 with AQN ends above BF16"] == "3B: +7.6, 7B: +2.7"
    assert said["AQN adds reward"] == ""


def test_the_tables_have_the_planted_measures():
    made = small({"nvfp4": 0.05}, entropy={"nvfp4": 0.1}, pilot={5e-4: -0.1, 1e-3: 0.0, 2e-3: 0.0})
    frame = arm_table(made).set_index("arm")
    assert frame.loc["nvfp4", "reward"] == pytest.approx(0.55)
    assert frame.loc["nvfp4", "entropy"] - frame.loc["bf16", "entropy"] == pytest.approx(0.1, abs=0.002)
    assert frame.loc["bf16", "mixed groups"] == pytest.approx(0.75)
    assert list(frame["number"]) == sorted(frame["number"], key=int)
    chosen = rate_table(made).query("chosen")
    assert set(chosen["rate"]) == {1e-3}
    assert not chosen["edge"].any()
    counts = made.outcomes[made.outcomes["split"] == "validation"].merge(made.runs, on="run")
    counts = counts[(counts["role"] == "pilot") & (counts["arm"] == "nvfp4") & (counts["rate"] == 1e-3)]
    drawn = min(64, int(counts["drawn"].min()))
    missed = [
        math.comb(n - c, drawn) / math.comb(n, drawn) for n, c in zip(counts["drawn"], counts["right"], strict=True)
    ]
    assert float(chosen.set_index("arm").loc["nvfp4", "widest"]) == pytest.approx(1 - np.mean(missed))
    runs = run_table(made).set_index("run")
    rights = made.outcomes[made.outcomes["split"] == "test"].groupby("run")[["right", "drawn"]].sum()
    expected = rights["right"] / rights["drawn"]
    np.testing.assert_allclose(runs.loc[expected.index, "countdown/test/pass@1"], expected)


def test_the_conditions_of_the_calibration_are_checked():
    """Bases have a pass@1 of 0.2 and arms of 0.4; steps 7 and 8 of 8 lie two steps of 0.2 / 7 above steps 5 and 6."""
    frame = calibration_table(small({}))
    assert frame["base"].tolist() == ["3m-0", "3m-1", "3m-2"]
    assert frame["pass@1"].to_numpy() == pytest.approx(np.full(3, 0.2), abs=0.02)
    assert frame["rise"].to_numpy() == pytest.approx(np.full(3, 2 * 0.2 / 7))
    assert frame["best"].to_numpy() == pytest.approx(np.full(3, 0.4), abs=0.02)
    assert frame["met"].all()
    assert not calibration_table(small({"nvfp4": 0.58}))["met"].any()  # above the ceiling of 90 %


# --- what can't be compared ------------------------------------------------------------------------------------------


def test_a_placebo_that_differs_stops_all_comparisons():
    made = small({}, arms=[*ARMS, "nvfp4-placebo"])
    same = made.outcomes.set_index("run")
    for seed in range(4):
        for model in ("3m-0", "3m-1", "3m-2"):
            names = [f"countdown-3m-{arm}-{model}-seed{seed}" for arm in ("nvfp4-placebo", "nvfp4")]
            same.loc[names[0], "right"] = same.loc[names[1], "right"].to_numpy()
    equal = type(made)(made.header, made.runs, made.steps, same.reset_index()[made.outcomes.columns])
    assert {outcome.placebos for outcome in all_outcomes(equal)} == {12}
    assert "provisional" not in text.decisions_section(decision_table(all_outcomes(equal)))
    assert "provisional" in text.decisions_section(decision_table(all_outcomes(small({}))))
    steps = equal.steps.copy()
    steps.loc[steps["run"] == "countdown-3m-nvfp4-placebo-3m-1-seed2", "reward"] += 1e-6
    with pytest.raises(ResultError, match=r"countdown-3m-nvfp4-placebo-3m-1-seed2 differs .* nothing is compared"):
        all_outcomes(type(made)(made.header, made.runs, steps, equal.outcomes))


def test_failed_runs_are_listed_and_their_pairs_left_out():
    failed = [f"countdown-3m-nvfp4-aqn-3m-0-seed{seed}" for seed in range(3)]
    made = small({}, failed=failed)
    frame = comparison_table(all_outcomes(made), made.runs).set_index(["measure", "comparison"]).loc["pass@1"]
    assert (frame.loc["5-2", "pairs"], frame.loc["5-2", "lost_pairs"], frame.loc["5-2", "unstable"]) == (
        9,
        3,
        "nvfp4-aqn",
    )
    assert (frame.loc["2-1", "pairs"], frame.loc["2-1", "lost_pairs"], frame.loc["2-1", "unstable"]) == (12, 0, "")


@pytest.mark.parametrize(
    ("kind", "failed", "expected"), [("diverged", 2, False), ("diverged", 3, True), ("out of memory", 6, False)]
)
def test_an_arm_is_unstable_if_over_one_in_six_runs_diverged(kind, failed, expected):
    statuses = [f"{kind} after 3 of 5 steps"] * failed + ["ok"] * (12 - failed)
    assert is_unstable(pd.DataFrame({"arm": "a", "status": statuses}), "a") is expected


# --- the page --------------------------------------------------------------------------------------------------------


def page(folder, made, real=REAL):
    write_study(folder / "data", made)
    file = Path("config/paper.yaml") if real else None
    write_page(PageJob(data=[folder / "data"], real=real, real_file=file, machine="H200", out=folder / "page"))
    return (folder / "page/exploration.md").read_text()


def test_the_page_is_made_from_the_files_alone_and_its_links_lead_to_the_runs(tmp_path):
    """A number's row links to its pairs, these name runs, and the table of runs has each with its stamp."""
    made = study({"nvfp4": 0.05}, pilot={5e-4: -0.1, 1e-3: 0.0}, noise=0.002, problems=30, drawn=16, seeds=2)
    text = page(tmp_path, made)
    folder = tmp_path / "page"
    links = set(re.findall(r"\]\(([^)]+)\)", text))
    assert {link for link in links if not (folder / link.partition("#")[0]).resolve().is_file()} == set()
    runs = pd.read_csv(folder / "exploration/runs.csv").set_index("run")
    for size in ("3m", "25m"):
        assert f"exploration/pairs-countdown-{size}.csv" in links
        pairs = pd.read_csv(folder / f"exploration/pairs-countdown-{size}.csv")
        assert set(pairs["run"]) | set(pairs["other_run"]) <= set(runs.index)
        assert (runs.loc[pairs["run"], "commit"] == "c" * 12).all()
        [row] = [line for line in text.splitlines() if re.match(rf"\| {size} +\| countdown \| pass@1 +\| 2−1", line)]
        estimate = float(re.search(r"([+−]\d\.\d) \[", row)[1].replace("−", "-"))
        chosen = pairs.query("comparison == '2-1' and measure == 'pass@1'")
        assert 100 * chosen.groupby("base")["difference"].mean().mean() == pytest.approx(estimate, abs=0.06)
    assert {"runs.parquet", "steps.parquet", "outcomes.parquet"} <= {Path(link).name for link in links}
    assert "`gsm8k-7b` lacks arms 3, 6, 7, 8, 9." in text
    assert "~108" in text


def test_a_run_of_the_pipeline_says_so_and_needs_neither_pilot_nor_second_size(tmp_path):
    text = page(tmp_path, small({}, problems=20, drawn=16, seeds=1, decides=False))
    assert "run of the pipeline, and no result about the question" in text
    assert "There was no pilot." in text
    assert "There is one size, and so no trend." in text
    assert "pass@16" in text
    assert not (tmp_path / "page/exploration/trend.png").exists()


def test_a_page_without_pilot_and_real_models_doesn_t_speak_of_them(tmp_path):
    text = page(tmp_path, small({}, problems=20, drawn=16, seeds=1, decides=False), real=[])
    links = set(re.findall(r"\]\(([^)]+)\)", text))
    files = {link.partition("#")[0] for link in links}
    assert {file for file in files if not (tmp_path / "page" / file).resolve().is_file()} == set()
    assert "the pilot chose" not in text
    assert "list of real models" not in text


def test_a_study_without_main_runs_has_no_page(tmp_path):
    made = small({}, problems=5)
    empty = type(made)(made.header, made.runs[made.runs["role"] == "base"], made.steps, made.outcomes)
    with pytest.raises(ResultError, match="nothing to compare"):
        page(tmp_path, empty)


#: The data that is committed, once the runs are made.
COMMITTED = ROOT / "results/reference/exploration"


@pytest.mark.skipif(
    not (ROOT / "docs/results/exploration").is_dir(), reason="no main run of config/exploration.yaml is committed yet"
)
def test_the_committed_tables_are_those_of_the_committed_data(tmp_path, monkeypatch):
    monkeypatch.undo()
    data = read_studies(sorted(COMMITTED.iterdir()))
    made = comparison_table(all_outcomes(data), data.runs)
    stored = pd.read_csv(ROOT / "docs/results/exploration/comparisons.csv")
    said = made[made["measure"] == "pass@64"].set_index(["experiment", "comparison"])["rates"]
    assert said["countdown-25m", "2-3"] == "0.00025, 0.0005"
    assert said["countdown-25m", "5-9"] == said["countdown-3m", "2-3"] == "0.0005"
    claimed = claim_table(data, all_outcomes(data)).set_index(["claim", "size", "task"])
    at_two_rates = claimed.loc["AQN raises the entropy of what is sampled", "25m", "countdown"]
    assert (at_two_rates["rates"], at_two_rates["says"]) == ("0.0005, 0.00025", "open: two rates")
    assert claimed.loc["AQN raises the entropy of what is sampled", "3m", "countdown"]["rates"] == "0.0005"
    assert (
        claimed.loc["AQN ends above NVFP4 without it", "25m", "countdown"]["says"]
        == "no difference of 2 points here, at two rates"
    )
    steps = {run: rows["entropy/sampler"].mean() for run, rows in data.steps.groupby("run")}
    for row in follower_table(data).itertuples():
        pairs = data.runs[(data.runs["experiment"] == row.experiment) & (data.runs["role"] == "main")]
        one, other = (pairs[pairs["arm"] == arm].set_index(["model", "seed"])["run"] for arm in (row.arm, row.followed))
        both = one.index.intersection(other.index)
        ratio = np.mean([steps[run] for run in one[both]]) / np.mean([steps[run] for run in other[both]])
        assert row.follows
        assert ratio == pytest.approx(1, abs=0.1)
    for column in ("difference", "difference_low", "difference_high", "p", "p_holm", "pairs"):
        np.testing.assert_allclose(made[column].astype(float), stored[column], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "task"), [("3m", "countdown"), ("3m", "comparisons"), ("25m", "countdown"), ("25m", "comparisons")]
)
def test_the_rates_and_pairs_of_the_protocol_are_those_of_the_committed_pilot(monkeypatch, size, task):
    monkeypatch.undo()
    data = read_studies(sorted(COMMITTED.glob(f"{size}*")))
    protocol = (ROOT / "docs/exploration-protocol.md").read_text()
    [listed] = re.findall(rf"^\| {size}, {task} \| (\S+: `.*`) \|$", protocol, re.MULTILINE)
    said = {
        arm: float(rate)
        for rate, arms in re.findall(r"(\S+): ([^;]*)", listed)
        for arm in re.findall(r"`([\w-]+)`", arms)
    }
    assert said.keys() == {arm for pair in PRIMARY.values() for arm in pair}
    chosen = chosen_rates(dict(pilots(data))[f"pilot-{task}-{size}"])
    assert {arm: chosen[f"pilot-{task}-{size}", arm] for arm in said} == said
    experiment = yaml.safe_load((ROOT / "config/exploration.yaml").read_text())["experiments"][f"{task}-{size}"]
    assert {arm: float(experiment["arms"][arm]["optimizer.learning_rate"]) for arm in said} == said
    row = power_table(data).set_index("pilot").loc[f"pilot-{task}-{size}"]
    spread, pairs, seeds = re.search(
        rf"^\| {size}, {task} \| (\S+) points \| (\d+) \| (\d) \|$", protocol, re.MULTILINE
    ).groups()
    assert (f"{100 * row['spread']:.1f}", str(row["pairs"])) == (spread, pairs)
    assert len(experiment["grid"]["seed"]) == int(seeds) == min(7, max(4, -(-row["pairs"] // 3)))


def test_one_pair_has_no_interval_of_a_mean_over_steps():
    """One number has no spread, so no p value may say that the claim holds."""
    made = study({}, entropy={"nvfp4": 0.05}, sizes=("3m",), seeds=1, problems=20)
    runs = made.runs[made.runs["model"] == "3m-0"]
    one = type(made)(made.header, runs, made.steps, made.outcomes)
    row = claim_table(one, all_outcomes(one)).set_index("claim").loc["Rounding to 4 bits raises the entropy"]
    assert row["difference"] == pytest.approx(0.05, abs=0.005)
    assert row[["difference_low", "p"]].isna().all()
    assert row["says"] == "open"
