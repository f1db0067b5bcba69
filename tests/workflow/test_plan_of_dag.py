"""Snakemake's plan, and its refusal of configurations that can't run."""

import re

import pytest
import yaml

from tests.conftest import in_nightly
from tests.tiny import tiny_decoder, tiny_qwen2

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


def refused(tree, tmp_path, change) -> str:
    """Snakemake's message for the default configuration after `change`; it must exit with an error before any job."""
    values = yaml.safe_load((tree.folder / "config/mini.yaml").read_text())
    change(values)
    file = tmp_path / "changed.yaml"
    file.write_text(yaml.safe_dump(values))
    run = tree.snakemake("--configfile", str(file), check=False)
    assert run.returncode != 0
    assert not (tree.folder / "results").exists()
    return run.stdout + run.stderr


def set_key(*path_and_value):
    *path, last, value = path_and_value

    def change(values):
        for key in path:
            values = values[key]
        values[last] = value

    return change


def test_a_configuration_that_cant_run_is_one_sentence_before_any_job(tree, tmp_path):
    """Other sentences: `tests/unit/settings/test_errors.py` and `tests/unit/workflow`."""
    said = refused(tree, tmp_path, set_key("evaluaton", {}))
    assert "changed.yaml: unknown key `evaluaton`; did you mean `evaluation`?" in said
    assert "Traceback" not in said


def test_a_truncated_checkpoint_is_named_before_any_job(tree, tmp_path):
    folder = tiny_qwen2(tmp_path / "short")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    said = refused(tree, tmp_path, set_key("models", "miniature", {"source": "local", "path": str(folder)}))
    assert "model.safetensors" in said
    assert "Traceback" not in said


def test_settings_that_do_not_fit_a_local_model_are_named_before_any_job(tree, tmp_path):
    model = {"source": "local", "path": str(tiny_decoder(tmp_path / "model", "olmo2"))}
    said = refused(tree, tmp_path, set_key("models", "miniature", model))
    assert "adapter.train_norms needs an RMSNorm" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("profile", ["gpu", *in_nightly("node")])
def test_the_profiles_of_one_machine_plan_the_same(tree, profile):
    """That of a shared GPU has a test of its own."""
    assert MINI.items() <= tree.planned("--profile", f"profiles/{profile}").items()


def test_a_job_asks_for_the_gpus_that_its_engine_shares(tree, tmp_path):
    values = yaml.safe_load((tree.folder / "config/mini.yaml").read_text())
    engine = {"engine": "vllm", "vllm": {"tensor_parallel": 2}}
    values["evaluation"] |= engine
    values["experiments"]["main"]["arms"] = {"bf16-lora": {"weights": "bf16", "rollout": engine}, "nf4-lora": {}}
    (tmp_path / "shared.yaml").write_text(yaml.safe_dump(values))
    said = tree.snakemake("--dry-run", "--configfile", str(tmp_path / "shared.yaml")).stdout
    jobs = [job.partition(":")[0] + job.partition("gpu=")[2][:1] for job in said.split("\nrule ")[1:]]
    assert {job for job in jobs if job[:-1] in ("evaluate", "train", "profile", "quantize")} == {
        *("evaluate2", "train2", "train1", "profile2", "profile1", "quantize1")
    }


def test_a_run_and_an_evaluation_read_the_splits_that_they_use(tree, tmp_path):
    values = yaml.safe_load((tree.folder / "config/mini.yaml").read_text())
    values["evaluation"]["tasks"][1]["split"] = "validation"
    (tmp_path / "splits.yaml").write_text(yaml.safe_dump(values))
    run, results = "main-nvfp4-lora-seed0", "results/mini"
    target = f"{results}/evaluate/{run}/result.json"
    said = tree.snakemake(target, "--dry-run", "--configfile", str(tmp_path / "splits.yaml")).stdout
    jobs = {job.partition(":")[0]: job for job in said.split("\nrule ")[1:]}
    read = {rule: set(found[1].split(", ")) for rule, job in jobs.items() if (found := re.search("input: (.*)", job))}
    base = f"{results}/quantize/miniature-nvfp4/checkpoint"
    assert read["train"] == {base, *(f"{results}/data/arithmetic/{file}" for file in ("dataset.json", "train.jsonl"))}
    asked = {f"{results}/data/{file}.jsonl" for file in ("arithmetic/test", "numbers/validation")}
    assert read["evaluate"] >= asked | {base, f"{results}/train/{run}/policy"}
    assert not [file for file in read["evaluate"] if file.endswith("train.jsonl")]


def test_jobs_lease_the_part_of_a_gpu_that_their_profile_says(tree):
    """What is timed has the GPU alone."""
    said = tree.snakemake("--dry-run", "--printshellcmds", "--profile", "profiles/shared").stdout
    jobs = {job.partition(":")[0]: job for job in said.split("\nrule ")[1:]}
    parts = {rule: found[1] for rule, job in jobs.items() if (found := re.search(r"gpu_percent=(\d+)", job))}
    leased = {rule: found[1] for rule, job in jobs.items() if (found := re.search(r"--gpu-percent (\d+) ", job))}
    shared = yaml.safe_load((tree.folder / "profiles/shared/config.yaml").read_text())["set-resources"]
    assert leased == {rule: str(resources["gpu_percent"]) for rule, resources in shared.items()}
    assert parts == leased | {"profile": "100"}


def test_profiles_name_rules_and_resources_that_exist(tree):
    rules = {line.strip() for line in tree.snakemake("--list-rules").stdout.splitlines()}
    for file in (tree.folder / "profiles").glob("*/config.yaml"):
        for rule, resources in yaml.safe_load(file.read_text()).get("set-resources", {}).items():
            assert rule in rules, file
            assert set(resources) <= {"mem_mb", "runtime", "gpu", "gpu_percent"}
