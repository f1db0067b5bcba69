"""Adapters of others, which PEFT fails on, and an adapter's card."""

import json
import shutil

import pytest
import torch
from torch.nn.functional import log_softmax

from qerl.checkpoints.files import CheckpointError
from qerl.formats.codecs import PACKED_FORMATS
from qerl.models.adapter_files import Base
from qerl.models.export import write_merged
from qerl.models.policy import load_policy, with_adapter
from qerl.settings.run import LAYERS, AdapterSettings
from tests.parity.family_models import adapted, by_the_card, code_of_the_card
from tests.tiny import tiny_bases, tiny_qwen2, write_template

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_qwen2(tmp_path_factory.mktemp("base"))
    write_template(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "adapter"
    policy = with_adapter(base, AdapterSettings(rank=4, train_norms=False), "float32", 0, CPU)
    policy.save(folder)
    return folder


def changed(adapter, folder, **changes):
    shutil.copytree(adapter, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


REFUSED = {
    "a rank that memory doesn't hold": ({"r": 10**9}, "has r=1000000000, which isn't supported"),
    "a rank above that of the file": ({"r": 5}, "has the rank 5, and the matrices of .* at most 4"),
    "a lower rank": ({"r": 2}, "doesn't fit the model .*size mismatch"),
    "no rank": ({"r": 0}, "has r=0, which isn't supported; save"),
    "a rank that is a text": ({"r": "4"}, "has r=4, which"),
    "a scale that is no number": ({"lora_alpha": float("nan")}, "has lora_alpha=nan, which"),
    "a copy of a module without one in the file": ({"modules_to_save": ["lm_head"]}, "doesn't fit the model"),
    "a copy of the model": ({"modules_to_save": ["model"]}, "doesn't fit the model"),
    "targets of another model": (
        {"target_modules": ["c_attn"]},
        "doesn't fit the model .Target modules .'c_attn'. not found",
    ),
    "targets that aren't linear": ({"target_modules": ["mlp"]}, "doesn't fit the model .*is not supported"),
    "targets that are numbers": ({"target_modules": [3]}, r"has target_modules=\[3\], which"),
    "some of the targets": ({"target_modules": ["q_proj"]}, "holds .*lora_A.weight, which adapter_config.json"),
    "targets that aren't in the file": ({"target_modules": [*LAYERS, "lm_head"]}, "lacks lm_head.lora_A.weight"),
    "an invalid expression": ({"target_modules": "(q_proj"}, "doesn't fit the model"),
    "layers that the model doesn't have": ({"layers_to_transform": [99]}, "doesn't fit the model"),
    "a base whose weights PEFT changes": ({"init_lora_weights": "pissa"}, "has init_lora_weights=pissa, which isn't"),
    "replicated layers": ({"layer_replication": [[0, 10**6]]}, "has layer_replication=.*, which isn't supported"),
}


@pytest.mark.parametrize(("changes", "sentence"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_does_not_fit_is_one_sentence(base, adapter, tmp_path, changes, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        load_policy(base, changed(adapter, tmp_path / "foreign", **changes), "float32", CPU)


@pytest.mark.parametrize(
    "changes",
    [{}, {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"}, {"rank_pattern": {"q_proj": 4}}, {"later_key": 1}],
)
def test_an_adapter_that_fits_loads(base, adapter, tmp_path, changes):
    expected = load_policy(base, adapter, "float32", CPU).lm.state_dict()
    loaded = load_policy(base, changed(adapter, tmp_path / "foreign", **changes), "float32", CPU).lm.state_dict()
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


@pytest.mark.parametrize("changes", [{"r": 0}, {"r": 10**9}, {"r": 2}, {"lora_alpha": "x"}])
def test_a_merge_refuses_the_same_values(base, adapter, tmp_path, changes):
    with pytest.raises(CheckpointError, match=r"has the rank|has r=|lora_alpha=|has no A and B of rank 2 for"):
        write_merged(base, changed(adapter, tmp_path / "foreign", **changes), tmp_path / "out")


IDS = torch.tensor([[5, 6, 7, 40, 41, 8]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return tiny_bases(tmp_path_factory.mktemp("bases"), *PACKED_FORMATS)


#: What the card says that is rounded to bfloat16: NVFP4's weights when they are unpacked, the input of NF4's products.
@pytest.mark.parametrize(("weights", "near"), [("bf16", 1e-5), ("nvfp4", 3e-3), ("mxfp4", 1e-5), ("nf4", 3e-3)])
@torch.no_grad()
def test_the_code_of_the_card_makes_the_policy_with_stock_peft(bases, tmp_path, weights, near):
    policy = adapted(bases / weights, tmp_path / "policy", 0.1)
    names = by_the_card(tmp_path / "policy")
    ours, stock = (log_softmax(model(input_ids=IDS).logits, -1) for model in (policy.lm, names["model"]))
    torch.testing.assert_close(stock, ours, atol=near, rtol=0)
    bare = load_policy(bases / weights, None, "float32", CPU).lm(input_ids=IDS).logits
    assert (log_softmax(bare, -1) - ours).abs().max() > 0.03  # what was trained shows
    assert names["tokenizer"].decode(IDS[0]) == policy.tokenizer.decode(IDS[0])


def test_an_adapter_names_its_base(bases, tmp_path):
    policy = adapted(bases / "nvfp4", train_norms=False)
    for name, base in {"here": None, "hub": Base("org/name", "0" * 40)}.items():
        policy.save(tmp_path / name, base)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        expected = base or Base(str(bases / "nvfp4"))
        assert (config["base_model_name_or_path"], config["revision"]) == (expected.name, expected.revision)
        card = (tmp_path / name / "README.md").read_text()
        assert f"`{expected.name}`" in card
        assert "More Information Needed" not in card
        assert "norms" not in card  # there are none
    assert 'from_pretrained(base, revision="0000' in code_of_the_card(tmp_path / "hub")
