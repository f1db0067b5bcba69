"""What decides a result includes what decides the results that it is made of."""

from pathlib import Path

import pytest

from qerl.settings.base import read_yaml
from qerl.workflow.plan import plan_from
from qerl.workflow.rules import Jobs

ROOT = Path(__file__).parents[3]
RUN, OTHER = "dose-nvfp4-modeltiny-0-seed0", "dose-nvfp4-modeltiny-1-seed0"
CALLS = [
    *(("data", "countdown"), ("data", "arithmetic"), ("pretrain", "tiny-0"), ("pretrain", "tiny-1")),
    *(("quantize", "tiny-0-nvfp4"), ("quantize", "tiny-0-bf16"), ("train", RUN), ("train", OTHER)),
    *(("evaluate", RUN), ("evaluate", OTHER), ("evaluate", "base-tiny-0-bf16"), ("table", "accuracy")),
    *(("gather", "planned"), ("dose", "tiny-0"), ("page", "planned")),
]


def deciding(change=lambda values: None) -> dict[tuple[str, str], str]:
    values = read_yaml(ROOT / "config/dose-small.yaml")
    # Bases that imitate two tasks.
    values["datasets"]["arithmetic"] = {
        **{"format": "math", "instruction": "Box the answer."},
        "origin": {"source": "generated", "train": 4000, "validation": 32, "test": 64},
    }
    for model in values["models"].values():
        model["datasets"] = ["countdown", "arithmetic"]
    change(values)
    plan = plan_from(values, ROOT / "config/mini.yaml")
    jobs = Jobs(plan)
    return {call: jobs.deciding(*call) for call in CALLS}


def changed(change) -> set[tuple[str, str]]:
    before, after = deciding(), deciding(change)
    return {call for call in CALLS if before[call] != after[call]}


def test_another_base_decides_all_that_is_made_of_it_and_nothing_else():
    found = changed(lambda values: values["models"]["tiny-0"].update(max_steps=7))
    assert set(CALLS) - found == {call for call in CALLS if call[0] == "data" or call[1] in ("tiny-1", OTHER)}


def test_other_data_decide_everything_that_reads_them():
    found = changed(lambda values: values["datasets"]["arithmetic"]["origin"].update(validation=31))
    assert set(CALLS) - found == {("data", "countdown")}  # bases imitate the solutions of both tasks


def test_a_changed_arm_decides_its_runs_and_what_is_made_of_them():
    def noisy(values):
        values["experiments"]["dose"]["arms"]["nvfp4"]["noise.schedule"] = "linear"

    assert changed(noisy) == {
        ("train", RUN),
        ("train", OTHER),
        ("evaluate", RUN),
        ("evaluate", OTHER),
    } | {("table", "accuracy"), ("gather", "planned"), ("dose", "tiny-0"), ("page", "planned")}


@pytest.mark.parametrize(
    ("module", "same"), [("qerl.rl.pretrain", {"data", "pretrain"}), ("qerl.data.sources", {"data"})]
)
def test_the_code_that_made_an_input_decides_too(monkeypatch, module, same):
    """The code of the job itself is a parameter of its own."""
    monkeypatch.setattr("qerl.jobs.code_version", lambda name: name)
    before = deciding()
    monkeypatch.setattr("qerl.jobs.code_version", lambda name: "other" if name == module else name)
    after = deciding()
    assert {call[0] for call in CALLS if after[call] == before[call]} == same


@pytest.mark.parametrize("module", ["qerl.gates.measure", "qerl.evals.evaluate"])
def test_the_code_of_what_gates_measure_decides_their_verdict(monkeypatch, module):
    """Gates read results that no table does: those of committed policies, of codecs and of speed."""
    plan = plan_from(read_yaml(ROOT / "config/ci.yaml"), ROOT / "config/mini.yaml")
    monkeypatch.chdir(ROOT)
    found = []
    for other in ("same", "other"):
        monkeypatch.setattr("qerl.jobs.code_version", lambda name, v=other: v if name == module else name)
        found.append(Jobs(plan).deciding("verdict"))
    assert found[0] != found[1]
