"""The quick start of README.md, and docs/runs.md: their blocks work as they stand, on a checkpoint of random weights.

The package is that of its wheel, in an environment and a folder without the clone.
"""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qerl.results.schema import RolloutRow, read_rows
from qerl.settings.data import INSTRUCTIONS
from tests.forks import call, forget_package
from tests.hub_layouts import cached, into_cache
from tests.tiny import TEMPLATE, tiny_qwen2, write_sums, write_template
from tests.workflow.conftest import ROOT

pytestmark = [pytest.mark.slow]
#: The environment, and the folder of its packages.
ENVIRONMENT = "environment"
PACKAGES = sysconfig.get_path("purelib", "venv", {"base": ENVIRONMENT})
#: A rubric of two rewards, of which one reads a column and the other waits.
ENVIRONMENT_OF_VERIFIERS = """
import datasets
import verifiers as vf


def load_environment():
    rows = [{"question": f"Write {n}", "answer": str(n)} for n in range(40)]
    data = datasets.Dataset.from_list(rows)

    def asked(prompt, answer):
        return float(prompt[-1]["content"] == f"Write {answer}")

    async def length(completion):
        return len(completion[-1]["content"])

    rubric = vf.Rubric(funcs=[asked, length], weights=[2.0, 0.5])
    return vf.SingleTurnEnv(dataset=data, eval_dataset=data.select(range(8)), system_prompt="Go.", rubric=rubric)
"""
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(title: str, page: str = "docs/runs.md") -> str:
    return (ROOT / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("readme")
    install(folder / "clone", folder / ENVIRONMENT)
    for name in ("config", "profiles"):
        shutil.copytree(ROOT / name, folder / name)
    write_template(tiny_qwen2(folder / "my-model"), f"{TEMPLATE[:-1]}{{{{ '!' if enable_thinking }}}}:")
    write_sums(folder / "problems.jsonl")
    return folder


def install(clone: Path, target: Path) -> None:
    """Build the wheel and install it into a new environment, where all else is what this environment has from PyPI."""
    # From a copy of its sources, because setuptools writes beside them.
    shutil.copytree(ROOT / "qerl", clone / "qerl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", clone.parent, clone]
    subprocess.run([sys.executable, "-P", "-m", "pip", *build], check=True)
    [wheel] = clone.parent.glob("*.whl")
    venv.create(target)
    python = target / "bin/python"
    add = ["install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([sys.executable, "-P", "-m", "pip", "--python", python, *add], check=True)
    # A path in a file .pth has its own such files unread, so the clone's editable installation isn't found.
    others = sysconfig.get_path("purelib")
    (target.parent / PACKAGES / "others.pth").write_text(f"{others}\n")
    shutil.rmtree(clone)


def blocks(text: str, folder: Path) -> list[tuple[str, str]]:
    """Write the blocks that begin with the name of a file; languages and texts of the others, in order."""
    others = []
    for language, block in BLOCK.findall(text):
        # As it stands but for its length.
        block = block.replace("steps: 200", "steps: 3").replace('"steps": 200', '"steps": 3').replace("1024", "6")
        if named := re.match(r"# ([\w.]+\.(?:py|yaml))\n", block):
            (folder / named[1]).write_text(block)
        else:
            others.append((language, block))
    return others


def environment(folder: Path, **variables: str) -> dict[str, str]:
    path = f"{folder / ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(folder / PACKAGES), **variables}


def in_a_shell(block: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    command = ["bash", "-ec", block]
    run = subprocess.run(
        command, cwd=folder, env=environment(folder, **variables), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, block + run.stdout + run.stderr
    return run


def in_forks(language: str, block: str, folder: Path) -> str:
    """Run a block of Python, or each command of a block of `qerl`; what they print."""
    said = ""
    for text in block.splitlines() if language == "sh" else [block]:
        run = call(partial(in_this_process, language, text), folder, environment(folder))
        assert run.returncode == 0, text + run.stdout + run.stderr
        said += run.stdout
    return said


def in_this_process(language: str, text: str) -> None:
    torch.set_num_threads(1)
    forget_package()  # that of the wheel is imported, which has no clone around it
    sys.path[:0] = [os.environ["PYTHONPATH"]]
    if language == "python":
        exec(text, {"__name__": "__main__"})
        return
    command, *sys.argv[1:] = shlex.split(text, comments=True)
    assert command == "qerl"
    from qerl.__main__ import main

    main()


def test_the_quick_start_with_a_model_and_a_data_set_of_the_hub(folder):
    home = folder / "hub-cache"
    cached("openai/gsm8k", home)
    write_template(model := tiny_qwen2(folder / "qwen"))
    into_cache(model, "models--Qwen--Qwen2.5-1.5B-Instruct", home)
    [(_, block)] = blocks(section("Train a model on your GPU", "README.md"), folder)
    train, others = block.split("\n", 1)
    shell = in_a_shell(train, folder, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    warnings = [line for line in (shell.stdout + shell.stderr).splitlines() if "WARNING" in line]
    assert all("WARNING qerl: " in line for line in warnings), "of a library, which a user can do nothing about"
    said = in_forks("sh", others, folder)
    assert said.count("A crate holds 7 pears.") == 1
    assert len((folder / "runs/gsm8k/metrics.jsonl").read_text().splitlines()) == 3
    assert (folder / "runs/gsm8k/eval/result.json").is_file()
    assert (folder / "runs/gsm8k/vllm/adapter/adapter_model.safetensors").is_file()


def test_one_run_by_hand(folder):
    [(_, block)] = blocks(section("One run by hand"), folder)
    said = in_forks("sh", block, folder)
    run = folder / "runs/first"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert (run / "policy/adapter_model.safetensors").is_file()
    assert said.count("A crate holds 7 pears.") == 4
    asked = INSTRUCTIONS["native"]["gsm8k"]
    held_out = [f"{json.loads(line)['question']}\n{asked}:" for line in (run / "data/test.jsonl").open()]
    prompts = {json.loads(line)["prompt"] for line in (run / "eval/samples.jsonl").open()}
    # The tiny tokenizer puts spaces between its characters.
    assert {"".join(prompt.split()) for prompt in prompts} == {"".join(question.split()) for question in held_out}
    assert json.loads((folder / "my-model-mxfp4/report.json").read_text())["weights"] == "mxfp4"


def test_the_wheel_has_every_file_of_the_package(folder):
    def files(place: Path) -> set[str]:
        found = (file for file in (place / "qerl").rglob("*") if file.is_file() and file.suffix not in (".pyc", ".md"))
        return {str(file.relative_to(place)) for file in found}

    assert files(folder / PACKAGES) == files(ROOT)


@pytest.mark.parametrize(
    "command",
    [
        "qerl plan config/paper.yaml",
        "qerl grid config/shapes.yaml",
        "qerl doctor --model my-model --rank 16 --max-tokens 6 --memory-gb 24",
        "qerl keys",
        "qerl where config/mini.yaml",
    ],
)
def test_commands_around_the_workflow_need_no_clone(folder, command):
    assert in_forks("sh", command, folder)


def test_as_a_library(folder):
    [block] = blocks(section("As a library"), folder)
    said = in_forks(*block, folder)
    assert "completion_length" in said
    assert "trained Interval(mean=" in said
    assert (folder / "runs/second/trained/result.json").is_file()


def test_a_reward_and_a_data_set_of_ones_own(folder):
    [block] = blocks(section("A reward and a data set of your own"), folder)
    in_forks(*block, folder)
    metrics = [json.loads(line) for line in (folder / "runs/own/metrics.jsonl").open()]
    assert all(row["reward"] < 0.2 for row in metrics)
    assert "What is" in (folder / "runs/own/data/train.jsonl").read_text()


def test_coming_from_trl(folder):
    import datasets
    from trl.trainer.grpo_config import GRPOConfig

    text = section("Coming from TRL")
    # Read and not imported, because the trainer imports vLLM.
    trainer = ast.parse(Path(find_spec("trl.trainer.grpo_trainer").origin).read_text())
    [made] = [part for part in ast.walk(trainer) if isinstance(part, ast.ClassDef) and part.name == "GRPOTrainer"]
    [start] = [part for part in made.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    known = {*inspect.signature(GRPOConfig).parameters, *(one.arg for one in start.args.args)}
    script = ast.walk(ast.parse(BLOCK.findall(text)[0][1]))
    named = {part.arg for part in script if isinstance(part, ast.keyword)}
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert named | set(re.findall("`(.*?)`", " ".join(rows))) <= known
    chats = [{"prompt": [{"role": "user", "content": f"{n} + {n}?"}], "answer": str(2 * n)} for n in range(24)]
    parts = {"train": chats[:16], "validation": chats[16:20], "test": chats[20:]}
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()})
    splits.save_to_disk(folder / "chats")
    [_, (_, commands)] = blocks(text, folder)
    in_forks("sh", commands, folder)
    metrics = [json.loads(line) for line in (folder / "runs/chats/metrics.jsonl").open()]
    for row in metrics:
        assert row["reward"] == pytest.approx(row["reward/right"] + 0.5 * row["reward/short"])
    assert "validation/reward" in metrics[-1]
    [first, *_] = read_rows(RolloutRow, folder / "runs/chats/rollouts/step-000001.jsonl.gz")
    assert re.fullmatch(r"Answerbriefly\.(\d+)\+\1\?:", first.prompt)  # the tiny tokenizer drops spaces


@pytest.mark.parametrize("library", ["reasoning_gym", "verifiers"])
def test_problems_of_other_libraries(folder, library):
    pytest.importorskip(library)
    blocks(section("Problems of other libraries"), folder)
    (folder / "my_env.py").write_text(ENVIRONMENT_OF_VERIFIERS)
    file, run = {"reasoning_gym": ("gym.yaml", "runs/gym"), "verifiers": ("rubric.yaml", "runs/rubric")}[library]
    in_forks("sh", f"qerl train {file}", folder)
    last = json.loads((folder / run / "metrics.jsonl").read_text().splitlines()[-1])
    if library == "reasoning_gym":
        assert last["validation/pass@1"] == 0
        return
    rows = [row for file in (folder / run / "rollouts").iterdir() for row in read_rows(RolloutRow, file)]
    for row in rows:
        wanted = int("".join(re.findall(r"\d", row.prompt)))
        for completion in row.completions:
            text = "".join(completion.tokens)
            assert completion.reward == pytest.approx(2 * (row.gold == str(wanted)) + 0.5 * len(text))
    assert last["validation/reward"] > 2
