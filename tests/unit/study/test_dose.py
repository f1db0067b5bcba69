"""The dose study on synthetic data with a planted truth, and on the committed data against an independent script."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qerl.report_jobs import PageJob
from qerl.results.schema import Dose, DoseReport, Machine, Provenance, ResultError, write
from qerl.results.statistics import Interval
from qerl.study.dose import (
    DISCOVERY,
    FIRST,
    WIDEST,
    Outcome,
    all_outcomes,
    dose_table,
    envelope,
    of_complete_seeds,
    secondary_table,
    write_page,
)
from qerl.study.runs import METRICS, OUTCOMES, RUNS, STEPS, Study, StudyHeader, write_study
from tests.conftest import in_nightly
from tests.recompute_dose import estimates

ARMS = ("bf16", "bf16-again", "hot-1.2", "entropy", "nvfp4", "aqn-4", "aqn-8", "paper-bf16")
STAMP = Provenance(commit="c" * 40, dirty=False, machine=Machine(label="a machine"), time="2026-11-23T00:00:00+00:00")


def study(
    discovery: Mapping[str, float] = {}, entropy: Mapping[str, float] = {}, noise=0.005, seeds=4, problems=4, arms=ARMS
) -> Study:
    """Runs of three bases whose discovery is 0.5 + its arm's, + `noise` a run (SD)."""
    generator = np.random.default_rng(0)
    runs, steps, counts = [], [], []
    for arm in arms:
        for model in ("3m-0", "3m-1", "3m-2"):
            for seed in range(seeds):
                name = f"{arm}-{model}-{seed}"
                row = {"run": name, "role": "main", "experiment": "dose-3m", "size": "3m", "arm": arm, "model": model}
                more = {"seed": seed, "rate": 5e-4, "status": "ok", "seconds": 1.0}
                runs.append({**dict.fromkeys(RUNS.names, ""), **row, **more})
                found = 0.5 + discovery.get(arm, 0.0) + noise * generator.normal()
                values = dict.fromkeys(METRICS, 0.0) | {"entropy": 0.1 + entropy.get(arm, 0.0)}
                steps += [{"run": name, "step": step, **values, "discovery": found * step / 3} for step in (1, 2, 3)]
                for temperature in (0.7, 1.0, 1.3):
                    asked = {"run": name, "task": "countdown", "split": "test", "temperature": temperature}
                    for problem in range(problems):
                        right = int(temperature == 1.0) + (problem % 2)
                        counts.append({**asked, "problem": f"p{problem}", "right": right, "drawn": 4, "distinct": 1})
    frames = [(runs, RUNS), (steps, STEPS), (counts, OUTCOMES)]
    header = StudyHeader(study="dose", decides=True, protocol="a" * 64, provenance=STAMP)
    return Study(header, *(pd.DataFrame(rows, columns=schema.names) for rows, schema in frames))


def discovery_of(data: Study) -> Outcome:
    """The outcome of discovery of data in one folder."""
    in_folder = replace(data, runs=data.runs.assign(part="data"))
    [found] = [outcome for outcome in all_outcomes(in_folder) if outcome.measure == DISCOVERY]
    return found


@pytest.mark.parametrize(
    ("discovery", "entropy", "verdict"),
    [
        ({}, {}, "blind"),
        ({"bf16-again": 0.1}, {}, "repetition differs"),
        ({"entropy": 0.05}, {}, "no help"),
        ({"entropy": 0.05, "aqn-4": 0.1}, {"entropy": 0.1, "aqn-4": 0.1}, "helps"),
        ({"entropy": 0.1, "aqn-4": 0.1}, {"entropy": 0.1, "aqn-4": 0.1}, "as entropy"),
        # The control of its entropy is another one, which raises nothing.
        ({"entropy": 0.1, "aqn-4": 0.1}, {"entropy": 0.1, "aqn-4": 0.0}, "helps"),
        ({"entropy": 0.01, "aqn-4": 0.1}, {}, "blind"),  # a control that rises, by less than what counts
    ],
)
def test_the_decision_is_that_of_the_planted_truth(discovery, entropy, verdict):
    found = discovery_of(study(discovery, entropy))
    assert found.verdict == verdict
    for arm, effect in discovery.items():
        interval = found.comparisons[arm].difference.interval
        assert interval.mean == pytest.approx(effect, abs=0.01)
        assert interval.low < effect < interval.high or abs(interval.mean - effect) < 0.01


def test_nothing_is_concluded_from_one_seed():
    assert discovery_of(study({"entropy": 0.05, "aqn-4": 0.1}, seeds=1)).verdict == "one seed"


def test_differences_too_wide_for_a_sentence_are_undecided():
    assert discovery_of(study({"entropy": 0.3}, noise=0.15)).verdict == "undecided"


def test_the_envelope_takes_each_arms_best_temperature():
    data = study()
    # At temperature 1 each problem has one right completion more, of four.
    best = envelope(data.runs, data.outcomes, 1)
    assert set(best["temperature"]) == {1.0}
    assert best["value"].mean() == pytest.approx((1 / 4 + 2 / 4) / 2)


def test_the_page_has_the_dose_of_each_arm_and_says_what_was_decided(tmp_path):
    write_study(tmp_path / "data", study({"aqn-8": 0.2}))
    measured = Dose(
        problems=1, completions=4, tokens=9, **dict.fromkeys(("kl", "entropy", "entropy_change"), _at(0.25))
    )
    write(tmp_path / "dose-3m-0.json", DoseReport(model="3m-0", arms={"aqn-8": measured}, provenance=STAMP))
    doses = [tmp_path / "dose-3m-0.json"]
    write_page(PageJob(data=[tmp_path / "data"], doses=doses, out=tmp_path / "out"))
    page = (tmp_path / "out/dose.md").read_text()
    table = pd.read_csv(tmp_path / "out/dose/comparisons.csv").set_index("arm")
    assert table.loc["aqn-8", "dose"] == 0.25
    assert table["dose"].notna().sum() == 1
    assert table.loc["aqn-8", "discovery"] == pytest.approx(0.2, abs=0.01)
    # An effect of noise is shown also where the assay is blind.
    assert "can't see an effect" in page
    [row] = [line for line in page.splitlines() if line.startswith("| `dose-3m`") and "| discovery" in line]
    assert "`aqn-8` +20" in row or "`aqn-8` +19" in row
    assert (tmp_path / "out/dose/response.png").is_file()


def _at(value: float) -> Interval:
    return Interval(value, value, value)


def test_a_dose_counts_for_the_data_in_its_folder(tmp_path):
    """Bases are pretrained anew for other data, so their doses differ."""
    data = [tmp_path / "early", tmp_path / "late"]
    for folder, kl in zip([*data, tmp_path], (1.0, 2.0, 4.0), strict=True):
        values = dict.fromkeys(("kl", "entropy", "entropy_change"), _at(kl))
        dose = Dose(problems=1, completions=4, tokens=9, **values)
        folder.mkdir(exist_ok=True)
        write(folder / "dose-3m-0.json", DoseReport(model="3m-0", arms={"aqn-8": dose}, provenance=STAMP))
    files = [folder / "dose-3m-0.json" for folder in data]
    found = dose_table(files, data, {"3m-0": "3m"}).set_index("part")["kl"]
    assert found.to_dict() == {"early": 1.0, "late": 2.0}
    assert dose_table(files, data, {"3m-1": "3m"}).empty  # of a base without runs so far
    elsewhere = dose_table([tmp_path / "dose-3m-0.json"], data, {"3m-0": "3m"}).set_index("part")["kl"]
    assert elsewhere.to_dict() == {"early": 4.0, "late": 4.0}


def test_the_page_has_how_far_rounding_moves_each_base(tmp_path):
    """Two bases of a size that has runs, and a base that has none yet; a completion of the latter has 400 tokens."""
    write_study(tmp_path / "data", study({"aqn-8": 0.2}))
    doses = []
    for model, tokens, kl in (("3m-0", 40, 0.02), ("3m-1", 120, 0.04), ("121m", 1600, 3.0)):
        values = {"kl": _at(kl), "entropy": _at(0.1), "entropy_change": _at(5e-4)}
        dose = Dose(problems=1, completions=4, tokens=tokens, **values)
        doses.append(tmp_path / f"dose-{model}.json")
        write(doses[-1], DoseReport(model=model, arms={"nvfp4": dose}, provenance=STAMP))
    write_page(PageJob(data=[tmp_path / "data"], doses=doses, out=tmp_path / "out"))
    bases = pd.read_csv(tmp_path / "out/dose/bases.csv").set_index("base")
    assert bases["tokens"].to_dict() == {"3m": 20, "121m": 400}
    assert bases["kl"].to_dict() == {"3m": 0.03, "121m": 3.0}
    token_kl = {"3m": (0.02 / 10 + 0.04 / 30) / 2, "121m": 3.0 / 400}
    assert bases["token_kl"].to_dict() == pytest.approx(token_kl, rel=1e-5)
    assert "`121m`" in (tmp_path / "out/dose.md").read_text()


def test_secondary_measures_are_means_over_their_steps():
    data = study({"entropy": 0.1})
    noisy = data.steps["run"].str.startswith("aqn-8") & (data.steps["step"] > 1)
    steps = data.steps.assign(**{"noise/sigma": noisy * 0.1, "entropy/sampler": data.steps["step"] * (1.0 + noisy)})
    runs = data.runs.assign(part="data")
    steps = steps.assign(step=10 * steps["step"])  # 10, 20, 30: a tenth of the steps is three, and noise begins at 20
    found = replace(data, runs=runs, steps=steps)
    rows = secondary_table(found, all_outcomes(found)).set_index("arm")
    assert rows.loc[["bf16", "aqn-8"], "sampler's entropy"].tolist() == pytest.approx([2, (1 + 4 + 6) / 3])
    [first] = [name for name in rows if "steps 20 to 22" in name]
    assert rows.loc[["bf16", "aqn-8"], first].tolist() == [2, 4]
    assert set(rows["distinct solutions of a problem"]) == {1}


def test_a_seed_counts_once_every_arm_has_it_on_every_base():
    whole = study(seeds=3)
    late = whole.runs[whole.runs["run"] != "aqn-8-3m-1-2"]
    failed = late.assign(status=late["status"].where(late["run"] != "bf16-3m-0-1", "out of memory"))
    kept = of_complete_seeds(replace(whole, runs=failed)).runs
    assert set(kept["seed"]) == {0, 1}
    assert len(kept) == 2 * 3 * len(ARMS)


@pytest.mark.parametrize("other", ["nvfp4", "entropy"])
def test_data_without_a_control_or_a_dose_are_refused(tmp_path, other):
    write_study(tmp_path / "data", study(arms=("bf16", "bf16-again", other)))
    with pytest.raises(ResultError, match="no experiment with a base line, its repetition, a control and a dose"):
        write_page(PageJob(data=[tmp_path / "data"], doses=[], out=tmp_path / "out"))


@pytest.mark.parametrize("arms", [["bf16"], ["bf16-again"], ["hot-1.2", "entropy"], ["nvfp4", "aqn-4", "aqn-8"], ARMS])
def test_data_in_which_all_runs_of_a_role_failed_are_refused(tmp_path, arms):
    data = study(seeds=1)
    failed = data.runs["arm"].isin(arms)
    outcomes = data.outcomes[~data.outcomes["run"].isin(data.runs["run"][failed])]
    runs = data.runs.assign(status=data.runs["status"].mask(failed, "diverged"))
    write_study(tmp_path / "data", replace(data, runs=runs, outcomes=outcomes))
    with pytest.raises(ResultError, match=r"no experiment with a base line, .* ended well in pairs"):
        write_page(PageJob(data=[tmp_path / "data"], doses=[], out=tmp_path / "out"))


def test_an_experiment_without_a_dose_is_named_and_not_compared(tmp_path):
    write_study(tmp_path / "early", study({"entropy": 0.05}))
    late = study({"entropy": 0.05}, seeds=3, arms=("bf16", "bf16-again", "entropy"))
    frames = (late.runs, late.steps, late.outcomes)
    tables = [frame.assign(run="late-" + frame["run"]) for frame in frames]
    runs = tables[0].assign(experiment="assay-25m", size="25m")
    write_study(tmp_path / "late", Study(late.header, runs, *tables[1:]))
    write_page(PageJob(data=[tmp_path / "early", tmp_path / "late"], doses=[], out=tmp_path / "out"))
    page = (tmp_path / "out/dose.md").read_text()
    [line] = [line for line in page.splitlines() if "assay-25m" in line and not line.startswith("|")]
    assert "nothing is compared" in line
    assert "of 3 seeds there are 27 runs, of `bf16`, `bf16-again`, `entropy`" in line
    assert set(pd.read_csv(tmp_path / "out/dose/comparisons.csv")["experiment"]) == {"dose-3m"}


PUBLISHED = sorted(file.parent for file in Path("results/reference/dose").glob("*/runs.parquet"))


@pytest.mark.parametrize("draws", [1, *in_nightly(4000)])
def test_the_published_estimates_are_those_of_a_script_that_shares_no_code(draws):
    """tests/recompute_dose.py reads the Parquet files with pandas alone; one draw gives no interval."""
    index = ["experiment", "arm"]
    own = estimates(PUBLISHED, draws).set_index(index).add_suffix(" own")
    page = pd.read_csv("docs/results/dose/comparisons.csv").set_index(index)
    rows = page.join(own, how="inner")
    assert len(rows) == len(own) == len(page) > 30
    for measure in (DISCOVERY, FIRST, WIDEST):
        assert rows[measure].to_numpy() == pytest.approx(rows[f"{measure} own"].to_numpy(), abs=1e-6)
        for end in ("low", "high") if draws > 1 else ():
            of_script = rows[f"{measure}_{end} own"].to_numpy()
            assert rows[f"{measure}_{end}"].to_numpy() == pytest.approx(of_script, abs=0.006)
