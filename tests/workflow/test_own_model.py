"""The same DAG on a checkpoint and a file of problems that the project didn't make."""

import json
from pathlib import Path

import pytest
import yaml

from qerl.cli.workflow import run_job
from qerl.workflow.plan import plan_from
from qerl.workflow.stages import Jobs
from tests.tiny import tiny_llama, tiny_qwen2
from tests.workflow.conftest import Tree, copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


RUN = "main-nvfp4-lora-seed0"


def given(tree: Tree, model: Path, problems: Path) -> tuple[str, ...]:
    """Arguments of a run of one arm on a model and problems, which are made; figures and speeds are test_dag.py's."""
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert len(list(model.glob("*.safetensors"))) > 1
    rows = [
        {"question": f"A crate holds {n} pears. How many do 2 crates hold?", "answer": f"2*{n}={2 * n}\n#### {2 * n}"}
        for n in range(3, 60)
    ]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    values["experiments"]["main"]["arms"] = {"nvfp4-lora": {"weights": "nvfp4"}}
    file = problems.with_name("own.yaml")
    file.write_text(yaml.safe_dump(values | {"benches": {}}))
    return "--config", f"model={model}", f"problems={problems}", "--configfile", str(file), "--"


def test_own_model_and_problems_from_the_command_line(tmp_path, monkeypatch):
    tree, problems = copy_tree(tmp_path / "tree"), tmp_path / "pears.jsonl"
    model = tiny_llama(tmp_path / "Own Model's", shard_size="60KB")
    keys = given(tree, model, problems)
    monkeypatch.chdir(tree.folder)
    planned = plan_from({"model": model, "problems": problems}, tmp_path / "own.yaml")
    results, [run] = Path(planned.folder), planned.runs.values()
    tree.snakemake(*keys, f"{results}/evaluate/{RUN}/result.json")
    assert not (results / "models").exists()
    trained = json.loads((results / f"train/{RUN}/run.json").read_text())
    assert trained["settings"]["model"] == run.settings.model
    assert run.settings.model.startswith("Own-Model")
    assert trained["settings"]["dataset"] == "pears"
    evaluation = json.loads((results / f"evaluate/{RUN}/result.json").read_text())
    assert list(evaluation["tasks"]) == ["pears"]
    sizes = json.loads((results / "data/pears/dataset.json").read_text())["rows"]
    assert sum(sizes.values()) == len(problems.read_text().splitlines())
    assert evaluation["tasks"]["pears"]["problems"] == sizes["test"]
    # The table of what there is: bases are evaluated as policies are.
    jobs = Jobs(planned)
    jobs.files.listed.write_text("".join(f"{file}\n" for file in jobs.files.stored if Path(file).exists()))
    run_job(jobs.table("accuracy"))
    assert "pears" in (results / "tables/accuracy.md").read_text()


def test_all_of_own_models_table_is_planned(tmp_path, tree, monkeypatch):
    model, problems = tiny_qwen2(tmp_path / "Own-Model-0.1B", shard_size="60KB"), tmp_path / "pears.jsonl"
    keys = given(tree, model, problems)
    monkeypatch.chdir(tree.folder)
    results = plan_from({"model": model, "problems": problems}, tmp_path / "own.yaml").folder
    assert tree.planned(*keys, f"{results}/tables/accuracy.md") == {
        **{"prepare_data": 1, "check_model": 2, "quantize": 2, "train": 1, "evaluate": 3},
        **{"list_results": 1, "collect_results": 1, "tables": 1},
    }


def test_a_model_without_a_configuration_uses_that_of_real_models(tmp_path, tree):
    model = tiny_qwen2(tmp_path / "own")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    planned = tree.planned("--config", f"model={model}")
    assert (planned["train"], planned["evaluate"], planned.get("pretrain")) == (3, 5, None)


@pytest.mark.parametrize(
    ("key", "name", "sentence"),
    [
        (
            "model",
            "1e5",
            "`model` must be a path, not 100000.0; a name that reads as a number needs its folder",
        ),
        (
            "problems",
            "sums {a}.jsonl",
            "`problems`: Snakemake takes braces for a wildcard, and sums {a}.jsonl has some",
        ),
    ],
)
def test_a_name_that_snakemake_reads_otherwise_is_a_sentence(tmp_path, key, name, sentence):
    tree = copy_tree(tmp_path / "tree")
    names = {"model": "plain", "problems": "sums.jsonl", key: name}
    (tiny_qwen2(tree.folder / names["model"]) / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"question": f"What are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(60)]
    (tree.folder / names["problems"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"{one}={path}" for one, path in names.items()]
    run = tree.snakemake("-n", "--config", *arguments, check=False)
    assert run.returncode == 1
    said = run.stdout + run.stderr
    assert sentence in said
    assert "Traceback" not in said
    if name[0].isdigit():  # the remedy that the sentence names
        assert tree.planned("--config", f"model=./{name}", "problems=sums.jsonl")["train"] > 0
