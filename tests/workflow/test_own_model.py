"""The same DAG on a checkpoint and a file of problems that the project didn't make."""

import json

import pytest
import yaml

from qerl.plan import plan_from
from tests.tiny import tiny_llama, tiny_qwen2

from .conftest import copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.mark.parametrize(
    ("make", "folder", "target"),
    [
        (tiny_qwen2, "Own-Model-0.1B", "tables/accuracy.md"),
        (tiny_llama, "Own Model's", "evaluate/main-nvfp4-lora-seed0/result.json"),
    ],
)
def test_own_model_and_problems_from_the_command_line(tmp_path, monkeypatch, make, folder, target):
    model = make(tmp_path / folder, shard_size="60KB")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    assert len(list(model.glob("*.safetensors"))) > 1
    rows = [
        {"question": f"A crate holds {n} pears. How many do 2 crates hold?", "answer": f"2*{n}={2 * n}\n#### {2 * n}"}
        for n in range(3, 60)
    ]
    problems = tmp_path / "pears.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = copy_tree(tmp_path / "tree")
    # Every kind of rule but measurements and figures, which test_dag.py has.
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    values["experiments"]["main"]["arms"] = {"nvfp4-lora": {"weights": "nvfp4"}}
    (tree.folder / "own.yaml").write_text(yaml.safe_dump(values | {"benches": {}}))
    keys = ("--config", f"model={model}", f"problems={problems}")
    monkeypatch.chdir(tree.folder)
    planned = plan_from({"model": model, "problems": problems}, tree.folder / "own.yaml")
    name, [run] = planned.folder, planned.runs.values()
    tree.snakemake(f"{name}/{target}", "--configfile", "own.yaml", *keys)
    results = tree.folder / name
    assert not (results / "models").exists()
    trained = json.loads((results / "train/main-nvfp4-lora-seed0/run.json").read_text())
    assert trained["settings"]["model"] == run.settings.model
    assert run.settings.model.startswith("Own-Model")
    assert trained["settings"]["dataset"] == "pears"
    evaluation = json.loads((results / "evaluate/main-nvfp4-lora-seed0/result.json").read_text())
    assert list(evaluation["tasks"]) == ["pears"]
    sizes = json.loads((results / "data/pears/dataset.json").read_text())["rows"]
    assert sum(sizes.values()) == len(rows)
    assert evaluation["tasks"]["pears"]["problems"] == sizes["test"]
    assert target != "tables/accuracy.md" or "pears" in (results / target).read_text()


def test_a_model_without_a_configuration_is_planned_with_that_of_real_models(tmp_path, tree):
    model = tiny_qwen2(tmp_path / "own")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    planned = tree.planned("--config", f"model={model}")
    assert (planned["train"], planned["evaluate"], planned.get("pretrain")) == (3, 5, None)
