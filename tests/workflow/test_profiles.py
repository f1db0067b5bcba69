"""The profiles of clusters, by a dry run with their executor's plugin, where it is installed."""

import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import yaml

pytestmark = pytest.mark.slow
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
    shown = tree.snakemake(
        "--dry-run", "--printshellcmds", "--max-threads", "8", "--cores", "8", "--configfile", str(file)
    ).stdout
    return {name: training(shown, f"main-{name}-seed0") for name in arms}


def training(shown: str, run: str) -> SimpleNamespace:
    block = next(b for b in shown.split("\n\n") if "rule train:" in b and f"/train/{run}/" in b)
    line = re.search(r"^ +resources: (.*)$", block, re.MULTILINE)[1]
    resources = dict(item.split("=", 1) for item in line.split(", "))
    numbers = {name: int(value) if value.isdigit() else value for name, value in resources.items()}
    threads = re.search(r"^ +threads: (\d+)$", block, re.MULTILINE)
    return SimpleNamespace(
        resources=SimpleNamespace(**numbers, get=numbers.get, keys=numbers.keys),
        threads=int(threads[1]) if threads else 1,
        command=block[block.index("trap : TERM") :],
    )


def test_a_run_on_several_machines_is_started_by_srun_on_each(trainings):
    one, two = trainings["one"], trainings["two"]
    assert " python -P -m qerl rule" in one.command
    assert "srun" not in one.command
    assert not {"nodes", "tasks", "mpi", "gres", "tasks_per_gpu"} & one.resources.keys()
    assert (one.threads, one.resources.gpu) == (2, 2)
    assert "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=3 python -P -m qerl rule" in two.command
    assert (two.threads, two.resources.gpu, two.resources.gpu_percent) == (3, 6, 300)
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


def test_a_snakemake_on_one_machine_refuses_a_run_on_several(tree, tmp_path):
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    values["experiments"]["main"]["base"] |= {"processes": 2, "nodes": 2}
    (tmp_path / "nodes.yaml").write_text(yaml.safe_dump(values))
    run = tree.snakemake("--configfile", str(tmp_path / "nodes.yaml"), check=False)
    assert run.returncode == 1
    assert "experiment main, arm nvfp4-lora: nodes=2 needs a cluster; use a profile" in run.stdout + run.stderr
