"""QeRL's reinforcement learning on one page: GRPO with Adaptive Quantization Noise on an NVFP4 base.

    python examples/grpo_gsm8k.py --out runs/page                       # Qwen2.5-1.5B-Instruct on GSM8K, one GPU
    python examples/grpo_gsm8k.py --out runs/page --model FOLDER --problems FILE.jsonl

Sections and equations are those of the QeRL paper (arXiv 2510.11696). `qerl train` runs the same loop, and adds
checkpoints, several GPUs, other losses and metrics (`qerl.rl.train`). Suffixes of names are dimensions: P problems
with G completions each, N completions of a micro-batch, T tokens of a completion.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import fmean

import torch

import qerl
from qerl.checkpoints.files import weights_format_of
from qerl.data.prompts import Thinking
from qerl.data.sources import prepare
from qerl.models.policy import with_adapter
from qerl.rl.losses import BatchSize, LossInputs, mismatch, policy_loss
from qerl.rl.noise import Noise
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch, split
from qerl.rl.rewards import Answer, function_parts, group_advantages, reward_parts, total
from qerl.rl.rollouts import Task, step_seed
from qerl.rl.update import make_optimizer, warmup_cosine
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings import run as settings
from qerl.settings.data import DatasetSettings, HubData, LocalData
from qerl.workflow.bases import model_folder


def main() -> None:
    """Quantize the base, then sample, grade and update in each step, and save the adapter."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="new folder for base, problems and adapter")
    parser.add_argument("--model", default="Qwen/Qwen2.5-1.5B-Instruct", help="folder or hub name, dense or NVFP4")
    parser.add_argument("--problems", type=Path, help="JSONL of `question` and `answer` (`#### n`); default: GSM8K")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=16, help="problems of a step (P)")
    parser.add_argument("--group-size", type=int, default=8, help="completions of each (G)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest completion")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps on one rollout (mu)")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--reward", help="a reward of your own, added to the grader's: module:function")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # The base: every linear layer in NVFP4, frozen. What is trained is a LoRA adapter on all of them, whose B = 0 makes
    # the first policy equal the base, and the RMSNorms, which also carry the noise.
    base = model_folder(args.model)
    if weights_format_of(base) != "nvfp4":
        base = qerl.quantize(base, args.out / "base", weights="nvfp4")
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    policy = with_adapter(base, settings.AdapterSettings(rank=32, alpha=64), dtype, args.seed)

    # The problems, whose records are checked one by one. The instruction asks for <think> and <answer>.
    origin: HubData | LocalData = HubData(source="hub", repo="openai/gsm8k", subset="main", revision="main")
    if args.problems:
        origin = LocalData(source="local", path=args.problems, validation_fraction=0, test_fraction=0)
    prepare(DatasetSettings(format="gsm8k", answer="tags", origin=origin), args.out / "data")
    task = Task.of(args.out / "data")

    # What the steps need. Each part reads the settings of its own kind, whose defaults are the paper's Table 4.
    loss_settings = settings.LossSettings(name="grpo")  # Eq. 3: clipped to [1 - 0.2, 1 + 0.28], no KL term (Appendix E)
    own = {"own": settings.RewardFunction(function=args.reward)} if args.reward else {}
    reward_weights = settings.RewardSettings(functions=own)
    optimizer_settings = settings.OptimizerSettings(learning_rate=args.learning_rate)
    optimizer = make_optimizer(policy, optimizer_settings)
    noise = Noise(policy.lm, settings.NoiseSettings(schedule="exponential"), args.seed)
    sampler = make_sampler(policy, settings.EngineSettings())  # reads the trainer's own packed weights: no second copy
    thinking = Thinking(policy.tokenizer, task.thinking)

    for step in range(1, args.steps + 1):
        start = time.perf_counter()

        # Rollout (Algorithm 1). Adaptive Quantization Noise adds z ~ N(0, sigma^2) to the RMSNorm weights that feed the
        # projections (Eq. 10 to 12), one z for the step: all of its tokens come from one perturbed policy. Rounding to
        # 4 bits makes the policy explore, says the paper; sigma adds to it at first, and decays by stages (Eq. 8).
        problems = task.at(range((step - 1) * args.prompts, step * args.prompts), args.seed)
        prompts = task.prompts(policy.tokenizer, problems)
        params = SamplingParams(args.max_tokens, count=args.group_size, seed=step_seed(args.seed, step))
        with noise.at(step, args.steps) as drawn:
            sampler.sync()
            groups = sampler.generate(prompts, params)

        # Rewards: is the final answer right, and is it stated in the form that was asked for?
        of_problems = zip(problems, prompts, groups, strict=True)
        completed = [(problem, prompt, one) for problem, prompt, group in of_problems for one in group]
        answers = []
        for problem, prompt, completion in completed:
            text = thinking.text(completion.token_ids, str(policy.tokenizer.decode(prompt)))
            answers.append((problem, Answer(text, len(completion.token_ids), args.max_tokens)))
        parts = function_parts(reward_weights, answers, step)
        for part, (problem, answer) in zip(parts, answers, strict=True):
            part |= reward_parts(answer, problem, task.format, reward_weights, task.answer)
        rewards_PG = torch.tensor([total(part, reward_weights.weights) for part in parts]).view(-1, args.group_size)

        # Advantages (Eq. 4): A = (r - mean r) / std r within a group. The other completions of the problem are the
        # baseline, in place of a value function. A group of equal rewards has A = 0 and teaches nothing.
        advantages_PG = group_advantages(rewards_PG)

        # Packing: rows without padding, in which a prompt precedes all its completions once.
        scores = zip(rewards_PG.flatten().tolist(), advantages_PG.flatten().tolist(), strict=True)
        samples = [Sample(prompt, one, *score) for (_, prompt, one), score in zip(completed, scores, strict=True)]
        batches = [micro_batch(samples, row, policy.device) for row in split(samples, max_tokens=16384)]
        tokens = sum(len(sample.completion.token_ids) for sample in samples)
        whole = BatchSize(len(samples), tokens, args.max_tokens, len(batches))

        # log pi_old [N, T], of the policy before the first update. The trainer computes it anew, without noise: by the
        # sampler's numbers, which are those of the perturbed policy, the ratio below would measure the noise.
        with torch.no_grad():
            olds = [logprobs_and_entropy(policy, batch, params.temperature)[0] for batch in batches]

        # Updates. The loss of a token is -min(r A, clip(r) A) with the ratio r = pi / pi_old; its mean is over a
        # completion's tokens, then over completions. r corrects for tokens that were drawn from pi_old, when pi has
        # moved on, and the clip ends what a token can gain by moving. At first r = 1: the gradient is -A grad log pi.
        for parameters in optimizer.param_groups:
            parameters["lr"] = parameters["peak"] * warmup_cosine(optimizer_settings.warmup_ratio, step, args.steps)
        for _ in range(args.updates):
            optimizer.zero_grad()
            loss = 0.0
            for batch, old_logprobs_NT in zip(batches, olds, strict=True):
                logprobs_NT, _ = logprobs_and_entropy(policy, batch, params.temperature)
                inputs = LossInputs(logprobs_NT, old_logprobs_NT, batch.advantages_N[:, None], batch.mask_NT)
                share = policy_loss(inputs, loss_settings, whole).loss  # those of all micro-batches sum to the loss
                share.backward()
                loss += share.item()
            norm = torch.nn.utils.clip_grad_norm_([p for _, p in policy.trainable()], optimizer_settings.max_grad_norm)
            optimizer.step()

        # KL(sampler || trainer) of a token: what noise and the sampler's own kernels change.
        kl = sum(mismatch(old, b.sampler_logprobs_NT, b.mask_NT)[0] for b, old in zip(batches, olds, strict=True))
        correct, seconds = fmean(part["correct"] or 0 for part in parts), time.perf_counter() - start
        print(f"step {step}/{args.steps}  reward {rewards_PG.mean():.6f}  correct {correct:.4f}  ", end="")
        print(f"length {tokens / len(samples):.1f}  loss {loss:.6f}  gradient {norm:.6f}  ", end="")
        print(f"sampler KL {kl / tokens:.2e}  sigma {drawn.sigma:.2e}  {seconds:.1f} s", flush=True)

    policy.save(args.out / "adapter")  # in PEFT's layout


if __name__ == "__main__":
    main()
