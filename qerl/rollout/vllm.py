"""vLLM as a sampler: an engine in this process that receives adapter and norms as tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor

from qerl.checkpoints.files import left_out, weights_format_of
from qerl.host.console import log
from qerl.models.adapter_files import PREFIX
from qerl.models.blocks import noisy_norms
from qerl.models.export import lora_room, write_dense
from qerl.models.linear import POLICY_ADAPTER
from qerl.models.policy import Policy
from qerl.models.structure import structure_of
from qerl.rollout.sampler import Completion, SamplingParams, refuse_nan, stop_tokens
from qerl.settings.base import ConfigError
from qerl.settings.run import VllmSettings

# The tensors that a sampler with its own copy of the weights must receive: the present adapter and norms.


def adapter_config(policy: Policy) -> LoraConfig | None:
    """PEFT's configuration of the policy's adapter, or None without an adapter."""
    if policy.peft is None:
        return None
    config = policy.peft.peft_config[POLICY_ADAPTER]
    assert isinstance(config, LoraConfig)
    return config


def lora_tensors(policy: Policy, dtype: torch.dtype) -> dict[str, Tensor]:
    """A [rank, in] and B [out, rank] of every adapted layer by PEFT's name, in `dtype`.

    B is multiplied by PEFT's factor alpha / rank, in float32, and rounded once.
    """
    tensors = {}
    for name, layer in policy.lm.named_modules():
        if isinstance(layer, LoraLayer):
            adapter: Any = layer
            a, b = adapter.lora_A[POLICY_ADAPTER].weight.detach(), adapter.lora_B[POLICY_ADAPTER].weight.detach()
            tensors[f"{PREFIX}{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = (b.float() * adapter.scaling[POLICY_ADAPTER]).to(dtype)
    return tensors


def norm_weights(policy: Policy) -> dict[str, Tensor]:
    """`w + z` [features], float32, for both norms of every block, by the weight's name in the base's checkpoint."""
    names = {place: name for name, place in structure_of(policy.lm.config).noisy_norms().items()}
    active = [norms[-1] for norms in noisy_norms(policy.lm).values()]  # PEFT's trained copies where there are any
    return {f"{names[norm.layer, norm.role]}.weight": norm.weight.detach().float() + norm.noise for norm in active}


_ENVIRONMENT = {
    # The engine runs in this process, so that it receives weights as tensors.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The older of two model runners, whose sampler can return untruncated log-probabilities (`worker_hooks`).
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # On a CPU, vLLM must not bind the threads of this process, which also trains.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def _import_vllm() -> Any:
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ConfigError("vLLM isn't installed; docs/runs.md tells how, or use rollout.engine=native") from None
    # Importing it raises an error for untested releases of vLLM, before an engine starts.
    import qerl.rollout.vllm_worker  # noqa: F401

    return vllm


class VllmSampler:
    """Samples with an in-process vLLM engine that starts from the policy's base checkpoint.

    `sync` sends adapter, norms and noise; the constructor calls it once. `kernel` names the kernel of the weights'
    products. `weights` is the format in the engine ("nvfp4", or "nvfp4 as bfloat16" where it has no kernel).
    Raises `ConfigError` if vLLM is missing, is an untested release, or doesn't support the weight format.
    """

    def __init__(self, policy: Policy, settings: VllmSettings) -> None:
        self.policy = policy
        self.settings = settings
        self._vllm = _import_vllm()
        self._cpu = policy.device.type == "cpu"
        self._asleep = False
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ConfigError(
                "an engine of vLLM within each of several processes isn't supported; use one process or engine=native"
            )
        gpus = torch.cuda.device_count()
        if not self._cpu and gpus < settings.tensor_parallel:
            raise ConfigError(
                f"vllm.tensor_parallel={settings.tensor_parallel} needs as many GPUs, and this process sees {gpus}; "
                "lower it"
            )
        if settings.sleep and self._cpu:
            raise ConfigError("vLLM can't sleep on a CPU; set vllm.sleep=false")
        folder = Path(str(policy.lm.name_or_path))
        self.weights = weights_format_of(folder)
        with _served_checkpoint(folder, self.weights, policy) as (served, self.weights), self._no_compiler():
            self.engine = self._vllm.LLM(model=str(served), **self._engine_arguments())
        #: That of the adapter and norms on which policy and engine agree since the latest sync.
        self.checksum = ""
        self.kernel: str = self._call("qerl_prepare")
        self.sync()
        log.info("completions come from %s", self.served)

    @property
    def max_sequences(self) -> int:
        """The largest number of sequences that are decoded together; others wait."""
        return self.settings.max_sequences

    @property
    def served(self) -> str:
        """Description of engine, kernel and weights, for results."""
        return f"vLLM {self._vllm.__version__}, {self.kernel} on {self.weights}"

    def _engine_arguments(self) -> dict[str, Any]:
        from qerl.rollout.vllm_worker import ADDITIONAL_CONFIG

        config, cache = adapter_config(self.policy), self.settings.kv_cache_gib or (1.0 if self._cpu else None)
        adapter = {"enable_lora": True, "max_lora_rank": lora_room(config.r), "max_loras": 1} if config else {}
        return {
            **adapter,
            "dtype": str(self.policy.lm.dtype).removeprefix("torch."),
            "gpu_memory_utilization": self.settings.utilization,
            "kv_cache_memory_bytes": None if cache is None else int(cache * 2**30),
            "tensor_parallel_size": self.settings.tensor_parallel,
            "max_model_len": self.settings.max_model_len,
            "max_num_seqs": self.settings.max_sequences,
            "enable_sleep_mode": self.settings.sleep,
            "enforce_eager": self.settings.eager or self._cpu,
            # All completions of a prompt share its cache.
            "enable_prefix_caching": True,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "worker_extension_cls": "qerl.rollout.vllm_worker.WorkerExtension",
            "additional_config": ADDITIONAL_CONFIG,
        }

    def _no_compiler(self) -> AbstractContextManager:
        """Disable torch.compile on a CPU: vLLM compiles small helpers even in eager mode, which needs a C++
        compiler.
        """
        return torch.compiler.set_stance("force_eager") if self._cpu else nullcontext()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method on all ranks and return the result, which must be the same on each."""
        first, *others = self.engine.collective_rpc(method, args=arguments)
        if any(other != first for other in others):
            raise RuntimeError(f"the ranks of vLLM return different results of {method}: a defect of qerl")
        return first

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """See `Sampler`. Raises ValueError if `params` sets what vLLM doesn't have."""
        if params.lengths or params.replay or params.part or params.turns:
            raise ValueError("vLLM supports no lengths or tokens of completions, parts or turns; use the native engine")
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt has no tokens; give each at least one")
        self._wake()
        requests = [
            self._vllm.SamplingParams(
                n=params.count if params.temperature else 1,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                # As with the eager sampler, a completion depends on seed, prompt and its number in the group, which
                # vLLM adds. Its bits depend on more, because rounding in kernels varies with the batch.
                seed=int(np.random.SeedSequence([params.seed, number]).generate_state(1, np.uint64)[0]) >> 2,
                stop_token_ids=sorted(stop_tokens(self.policy, params)),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for number in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with self._no_compiler():
            outputs = self.engine.generate(inputs, requests, lora_request=self._adapter(), use_tqdm=False)
        if self.settings.sleep:
            self.engine.sleep(level=1)
            self._asleep = True
        groups = [[_completion(choice) for choice in output.outputs] for output in outputs]
        refuse_nan(groups)
        # vLLM refuses to draw the same greedy completion several times.
        return groups if params.temperature else [group * params.count for group in groups]

    def _adapter(self) -> Any:
        if self.policy.peft is None:
            return None
        from vllm.lora.request import LoRARequest

        from qerl.rollout.vllm_worker import ADAPTER_ID

        # The engine already has an adapter of this id, so it never opens the path.
        return LoRARequest("qerl", ADAPTER_ID, "in memory")

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # the engine needs the memory that PyTorch reserved for the update
            self.engine.wake_up()
            self._asleep = False

    @torch.no_grad()
    def sync(self) -> None:
        """Send the policy's adapter and norms `w + z` to the engine, and reset its prefix cache.

        Raises RuntimeError if the engine's values then differ from the policy's.
        """
        from qerl.rollout.vllm_worker import checksum

        self._wake()
        config, norms = adapter_config(self.policy), norm_weights(self.policy)
        lora = lora_tensors(self.policy, self._call("qerl_lora_dtype")) if config else {}
        targets = sorted(config.target_modules or []) if config else []
        if self.settings.tensor_parallel > 1:  # the other ranks are processes with their own GPUs
            lora, norms = ({name: t.cpu() for name, t in tensors.items()} for tensors in (lora, norms))
        pushed = self._call("qerl_push", lora, config.r if config else 0, targets, norms)
        # Sums of bits: a name that vLLM maps to another layer, or a value that it rounds again, would look like noise.
        sent = checksum({**norms, **lora})
        if different := [name for name in sent if sent[name] != pushed[name]]:
            raise RuntimeError(f"{different[0]} differs between vLLM and the policy after a sync: a defect of qerl")
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM didn't reset its prefix cache, because requests are still running")
        self.checksum = sha256(repr(sorted(sent.items())).encode()).hexdigest()[:16]

    def close(self) -> None:
        """Stop the engine and release its memory."""
        self.engine.llm_engine.engine_core.shutdown()
        del self.engine


def _completion(choice: Any) -> Completion:
    logprobs = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
    return Completion(list(choice.token_ids), logprobs, choice.finish_reason == "stop")


@contextmanager
def _served_checkpoint(folder: Path, weights: str, policy: Policy) -> Iterator[tuple[Path, str]]:
    """The folder that the engine loads, and the format of the weights in the engine.

    vLLM has no kernels for 4-bit weights on a CPU. There it loads an unpacked copy, which is deleted afterwards.
    """
    if weights == "bf16" or policy.device.type != "cpu":
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

        if weights == "nf4" and "bitsandbytes" not in QUANTIZATION_METHODS:
            raise ConfigError(
                "this vLLM has no bitsandbytes weights (they left it with 0.28); install vllm-bnb-plugin or vllm 0.24, "
                "or use rollout.engine=native for weights=nf4"
            )
        if ignored := left_out(folder):
            sentence = "vLLM may apply %s, as %s states, and updates don't; rollout.engine=native doesn't either"
            log.warning(sentence, " and ".join(ignored), folder)
        yield folder, weights
        return
    dtype = str(policy.lm.dtype).removeprefix("torch.")
    log.warning("vLLM has no kernel for %s on a CPU: it loads the weights unpacked to %s", weights, dtype)
    with TemporaryDirectory() as scratch:
        write_dense(folder, Path(scratch), policy.lm.dtype)
        yield Path(scratch), f"{weights} as {dtype}"
