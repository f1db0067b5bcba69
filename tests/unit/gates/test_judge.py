"""Gates: each check passes and fails where it should, and nothing passes without a baseline."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from qerl.cli import commands as cli
from qerl.gates.compare import (
    COLUMNS,
    Baseline,
    Gate,
    GateMeasurements,
    SpeedPairs,
    accept,
    collect,
    find_baseline,
    judge,
    overall,
    read_baseline,
    read_gates,
    write_baseline,
    write_verdict,
)
from qerl.gates.measure import ANSWERS, VECTORS, measure_numerics
from qerl.report_jobs import NumericsJob, workload_key
from qerl.results.schema import NO_MEMORY, Machine, ResultError
from qerl.settings.base import ConfigError, parse, read_yaml
from qerl.settings.workflow import Config
from qerl.workflow.plan import plan
from tests.mutations import MUTATIONS, mutated
from tests.synthetic_results import (
    NO_METRICS,
    rollout_point,
    write_bench,
    write_evaluation,
    write_json,
    write_lines,
    write_run,
)
from tests.vectors import vectors

GATES = Path("config/gates")
FIXTURES = Path("tests/fixtures/gates")
ARM = "nvfp4-lora-aqn"
MACHINE = Machine(label="Some CPU @ 2.0 GHz, 2 cores")
VERSIONS = {"torch": "2.13.0"}
PROVENANCE = {"commit": "c" * 40, "dirty": False, "machine": {"label": MACHINE.label}, "versions": VERSIONS}
COMPLETIONS = {f"arithmetic p{number} 0": f"0123abcd {int(number % 5 != 0)}" for number in range(200)}
ACCURACIES = {"seed=0": 0.80, "seed=1": 0.75, "seed=2": 0.78, "seed=3": 0.83}


def measured(**changes):
    values = {
        "key": "k",
        "values": {"memory": 800.0, "kl": 1e-12},
        "series": {"loss": [0.5, 0.25, 0.125]},
        "accuracies": {"accuracy": ACCURACIES},
        "completions": {"stored": COMPLETIONS},
        "ratios": {"rollout-to-baseline": ([1.0, 1.1, 0.9] * 4, [1.0, 1.0, 1.0] * 4)},
        "compared_with": "c" * 40,
        "provenance": PROVENANCE,
    }
    return GateMeasurements.model_validate(values | changes)


def gate(metric, check, limit):
    return Gate(gate="g", metric=metric, check=check, limit=limit, why="because")


BASELINE = Baseline(measured=measured())
#: The baselines of this machine class, and of any.
OWN, ELSEWHERE, NOWHERE = (BASELINE, BASELINE), (None, BASELINE), (None, None)


def times(now):
    return {"ratios": {"rollout-to-baseline": (now, [1.0] * len(now))}}


def moved(*points):
    """The baseline with its accuracies changed by some points."""
    return {"accuracies": {"accuracy": {s: a + p / 100 for (s, a), p in zip(ACCURACIES.items(), points, strict=True)}}}


def flipped(count, other="4567abcd 1"):
    """The baseline's completions with the first `count` replaced."""
    return {"completions": {"stored": {n: other if i < count else c for i, (n, c) in enumerate(COMPLETIONS.items())}}}


@pytest.mark.parametrize(
    ("metric", "check", "limit", "changes", "outcome"),
    [
        ("kl", "at-most", 1e-9, {}, "pass"),
        ("kl", "at-most", 1e-9, {"values": {"kl": 2e-9}}, "fail"),
        ("kl", "at-most", 1e-9, {"values": {"kl": math.nan}}, "fail"),
        ("kl", "at-least", 1e-13, {}, "pass"),
        ("kl", "at-least", 1e-11, {}, "fail"),
        ("memory", "growth", 100, {"values": {"memory": 899.0}}, "pass"),
        ("memory", "growth", 100, {"values": {"memory": 901.0}}, "fail"),
        ("memory", "growth", 100, {"values": {"memory": 10.0}}, "pass"),
        ("accuracy", "paired", 0.02, {}, "pass"),
        ("accuracy", "paired", 0.02, moved(-3, -3, -3, -3), "fail"),
        ("accuracy", "paired", 0.02, moved(3, 3, 3, 3), "fail"),
        ("accuracy", "paired", 0.02, moved(4, -4, 3, -3), "pass"),
        ("accuracy", "paired", 0.02, moved(-1, -2, -1, -2), "pass"),
        ("accuracy", "paired", 0.02, {"accuracies": {"accuracy": {"seed=0": 0.80}}}, "fail"),
        ("stored", "same", 0.01, {}, "pass"),
        ("stored", "same", 0.01, flipped(1), "fail"),
        # The text is the same and the verdict isn't: a grader that changed.
        ("stored", "same", 0.01, flipped(1, "0123abcd 1"), "fail"),
        ("stored", "same", 0.01, {"completions": {"stored": {"other 1 0": "0123abcd 1"}}}, "fail"),
        ("loss", "golden", 1e-3, {}, "pass"),
        ("loss", "golden", 1e-3, {"series": {"loss": [0.5, 0.25, np.nextafter(0.125, 1)]}}, "fail"),
        ("loss", "golden", 1e-3, {"series": {"loss": [0.5, 0.25]}}, "fail"),
        ("rollout-to-baseline", "ratio-at-most", 1.15, {}, "pass"),
        ("rollout-to-baseline", "ratio-at-most", 1.15, times([1.3] * 12), "fail"),
        # Slow in one round and quick in the next: the interval reaches below the limit.
        ("rollout-to-baseline", "ratio-at-most", 1.15, times([0.9, 1.5] * 6), "pass"),
        # A row without anything measured must not look like a pass.
        ("nothing", "at-most", 1e9, {}, "fail"),
    ],
)
def test_a_check_passes_and_fails(metric, check, limit, changes, outcome):
    assert judge(gate(metric, check, limit), measured(**changes), *OWN).outcome == outcome


@pytest.mark.parametrize(
    ("metric", "check", "baselines", "changes"),
    [
        ("memory", "growth", ELSEWHERE, {}),
        ("memory", "growth", NOWHERE, {}),
        ("accuracy", "paired", NOWHERE, {}),
        ("stored", "same", NOWHERE, {}),
        ("loss", "golden", NOWHERE, {}),
        ("rollout-to-baseline", "ratio-at-most", NOWHERE, {"ratios": {}, "compared_with": None}),
    ],
)
def test_without_a_baseline_nothing_passes(metric, check, baselines, changes):
    found = judge(gate(metric, check, 9), measured(**changes), *baselines)
    assert (found.outcome, overall([found])) == ("no baseline", "no baseline")
    assert "qerl gate accept" in found.detail


@pytest.mark.parametrize("versions", [VERSIONS, {"torch": "2.11.0"}])
@pytest.mark.parametrize(
    ("metric", "check", "limit", "changes", "outcome"),
    [
        ("stored", "same", 0.01, flipped(2), "pass"),
        ("stored", "same", 0.01, flipped(3), "fail"),
        ("accuracy", "paired", 0.02, moved(1, -1, 2, 0), "pass"),
        ("accuracy", "paired", 0.02, moved(3, 3, 3, 3), "fail"),
        # In its first two steps.
        ("loss", "golden", 1e-3, {"series": {"loss": [0.5001, 0.2501, 7.0]}}, "pass"),
        ("loss", "golden", 1e-3, {"series": {"loss": [0.5, 0.26, 0.125]}}, "fail"),
    ],
)
def test_on_another_machine_or_with_other_versions_numbers_are_bounded(
    versions, metric, check, limit, changes, outcome
):
    place = OWN if versions != VERSIONS else ELSEWHERE
    told = measured(**changes, provenance=PROVENANCE | {"versions": versions})
    assert judge(gate(metric, check, limit), told, *place).outcome == outcome


def test_changed_verdicts_are_listed():
    found = judge(gate("stored", "same", 0.01), measured(**flipped(2, "0123abcd 0")), *OWN)
    assert found.detail == "1 of 200 completions differ, 1 lost, 0 won: arithmetic p1 0"
    found = judge(gate("accuracy", "paired", 0.02), measured(**moved(1, -1, 2, 0)), *OWN)
    assert found.detail == "in points: +1.0, -1.0, +2.0, +0.0"


# --- files -----------------------------------------------------------------------------------------------------------


def test_the_projects_gates_are_read_and_look_at_what_is_measured():
    gates = read_gates(GATES / "gates.tsv")
    assert {g.check for g in gates} == {"at-most", "at-least", "ratio-at-most", "growth", "paired", "same", "golden"}
    for file in (GATES / "baselines").glob("*.json"):
        found = read_baseline(file).measured
        named = {*found.values, *found.series, *found.accuracies, *found.completions, *found.ratios}
        assert {g.metric for g in gates} - named <= {"rollout-to-baseline", "update-to-baseline"}
    named = {f"stored/{folder.name}" for folder in (FIXTURES / "trained").iterdir()}
    assert {g.metric for g in gates if g.check == "same"} == named


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["gate\tmetric"], "must begin with the columns"),
        (["\t".join(COLUMNS)], "has no gate"),
        (["\t".join(COLUMNS), "a\tb\tat-most\tmuch\twhy"], "line 2: `limit`"),
        (["\t".join(COLUMNS), "a\tb\tat-most\t1"], "line 2: a row has 5 columns"),
        (["\t".join(COLUMNS), "a\tb\tat-most\t1\t"], "line 2: `why`"),
        (["\t".join(COLUMNS), "a\tb\tabout\t1\twhy"], "line 2: `check`"),
        (["\t".join(COLUMNS), *["a\tb\tat-most\t1\twhy"] * 2], "two gates called 'a'"),
    ],
)
def test_an_invalid_row_is_named(tmp_path, lines, sentence):
    file = tmp_path / "gates.tsv"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match=sentence):
        read_gates(file)


@pytest.mark.parametrize("row", [b'a\t"b\tat-most\t1\tw\n', "a\tb\tat-most\t1\tfür\n".encode("latin-1")])
def test_a_file_that_is_no_table_is_named(tmp_path, row):
    (tmp_path / "gates.tsv").write_bytes(b"gate\tmetric\tcheck\tlimit\twhy\n" + row)
    with pytest.raises(ConfigError, match=r"gates\.tsv, after line .*: this is no table in UTF-8"):
        read_gates(tmp_path / "gates.tsv")


def test_times_of_speed_come_in_pairs_and_are_above_zero():
    for now, baseline in (([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([float("nan")], [1.0])):
        with pytest.raises(ValueError, match=r"come in pairs|greater than 0|finite"):
            SpeedPairs(now=now, baseline=baseline)


def test_baselines_are_found_by_machine_and_workload(tmp_path):
    written = write_baseline(tmp_path, measured())
    assert written.name == "some-cpu-2-0-ghz-2-cores.json"
    assert find_baseline(tmp_path, "k", MACHINE) == find_baseline(tmp_path, "k") == read_baseline(written)
    assert find_baseline(tmp_path, "other key", MACHINE) is find_baseline(tmp_path, "other key") is None
    assert find_baseline(tmp_path, "k", Machine(label="Some CPU @ 2.0 GHz, 4 cores")) is None
    written.write_text("{")
    with pytest.raises(ConfigError, match=r"2-cores.json is not a Baseline: .*restore it"):
        read_baseline(written)


def test_the_workload_is_all_that_is_run(tmp_path):
    """The place of a model's folder isn't, and its content is."""
    values = read_yaml(Path("config/ci.yaml"))
    key = workload_key(parse(Config, values, "test"))
    copied = shutil.copytree(values["models"]["miniature"]["path"], tmp_path / "elsewhere")
    values["models"]["miniature"]["path"] = str(copied)
    values["benches"]["rollout"]["repeats"] += 1
    values["gates"]["rounds"] = 3
    assert workload_key(parse(Config, values | {"name": "other"}, "test")) == key
    (copied / "generation_config.json").write_text("{}")
    changed = workload_key(parse(Config, values, "test"))
    values["experiments"]["main"]["base"]["steps"] = 11
    assert len({key, changed, workload_key(parse(Config, values, "test"))}) == 3


def test_the_committed_baselines_are_of_the_committed_workload():
    """A setting with a new default, or a moved file, would leave every gate without a baseline."""
    config = parse(Config, read_yaml(Path("config/ci.yaml")), "test")
    assert find_baseline(config.gates.baselines, workload_key(config))


# --- numerics --------------------------------------------------------------------------------------------------------


def test_the_vectors_are_those_of_the_libraries():
    stored, made = load_file(FIXTURES / VECTORS), vectors()
    assert stored.keys() == made.keys()
    for name, tensor in made.items():
        if tensor.dtype == torch.float64:  # a product, whose order of additions is that of the machine's BLAS
            torch.testing.assert_close(stored[name], tensor, rtol=0, atol=1e-12, msg=name)
        else:
            assert torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_numerics_pass_on_this_code_and_detect_a_scale_off_by_one_step(tmp_path):
    measure_numerics(NumericsJob(vectors=FIXTURES, out=tmp_path / "out.json"))
    values = json.loads((tmp_path / "out.json").read_text())["values"]
    assert {name: value for name, value in values.items() if value and not name.startswith("product/")} == {}
    assert max(values.values()) < 1e-6
    changed = load_file(FIXTURES / VECTORS)
    changed["nvfp4/weight_scale"].view(torch.uint8)[5, 3] += 1
    (tmp_path / ANSWERS).write_text((FIXTURES / ANSWERS).read_text())
    save_file(changed, tmp_path / VECTORS)
    measure_numerics(NumericsJob(vectors=tmp_path, out=tmp_path / "out.json"))
    values = json.loads((tmp_path / "out.json").read_text())["values"]
    assert values["codec/nvfp4"] == 1
    assert values["dequantize/nvfp4"] > 0
    assert values["product/nvfp4"] > 1e-6
    assert values["codec/mxfp4"] == 0


# --- from results to a verdict ---------------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path):
    """The result files of one run, as the workflow writes them."""
    step = NO_METRICS | {"loss": 0.1, "reward": 0.5, "grad_norm": 1.0}
    metrics = [
        step | {"mismatch/kl": 1e-12, "noise/sigma": 0.0},
        step | {"mismatch/kl": 2e-5, "noise/sigma": 0.01},
        step | {"mismatch/kl": 1e-5, "noise/sigma": 0.005},
    ]
    run = write_run(tmp_path, ARM, 0, metrics)
    evaluation = write_evaluation(tmp_path, "r", {"d": np.array([[0], [1], [0], [1]])}, "nvfp4", run)
    base = write_evaluation(tmp_path / "base", "s", {"d": np.array([[0], [1]])}, "nvfp4")
    content = json.loads(base.read_text())
    stored = {key: content[key] for key in ("tasks", "sampler", "provenance")} | {"stored": "s"}
    folder = tmp_path / "gates/stored/s"
    shutil.copytree(base.parent, folder)
    points = [rollout_point(weights, 16, [100.0, 50.0]) for weights in ("bf16", "nvfp4")]
    speed = {
        "baseline": "c" * 40,
        "samples": {"rollout": {"now": [2.0, 2.2], "baseline": [1.0, 1.1]}},
        "provenance": PROVENANCE,
    }
    return [
        run,
        evaluation,
        write_json(folder / "result.json", stored),
        write_bench(tmp_path, "rollout", "rollout", points),
        write_json(tmp_path / "gates/numerics.json", {"values": {"graders": 0.0}, "provenance": PROVENANCE}),
        write_json(tmp_path / "gates/speed.json", speed),
    ]


def test_metrics_are_collected_from_results(results):
    found = collect("k", results)
    assert found.values == {
        "graders": 0.0,
        f"memory/{ARM}": 500.0,
        f"mismatch/{ARM}": 1e-12,
        f"noise/{ARM}": 1e-5,
        f"evaluation-noise/{ARM}": 0.0,
    }
    assert found.series[f"loss/{ARM}"] == [0.1] * 3
    assert found.accuracies == {f"accuracy/{ARM}": {"seed=0": 0.5}}
    # The SHA-256 of the text "a" begins with ca978112.
    assert found.completions == {"stored/s": {"d 0 0": "ca978112 0", "d 1 0": "ca978112 1"}}
    assert found.ratios["nvfp4-to-bf16/rank=16"] == ([0.01, 0.02], [0.01, 0.02])
    assert found.ratios["rollout-to-baseline"] == ([2.0, 2.2], [1.0, 1.1])
    results[0].write_text(results[0].read_text().replace('"summary"', '"sumary"'))
    with pytest.raises(ResultError, match=r"run.json is not a RunResult: unknown key `sumary`"):
        collect("k", results)


def test_a_step_without_a_number_fails_its_gates(results):
    """Whichever step it is: `max` of Python drops a NaN that isn't the first."""
    file = results[0].with_name("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    write_lines(file, [rows[0], rows[1], rows[2] | {"mismatch/kl": math.nan}])
    found = collect("k", results)
    assert judge(gate(f"noise/{ARM}", "at-least", 0), found, *NOWHERE).outcome == "fail"
    write_lines(
        file, [row | {"mismatch/kl": kl, "noise/sigma": 0} for kl, row in zip((1, math.nan, 1), rows, strict=True)]
    )
    assert judge(gate(f"mismatch/{ARM}", "at-most", 9), collect("k", results), *NOWHERE).outcome == "fail"
    told = measured(series={"loss": [0.5, math.nan, 0.125]}, provenance=PROVENANCE | {"versions": {"torch": "2.11.0"}})
    assert judge(gate("loss", "golden", 9), told, *OWN).outcome == "fail"


def test_what_failed_has_no_measurement(results, tmp_path):
    write_json(results[0], json.loads(results[0].read_text()) | {"status": "diverged", "summary": None})
    results[1].with_name("samples.jsonl").write_text("")
    write_json(results[1], json.loads(results[1].read_text()) | {"status": "diverged", "tasks": {}})
    points = [rollout_point("bf16", 16, [100.0, 50.0]), rollout_point("nvfp4", 16, [], NO_MEMORY)]
    points += [rollout_point("bf16", 32, [], NO_MEMORY), rollout_point("nvfp4", 32, [100.0])]
    write_bench(tmp_path, "rollout", "rollout", points)
    found = collect("k", results)
    assert (found.values, found.series, found.accuracies) == ({"graders": 0.0}, {}, {})
    assert found.ratios.keys() == {"rollout-to-baseline"}
    assert judge(gate(f"accuracy/{ARM}", "paired", 1), found, *OWN).outcome == "fail"


def test_the_exit_code_follows_the_verdict(results, tmp_path):
    (tmp_path / "gates.tsv").write_text(
        "\t".join(COLUMNS) + f"\ngraders\tgraders\tat-most\t0\tw\nmemory\tmemory/{ARM}\tgrowth\t100\tw\n"
    )
    told = {"file": tmp_path / "gates.tsv", "baselines": tmp_path / "baselines", "vectors": FIXTURES}
    settings = parse(Config, read_yaml(Path("config/ci.yaml")), "test").gates.model_copy(update=told)
    found = collect("k", results)

    def shown():
        write_verdict(settings, found, tmp_path / "out")
        result = CliRunner().invoke(cli.app, ["gate", "show", str(tmp_path / "out" / "verdict.json")])
        return json.loads((tmp_path / "out" / "verdict.json").read_text())["outcome"], result.exit_code

    assert shown() == ("no baseline", 1)
    write_baseline(settings.baselines, found)
    assert shown() == ("pass", 0)
    write_baseline(settings.baselines, found.model_copy(update={"values": found.values | {f"memory/{ARM}": 1.0}}))
    assert shown() == ("fail", 1)
    page = (tmp_path / "out" / "verdict.html").read_text()
    assert page.index(">memory<") < page.index(">graders<")  # what fails comes first


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_defect_still_applies_and_names_existing_gates(name):
    mutation = MUTATIONS[name]
    compile(mutated(Path(mutation.file).read_text(), mutation), mutation.file, "exec")
    assert set(mutation.seen) <= {gate.gate for gate in read_gates(GATES / "gates.tsv")}


# --- accept ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def accepting(tmp_path, monkeypatch):
    """A repository with finished results of config/ci.yaml; a function that stores what was measured."""
    values = read_yaml(Path("config/ci.yaml"))
    values["models"]["miniature"]["path"] = str(Path("tests/fixtures/gates/policy").resolve())
    made = plan(parse(Config, values, "test"))
    monkeypatch.chdir(tmp_path)
    for variable in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{variable}_NAME", "t")
        monkeypatch.setenv(f"GIT_{variable}_EMAIL", "t@example.org")
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "commit", "-q", "--allow-empty", "-m", "first"], check=True)

    def store(**told):
        file = Path(made.folder) / "gates" / "measured.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(measured(provenance=PROVENANCE | told).model_dump_json())
        return made.config, file.parent

    return store


def test_a_baseline_is_a_commit_of_its_own_of_committed_code(accepting):
    for dirty in ({"dirty": True}, {"commit": None}):
        with pytest.raises(ConfigError, match="commit first"):
            accept(*accepting(**dirty))
    Path("other").write_text("unrelated")
    subprocess.run(["git", "add", "other"], check=True)
    with pytest.raises(ConfigError, match="commit of its own"):
        accept(*accepting())
    subprocess.run(["git", "reset", "-q"], check=True)
    written = accept(*accepting())
    changed = subprocess.run(["git", "show", "--name-only", "--format=%s"], capture_output=True, text=True, check=True)
    assert changed.stdout.splitlines() == [f"Baseline {written.stem}: {'c' * 12}", "", str(written)]
    assert read_baseline(written).measured == measured()
