"""A miniature Qwen2 policy with its tokenizer, trained from scratch on worked solutions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from qerl.data.grading import is_correct
from qerl.data.prompts import prompt_text, texts_ids
from qerl.data.sources import read_split
from qerl.host.console import log
from qerl.host.provenance import share
from qerl.jobs import PretrainJob
from qerl.models.policy import Policy
from qerl.results.paths import PRETRAIN
from qerl.results.schema import PretrainCheck, PretrainReport, Provenance
from qerl.results.store import write
from qerl.rl.rollouts import Task
from qerl.rollout.eager import EagerSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.models import PretrainSettings
from qerl.settings.run import SamplingSettings

# The policy imitates both styles of the generated solutions (step by step, and the answer at once). It thus solves
# about half of the problems, which leaves reinforcement learning something to improve.

_TURN_START, _TURN_END = "<|im_start|>", "<|im_end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BLOCK = 64
_POOL = 32


class PretrainError(ValueError):
    """The miniature didn't become a policy that reinforcement learning can start from."""


@dataclass(frozen=True)
class _Example:
    """Token ids of prompt and completion; the first `prompt` of them carry no loss."""

    ids: list[int]
    prompt: int


def pretrain_base(job: PretrainJob) -> None:
    """Train the miniature on the train splits of its data sets; write a Hugging Face checkpoint and `pretrain.json`.

    Computes in float32, on a GPU if there is one, and saves bfloat16. Raises `PretrainError`, and writes nothing, if
    the saved policy's accuracy on the first data set lies outside `accepted`.
    """
    settings = job.settings
    tasks = {name: Task.of(job.data[name]) for name in settings.datasets}
    checked = {name: replace(task, problems=read_split(job.data[name], "validation")) for name, task in tasks.items()}
    for split, found in (("train", tasks), ("validation", checked)):
        for name, task in found.items():
            if not task.problems:
                folder = job.data[name]
                raise PretrainError(f"{folder} has no {split} problems; pre-training needs both train and validation")
    tokenizer = train_tokenizer(tasks.values(), settings.vocab_size)
    examples = [example for task in tasks.values() for example in _examples(tokenizer, task)]
    torch.manual_seed(settings.seed)
    model = build_model(settings, tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type]
    checks = _train(model, tokenizer, examples, checked[settings.datasets[0]], settings)
    model.bfloat16().float()
    final = {name: accuracy(model, tokenizer, task, settings.seed) for name, task in checked.items()}
    solved, (low, high) = final[settings.datasets[0]], settings.accepted
    if not low <= solved <= high:
        raise PretrainError(
            f"the miniature solves {solved:.0%} of {settings.datasets[0]}'s validation problems, outside `accepted` "
            f"[{low:.0%}, {high:.0%}]; change `max_steps`, `target_accuracy` or the data's `terse`"
        )
    model.bfloat16().save_pretrained(job.out)
    share(job.out)
    tokenizer.save_pretrained(job.out)
    report = PretrainReport(
        steps=checks[-1].step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        checks=checks,
        accuracy=final,
        provenance=Provenance.of_now(settings.seed),
    )
    write(job.out / PRETRAIN, report)


def train_tokenizer(tasks: Iterable[Task], vocab_size: int) -> Qwen2Tokenizer:
    """Train Qwen2's tokenizer (byte-level BPE, single digits) on the training texts, with a ChatML template.

    It is Qwen2's own class, because Transformers loads that class for every Qwen2 checkpoint and splits texts in its
    way.
    """
    base = Qwen2Tokenizer(eos_token=_TURN_END, extra_special_tokens=[_TURN_START])
    problems = ((problem, task.instruction) for task in tasks for problem in task.problems)
    texts = chain.from_iterable((prompt_text(p.question, said), p.solution or "") for p, said in problems)
    roles = ["user\nassistant"] * 100
    tokenizer = base.train_new_from_iterator(chain(roles, texts), vocab_size, show_progress=False)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def build_model(settings: PretrainSettings, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Build the untrained Qwen2 in float32; its vocabulary is padded to a multiple of 64."""
    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / _BLOCK) * _BLOCK,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=1024,
        initializer_range=0.04,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    return Qwen2ForCausalLM(config)


def accuracy(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, task: Task, seed: int) -> float:
    """Share of the task's problems that one completion, sampled as in the paper's evaluation, solves."""
    prompts = task.prompts(tokenizer, task.problems)
    longest = max(len(tokenizer.encode(problem.solution or "")) for problem in task.problems)
    sampling = SamplingSettings(temperature=0.6, top_p=0.95)
    params = SamplingParams(2 * longest, sampling.temperature, sampling.top_p, seed=seed)
    completions = EagerSampler(Policy(model, tokenizer)).generate(prompts, params)
    texts = [str(tokenizer.decode(one.token_ids, skip_special_tokens=True)) for (one,) in completions]
    graded = zip(texts, task.problems, strict=True)
    return sum(is_correct(text, problem.answer, task.format) for text, problem in graded) / len(texts)


def _train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    examples: list[_Example],
    checked: Task,
    settings: PretrainSettings,
) -> list[PretrainCheck]:
    """Train until the target accuracy or the last step; return step, mean loss and accuracy of each check."""
    # Muon for the projections learns these problems in fewer steps than AdamW alone; embeddings, norms and biases take
    # twice its rate.
    named, rate = list(model.named_parameters()), settings.learning_rate
    projections = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
    others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(projections, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=2 * rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    # Warm-up, then linear decay to zero: at a high rate the shares of the two styles swing from step to step, and with
    # the decay they approach the data's shares.
    steps, warmup = settings.max_steps, max(1, settings.max_steps // 20)
    factor = lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))  # noqa: E731
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    checks: list[PretrainCheck] = []
    losses: list[float] = []
    batches = _batches(examples, settings.batch_size, random.Random(settings.seed))
    for step, batch in enumerate(islice(batches, settings.max_steps), start=1):
        loss = _loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
        if step % settings.check_every and step != settings.max_steps:
            continue
        solved = accuracy(model.eval(), tokenizer, checked, settings.seed)
        model.train()
        checks.append(PretrainCheck(step=step, loss=sum(losses) / len(losses), accuracy=solved))
        losses.clear()
        log.info("step %d: loss %.3f, accuracy %.3f", step, checks[-1].loss, solved)
        if solved >= settings.target_accuracy:
            break
    return checks


def _loss(model: Qwen2ForCausalLM, batch: list[_Example]) -> torch.Tensor:
    """Mean cross-entropy of the completions' tokens.

    Padding is on the right, where causal attention hides it from every real token, so no mask is needed. Logits are
    computed only at tokens with a loss.
    """
    width = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width), -100)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        targets[row, example.prompt - 1 : len(example.ids) - 1] = torch.tensor(example.ids[example.prompt :])
    ids, targets = ids.to(model.device), targets.to(model.device)
    wanted = targets >= 0
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return nn.functional.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


def _batches(examples: list[_Example], size: int, rng: random.Random) -> Iterator[list[_Example]]:
    """Yield shuffled batches for ever. Each has prompts of similar length, so little of it is padding.

    Sorted by whole length, a batch would hold one style of solution, and the short style's tokens would weigh more.
    """
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order), size * _POOL):
            pool = sorted(order[start : start + size * _POOL], key=lambda example: example.prompt)
            starts = list(range(0, len(pool), size))
            rng.shuffle(starts)
            yield from (pool[first : first + size] for first in starts)


def _examples(tokenizer: Qwen2Tokenizer, task: Task) -> list[_Example]:
    if unsolved := [problem.id for problem in task.problems if problem.solution is None]:
        raise PretrainError(f"problem {unsolved[0]} has no worked solution; pre-training imitates solutions")
    prompts = task.prompts(tokenizer, task.problems)
    completions = texts_ids(tokenizer, [problem.solution or "" for problem in task.problems])
    return [
        _Example([*prompt, *completion, tokenizer.eos_token_id], len(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
