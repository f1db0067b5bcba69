"""Snakemake's plan, and its refusal of configurations that can't run."""

import json
import re

import pytest
import yaml

from tests.tiny import tiny_decoder, tiny_qwen2

MINI = {"prepare_data": 3, "pretrain": 1, "quantize": 4, "train": 18, "evaluate": 22, "profile": 2}


def test_both_entry_points_plan_the_whole_default_configuration(tree):
    root = tree.planned()
    assert MINI.items() <= root.items()
    inner = tree.planned("--snakefile", "workflow/Snakefile")
    assert MINI.items() <= inner.items()


def test_the_default_plan_needs_every_kind_of_result(tree):
    planned = tree.planned()
    assert planned["tables"] == 4
    assert planned["figures"] == 6


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


MAIN = ("experiments", "main")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_key("evaluaton", {}), "changed.yaml: unknown key `evaluaton`; did you mean `evaluation`?"),
        (set_key(*MAIN, "base", "adapter", {"rnk": 8}), "unknown key `experiments.main.base.adapter.rnk`"),
        (set_key(*MAIN, "arms", "bad", {"weights": "nf4", "method": "full"}), "method=full can't train weights=nf4"),
        (set_key(*MAIN, "arms", "bad", {"adapter.rank": 0}), "adapter.rank=0 leaves method=lora nothing to train"),
        (
            set_key(*MAIN, "base", "model", "minature"),
            "experiments.main.base.model names 'minature', which is not in `models`",
        ),
        (set_key("models", "miniature", "hidden_size", 100), "hidden_size=100 must be a multiple of 64"),
        (set_key("models", "miniature", {"source": "local", "path": "no/such/folder"}), "no/such/folder"),
        (set_key("datasets", "arithmetic", "origin", {"source": "local", "path": "no/such.jsonl"}), "no/such.jsonl"),
    ],
)
def test_a_configuration_that_cant_run_is_one_sentence_before_any_job(tree, tmp_path, change, sentence):
    said = refused(tree, tmp_path, change)
    assert sentence in said
    assert "Traceback" not in said


def test_a_record_without_answer_is_named_before_any_job(tree, tmp_path):
    problems = tmp_path / "problems.jsonl"
    rows = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "2 + 2?", "answer": "four"}]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tree.snakemake("--config", f"problems={problems}", check=False)
    assert run.returncode != 0
    said = run.stdout + run.stderr
    assert "problems.jsonl" in said
    assert "line 2" in said


def test_a_truncated_checkpoint_is_named_before_any_job(tree, tmp_path):
    folder = tiny_qwen2(tmp_path / "short")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    said = refused(tree, tmp_path, set_key("models", "miniature", {"source": "local", "path": str(folder)}))
    assert "model.safetensors" in said
    assert "Traceback" not in said


def test_a_base_without_chat_template_is_named_before_any_job(tree, tmp_path):
    folder = tiny_qwen2(tmp_path / "mute")
    said = refused(tree, tmp_path, set_key("models", "miniature", {"source": "local", "path": str(folder)}))
    assert "has no chat template" in said


def test_settings_that_do_not_fit_a_local_model_are_named_before_any_job(tree, tmp_path):
    model = {"source": "local", "path": str(tiny_decoder(tmp_path / "model", "olmo2"))}
    said = refused(tree, tmp_path, set_key("models", "miniature", model))
    assert "adapter.train_norms needs an RMSNorm" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("profile", ["gpu", "node", "shared"])
def test_the_profiles_of_one_machine_plan_the_same(tree, profile):
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


def test_group_size_that_does_not_divide_is_refused(tree, tmp_path):
    folder = tmp_path / "odd"
    folder.mkdir()
    sizes = {"hidden_size": 72, "intermediate_size": 128, "vocab_size": 100, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 4, **sizes}))
    said = refused(tree, tmp_path, set_key("models", "miniature", {"source": "local", "path": str(folder)}))
    assert "72" in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: text.replace("\nname: mini\n", "\n"), "mine.yaml has no `name`; give it a `name`"),
        (lambda text: text + "\nprotocol: paper\nprotocol: paper\n", "mine.yaml: the key `protocol` is given twice"),
    ],
)
def test_a_file_of_ones_own_is_named_and_no_other(tree, tmp_path, change, sentence):
    file = tmp_path / "mine.yaml"
    text = (tree.folder / "config/mini.yaml").read_text()
    assert change(text) != text
    file.write_text(change(text))
    run = tree.snakemake("--dry-run", "--configfile", str(file), check=False)
    assert run.returncode != 0
    said = run.stdout + run.stderr
    assert sentence in said
    assert "mini.yaml" not in said
    assert "Traceback" not in said
