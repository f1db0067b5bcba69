"""Snakemake's plan, and its refusal of configurations that can't run."""

import re
import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import yaml

from qerl.settings.workflow import merged
from qerl.study.runs import write_study
from tests.conftest import in_nightly
from tests.tiny import tiny_decoder, tiny_qwen2, write_sums, write_template
from tests.unit.study.test_dose import study
from tests.workflow.conftest import ROOT, copy_tree

MINI = {"prepare_data": 3, "pretrain": 1, "quantize": 4, "train": 18, "evaluate": 22, "profile": 2}


def test_both_entry_points_plan_the_whole_default_configuration(tree):
    """The default plan needs every kind of result."""
    assert (MINI | {"tables": 4, "figures": 6}).items() <= tree.planned().items()
    inner = tree.planned("--snakefile", "workflow/Snakefile")
    assert MINI.items() <= inner.items()


#: The jobs of .test/config/config.yaml.
SMALL = {"prepare_data": 2, "pretrain": 1, "quantize": 2, "train": 2, "evaluate": 4, "profile": 2, "write_report": 1}


def test_the_folder_of_the_workflow_catalog_has_a_small_configuration(tree):
    assert SMALL.items() <= tree.planned("--directory", ".test").items()


IMPORTING = """
configfile: "config.yaml"


module qerl:
    snakefile: "{folder}/workflow/Snakefile"
    config: config["qerl"]


use rule * from qerl as qerl_*


rule mine:
    input: rules.qerl_all.input
    default_target: True
"""


def test_another_workflow_imports_the_rules_with_its_own_configuration(tree, tmp_path):
    (tmp_path / "Snakefile").write_text(IMPORTING.format(folder=tree.folder))
    values = yaml.safe_load((tree.folder / ".test/config/config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"mine": 1, "qerl": values}))
    planned = tree.planned("--snakefile", str(tmp_path / "Snakefile"), "--directory", str(tmp_path))
    assert {f"qerl_{rule}": count for rule, count in SMALL.items()}.items() <= planned.items()
    assert planned["mine"] == 1


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def refused(tree, tmp_path, **changes) -> str:
    """Snakemake's message for the default configuration with other keys; it must exit with an error before any job."""
    return refused_file(tree, changed(tree, tmp_path, **changes))


def refused_file(tree, file: str) -> str:
    run = tree.snakemake("--configfile", file, check=False)
    assert run.returncode != 0
    assert not (tree.folder / "results").exists()
    said = run.stdout + run.stderr
    assert "Traceback" not in said
    return said


def changed(tree, tmp_path, **changes) -> str:
    """A file with the default configuration and other keys."""
    values = merged(yaml.safe_load((tree.folder / "config/mini.yaml").read_text()), changes)
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(values))
    return str(tmp_path / "changed.yaml")


def test_a_configuration_that_cant_run_is_one_sentence_before_any_job(tree, tmp_path):
    """Other sentences: `tests/unit/settings/test_errors.py` and `tests/unit/workflow`."""
    said = refused(tree, tmp_path, evaluaton={})
    assert "changed.yaml: unknown key `evaluaton`; did you mean `evaluation`?" in said
    model = {"source": "local", "path": str(tiny_decoder(tmp_path / "model", "olmo2"))}
    assert "adapter.train_norms needs an RMSNorm" in refused(
        tree, tmp_path, models={"own": model}, experiments={"main": {"base": {"model": "own"}}}
    )
    nodes = {"main": {"base": {"processes": 2, "nodes": 2}}}
    assert ": nodes=2 needs a cluster; use a profile" in refused(tree, tmp_path, experiments=nodes)
    assert re.search(r"run `qerl lock \S*config/paper.yaml`", refused_file(tree, "config/paper.yaml"))


def printed(tree, *arguments: str) -> dict[str, list[str]]:
    """What a dry run prints of each job, by its rule."""
    jobs: dict[str, list[str]] = {}
    for job in tree.snakemake("--dry-run", "--printshellcmds", *arguments).stdout.split("\nrule ")[1:]:
        jobs.setdefault(job.partition(":")[0], []).append(job)
    return jobs


def test_a_job_asks_for_the_gpus_that_its_engine_shares(tree, tmp_path):
    engine = {"engine": "vllm", "vllm": {"tensor_parallel": 2}}
    arms = {"bf16-lora": {"rollout": engine}, "bf16-full": None, "nvfp4-lora": None, "nvfp4-lora-aqn": None}
    file = changed(tree, tmp_path, evaluation=engine, experiments={"main": {"arms": arms}})
    asked = {
        rule: {job.partition(" gpu=")[2][:1] for job in jobs}
        for rule, jobs in printed(tree, "--configfile", file).items()
    }
    assert {rule: asked[rule] for rule in ("evaluate", "train", "profile", "quantize")} == {
        **{"evaluate": {"2"}, "train": {"1", "2"}, "profile": {"1", "2"}, "quantize": {"1"}}
    }


def test_a_run_and_an_evaluation_read_the_splits_that_they_use(tree, tmp_path):
    tasks = yaml.safe_load((tree.folder / "config/mini.yaml").read_text())["evaluation"]["tasks"]
    tasks[1]["split"] = "validation"
    run, results = "main-nvfp4-lora-seed0", "results/mini"
    file = changed(tree, tmp_path, evaluation={"tasks": tasks})
    jobs = printed(tree, f"{results}/evaluate/{run}/result.json", "--configfile", file)
    read = {
        rule: set(found[1].split(", ")) for rule, [job, *_] in jobs.items() if (found := re.search("input: (.*)", job))
    }
    base = f"{results}/quantize/miniature-nvfp4/checkpoint"
    assert read["train"] == {base, *(f"{results}/data/arithmetic/{file}" for file in ("dataset.json", "train.jsonl"))}
    asked = {f"{results}/data/{file}.jsonl" for file in ("arithmetic/test", "numbers/validation")}
    assert read["evaluate"] >= asked | {base, f"{results}/train/{run}/policy"}
    assert not [file for file in read["evaluate"] if file.endswith("train.jsonl")]


@pytest.mark.parametrize("profile", ["gpu", *in_nightly("node")])
def test_the_profiles_of_one_machine_plan_the_same(tree, profile):
    assert MINI.items() <= tree.planned("--profile", f"profiles/{profile}").items()


def test_profiles_name_rules_and_resources_that_exist(tree):
    rules = {line.strip() for line in tree.snakemake("--list-rules").stdout.splitlines()}
    for file in (tree.folder / "profiles").glob("*/config.yaml"):
        for rule, resources in yaml.safe_load(file.read_text()).get("set-resources", {}).items():
            assert rule in rules, file
            assert set(resources) <= {"mem_mb", "runtime", "gpu"}


# The same DAG on a checkpoint and a file of problems that the project didn't make.


def test_all_that_own_models_and_problems_need_is_planned(tmp_path, tree):
    write_template(tiny_qwen2(tmp_path / "Own-Model-0.1B"))
    write_sums(tmp_path / "pears.jsonl")
    text = (tree.folder / "config/own.yaml").read_text().replace("path/to/checkpoint", "Own-Model-0.1B")
    (tmp_path / "my.yaml").write_text(text.replace("path/to/problems.jsonl", "pears.jsonl"))
    planned = tree.planned("--directory", str(tmp_path), "--configfile", str(tmp_path / "my.yaml"))
    made = {"prepare_data": 1, "check_model": 4, "quantize": 2, "train": 3, "evaluate": 5}
    assert {rule: planned[rule] for rule in made} == made
    assert not {"pretrain", "fetch_model"} & planned.keys()


# The profiles of clusters, by a dry run with their executor's plugin, where it is installed.


with_plugin = pytest.mark.skipif(
    find_spec("snakemake_executor_plugin_slurm") is None, reason="snakemake-executor-plugin-slurm isn't installed"
)


@with_plugin
def test_the_profile_for_slurm_has_the_options_of_its_plugin(tree):
    """Snakemake refuses options that the executor doesn't have. The jobs are those without the profile."""
    config = ("--configfile", "config/mini.yaml")
    assert tree.planned("--profile", "profiles/slurm", *config) == tree.planned(*config)


@pytest.fixture(scope="module")
def trainings(tree, tmp_path_factory) -> dict[str, SimpleNamespace]:
    """Resources, threads and command of a run on one machine and of one on two, as a dry run prints them."""
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    arms = {"one": {"processes": 2}, "two": {"processes": 6, "nodes": 2}}
    values["experiments"]["main"]["arms"] = {name: {"weights": "nvfp4"} | keys for name, keys in arms.items()}
    file = tmp_path_factory.mktemp("nodes") / "nodes.yaml"
    file.write_text(yaml.safe_dump(values))
    jobs = printed(tree, "--max-threads", "8", "--cores", "8", "--configfile", str(file))["train"]
    return {name: training(next(job for job in jobs if f"/train/main-{name}-seed0/" in job)) for name in arms}


def training(block: str) -> SimpleNamespace:
    line = re.search(r"^ +resources: (.*)$", block, re.MULTILINE)[1]
    resources = dict(item.split("=", 1) for item in line.split(", "))
    numbers = {name: int(value) if value.isdigit() else value for name, value in resources.items()}
    threads = re.search(r"^ +threads: (\d+)$", block, re.MULTILINE)
    return SimpleNamespace(
        resources=SimpleNamespace(**numbers, get=numbers.get, keys=numbers.keys),
        threads=int(threads[1]) if threads else 1,
        command=block[block.index("trap : TERM") :].partition("\n\n")[0],
    )


def test_a_run_on_several_machines_is_started_by_srun_on_each(trainings):
    one, two = trainings["one"], trainings["two"]
    assert " python -P -m qerl rule" in one.command
    assert "srun" not in one.command
    assert not {"nodes", "tasks", "mpi", "gres", "tasks_per_gpu"} & one.resources.keys()
    assert (one.threads, one.resources.gpu) == (2, 2)
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=3 python -P -m qerl rule" in two.command
    assert (two.threads, two.resources.gpu) == (3, 6)
    assert (two.resources.nodes, two.resources.gres) == (2, "gpu:3")


@with_plugin
def test_slurm_gives_a_run_on_two_machines_one_task_and_equally_many_gpus_on_each(trainings):
    """The call of sbatch, and the step in it, which leaves the start on the machines to the rule."""
    from snakemake_executor_plugin_slurm.submit_string import get_submit_command
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    def submitted(job: SimpleNamespace) -> set[str]:
        about = dict.fromkeys(("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir"), "")
        return set((get_submit_command(job, about) + set_gres_string(job)).split())

    two = submitted(trainings["two"])
    assert {"--nodes=2", "--ntasks=2", "--cpus-per-task=3", "--gpus=6", "--gres=gpu:3"} <= two
    assert not any(option.startswith("--ntasks-per-gpu") for option in two)
    one = submitted(trainings["one"])
    assert {"--cpus-per-task=2", "--gpus=2"} <= one
    assert not any(option.startswith(("--nodes", "--ntasks", "--gres")) for option in one)
    # A step with this resource calls the rule's command once, on the first machine, without an srun of its own.
    assert trainings["two"].resources.mpi == "srun"


# A study's rules: the page of finished runs and that of committed data start no run; the whole one starts all.


def test_pages_of_finished_runs_and_of_committed_data_start_no_run(tmp_path):
    tree = copy_tree(tmp_path / "qerl")
    costs = tree.folder / "results/reference"
    costs.mkdir(parents=True)
    for file in (ROOT / "results/reference").glob("*.csv"):
        shutil.copy(file, costs)
    config = ("--configfile", "config/dose.yaml")
    finished = {"list_results": 1, "gather_study": 1, "study_page": 1, "study_finished": 1}
    assert tree.planned(*config, "--", "study_finished") == finished
    write_study(tree.folder / "results/reference/dose/some", study(seeds=1, problems=2))
    (tree.folder / "results/reference/dose/some/runs.parquet").unlink()
    lacking = tree.snakemake("--dry-run", *config, "--", "study_published", check=False)
    assert "results/reference/dose/some/runs.parquet" in lacking.stdout + lacking.stderr
    write_study(tree.folder / "results/reference/dose/some", study(seeds=1, problems=2))
    assert tree.planned(*config, "--", "study_published") == {"study_published": 1}


def test_the_small_study_ends_in_its_page(tree):
    planned = tree.planned("--configfile", "config/dose-small.yaml")
    assert (planned["gather_study"], planned["study_page"], planned["measure_dose"]) == (1, 1, 2)
    assert planned["train"] == 10
