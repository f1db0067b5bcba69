"""The commands and files of docs/tutorial.md and the cells of its notebook, as they stand but for their lengths."""

import json
import re
import shlex
import sys
from functools import partial

import pandas as pd
import pytest
import torch

from tests.forks import call, use_package
from tests.workflow.conftest import ROOT, Tree, copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
#: Shorter runs of a smaller model: numbers and names of keys stay where they stand.
SHORTER = [(r"\b(steps\"?: )20\b", r"\g<1>2"), (r"\b(test\"?: )256\b", r"\g<1>6"), (r"\b(56|64)\b", "6")]


def shorter(text: str) -> str:
    for pattern, number in SHORTER:
        text = re.sub(pattern, number, text)
    return text


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory) -> Tree:
    """A tree in which the page's commands have run, with what they printed in printed.txt."""
    tree = copy_tree(tmp_path_factory.mktemp("tutorial") / "qerl")
    micro = (ROOT / ".test/config/config.yaml").read_text()
    (tree.folder / "config/mini.yaml").write_text(micro.replace("name: micro", "name: mini"))
    printed = ""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), re.M | re.S):
        if language == "yaml":
            (tree.folder / block.split("\n")[0].removeprefix("# ")).write_text(shorter(block))
            continue
        for line in block.splitlines():
            name, *words = shlex.split(shorter(line))
            if name == "snakemake":
                tree.snakemake(*words)
                continue
            assert name == "qerl"
            run = call(partial(command, words, tree), tree.folder, tree.environment)
            assert run.returncode == 0, line + run.stdout + run.stderr
            printed += run.stdout
    (tree.folder / "printed.txt").write_text(printed)
    return tree


def command(words: list[str], tree: Tree) -> None:
    torch.set_num_threads(1)
    use_package(tree.folder)
    sys.argv[1:] = words
    from qerl.__main__ import main

    main()


def notebook(tree: Tree) -> None:
    torch.set_num_threads(1)
    use_package(tree.folder)
    cells = json.loads((ROOT / "examples/tutorial.ipynb").read_text())["cells"]
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(shorter("".join(cell["source"])), names)
    print(json.dumps({"steps": len(names["run"].metrics), "before": names["before"].accuracy.mean}))


def test_the_commands_of_the_tutorial_make_what_it_says(tutorial):
    runs = tutorial.folder / "runs/tutorial"
    for name in ("nvfp4", "bf16"):
        assert len((runs / name / "metrics.jsonl").read_text().splitlines()) == 2
        assert len(pd.read_json(runs / name / "eval/samples.jsonl", lines=True)["problem"].unique()) == 6
    shown = [str(file.relative_to(tutorial.folder)) for file in (runs / "nvfp4/samples.html", runs / "samples.html")]
    assert all(page in (tutorial.folder / "printed.txt").read_text().splitlines() for page in shown)
    assert {"README.md", "adapter_model.safetensors"} < {file.name for file in (runs / "card").iterdir()}
    assert (runs / "vllm/adapter/adapter_model.safetensors").is_file()


def test_the_cells_of_the_notebook_run_and_score_the_untrained_model_as_the_command_does(tutorial):
    run = call(partial(notebook, tutorial), tutorial.folder, tutorial.environment)
    assert run.returncode == 0, run.stdout + run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["steps"] == 2
    result = json.loads((tutorial.folder / "runs/tutorial/untrained/result.json").read_text())
    [task] = result["tasks"].values()
    assert said["before"] == pytest.approx(task["accuracy"])
    assert (tutorial.folder / "runs/notebook-card/README.md").is_file()
