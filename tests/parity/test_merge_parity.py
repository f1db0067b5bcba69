"""Merged checkpoints against PEFT's own merge, llmcompressor's packing of it, and transformers' loading."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from qerl.checkpoints.files import CheckpointError
from qerl.formats.codecs import PACKED_FORMATS
from qerl.models.export import export, merge, write_dense, write_merged
from qerl.models.policy import load_policy, with_adapter
from qerl.rl.noise import Noise
from qerl.settings.run import AdapterSettings, NoiseSettings
from tests.parity.family_models import perturbed
from tests.parity.test_codec_parity import assert_bits_equal
from tests.parity.test_quant_parity import by_library, tensors_of
from tests.tiny import tiny_bases, tiny_qwen2

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 40, 41, 8]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return tiny_bases(tmp_path_factory.mktemp("bases"), *PACKED_FORMATS, shard_size="60KB")


def trained(base, folder, sigma=0.0, **adapter):
    """A policy with random values in all that is trained, saved to `folder`."""
    settings = AdapterSettings(**{"rank": 4, "alpha": 12, **adapter})
    policy = perturbed(with_adapter(base, settings, "float32", 0, CPU), 0.1)
    if sigma:
        Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=sigma), seed=3).set(2, 10)
    policy.save(folder)
    return policy


def by_peft(base, adapter, folder):
    """The tensors of PEFT's merge into the unpacked base, in float32."""
    dense = base
    if base.name != "bf16":
        dense = folder / "dense"
        dense.mkdir()
        write_dense(base, dense, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


@pytest.mark.parametrize("weights", ["bf16", "nvfp4", "mxfp4", "nf4"])
def test_a_merge_is_pefts_on_the_unpacked_base(bases, tmp_path, weights):
    trained(bases / weights, tmp_path / "policy")
    merge(bases / weights, tmp_path / "policy", tmp_path / "merged", "bf16")
    expected, found = by_peft(bases / weights, tmp_path / "policy", tmp_path), tensors_of(tmp_path / "merged")
    assert found.keys() | {"lm_head.weight"} == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name].bfloat16(), rtol=2**-7, atol=1e-6)
        assert (tensor == expected[name].bfloat16()).float().mean() > 0.999, name
    before = tensors_of(bases / "bf16")
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, before[name])}
    projections = {name for name in found if name.endswith("proj.weight")}
    assert changed == projections | {name for name in found if name.endswith("layernorm.weight")}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_packed_again_it_is_the_librarys_packing_of_the_merge(bases, tmp_path):
    trained(bases / "nvfp4", tmp_path / "policy")
    for weights in ("bf16", "nvfp4"):
        merge(bases / "nvfp4", tmp_path / "policy", tmp_path / weights, weights)
    expected, found = by_library(tmp_path / "bf16", tmp_path / "library", "nvfp4"), tensors_of(tmp_path / "nvfp4")
    assert_bits_equal(found, expected)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", dtype=torch.bfloat16)
    ours = load_policy(tmp_path / "nvfp4", None, "bfloat16", CPU)
    torch.testing.assert_close(stock(IDS).logits, ours.lm(IDS).logits, atol=0.02, rtol=0)
    assert ours.tokenizer.decode(IDS[0]) == load_policy(bases / "nvfp4", None, "bfloat16", CPU).tokenizer.decode(IDS[0])


def test_noise_is_in_no_merge(bases, tmp_path):
    for name, sigma in {"quiet": 0.0, "noisy": 0.5}.items():
        trained(bases / "bf16", tmp_path / name / "policy", sigma)
        merge(bases / "bf16", tmp_path / name / "policy", tmp_path / name / "merged", "bf16")
    quiet, noisy = (tensors_of(tmp_path / name / "merged") for name in ("quiet", "noisy"))
    torch.testing.assert_close(noisy, quiet, rtol=0, atol=0)


def test_an_adapter_of_another_base_is_refused(bases, tmp_path):
    for name, shape, sentence in (
        ("deeper", {"num_hidden_layers": 3}, "lacks"),
        ("wider", {"hidden_size": 128}, "has"),
    ):
        other = tiny_qwen2(tmp_path / name / "base", **shape)
        trained(other, tmp_path / name / "policy")
        with pytest.raises(CheckpointError, match=rf"changes model\.layers\..*{sentence}.*; give it its own base"):
            merge(bases / "bf16", tmp_path / name / "policy", tmp_path / "merged", "bf16")
        with pytest.raises(CheckpointError, match=rf"changes model\.layers\..*{sentence}.*; give it its own base"):
            export(bases / "bf16", tmp_path / name / "policy", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


LORA = ["q_proj", "up_proj"]
#: Adapters of PEFT's with more than plain LoRA, and whether a merge into a base with an own head can be written.
ADAPTERS = {
    "embedding": ({"modules_to_save": ["embed_tokens"]}, True),
    "head": ({"modules_to_save": ["lm_head"]}, True),
    "both": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "tokens": ({"trainable_token_indices": [5, 6]}, False),
    "embedding-lora": ({"target_modules": [*LORA, "embed_tokens"]}, False),
    "head-lora": ({"target_modules": [*LORA, "lm_head"]}, True),
    "rslora": ({"use_rslora": True}, False),
    "alphas": ({"alpha_pattern": {"q_proj": 3}}, False),
    "bias": ({"lora_bias": True}, False),
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


def of_peft(base, folder, **options):
    """PEFT's own adapter with random values, saved to `folder`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = get_peft_model(model, LoraConfig(r=3, lora_alpha=7, **{"target_modules": LORA, **options}))
    generator = torch.Generator().manual_seed(2)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.2 * torch.randn(parameter.shape, generator=generator)
    peft.save_pretrained(folder, save_embedding_layers=False if "lora" in folder.name else "auto")
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_with_more_than_plain_lora_is_sampled_right_and_not_merged_into_a_tied_base(bases, tmp_path, name):
    theirs = of_peft(bases / "bf16", tmp_path / name, **ADAPTERS[name][0])
    ours = load_policy(bases / "bf16", tmp_path / name, "float32", CPU)
    torch.testing.assert_close(ours.lm(IDS).logits, theirs(IDS).logits)
    with pytest.raises(CheckpointError, match="merge this adapter by PEFT"):
        merge(bases / "bf16", tmp_path / name, tmp_path / "out", "bf16")
    if name not in ("head-lora", "rslora", "alphas", "bias"):  # which stay in the adapter of an export
        with pytest.raises(CheckpointError, match="merge this adapter by PEFT"):
            export(bases / "bf16", tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@torch.no_grad()
@pytest.mark.parametrize("name", ADAPTERS)
def test_into_a_base_with_an_own_head_it_is_merged_as_by_peft_or_refused(untied, tmp_path, name):
    options, merged = ADAPTERS[name]
    theirs = of_peft(untied, tmp_path / name, **options)
    if not merged:
        with pytest.raises(CheckpointError, match="merge this adapter by PEFT"):
            write_merged(untied, tmp_path / name, tmp_path / "out", torch.float32)
        return
    write_merged(untied, tmp_path / name, tmp_path / "out", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(model(IDS).logits, theirs.merge_and_unload()(IDS).logits, atol=1e-5, rtol=1e-5)
