"""Whole configurations: the paper's grid, whose plan is exact and quick, and nightly runs of them in miniature."""

import json
import re
import shutil

import pytest
import yaml

from qerl.cli.workflow import run_job
from qerl.report_jobs import FigureJob, TableJob, stored_results
from qerl.settings.base import parse, read_yaml
from qerl.settings.workflow import Config, merged
from qerl.workflow.plan import plan
from qerl.workflow.rules import Jobs
from tests.conftest import nightly
from tests.small import small, write_small
from tests.walk import write_walk
from tests.workflow.conftest import ROOT, copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAPER = ROOT / "config/paper.yaml"
#: One experiment of each kind, with one arm; `make paper-small` runs the whole.
EXPERIMENTS = {"gsm8k-7b": "nvfp4-awq-lora-aqn", "bigmath-32b": "bf16-lora", "steps-7b": "nvfp4-lora"}
BENCHES = ("rollout-7b-1", "step-7b")
#: In miniature models are the same but for their names.
MODEL = "qwen2.5-7b"


def outputs(said: str) -> set[str]:
    """All files that a dry run would make."""
    lines = re.findall(r"^    output: (.*)$", said, re.MULTILINE)
    return {name for line in lines for name in line.split(", ")}


def expected(plan_, results: str) -> set[str]:
    """One file for each row of each table of the plan."""
    return {
        *(f"{results}/train/{name}/run.json" for name in plan_.runs),
        *(f"{results}/evaluate/{name}/result.json" for name in plan_.evaluations),
        *(f"{results}/quantize/{name}/report.json" for name in plan_.checkpoints),
        *(f"{results}/profile/{name}.json" for name in plan_.config.benches),
        *(f"{results}/tables/{name}.csv" for name in TableJob.names(plan_)),
        *(f"{results}/figures/{name}.png" for name in FigureJob.names(plan_)),
    }


def rows(files: set[str]) -> set[str]:
    kinds = r"(train/[^/]+/run|evaluate/[^/]+/result|quantize/[^/]+/report|profile/[^/]+)\.json$|\.(csv|png)$"
    return {file for file in files if re.search(kinds, file)}


def test_a_dry_run_lists_exactly_the_planned_runs(tree):
    """With the protocol that isn't the file's own, which `tests/unit/workflow/test_plan.py` compares with the other."""
    plan_ = plan(parse(Config, {**read_yaml(PAPER), "protocol": "upstream-scripts"}, "paper"))
    run = tree.snakemake("-n", "--configfile", "config/paper.yaml", "--config", "protocol=upstream-scripts")
    assert rows(outputs(run.stdout)) == expected(plan_, plan_.folder)
    assert plan_.folder == "results/paper-upstream-scripts"


def subset(values: dict) -> dict:
    """The configuration with `EXPERIMENTS` and `BENCHES` alone, on one model."""
    experiments = {name: _with_one_arm(values["experiments"][name], arm) for name, arm in EXPERIMENTS.items()}
    experiments["steps-7b"]["grid"] |= {"rollout.group_size": [2]}
    benches = {name: values["benches"][name] for name in BENCHES}
    benches["rollout-7b-1"] = benches["rollout-7b-1"] | {"weights": ["bf16", "nvfp4"], "ranks": [16]}
    return values | {"experiments": experiments, "benches": benches}


def _with_one_arm(experiment: dict, arm: str) -> dict:
    return merged(experiment, {"base": {"model": MODEL}}) | {"arms": {arm: experiment["arms"][arm]}}


def test_the_miniature_has_the_same_rows_as_the_paper_but_for_the_seeds(tmp_path):
    paper = plan(parse(Config, read_yaml(PAPER), "paper"))
    tiny = plan(parse(Config, read_yaml(write_small(PAPER, tmp_path)), "small"))
    assert tiny.runs.keys() == {name for name in paper.runs if name.endswith("-seed0")}
    assert tiny.timed.keys() == paper.timed.keys()
    assert tiny.checkpoints.keys() == paper.checkpoints.keys()
    assert all(kind.names(tiny) == kind.names(paper) for kind in (TableJob, FigureJob))
    assert {e.id: e.tasks for e in tiny.evaluations.values()}.items() <= {
        e.id: e.tasks for e in paper.evaluations.values()
    }.items()
    for name, run in tiny.runs.items():
        same = {"model", "dataset", "weights", "method", "adapter", "noise", "loss", "optimizer", "reward"}
        assert run.settings.model_dump(include=same) == paper.runs[name].settings.model_dump(include=same)


@nightly
def test_one_experiment_of_each_kind_runs_to_the_end_in_miniature(tmp_path, monkeypatch):
    """A table and a figure beside the paper's are rules' jobs; the others are made in this process."""
    values = subset(small(read_yaml(PAPER), tmp_path / "data"))
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(values))
    tree = copy_tree(tmp_path / "tree")
    plan_ = plan(parse(Config, values, "small"))
    jobs, results = Jobs(plan_), plan_.folder
    targets = [*map(str, stored_results(plan_)), f"{results}/tables/table1.csv", f"{results}/figures/figure4.png"]
    tree.snakemake("--configfile", str(tmp_path / "small.yaml"), "--", *targets)
    monkeypatch.chdir(tree.folder)
    for job in (jobs.of(*call) for kind in ("table", "figure") for call in jobs.calls(kind)):
        if not list(job.out.glob(f"{job.name}.*")):
            run_job(job)
    for file in expected(plan_, results):
        assert (tree.folder / file).is_file(), file


# config/walk.yaml on a tiny checkpoint in the files of Qwen2.5's repository, from these files to a score.

WALKED = "main-nvfp4-lora-aqn-seed0"


@nightly
def test_the_walk_reaches_a_trained_score(tmp_path):
    values = read_yaml(ROOT / "config/walk.yaml")
    short = {"steps": 1, "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 8}}}
    values = merged(values, {"experiments": {"main": {"base": short}}, "evaluation": {"sampling": {"max_tokens": 4}}})
    tree = copy_tree(tmp_path / "tree")
    (tree.folder / "short.yaml").write_text(yaml.safe_dump(values))
    write_walk(tree.folder / "work/walk", "tiny", shard_bytes=10**6)
    assert len(list((tree.folder / "work/walk/model").glob("model-*.safetensors"))) > 1

    tree.snakemake(f"results/walk/evaluate/{WALKED}/result.json", "--configfile", "short.yaml")
    results = tree.folder / "results/walk"
    quantized = json.loads((results / "quantize/qwen2.5-1.5b-nvfp4/checkpoint/tokenizer_config.json").read_text())
    assert (quantized["eos_token"], quantized["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    step = json.loads((results / f"train/{WALKED}/metrics.jsonl").read_text())
    assert step["grad_norm"] > 0
    tasks = json.loads((results / f"evaluate/{WALKED}/result.json").read_text())["tasks"]
    assert {name: (task["task"], task["problems"]) for name, task in tasks.items()} == {
        "gsm8k": ("gsm8k", 3),
        "math500": ("math_500", 3),
    }
    for line in (results / f"evaluate/{WALKED}/samples.jsonl").read_text().splitlines():
        prompt = json.loads(line)["prompt"]
        assert prompt.startswith("<|im_start|>system\nYou are Qwen")
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


# The speed grid: points are measured once, and tables use existing points without a measurement.

POINTS = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "prompt": [8], "tokens": 4}
MIX = {"engine": "native", "sizes": ["tiny"], "weights": ["bf16"], "ranks": [4], "prompts": 2, "group_size": 2}
MIX |= {"prompt": [4, 8], "median": 4, "tokens": 8, "repeats": 1}
ARGUMENTS = ("--configfile", "speed.yaml")


@nightly
def test_points_are_measured_once_and_tables_use_existing_points(tmp_path):
    tree = copy_tree(tmp_path / "qerl")
    values = {
        "name": "speed",
        "shapes": {"samples": ["committed"], "decode": [POINTS | {"sequences": [1, 2]}], "mixes": [MIX]},
    }
    (tree.folder / "speed.yaml").write_text(yaml.safe_dump(values))
    tree.snakemake(*ARGUMENTS, "--", "shapes_measure")
    assert tree.planned(*ARGUMENTS, "--", "shapes_measure") == {}
    # On another machine, or where the code has changed since: tables, and no measurement.
    results = tree.folder / "results/speed"
    (tree.folder / "committed").mkdir()
    for file in results.glob("points/*/*.json"):
        shutil.move(file, tree.folder / "committed")
    shutil.rmtree(results / "points")
    code = tree.folder / "qerl/bench/native.py"
    code.write_text(code.read_text() + "\n_CHANGED = 1\n")
    assert tree.planned(*ARGUMENTS) == {
        **{"default": 1, "shapes": 1, "list_results": 1, "collect_results": 1, "write_report": 1}
    }
    tree.snakemake(*ARGUMENTS)
    assert "native" in (results / "tables/decode-tiny-8x4.md").read_text()
    assert "native" in (results / "tables/mixes.md").read_text()
