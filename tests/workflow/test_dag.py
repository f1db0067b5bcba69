"""The whole DAG in miniature: it runs, repeats nothing, and reruns only jobs that a change affects.

One of its experiments has a reward and a data set of the user, by import path, and answers in tags.
"""

import json
import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from qerl.report.archive import verify, write_archive
from tests.pages import parts_of
from tests.workflow.conftest import Tree, copy_tree

CONFIG = ("--configfile", "dag.yaml")
RESULTS = "results/micro"
MAIN, OWN = "main-nvfp4-lora-aqn-seed0", "own-nvfp4-lora-seed0"
TABLE = f"{RESULTS}/tables/accuracy.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DATA = """
def rows():
    return [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(40)]
"""
REWARD = """
from own_lengths import of

def length(answer, problem):
    return float(of(answer.text))
"""
LENGTHS = "def of(text):\n    return len(text)\n"
SUMS = {
    "format": "gsm8k",
    "answer": "tags",
    "instruction": "Write <think>steps</think><answer>number</answer>.",
    "origin": {"source": "python", "function": "own_data:rows"},
}


def configuration(tree: Tree) -> dict:
    """The miniature with a second experiment, on the user's problems and reward."""
    values = yaml.safe_load((tree.folder / "tests/config/micro.yaml").read_text())
    main = values["experiments"]["main"]
    own = {"dataset": "sums", "reward": {"functions": {"own": "own_reward:length"}}}
    values["experiments"] = {
        "main": main
        | {"arms": {"nvfp4-lora-aqn": main["arms"]["nvfp4-lora-aqn"]}, "tasks": ["arithmetic", "definitions"]},
        "own": main | {"arms": {"nvfp4-lora": {"weights": "nvfp4"}}, "base": main["base"] | own, "tasks": ["sums"]},
    }
    values["datasets"]["sums"] = SUMS
    values["evaluation"]["tasks"].append({"dataset": "sums", "harness": "lm-eval"})
    values["benches"]["step"]["experiment"] = "own"
    return values


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tree = copy_tree(tmp_path_factory.mktemp("dag") / "qerl")
    for name, text in {"own_data": DATA, "own_reward": REWARD, "own_lengths": LENGTHS}.items():
        (tree.folder / f"{name}.py").write_text(text)
    (tree.folder / "dag.yaml").write_text(yaml.safe_dump(configuration(tree)))
    tree.snakemake(*CONFIG)
    return tree


def test_every_number_of_the_report_leads_to_samples_of_its_page(finished):
    page, report = (finished.folder / RESULTS / name for name in ("samples.html", "report.html"))
    sources = {source["id"]: source for source in parts_of(page)["index"]["sources"]}
    assert [view["step"] for view in sources[MAIN]["views"] if view["trained"]] == ["1", "2"]
    views = {f"{id}/{view['step']}" for id, source in sources.items() for view in source["views"]}
    addresses = set(re.findall(r'href="samples\.html#([^"]+)"', report.read_text()))
    assert addresses <= views | sources.keys()
    evaluated = {path.name for path in (finished.folder / RESULTS).glob("evaluate/*")}
    assert {address.split("/")[0] for address in addresses} == evaluated
    assert "Nothing failed." in report.read_text()


def test_an_archive_of_the_results_is_verified_in_another_folder(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.folder)
    write_archive(Path(RESULTS), tmp_path / "micro.zip", [Path("dag.yaml")])
    monkeypatch.chdir(tmp_path)
    assert verify(tmp_path / "micro.zip")["tables"] == len([*(finished.folder / RESULTS / "tables").glob("*.csv")]) > 0


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished DAG with its file times, for tests that change results."""
    shutil.copytree(finished.folder, tmp_path / "qerl", symlinks=True)
    return Tree(tmp_path / "qerl")


def test_every_result_is_there_and_stamped(finished):
    results = finished.folder / RESULTS
    stamped = [*results.glob("train/*/run.json"), *results.glob("evaluate/*/result.json"), *results.glob("profile/*")]
    stamped += [*results.glob("quantize/*/report.json"), *results.glob("models/*/pretrain.json")]
    assert len(stamped) == 2 + 4 + 2 + 2 + 1
    for file in stamped:
        provenance = json.loads(file.read_text())["provenance"]
        assert provenance["commit"] == "test"
        assert provenance["machine"]["cores"] >= 1
    for kind, suffixes in (("tables", (".csv", ".md", ".tex", ".html")), ("figures", (".svg", ".png"))):
        for suffix in suffixes:
            assert list((results / kind).glob(f"*{suffix}"))


def test_the_users_functions_are_called(finished):
    results = finished.folder / RESULTS
    metrics = (results / f"train/{OWN}/metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[0])["reward/own"] > 0
    meta = json.loads((results / "data/sums/dataset.json").read_text())
    assert (meta["answer"], sum(meta["rows"].values())) == ("tags", 40)


def test_snakemakes_report_begins_with_the_report_and_tells_of_machine_and_commit(finished):
    finished.snakemake(*CONFIG, "--report", "report.html")
    text = (finished.folder / "report.html").read_text()
    results, categories = (_value(text, name) for name in ("results", "categories"))
    assert sorted(categories)[:2] == ["0 Report", "1 Main table"]
    assert categories["0 Report"] == {"Other": [f"{RESULTS}/report.html"]}
    assert categories["1 Main table"] == {"Other": [f"{RESULTS}/tables/accuracy.html"]}
    results.pop(f"{RESULTS}/report.html")
    for path, result in results.items():
        assert path.endswith((".html", ".png")), f"{path} is not shown but downloaded"
        kind = "text/html" if path.endswith(".html") else "image/png"
        assert result["data_uri"].startswith(f"data:{kind}")
        assert "Machine: " in result["caption"]
        assert "Commit: test" in result["caption"]
    assert "Seeds per arm: 1" in results["results/micro/tables/accuracy.html"]["caption"]


def _value(page: str, name: str):
    """The value that a script of the report assigns."""
    script = page.split(f'<script id="{name}">', 1)[1]
    return json.JSONDecoder().raw_decode(script.split(" = ", 1)[1])[0]


LOSSES = "qerl/rl/losses.py"


@pytest.mark.parametrize(
    ("file", "old", "new", "rerun"),
    [
        ("own_reward.py", "def length", "# a remark\ndef length", {}),
        ("own_lengths.py", "len(text)", "-len(text)", {"train": 1, "evaluate": 1, "profile": 1}),
        ("own_data.py", "n + 1", "n + 2", {"prepare_data": 1, "train": 1, "evaluate": 3, "profile": 1}),
        ("dag.yaml", "noise.schedule: constant", "noise.schedule: linear", {"train": 1, "evaluate": 1}),
        (LOSSES, "torch.exp(log_ratio)\n", "torch.exp(1.0 * log_ratio)\n", {"train": 2, "evaluate": 2, "profile": 1}),
    ],
)
def test_a_change_reruns_what_it_decides(finished, file, old, new, rerun):
    path = finished.folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    planned = finished.planned(*CONFIG)
    path.write_text(text)
    tables = {"collect_results", "list_results", "samples_page", "tables", "figures", "write_report", "default"}
    assert {rule: count for rule, count in planned.items() if rule not in tables} == rerun


def test_a_failed_job_leaves_finished_results_alone_and_names_the_reason(copied):
    """A checkpoint is truncated: the training that needs it fails, and finished results stay."""
    weights = next((copied.folder / RESULTS / "quantize/miniature-nvfp4/checkpoint").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    run = copied.snakemake(*CONFIG, "--forcerun", f"{RESULTS}/train/{OWN}/run.json", check=False)
    assert run.returncode != 0
    assert weights.name in run.stdout + run.stderr
    assert (run.stdout + run.stderr).count(
        "Error in rule train"
    ) == 1  # further tries are for kills (faults/test_dag.py)
    assert (copied.folder / RESULTS / f"train/{MAIN}/run.json").exists()


def limited(tree: Tree, name: str, **changes) -> tuple[str, ...]:
    """Arguments for the main experiment with a limit of its time, under a name."""
    values = configuration(tree)
    main = values["experiments"].pop("main")
    values["experiments"][name] = main | changes
    (tree.folder / "limited.yaml").write_text(yaml.safe_dump(values))
    return "--configfile", "limited.yaml", "--"


def test_a_run_over_its_time_limit_is_a_row_of_the_table(copied):
    """Without `on_failure: row` it fails, and a higher limit continues it: `tests/unit/rl/test_failures.py`."""
    late = limited(copied, "main", time_limit=1e-9, on_failure="row")
    copied.snakemake(*late, TABLE)
    lines = (copied.folder / TABLE).read_text().splitlines()
    row = next(line for line in lines if "LoRA + AQN" in line)
    assert "seed 0: timeout of 1e-09 h after 1 of 2 steps" in row
    assert copied.planned(*late, TABLE) == {}


CARRIED = ("results", "work", ".snakemake/metadata")


def moved(tree: Tree, folder: Path) -> Tree:
    """A new copy of the code, with another tree's results and state, whose times are drawn anew."""
    new, draws = copy_tree(folder), random.Random(0)
    for name in ("dag.yaml", "own_data.py", "own_reward.py", "own_lengths.py"):
        shutil.copyfile(tree.folder / name, folder / name)
    for part in CARRIED:
        shutil.copytree(tree.folder / part, folder / part, symlinks=True, copy_function=shutil.copyfile)
    now = time.time()
    for path in sorted(path for part in CARRIED for path in (folder / part).rglob("*")):
        drawn = now - draws.uniform(0, 1e6)
        os.utime(path, (drawn, drawn), follow_symlinks=False)
    return new


def test_an_interrupted_run_continues_in_another_folder_and_nothing_else_runs(copied, tmp_path):
    target = f"{RESULTS}/train/{MAIN.replace('main', 'stopped')}/run.json"
    copied.snakemake(*limited(copied, "stopped", time_limit=1e-9), target, check=False)
    elsewhere = moved(copied, tmp_path / "elsewhere")
    assert {"train", "evaluate", "quantize"} <= elsewhere.planned(*CONFIG).keys()
    # The command of docs/faults.md for results that lost their times.
    command = re.search(r"`(find results .*?)`", (elsewhere.folder / "docs/faults.md").read_text())
    subprocess.run(command[1], shell=True, cwd=elsewhere.folder, check=True)
    assert elsewhere.planned(*CONFIG) == {}
    arguments = (*limited(elsewhere, "stopped"), target)
    assert elsewhere.planned(*arguments) == {"train": 1}
    elsewhere.snakemake(*arguments)
    log = next((elsewhere.folder / RESULTS / "logs/train").glob("stopped-*.log"))
    assert "continuing from step 1 of 2" in log.read_text()
    assert elsewhere.planned(*arguments) == {}
