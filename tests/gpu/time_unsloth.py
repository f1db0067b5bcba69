"""GRPO steps of Unsloth with vLLM on the work of `qerl.bench.trl`, with random weights of Qwen2's shapes.

    python -m tests.gpu.time_unsloth OUT.json --size 7B --rank 16

It needs unsloth 2026.10.9, which asks for TRL 1.15, and in 4 bits vllm-bnb-plugin. Settings are those that Unsloth
recommends for GRPO: vLLM on the trainer's own weights (`fast_inference`), its recomputation of activations, its 8-bit
optimizer, and no correction between vLLM and the trainer. As TRL's, the loss has no reference policy. The committed
sample was measured by a longer form of this script with the same settings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer
from rich import print

#: No telemetry, and vLLM's own sampler, as where vLLM is timed alone.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "UNSLOTH_VLLM_NO_FLASHINFER": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
}
PACKAGES = "unsloth", "unsloth_zoo", "torch", "transformers", "trl", "peft", "vllm", "bitsandbytes", "triton"
#: vLLM's share of the GPU's free memory.
SHARE = 0.55


def write_model(folder: Path, size: str) -> None:
    """Write the checkpoint in a process of its own, because Unsloth must be imported before transformers."""
    code = (
        "import sys; from pathlib import Path; from qerl.models.random import TEXTS, write_checkpoint; "
        "write_checkpoint(Path(sys.argv[1]), sys.argv[2], TEXTS)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), size], check=True)


def model_of(folder: Path, rank: int, weights: str, sequences: int, longest: int) -> tuple[Any, Any]:
    """The policy with its adapter and vLLM engine, and the tokenizer."""
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(folder),
        max_seq_length=longest,
        load_in_4bit=weights == "nf4",
        local_files_only=True,
        fast_inference=True,
        max_lora_rank=rank,
        max_num_seqs=sequences,
        gpu_memory_utilization=SHARE,
    )
    adapted = FastLanguageModel.get_peft_model(
        model,
        r=rank,
        lora_alpha=rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    return adapted, tokenizer


def main(
    out: Path,
    size: Annotated[str, typer.Option()] = "7B",
    rank: Annotated[int, typer.Option()] = 16,
    weights: Annotated[Literal["bf16", "nf4"], typer.Option()] = "bf16",
    mixed: Annotated[bool, typer.Option(help="Lognormal lengths, half of the groups without a gradient.")] = True,
    micro_batch: Annotated[int, typer.Option(help="Completions of a micro-batch.")] = 32,
    repeats: Annotated[int, typer.Option(help="Timed steps, after one that isn't timed.")] = 2,
) -> None:
    """Time the steps, and write seconds and the most memory that PyTorch allocated."""
    out = out.absolute()
    os.environ.update(ENVIRONMENT)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, size)
        os.chdir(scratch)  # Unsloth writes code and adapters into the current folder
        import unsloth  # noqa: F401  # before all libraries that it patches

        steps = train(folder, size, rank, weights, mixed, micro_batch, repeats)
        from qerl.host.provenance import stamp, write_json

        packages = {name: version(name) for name in PACKAGES}
        asked = {"size": size, "rank": rank, "weights": weights, "mixed": mixed, "micro_batch": micro_batch}
        write_json(out, {**asked, "steps": steps, "packages": packages, "provenance": stamp()})
        os.chdir(out.parent)


def train(
    folder: Path, size: str, rank: int, weights: str, mixed: bool, micro_batch: int, repeats: int
) -> list[dict[str, float]]:
    """Seconds and memory of each step, the first one included, which isn't timed elsewhere."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from qerl.bench import workloads
    from qerl.settings.workloads import StepWork

    lengths = {"prompt": 256, "tokens": 2048, "median": 300, "sigma": 0.8, "equal_groups": 0.5} if mixed else {}
    work = StepWork(size=size, weights=weights, rank=rank, prompts=16, group_size=8, repeats=repeats, **lengths)
    wanted = list(chain(*workloads.completion_lengths(work)))
    longest = -(-(work.prompt + work.tokens + 1) // 64) * 64
    model, tokenizer = model_of(folder, rank, weights, work.completions, longest)
    generate = model.vllm_engine.generate

    def generate_lengths(prompts: list[Any], sampling_params: Any, **others: Any) -> Any:
        params = [sampling_params.clone() for _ in prompts]
        for one, tokens in zip(params, wanted, strict=True):
            one.n, one.ignore_eos, one.detokenize, one.min_tokens, one.max_tokens = 1, True, False, tokens, tokens
        return generate(prompts, sampling_params=params, **others)

    model.vllm_engine.generate = generate_lengths
    steps: list[dict[str, float]] = []
    rollouts: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self.begun
            peak = torch.cuda.max_memory_allocated()
            steps.append({"step": seconds, "rollout": rollouts[-1], "update": seconds - rollouts[-1], "peak": peak})
            print(steps[-1])

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *arguments: Any, **keywords: Any) -> Any:
            if any(len(ids) != work.prompt for ids in prompt_ids):
                raise RuntimeError(f"a prompt hasn't {work.prompt} tokens: the template differs from ours")
            torch.cuda.synchronize()
            begun = time.perf_counter()
            found = super()._generate_single_turn(prompt_ids, *arguments, **keywords)
            torch.cuda.synchronize()
            rollouts.append(time.perf_counter() - begun)
            workloads.check_drawn(work, sum(map(len, found[0])))
            return found

    def rewards(completions: list[list[dict[str, str]]], equal: list[bool], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [0.0 if same else workloads.text_reward(text) for text, same in zip(texts, equal, strict=True)]

    drawn = workloads.questions(
        AutoTokenizer.from_pretrained(folder), workloads.steps_of(work) * work.prompts, work.prompt
    )
    config = GRPOConfig(
        output_dir=str(folder.parent / "run"),
        max_steps=workloads.steps_of(work),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.completions // micro_batch,
        num_generations=work.group_size,
        max_completion_length=work.tokens,
        loss_type="grpo",
        beta=0.0,
        learning_rate=1e-5,
        optim="adamw_8bit",
        bf16=True,
        use_vllm=True,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Timed(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[rewards],
        args=config,
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": question}], "equal": work.is_equal(number)}
                for number, question in enumerate(drawn)
            ]
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    silent = [row["frac_reward_zero_std"] for row in trainer.state.log_history if "frac_reward_zero_std" in row]
    if min(silent) < work.equal_groups:
        raise RuntimeError(f"in a step {min(silent):.0%} of the groups earned the same: its time says nothing")
    return steps


if __name__ == "__main__":
    typer.run(main)
