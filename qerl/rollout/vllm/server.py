"""A running vLLM server as a sampler: OpenAI's completions API, with adapters loaded from a shared folder.

Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and `vllm serve BASE --enable-lora --max-lora-rank R
--generation-config vllm`. Its API can't change norms, so it supports neither trained norms nor noise.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import uuid4

import torch
from peft.utils import ModulesToSaveWrapper

from qerl.layers.adapters import POLICY_ADAPTER
from qerl.policy.policy import Policy
from qerl.provenance.files import share
from qerl.rollout.sampler import Completion, SamplingParams, refuse_lengths, stop_tokens
from qerl.rollout.vllm.seeds import prompt_seed
from qerl.rollout.vllm.weight_sync import noisy_norms
from qerl.settings.base import ConfigError
from qerl.settings.rollout import VllmSettings


class VllmServerSampler:
    """Samples from a server that serves the policy's base; `sync` saves the adapter and makes the server load it.

    Raises `ConfigError` if the server can't be reached, returns an error, or would sample from another policy.
    """

    def __init__(self, policy: Policy, settings: VllmSettings) -> None:
        if settings.url is None or settings.adapters is None:
            raise ConfigError("engine=vllm-server needs vllm.url and vllm.adapters")
        self.policy = policy
        self.settings = settings
        self._url = settings.url.rstrip("/")
        self._folder = settings.adapters.resolve()
        models = self._send("/v1/models")["data"]
        self._model: str = next(model["id"] for model in models if not model.get("parent"))
        self._loaded: str | None = None
        self.sync()

    @property
    def max_sequences(self) -> int:
        """No bound: the server has a queue of its own, and every process of a run asks the same server."""
        return sys.maxsize

    @property
    def served(self) -> str:
        """Description of engine and model, for results."""
        return f"vLLM server, {self._model}"

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[Completion]]:
        """See `Sampler`; a server's log-probabilities are those at temperature 1."""
        refuse_lengths(params)
        if params.temperature not in (0.0, 1.0):
            raise ConfigError(
                f"a vLLM server returns log-probabilities at temperature 1, not {params.temperature:g}; "
                "set sampling.temperature to 1 or 0, or use engine=vllm"
            )
        numbers = range(len(prompts)) if params.part is None else params.part.initial
        requests = [self._request(prompts[number], params, params.first + number) for number in numbers]
        with ThreadPoolExecutor(self.settings.max_sequences) as pool:
            answers = list(pool.map(lambda request: self._send("/v1/completions", request), requests))
        groups: list[list[Completion]] = [[] for _ in prompts]
        for number, answer in zip(numbers, answers, strict=True):
            groups[number] = [_completion(choice) for choice in answer["choices"]]
        # vLLM refuses to draw the same greedy completion several times.
        return groups if params.temperature else [group * params.count for group in groups]

    def _request(self, prompt: Sequence[int], params: SamplingParams, index: int) -> dict[str, Any]:
        return {
            "model": self._loaded or self._model,
            "prompt": list(prompt),
            "n": params.count if params.temperature else 1,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": prompt_seed(params.seed, index),
            "stop_token_ids": sorted(stop_tokens(self.policy, params)),
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def sync(self) -> None:
        """Make the server load the present adapter under a new name, and unload the previous one."""
        if any(norm.noise.any() for norm in noisy_norms(self.policy)):
            raise ConfigError("a vLLM server can't take noise; set noise.schedule=off or use engine=vllm")
        if self.policy.peft is None:
            return
        if any(isinstance(module, ModulesToSaveWrapper) for module in self.policy.lm.modules()):
            raise ConfigError("a vLLM server can't take trained norms; use adapter.train_norms=false or engine=vllm")
        name = f"qerl-{uuid4().hex[:12]}"
        with torch.no_grad():
            self.policy.peft.save_pretrained(str(self._folder / name), selected_adapters=[POLICY_ADAPTER])
        share(self._folder / name)
        self._send("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(self._folder / name)})
        self._forget()
        self._loaded = name

    def _forget(self) -> None:
        if self._loaded is not None:
            self._send("/v1/unload_lora_adapter", {"lora_name": self._loaded})
            shutil.rmtree(self._folder / self._loaded)
            self._loaded = None

    def close(self) -> None:
        """Make the server unload the adapter, and delete its files."""
        self._forget()

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request) as answer:
                text = answer.read().decode()
        except HTTPError as error:
            raise ConfigError(f"{self._url}{path} answered {error.code}: {error.read().decode()[:300]}") from None
        except URLError as error:
            raise ConfigError(f"no vLLM server answers at {self._url} ({error.reason}); check vllm.url") from None
        except (HTTPException, ConnectionError) as error:  # the server had accepted the request
            raise ConfigError(
                f"the vLLM server at {self._url} closed the connection ({type(error).__name__}); see its log, restart "
                "it and then the run, which continues from its last checkpoint"
            ) from None
        return json.loads(text) if text.startswith("{") else text


def _completion(choice: dict[str, Any]) -> Completion:
    return Completion(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"] == "stop")
