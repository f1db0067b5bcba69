"""Runs of a DAG that train side by side: results and reasons to rerun are those of runs in jobs of their own."""

import re

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import nightly
from tests.jobs import metrics_of, untimed
from tests.tiny import tiny_qwen2, write_template
from tests.workflow.conftest import Tree, copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REWARD = "def letters(answer, problem):\n    return float(sum(map(ord, answer.text)) % 7)\n"
ARMS = ("plain", "noisy")
RULES = ("cohort", "train")
RUNS = [f"main-{arm}-seed{seed}" for arm in ARMS for seed in range(3)]


def write(tree: Tree, name: str, side_by_side: int = 1, **arms) -> tuple[str, ...]:
    """Snakemake's arguments for all runs of a configuration in a folder of results of its own."""
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    rollout = {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 6}}
    base = {"model": "tiny", "dataset": "arithmetic", "weights": "nvfp4", "dtype": "float32", "steps": 4}
    base |= {"rollout": rollout, "adapter": {"rank": 4}, "checkpoint_every": 1}
    base |= {"optimizer": {"learning_rate": 0.01}, "reward": {"functions": {"own": "cohort_reward:letters"}}}
    changes = {"plain": {}, "noisy": {"noise.schedule": "constant", "adapter.rank": 2}}
    changes = {arm: keys | arms.get(arm, {}) for arm, keys in changes.items()}
    main = {"base": base, "arms": changes, "grid": {"seed": [0, 1, 2]}, "tasks": ["arithmetic"]}
    values["experiments"] = {"main": main}
    values |= {"name": name, "models": {"tiny": {"source": "local", "path": "tiny"}}, "benches": {}}
    values |= {"side_by_side": side_by_side}
    values["evaluation"]["tasks"] = values["evaluation"]["tasks"][:1]
    (tree.folder / f"{name}-{side_by_side}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    files = [f"results/{name}/train/{run}/run.json" for run in RUNS]
    return "--configfile", f"{name}-{side_by_side}.yaml", "--", *files


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    tree = copy_tree(tmp_path_factory.mktemp("cohorts") / "qerl")
    (tree.folder / "cohort_reward.py").write_text(REWARD)
    write_template(tiny_qwen2(tree.folder / "tiny"))
    tree.snakemake(*write(tree, "alone"))
    assert all(any(row["grad_norm"] > 0 for row in rows(tree, "alone", run)) for run in RUNS)
    return tree


def rows(tree: Tree, name: str, run: str) -> list[dict]:
    return metrics_of(tree.folder / f"results/{name}/train/{run}")


def assert_same(tree: Tree, name: str, run: str, other: str = "alone") -> None:
    """To the bit, in metrics and in weights."""
    assert untimed(rows(tree, name, run)) == untimed(rows(tree, other, run))
    found, expected = (
        load_file(tree.folder / f"results/{one}/train/{run}/policy/adapter_model.safetensors") for one in (name, other)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def logs(tree: Tree, name: str, rule: str) -> dict[str, str]:
    return {file.stem: file.read_text() for file in (tree.folder / f"results/{name}/logs/{rule}").glob("*.log")}


def finished(tree: Tree, name: str) -> list[str]:
    return [run for run in RUNS if (tree.folder / f"results/{name}/train/{run}/run.json").is_file()]


def test_a_dag_with_cohorts_has_the_runs_of_one_without(tree):
    arguments = write(tree, "together", 4)
    assert tree.planned(*arguments) == {"prepare_data": 1, "check_model": 2, "quantize": 1, "cohort": 2, "train": 6}
    run = tree.snakemake(*arguments)
    printed = (run.stdout + run.stderr).split("\nlocalrule ")
    for run in RUNS:
        assert_same(tree, "together", run)
    gpus = {rule: [re.search(r" gpu=(\d)", job)[1] for job in printed if job.startswith(rule)] for rule in RULES}
    assert gpus == {"cohort": ["1"] * 2, "train": ["0"] * 6}
    said = " ".join(logs(tree, "together", "cohort").values())
    assert f"{', '.join(RUNS[:4])} train side by side" in said
    assert f"{', '.join(RUNS[4:])} train side by side" in said
    # However many train side by side from now on, and with evaluations of the policies.
    for most in (4, 3, 2, 1):
        assert tree.planned(*write(tree, "together", most)) == {}
    planned = tree.planned("--configfile", "together-3.yaml")
    assert (planned["evaluate"], planned.get("train"), planned.get("cohort")) == (8, None, None)


def test_a_changed_arm_trains_without_the_others_and_a_run_alone_in_its_own_job(tree):
    name = "changed"
    tree.snakemake(*write(tree, name, 4))
    before = {run: (tree.folder / f"results/{name}/train/{run}/run.json").read_bytes() for run in RUNS}
    arguments = write(tree, name, 4, noisy={"optimizer.learning_rate": 0.02})
    assert tree.planned(*arguments) == {"cohort": 2, "train": 3}
    tree.snakemake(*arguments)
    assert tree.planned(*arguments) == {}
    after = {run: (tree.folder / f"results/{name}/train/{run}/run.json").read_bytes() for run in RUNS}
    assert [run for run in RUNS if after[run] != before[run]] == RUNS[3:]
    tree.snakemake(*write(tree, "other", noisy={"optimizer.learning_rate": 0.02}))
    for run in RUNS:
        assert_same(tree, name, run, "other")


@nightly
def test_each_job_of_a_cluster_makes_the_plan_of_the_first_snakemake(tree):
    """On a node Snakemake plans anew, and may run no other rule; meanwhile runs of the same cohort have finished."""
    name, arguments = "nodes", write(tree, "nodes", 4)
    dry = tree.snakemake("--dry-run", *arguments).stdout
    before = [
        *set(re.findall(rf"results/{name}/checked/[\w-]+", dry)),
        f"results/{name}/quantize/tiny-nvfp4/checkpoint",
    ]
    tree.snakemake(*arguments[:3], *before)
    [cohort] = set(re.findall(rf"results/{name}/cohorts/({RUNS[0]}[\w-]+)", dry))
    alone = "--mode", "remote", "--force", "--nolock", "--ignore-incomplete", "--scheduler", "greedy"
    for rule, job in (("cohort", f"cohort={cohort}"), *(("train", f"run={run}") for run in RUNS[:4])):
        tree.snakemake("--target-jobs", f"{rule}:{job}", "--allowed-rules", rule, *alone, *arguments[:2])
    assert finished(tree, name) == RUNS[:4]
    assert tree.planned(*arguments) == {"cohort": 1, "train": 2}
    assert f"{', '.join(RUNS[:4])} train side by side" in logs(tree, name, "cohort")[cohort]
    assert not any("step" in text for text in logs(tree, name, "train").values())  # each took its results
    for run in RUNS[:4]:
        assert_same(tree, name, run)
