"""config/walk.yaml on a tiny checkpoint in the files of Qwen2.5's repository, from these files to a score."""

import json

import pytest
import yaml

from qerl.settings.base import read_yaml
from qerl.settings.workflow import merged
from tests.conftest import nightly
from tests.walk import write_walk
from tests.workflow.conftest import ROOT, copy_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN = "main-nvfp4-lora-aqn-seed0"


@nightly
def test_the_walk_reaches_a_trained_score(tmp_path):
    values = read_yaml(ROOT / "config/walk.yaml")
    short = {"steps": 1, "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 8}}}
    values = merged(values, {"experiments": {"main": {"base": short}}, "evaluation": {"sampling": {"max_tokens": 4}}})
    tree = copy_tree(tmp_path / "tree")
    (tree.folder / "short.yaml").write_text(yaml.safe_dump(values))
    write_walk(tree.folder / "work/walk", "tiny", shard_bytes=10**6)
    assert len(list((tree.folder / "work/walk/model").glob("model-*.safetensors"))) > 1

    tree.snakemake(f"results/walk/evaluate/{RUN}/result.json", "--configfile", "short.yaml")
    results = tree.folder / "results/walk"
    quantized = json.loads((results / "quantize/qwen2.5-1.5b-nvfp4/checkpoint/tokenizer_config.json").read_text())
    assert (quantized["eos_token"], quantized["pad_token"]) == ("<|im_end|>", "<|endoftext|>")
    step = json.loads((results / f"train/{RUN}/metrics.jsonl").read_text())
    assert step["grad_norm"] > 0
    tasks = json.loads((results / f"evaluate/{RUN}/result.json").read_text())["tasks"]
    assert {name: (task["task"], task["problems"]) for name, task in tasks.items()} == {
        "gsm8k": ("gsm8k", 3),
        "math500": ("math_500", 3),
    }
    for line in (results / f"evaluate/{RUN}/samples.jsonl").read_text().splitlines():
        prompt = json.loads(line)["prompt"]
        assert prompt.startswith("<|im_start|>system\nYou are Qwen")
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
