"""The whole DAG on the micro configuration: it runs, does nothing twice, and reruns only what a change touches."""

import json

import pytest

from .conftest import copy_tree

CONFIG = ("--configfile", "tests/config/micro.yaml")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tree = copy_tree(tmp_path_factory.mktemp("dag") / "qerl")
    tree.snakemake(*CONFIG)
    return tree


def edit(tree, file: str, old: str, new: str) -> None:
    path = tree.folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_every_result_is_there_and_stamped(finished):
    results = finished.folder / "results/micro"
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


def test_the_report_shows_its_tables_and_tells_of_machine_and_commit(finished):
    finished.snakemake(*CONFIG, "--report", "report.html")
    text = (finished.folder / "report.html").read_text()
    results, categories, start = (_value(text, name) for name in ("results", "categories", "workflow-desc"))
    assert sorted(categories)[0] == "1 Main table"
    assert categories["1 Main table"] == {"Other": ["results/micro/tables/accuracy.html"]}
    assert "Accuracy on arithmetic" in start
    assert "<td>NVFP4</td>" in start
    for path, result in results.items():
        assert path.endswith((".html", ".png")), f"{path} is not shown but downloaded"
        kind = "text/html" if path.endswith(".html") else "image/png"
        assert result["data_uri"].startswith(f"data:{kind}")
        assert "Machine: " in result["caption"]
        assert "Commit: test" in result["caption"]
    assert "Seeds an arm: 1" in results["results/micro/tables/accuracy.html"]["caption"]


def _value(page: str, name: str):
    """The value that a script of the report assigns."""
    script = page.split(f'<script id="{name}">', 1)[1]
    return json.JSONDecoder().raw_decode(script.split(" = ", 1)[1])[0]


def test_no_checkpoint_stays_behind(finished):
    assert not list((finished.folder / "work").rglob("*.pt"))


def test_a_second_run_does_nothing(finished):
    run = finished.snakemake(*CONFIG)
    assert "Nothing to be done" in run.stdout + run.stderr


def test_a_comment_reruns_nothing(finished):
    edit(finished, "qerl/rl/losses.py", "import torch\n", "import torch  # a remark\n")
    assert finished.planned(*CONFIG) == {}


def test_a_changed_setting_reruns_that_run_and_what_depends_on_it(finished):
    edit(finished, "tests/config/micro.yaml", "noise.schedule: constant", "noise.schedule: linear")
    planned = finished.planned(*CONFIG)
    edit(finished, "tests/config/micro.yaml", "noise.schedule: linear", "noise.schedule: constant")
    assert planned["train"] == 1
    assert planned["evaluate"] == 1
    assert not {"prepare_data", "pretrain", "quantize"} & planned.keys()


def test_a_changed_formula_retrains_but_does_not_quantize_anew(finished):
    edit(finished, "qerl/rl/losses.py", "torch.exp(log_ratio)\n", "torch.exp(1.0 * log_ratio)\n")
    planned = finished.planned(*CONFIG)
    edit(finished, "qerl/rl/losses.py", "torch.exp(1.0 * log_ratio)\n", "torch.exp(log_ratio)\n")
    assert planned["train"] == 2
    assert not {"prepare_data", "pretrain", "quantize"} & planned.keys()


def test_a_failed_job_leaves_finished_results_alone_and_names_the_reason(finished):
    """A truncated checkpoint: the training that needs it fails, what was finished stays."""
    weights = next((finished.folder / "results/micro/quantize/miniature-nvfp4/checkpoint").glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    run = finished.snakemake(*CONFIG, "--forcerun", "results/micro/train/main-nvfp4-lora-seed0/run.json", check=False)
    weights.write_bytes(whole)
    assert run.returncode != 0
    assert weights.name in run.stdout + run.stderr
    assert (run.stdout + run.stderr).count("Error in rule train") == 1  # further tries are for kills (test_kill.py)
    assert (finished.folder / "results/micro/train/main-nvfp4-lora-aqn-seed0/run.json").exists()
