"""The GRPO step of `qerl.bench.steps` by TRL's GRPOTrainer: BF16 LoRA, or QLoRA with bitsandbytes NF4.

Completions come from vLLM in TRL's colocate mode, which has its own copy of the weights and no adapter. Before each
rollout TRL merges the adapter into the base and copies every weight to vLLM. With an NF4 base, vLLM quantizes the
checkpoint with bitsandbytes (built in up to vLLM 0.27, later a plugin). The merged weights then arrive in 4 bits, but
their new scales don't, so this sampler drifts from the trained policy. It is timed nevertheless, because
`use_vllm=True` does this. TRL also has transformers' eager generation (`sampler: transformers`), and continuous
batching, which is not timed here.

TRL 1.16 supports vLLM 0.22 to 0.31. It computes log-probabilities in chunks by its own kernels, whether `liger` is on
or off: that option changes only the layers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from qerl.bench import workloads
from qerl.bench.peers import no_room_is_out_of_memory
from qerl.bench.timing import nbytes, optimizer_bytes, unmeasured
from qerl.checkpoints.shapes import shape_of
from qerl.host.console import log
from qerl.host.gpus import Seconds, peak_memory_bytes, reset_peak_memory, seconds
from qerl.models.random import TEXTS, write_checkpoint
from qerl.report_jobs import PointJob
from qerl.results.speeds import StepMemory, TimedStep, byte_parts
from qerl.settings.base import ConfigError
from qerl.settings.run import AdapterSettings
from qerl.settings.workloads import StepWork, TrlStep

#: The version of TRL whose private names `TimedTrainer` uses.
TRL = "1.16."
#: Bytes of vLLM's share of the GPU for activations and buffers, beside its weights and cache.
_VLLM_BUFFERS = 5e9


class TimedTrainer(GRPOTrainer):
    """TRL's trainer that times sampling, and within it the copying of weights to vLLM."""

    def __init__(self, *arguments: Any, work: StepWork, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.work = work
        self.sampling: list[float] = []
        self.syncs: list[float] = []
        if self.use_vllm:
            self._untimed_sync = self.vllm_generation.sync_weights
            self.vllm_generation.sync_weights = self._timed_sync  # type: ignore[method-assign]
            self._generate_alike = self.vllm_generation.llm.generate
            self.vllm_generation.llm.generate = self._generate_lengths

    def _timed_sync(self) -> None:
        with seconds() as taken:
            self._untimed_sync()
        self.syncs.append(taken.value)

    def _generate_lengths(self, prompts: Sequence[Any], sampling_params: Any, **others: Any) -> Any:
        """Generate completions of the work's lengths, where TRL asks for one length of all."""
        params = [sampling_params.clone() for _ in prompts]
        for one, tokens in zip(params, chain(*workloads.completion_lengths(self.work)), strict=True):
            one.min_tokens = one.max_tokens = tokens
        return self._generate_alike(prompts, params, **others)

    def _generate_single_turn(self, prompt_ids: list[list[int]], *arguments: Any) -> Any:
        if any(len(prompt) != self.work.prompt for prompt in prompt_ids):
            raise RuntimeError(f"a prompt hasn't {self.work.prompt} tokens: TRL's template differs from ours")
        with seconds() as taken:
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *arguments)
        workloads.check_drawn(self.work, sum(map(len, completion_ids)))
        self.sampling.append(taken.value)
        return completion_ids, logprobs


class StepClock(TrainerCallback):
    """Seconds and peak memory of each step, from its first micro-batch to the optimizer's step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self._running = ExitStack()
        self._elapsed = Seconds()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        reset_peak_memory()
        self._elapsed = self._running.enter_context(seconds())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        self._running.close()
        self.seconds.append(self._elapsed.value)
        self.peaks.append(peak_memory_bytes())


def _rewards(completions: list[list[dict[str, str]]], equal: list[bool], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [0.0 if same else workloads.text_reward(text) for text, same in zip(texts, equal, strict=True)]


def vllm_share(work: StepWork, device_bytes: int) -> float:
    """The share of the GPU's memory that vLLM needs to decode all completions at once, without queueing."""
    length = work.prompt + work.tokens
    parts = byte_parts(work.base, 0, work.completions, length)
    # The embedding is stored too, and is as large as the head.
    return min((sum(parts.values()) + parts["head"] + _VLLM_BUFFERS) / device_bytes, 1.0)


def _share(work: StepWork, asked: TrlStep) -> float:
    """vLLM's share of the GPU's memory: the setting, or the default of `vllm_share`."""
    if asked.vllm_memory is not None:
        return asked.vllm_memory
    if not torch.cuda.is_available():
        return 0.25  # of the machine's memory; on a CPU the cache has a separate setting
    _, total = torch.cuda.mem_get_info()
    return vllm_share(work, total)


def _config(work: StepWork, asked: TrlStep, folder: Path) -> GRPOConfig:
    vllm = asked.sampler == "vllm"
    # `TimedTrainer` gives vLLM the lengths.
    limits = {"ignore_eos": True, "detokenize": False} if vllm else {"min_new_tokens": work.tokens}
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=workloads.steps_of(work),
        per_device_train_batch_size=asked.micro_batch,
        gradient_accumulation_steps=work.completions // asked.micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.tokens,
        loss_type="grpo",
        learning_rate=1e-5,
        optim=asked.optimizer,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"},
        gradient_checkpointing=asked.recompute,
        use_liger_kernel=asked.liger,
        use_vllm=vllm,
        vllm_gpu_memory_utilization=_share(work, asked),
        vllm_max_model_length=work.prompt + work.tokens,
        vllm_enable_sleep_mode=asked.sleep,
        vllm_importance_sampling_correction=asked.correction,
        generation_kwargs=limits,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _trainer(work: StepWork, asked: TrlStep, checkpoint: Path, folder: Path) -> TimedTrainer:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    drawn = workloads.questions(tokenizer, workloads.steps_of(work) * work.prompts, work.prompt)
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    adapter = LoraConfig(
        r=work.rank, lora_alpha=work.rank, target_modules=list(AdapterSettings().targets), task_type="CAUSAL_LM"
    )
    return TimedTrainer(
        str(checkpoint),
        reward_funcs=_rewards,
        args=_config(work, asked, folder),
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": question}], "equal": work.is_equal(number)}
                for number, question in enumerate(drawn)
            ]
        ),
        processing_class=tokenizer,
        quantization_config=nf4 if work.weights == "nf4" else None,
        peft_config=adapter,
        work=work,
    )


def _steps(trainer: TimedTrainer, clock: StepClock) -> list[TimedStep]:
    """Seconds by part. Rewards and TRL's pass that corrects vLLM's log-probabilities count as update."""
    syncs = trainer.syncs or [0.0] * len(clock.seconds)
    logged = [row for row in trainer.state.log_history if "step_time" in row]
    return [
        TimedStep(
            step=step,
            sync=sync,
            rollout=sampling - sync,
            update=step - sampling,
            peak_bytes=peak,
            trl_step_time=row["step_time"],
            grad_norm=row["grad_norm"],
        )
        for step, sync, sampling, peak, row in zip(
            clock.seconds, syncs, trainer.sampling, clock.peaks, logged, strict=True
        )
    ]


def _memory(trainer: TimedTrainer, peak: float, size: str) -> StepMemory:
    assert trainer.model is not None
    assert trainer.optimizer is not None
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    parts = {
        "weights": nbytes([*trainer.model.parameters()]) - nbytes(trained),
        "adapter": nbytes(trained),
        "optimizer": optimizer_bytes(trainer.optimizer),
    }
    cache_bytes = 0  # of transformers' generation, whose cache size is unknown
    if trainer.use_vllm:
        engine = trainer.vllm_generation.llm.llm_engine
        parts["sampler_weights"] = nbytes([*engine.model_executor.driver_worker.model_runner.model.parameters()])
        shape, cache = shape_of(size), engine.vllm_config.cache_config
        cache_bytes = cache.num_gpu_blocks * cache.block_size * shape.layers * 2 * shape.kv_width * 2
    return workloads.memory_of(peak, cache_bytes, parts)


def _system(work: StepWork, asked: TrlStep) -> str:
    name = f"TRL {trl.__version__} {'QLoRA NF4' if work.weights == 'nf4' else 'BF16 LoRA'}"
    return name if asked.correction or asked.sampler != "vllm" else f"{name} without correction"


def _sampler(trainer: TimedTrainer, weights: str) -> str:
    if not trainer.use_vllm:
        return f"transformers' generate on {weights}"
    import vllm

    return f"vLLM {vllm.__version__}, colocated, on merged {'bitsandbytes NF4' if weights == 'nf4' else weights}"


def _check(work: StepWork, asked: TrlStep) -> None:
    if not trl.__version__.startswith(TRL):
        raise ConfigError(f"TRL is {trl.__version__}, but this bench needs {TRL}x; install trl==1.16.0")
    if work.median is not None and asked.sampler != "vllm":
        raise ConfigError("transformers' generate gives all completions one length; use sampler vllm")
    if work.completions % asked.micro_batch:
        raise ConfigError(f"micro_batch={asked.micro_batch} doesn't divide the {work.completions} completions")


def _run(work: StepWork, asked: TrlStep, checkpoint: Path) -> dict[str, Any]:
    if asked.sampler == "vllm":
        # TRL takes the first free port of a short list, which two jobs on one machine can choose at the same time.
        with socket.socket() as probe:
            probe.bind(("", 0))
            os.environ.setdefault("MASTER_PORT", str(probe.getsockname()[1]))
    write_checkpoint(checkpoint, work.size, TEXTS)
    clock = StepClock()
    with TemporaryDirectory() as folder:
        trainer = _trainer(work, asked, checkpoint, Path(folder))
        trainer.add_callback(clock)
        trainer.train()
    timed = _steps(trainer, clock)[workloads.WARMUP :]
    log.info("%s", timed)
    shares = [row["frac_reward_zero_std"] for row in trainer.state.log_history if "step_time" in row]
    if min(shares) < work.equal_groups:
        raise RuntimeError(f"in a step {min(shares):.0%} of the groups earned the same: its time says nothing")
    if not any(step.grad_norm for step in timed):
        raise RuntimeError("the updates had no gradient: rewards didn't differ within any group; use larger groups")
    memory = _memory(trainer, max(clock.peaks[workloads.WARMUP :]), work.size)
    return {"sampler": _sampler(trainer, work.weights), "steps": tuple(timed), "memory": memory}


def measure_steps(job: PointJob[StepWork, None]) -> None:
    """Time the steps after one warm-up step, and write the result. Running out of memory is a result, too."""
    for part in unmeasured(job):
        work, asked, out = part.work, part.settings, job.out / part.file
        assert isinstance(asked, TrlStep)
        _check(work, asked)

        def measure(work: StepWork = work, asked: TrlStep = asked) -> dict[str, Any]:
            with TemporaryDirectory() as folder, no_room_is_out_of_memory():
                return _run(work, asked, Path(folder) / "model")

        stored = asked.model_copy(update={"vllm_memory": _share(work, asked)})
        workloads.write_steps(out, _system(work, asked), work, stored, measure)
