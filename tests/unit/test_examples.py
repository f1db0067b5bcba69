"""The scripts in `examples`, each run as a user runs it."""

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from traceback import walk_stack

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import qerl
from tests.tiny import tiny_qwen2, write_sums, write_template

ROOT = Path(__file__).parents[2]
#: Random completions are never correct, so a function of the text gives them rewards that differ.
REWARD = "def characters(answer, problem):\n    return len(set(answer.text))\n"
STEPS, PROMPTS, GROUP, TOKENS, RATE = 2, 2, 4, 6, 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which the page of the loop was run, with its output in printed.txt."""
    folder = tmp_path_factory.mktemp("page")
    write_template(tiny_qwen2(folder / "dense"))
    write_sums(folder / "sums.jsonl", 8)
    (folder / "reward_of_page.py").write_text(REWARD)
    options = {"model": "dense", "problems": "sums.jsonl", "out": "page", "reward": "reward_of_page:characters"}
    options |= {"steps": STEPS, "prompts": PROMPTS, "group-size": GROUP, "max-tokens": TOKENS, "learning-rate": RATE}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, ROOT / "examples/grpo_gsm8k.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def walks():
    """The functions of each walk in docs/architecture.md, by its heading."""
    found = {}
    for part in re.split(r"^## ", (ROOT / "docs/architecture.md").read_text(), flags=re.M)[1:]:
        if heading := re.match(r"(.+) \((\d+) functions\)\n", part):
            functions = re.findall(r"^\d+\. `([^`]+)`", part, flags=re.M)
            assert len(functions) == int(heading[2])
            found[heading[1]] = functions
    return found


def test_the_walks_of_the_architecture_name_what_exists():
    assert len(walks()) == 3
    for module, _, name in (each.partition(":") for names in walks().values() for each in names):
        found = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)


def printed(folder, name):
    """The numbers that the page printed of its steps."""
    lines = (folder / "printed.txt").read_text().splitlines()
    return [float(re.search(rf" {name} (\S+)", line)[1]) for line in lines]


def test_the_adapter_of_the_loop_loads_in_stock_peft_and_was_trained(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, folder / "page/adapter")
    matrices = {name: p for name, p in loaded.named_parameters() if "lora_B" in name}
    assert len(matrices) == 2 * 7  # each linear layer of two blocks
    assert all(matrix.abs().max() > 0 for matrix in matrices.values())


def test_the_loop_on_one_page_trains_the_policy_of_qerl_train(folder, monkeypatch):
    """To the same weights and with the same figures, of which tests/parity compares the gradient with TRL's."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    origin = {"source": "local", "path": "sums.jsonl", "validation_fraction": 0, "test_fraction": 0}
    values = {
        "model": "dense",
        "dataset": {"format": "gsm8k", "answer": "tags", "origin": origin},
        "out": "run",
        "dtype": "float32",
        "steps": STEPS,
        "rollout": {"prompts": PROMPTS, "group_size": GROUP, "sampling": {"max_tokens": TOKENS}},
        "noise": {"schedule": "exponential"},
        "reward": {"functions": {"own": "reward_of_page:characters"}},
        "optimizer": {"learning_rate": RATE},
    }
    stacks = []
    backward = torch.Tensor.backward

    def noted(*arguments, **options):
        frames = [frame for frame, _ in walk_stack(inspect.currentframe())]
        stacks.append([f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}" for frame in frames])
        return backward(*arguments, **options)

    monkeypatch.setattr(torch.Tensor, "backward", noted)
    run = qerl.train(values)
    # The first walk of docs/architecture.md is the call stack at `backward`, below the command.
    walk = [name for name in walks()["A token batch: `qerl train` → `backward`"] if not name.startswith("qerl.cli")]
    assert [name for name in reversed(stacks[0]) if name.startswith("qerl.")] == walk
    for name, column in {"reward": "reward", "length": "completion_length", "gradient": "grad_norm"}.items():
        assert printed(folder, name) == pytest.approx(run.metrics[column].tolist(), abs=1e-5), name
    assert printed(folder, "sigma") == [0, 0.01]
    assert run.metrics["grad_norm"].min() > 0.1
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (folder / "page/adapter", run.adapter))
    assert ours.keys() == theirs.keys()
    # By their root mean square: AdamW makes steps of the learning rate also where a gradient is all rounding, and there
    # each CPU rounds as it will. A defect moves whole matrices by about the learning rate.
    for name, tensor in ours.items():
        assert (tensor - theirs[name]).square().mean().sqrt() < 1e-4 * RATE, name
