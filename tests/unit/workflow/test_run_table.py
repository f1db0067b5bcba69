"""The sheet of runs: their hours by measured speeds, and what is done."""

import pandas as pd
import pytest

from qerl.settings.base import ConfigError
from qerl.workflow.costs import UNMEASURED, Costs, Hours, run_work, sheet, totals
from tests.synthetic_results import write_evaluation, write_run
from tests.unit.workflow.test_plan import ROOT, planned, values


def test_hours_are_tokens_over_the_measured_speed_and_never_invented():
    plan_ = planned(values("paper"))
    runs = sheet(plan_, "h200").set_index("run")
    speeds = pd.read_csv(ROOT / "qerl/workflow/measured/speeds.csv")
    chosen = (speeds.model == "qwen2.5-7b") & (speeds.weights == "nvfp4") & (speeds.sequences == 128)
    chosen &= (speeds["rank"] == 16) & (speeds.engine == "native") & (speeds.machine == "h200")
    (rate,) = speeds[chosen].rollout_tokens_per_second.dropna()
    hours = 600 * 128 * 4096 / rate / 3600
    assert runs.loc["gsm8k-7b-nvfp4-lora-seed0", "rollout_hours"] == pytest.approx(hours, abs=0.05)
    measured = set(speeds[speeds.machine != "cpu"].model)
    for name, row in runs.iterrows():
        assert (row.rollout_hours == UNMEASURED) or row.model in measured, name
    with pytest.raises(ConfigError, match="machine 'abacus'; use one of cpu, h100, h200"):
        sheet(plan_, "abacus")
    updated = set(speeds[speeds.update_tokens_per_second.notna()].model)
    assert updated
    for name, row in runs.iterrows():
        assert (row.update_hours == UNMEASURED) or row.model in updated, name


def test_the_hours_of_many_short_runs_add_up():
    plan_ = planned(values("dose"))
    runs, costs = sheet(plan_, "h200"), Costs("h200")
    whole = sum((costs.update(run_work(run)) for run in plan_.runs.values()), Hours())
    assert whole.estimated > 0.1
    assert f"updates: unmeasured, by estimate at most {whole} GPU-hours on h200" in totals(plan_, runs, "h200")


def test_an_installed_package_has_no_measured_speeds(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl.workflow.costs.SPEEDS", tmp_path / "speeds.csv")
    with pytest.raises(ConfigError, match=r"speeds.csv doesn't exist: .* run in a clone"):
        sheet(planned(values()), "h200")


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
