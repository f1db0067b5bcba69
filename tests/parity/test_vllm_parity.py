"""vLLM's real engine, on the CPU: against the eager sampler, and against plain transformers with PEFT.

All engines but those of two ranks run in this process, which alone imports vLLM, and only when a test runs.
"""

import gc
import importlib
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from qerl.models.export import export, merge
from qerl.models.policy import load_policy, with_adapter
from qerl.models.quantize import quantize_checkpoint
from qerl.rl.noise import Noise
from qerl.rl.rollouts import Task
from qerl.rl.train import Trainer
from qerl.rollout.eager import EagerSampler
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.rollout.vllm import VllmSampler
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import AdapterSettings, NoiseSettings, RunSettings, VllmSettings
from tests.conftest import in_nightly, nightly
from tests.families import FAMILIES
from tests.parity.family_models import (
    CPU,
    NORMS,
    PROMPTS,
    adapted,
    add_noise,
    assert_drawn_by,
    forced,
    perturbed,
    stock,
    with_peft,
)
from tests.tiny import tiny_family, tiny_qwen2, tiny_qwen3, write_template
from tests.unit.bench.test_workloads import rollouts
from tests.unit.rl.tiny_trainer import BASE, PROBLEMS

#: vLLM's attention on a CPU takes heads of 32 and more.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
SETTINGS = VllmSettings(max_model_len=256, kv_cache_gib=0.05)
SIGMA = 0.1


def draw(sampler, **changes):
    return sampler.generate(PROMPTS, SamplingParams(**{"max_tokens": 12, "count": 3, "seed": 4, **changes}))


def tokens(groups):
    return [[completion.token_ids for completion in group] for group in groups]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("frozen"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed: requirements-vllm-cpu.txt"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_qwen2(tmp_path_factory.mktemp("dense"), shard_size="60KB", **HEADS)


@pytest.fixture(scope="module")
def policy(checkpoint):
    return adapted(checkpoint, scale=0.1, alpha=12)


@pytest.fixture(scope="module")
def sampler(policy):
    sampler = VllmSampler(policy, SETTINGS)
    yield sampler
    sampler.close()


def test_given_lengths_of_completions_are_refused(sampler):
    with pytest.raises(ValueError, match="supports no lengths or tokens"):
        sampler.generate(PROMPTS, SamplingParams(max_tokens=4, lengths=((1,), (2,), (3,), (4,))))


@pytest.mark.parametrize("noisy", [False, True])
def test_logprobs_are_those_of_plain_transformers_and_peft(sampler, policy, checkpoint, tmp_path, noisy):
    policy.save(tmp_path)
    model = with_peft(checkpoint, tmp_path)
    noise = Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=SIGMA), seed=3)
    if noisy:
        add_noise(model)
        noise.set(2, 10)
    sampler.sync()
    groups = draw(sampler)
    noise.clear()
    sampler.sync()
    assert_drawn_by(model, groups, 1e-4)
    assert tokens(draw(sampler, temperature=0)) != tokens(groups)


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"temperature": 0.6, "top_p": 0.8}, {"top_k": 5}])
def test_logprobs_are_of_the_untruncated_distribution_at_the_sampling_temperature(sampler, policy, sampling):
    groups = draw(sampler, **sampling)
    assert_drawn_by(policy.lm, groups, 1e-4, temperature=sampling.get("temperature", 1.0))
    if sampling.get("top_k"):
        ranks = [
            (forced_logits > forced_logits[token]).sum().item()
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for completion in group
            for token, forced_logits in zip(
                completion.token_ids,
                policy.lm(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1],
                strict=True,
            )
        ]
        assert max(ranks) < 5


def test_greedy_completions_are_the_native_samplers(sampler, policy):
    native = EagerSampler(policy).generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0))
    groups = draw(sampler, temperature=0, count=2)
    assert tokens(groups) == [2 * group for group in tokens(native)]
    np.testing.assert_allclose(groups[2][0].logprobs, native[2][0].logprobs, atol=1e-4)


def test_a_stop_token_ends_a_completion_and_is_part_of_it(sampler, monkeypatch):
    endless = draw(sampler, ignore_eos=True)
    stop = endless[0][0].token_ids[3]
    monkeypatch.setattr(sampler.policy.lm.generation_config, "eos_token_id", stop)
    for long, short in zip(chain(*endless), chain(*draw(sampler)), strict=True):
        end = long.token_ids.index(stop) + 1 if stop in long.token_ids else 12
        assert short.token_ids == long.token_ids[:end]
        assert short.finished == (stop in long.token_ids)


def test_a_completion_depends_on_seed_place_and_number_alone(sampler):
    whole = tokens(draw(sampler))
    assert whole == tokens(draw(sampler))
    assert whole != tokens(draw(sampler, seed=5))
    assert len({tuple(completion) for completion in whole[0]}) == 3
    assert tokens(sampler.generate(PROMPTS[:2], SamplingParams(max_tokens=12, count=3, seed=4))) == whole[:2]


def test_sync_replaces_the_adapter_and_what_was_cached_with_it(sampler, policy):
    prompt = [list(range(5, 69)) * 3]
    params = SamplingParams(max_tokens=8, temperature=0)
    before = sampler.generate(prompt, params)[0][0]
    checksum = sampler.checksum
    saved = {name: p.detach().clone() for name, p in policy.trainable()}
    perturbed(policy, 0.1, seed=7)
    sampler.sync()
    assert sampler.checksum != checksum
    after = sampler.generate(prompt, params)[0][0]
    with torch.no_grad():
        expected = forced(policy.lm, prompt[0], after.token_ids)
    np.testing.assert_allclose(after.logprobs, expected, atol=1e-4)
    for name, parameter in policy.trainable():
        parameter.data.copy_(saved[name])
    sampler.sync()
    assert sampler.checksum == checksum
    assert sampler.generate(prompt, params)[0][0] == before


def test_a_value_that_the_engine_holds_wrong_is_noticed(sampler):
    engine = sampler.engine.collective_rpc

    def damaged(method, args=()):
        answers = engine(method, args=args)
        if method == "qerl_push":
            answers[0][next(iter(answers[0]))] += 1
        return answers

    sampler.engine.collective_rpc = damaged
    try:
        with pytest.raises(RuntimeError, match=r"model.* differs between vLLM and the policy after a sync"):
            sampler.sync()
    finally:
        sampler.engine.collective_rpc = engine


def test_the_checksum_sees_bits_and_places():
    from qerl.rollout import vllm_worker

    tensor = torch.randn(4, 6)
    same = vllm_worker.checksum({"w": tensor, "v": tensor.bfloat16()})
    assert same == vllm_worker.checksum({"w": tensor.clone(), "v": tensor.bfloat16()})
    assert same != vllm_worker.checksum({"w": tensor.flip(0), "v": tensor.bfloat16()})
    tensor[1, 2] = torch.nextafter(tensor[1, 2], torch.tensor(9.0))
    assert same["w"] != vllm_worker.checksum({"w": tensor})["w"]


def test_fifty_syncs_leave_no_adapter_behind_and_no_growth_of_memory(sampler, policy):
    from qerl.rollout import vllm_worker

    def resident():
        gc.collect()
        return psutil.Process().memory_info().rss

    sizes = []
    for _ in range(60):
        perturbed(policy, 0.001, seed=8)
        sampler.sync()
        sizes.append(resident())
    assert sampler.engine.collective_rpc("list_loras") == [{vllm_worker.ADAPTER_ID}]
    assert sizes[-1] - sizes[9] < 30 * sum(p.numel() * p.element_size() for _, p in policy.trainable())
    assert_drawn_by(policy.lm, draw(sampler), 1e-4)


@nightly
def test_two_ranks_hold_their_parts_of_adapter_and_norms(policy, checkpoint, tmp_path, monkeypatch):
    """Each rank is a process; what it holds is cut by vLLM's own rule and compared with what was sent."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # in this process `_no_compiler` says so
    sampler = VllmSampler(policy, SETTINGS.model_copy(update={"tensor_parallel": 2}))
    policy.save(tmp_path)
    model = with_peft(checkpoint, tmp_path)
    add_noise(model)
    noise = Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=SIGMA), seed=3)
    try:
        noise.set(2, 10)
        sampler.sync()
        groups = draw(sampler)
    finally:
        noise.clear()
        sampler.close()
    assert_drawn_by(model, groups, 1e-4)


@pytest.mark.parametrize("weights", ["nvfp4", *in_nightly("mxfp4", "nf4")])
def test_packed_weights_are_served_unpacked_on_a_cpu(checkpoint, tmp_path, caplog, weights):
    quantize_checkpoint(checkpoint, tmp_path / weights, weights)
    policy = with_adapter(
        tmp_path / weights, AdapterSettings(rank=8, targets=["q_proj", "down_proj"]), "float32", 0, CPU
    )
    perturbed(policy, 0.1, seed=2)
    sampler = VllmSampler(policy, SETTINGS)
    assert sampler.weights == f"{weights} as float32"
    assert sampler.kernel == "UnquantizedLinearMethod"
    assert f"no kernel for {weights} on a CPU" in caplog.text
    assert_drawn_by(policy.lm, draw(sampler), 1e-4)
    sampler.close()


@pytest.mark.parametrize("name", ["phi3", "gemma3", *in_nightly("qwen3", "llama", "mistral", "mistral-sliding")])
def test_other_families_draw_as_peft_does_with_adapter_norms_and_noise(tmp_path, name):
    """Norms of q and k, fused layers, windows of 8 tokens that texts pass, and norms of the form 1 + w."""
    rope = FAMILIES["phi3"].values["rope_parameters"]  # of heads of 16
    longer = {"rope_parameters": {**rope, **{key: 2 * rope[key] for key in ("short_factor", "long_factor")}}}
    tiny_family(tmp_path / "m", name, **HEADS | {"head_dim": 32}, **(longer if name == "phi3" else {}))
    policy = adapted(tmp_path / "m", tmp_path / "a", 0.1, alpha=12)
    model = with_peft(tmp_path / "m", tmp_path / "a")
    add_noise(model, NORMS[name])
    sampler = VllmSampler(policy, SETTINGS)
    Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=SIGMA), seed=3).set(2, 10)
    sampler.sync()
    assert_drawn_by(model, draw(sampler), 1e-4)
    sampler.close()


@pytest.mark.parametrize("name", ["gemma3", *in_nightly("qwen3")])
def test_norms_stay_float32_in_a_bfloat16_engine(tmp_path, name):
    """Noise of 5e-4 on weights near 1 is under half the spacing of bfloat16 there: rounding would lose it."""
    heads = HEADS | {"head_dim": 32}
    folder = tiny_qwen3(tmp_path / "m", **heads) if name == "qwen3" else tiny_family(tmp_path / "m", name, **heads)
    policy = load_policy(folder, None, "bfloat16", CPU)
    sampler = VllmSampler(policy, SETTINGS)
    before = sampler.checksum
    Noise(policy.lm, NoiseSettings(schedule="constant", sigma_start=5e-4), seed=0).set(1, 10)
    sampler.sync()
    assert sampler.checksum != before
    greedy = SamplingParams(max_tokens=8, temperature=0)
    native = EagerSampler(policy).generate(PROMPTS, greedy)
    for ours, theirs in zip(native, sampler.generate(PROMPTS, greedy), strict=True):
        np.testing.assert_allclose(ours[0].logprobs[0], theirs[0].logprobs[0], atol=0.05)
    sampler.close()


def test_either_engine_trains_alike(tmp_path, monkeypatch):
    """GRPO towards digits; the wider initialisation lets the head prefer some tokens to others."""
    checkpoint = tiny_qwen2(tmp_path / "base", initializer_range=0.2, **HEADS)
    parts = lambda answer, *_: {"correct": sum(map(str.isdigit, answer.text)), "format": 0.0, "overlong": 0.0}  # noqa: E731
    monkeypatch.setattr("qerl.rl.rollouts.reward_parts", parts)
    write_template(checkpoint)
    rollout = {"prompts": 4, "group_size": 8, "sampling": {"max_tokens": 8}, "vllm": SETTINGS.model_dump()}
    values = BASE | {"weights": "bf16", "steps": 20, "noise": {"schedule": "linear"}, "adapter": {"rank": 4}}
    rows = {}
    for engine in ("native", "vllm"):
        settings = parse(RunSettings, {**values, "rollout": {**rollout, "engine": engine}}, "test")
        policy = with_adapter(checkpoint, settings.adapter, "float32", settings.seed, CPU)
        sampler = make_sampler(policy, settings.rollout)
        rows[engine] = Trainer(settings, policy, sampler, Task(PROBLEMS, "gsm8k", ""), tmp_path / engine).run()
    sampler.close()
    assert max(abs(row["mismatch/kl"]) for row in rows["vllm"] if not row["noise/sigma"]) < 1e-6
    last = {engine: np.array([row["reward"] for row in found[-8:]]) for engine, found in rows.items()}
    assert all(rows[engine][0]["reward"] < 1 < 7 < rewards.mean() for engine, rewards in last.items())
    # 95 % intervals of the mean over the last steps, by Student's t.
    half = {engine: 2.36 * rewards.std(ddof=1) / np.sqrt(len(rewards)) for engine, rewards in last.items()}
    assert abs(last["native"].mean() - last["vllm"].mean()) < half["native"] + half["vllm"]


def test_releases_that_were_not_tested_are_refused(monkeypatch):
    import vllm

    from qerl.rollout import vllm_worker

    monkeypatch.setattr(vllm, "__version__", "0.29.1")
    with pytest.raises(ConfigError, match=r"0\.24 or 0\.31 or 0\.32 or 0\.33, but vLLM 0\.29\.1 is installed"):
        importlib.reload(vllm_worker)


def test_several_processes_are_refused(policy, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="several processes"):
        VllmSampler(policy, SETTINGS)


def test_sleep_is_refused_on_a_cpu(policy):
    with pytest.raises(ConfigError, match=r"vllm\.sleep=false"):
        VllmSampler(policy, SETTINGS.model_copy(update={"sleep": True}))


def test_nf4_without_its_plugin_is_refused_before_an_engine_starts():
    from qerl.rollout.vllm import _served_checkpoint

    on_a_gpu = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(ConfigError, match="vllm-bnb-plugin"), _served_checkpoint(Path("m"), "nf4", on_a_gpu):
        pass


@pytest.fixture
def in_this_process(monkeypatch):
    """vLLM's own switches: no process of the engine, which would import everything anew, and no C++ compiler."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with torch.compiler.set_stance("force_eager"):
        yield


def started(model, **options):
    """An engine as anyone would start it."""
    import vllm

    return vllm.LLM(
        model=str(model), dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=2**25, **options
    )


@torch.no_grad()
def assert_draws_as(engine, model, adapter=None):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=12, seed=1, logprobs=0, ignore_eos=True)
    for prompt in PROMPTS:
        [output] = engine.generate({"prompt_token_ids": prompt}, params, lora_request=adapter, use_tqdm=False)
        choice = output.outputs[0]
        drawn = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
        np.testing.assert_allclose(drawn, forced(model, prompt, list(choice.token_ids)), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", *in_nightly("qwen3", "llama")])
@pytest.mark.usefixtures("in_this_process")
def test_trained_adapters_load_in_stock_vllm(tmp_path, name):
    """With norms through `export`, without them as they are; engine and requests as anyone would write them."""
    from vllm.lora.request import LoRARequest

    checkpoint = tiny_family(tmp_path / "dense", name, dtype=torch.bfloat16, **HEADS | {"head_dim": 32})
    adapted(checkpoint, tmp_path / "trained", 0.1, alpha=12)
    export(checkpoint, tmp_path / "trained", tmp_path / "out")
    base = tmp_path / "out/base"
    plain = with_adapter(base, AdapterSettings(rank=8, train_norms=False), "float32", seed=5, device=CPU)
    perturbed(plain, 0.1, seed=6)
    plain.save(tmp_path / "plain")
    engine = started(base, enable_lora=True, max_lora_rank=8)
    adapters = {
        "norms": (tmp_path / "out/adapter", with_peft(checkpoint, tmp_path / "trained")),
        "plain": (tmp_path / "plain", with_peft(base, tmp_path / "plain")),
    }
    for number, (name, (folder, model)) in enumerate(adapters.items(), start=1):
        assert_draws_as(engine, model, LoRARequest(name, number, str(folder)))
    engine.llm_engine.engine_core.shutdown()


@pytest.mark.usefixtures("in_this_process")
def test_a_merged_checkpoint_loads_in_stock_vllm(checkpoint, policy, tmp_path):
    """Against stock transformers on the same files, whose weights PEFT's merge confirms (test_merge_parity)."""
    policy.save(tmp_path / "trained")
    merge(checkpoint, tmp_path / "trained", tmp_path / "merged", "bf16")
    model = stock(tmp_path / "merged")
    engine = started(tmp_path / "merged")
    assert_draws_as(engine, model)
    engine.llm_engine.engine_core.shutdown()


@pytest.mark.usefixtures("in_this_process")
def test_stock_vllm_draws_the_lengths_of_a_workload(tmp_path):
    """Both measurements check each completion's length."""
    ours, theirs = rollouts(tmp_path), rollouts(tmp_path, engine="vllm")
    assert theirs.sampler.startswith("vLLM")
    assert theirs.status == ours.status == "ok"
    assert theirs.completion_tokens == ours.completion_tokens
    assert theirs.prompt_tokens == ours.prompt_tokens
    assert len(theirs.runs) == len(ours.runs)
