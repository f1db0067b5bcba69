"""A miniature Qwen2 policy with its tokenizer, trained from scratch on worked solutions."""

from __future__ import annotations

import hashlib
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from qerl.data.generated import core_of, fresh_records
from qerl.data.grading import Goal, is_correct
from qerl.data.prompts import prompt_text, texts_ids
from qerl.data.records import parse_record
from qerl.data.sources import SPLITS, read_meta, read_split
from qerl.host.console import log
from qerl.host.process import Announcement, Interrupted, announced
from qerl.host.provenance import share
from qerl.jobs import PretrainJob
from qerl.kernels.packed_sequences import Packing
from qerl.models.blocks import use_attend
from qerl.models.policy import Policy, choose_device, use_own_modules
from qerl.results.paths import PRETRAIN
from qerl.results.schema import PretrainCheck, PretrainReport, Provenance, write
from qerl.rl.checkpoint import Checkpoints
from qerl.rl.parallel import Processes, start_processes
from qerl.rl.rollouts import Task
from qerl.rollout.eager import EagerSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.base import parse
from qerl.settings.data import CountdownData
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
#: Processes that draw rows for a process of the training, at most, and the rows that each draws ahead.
_WORKERS, _AHEAD = 4, 4
#: Seconds between messages on the progress.
_LOG_SECONDS = 30


class PretrainError(ValueError):
    """The miniature didn't become a policy that reinforcement learning can start from."""


@dataclass(frozen=True)
class _Example:
    """Token ids of prompt and completion; the first `prompt` of them carry no loss."""

    ids: list[int]
    prompt: int


def pretrain_base(job: PretrainJob) -> None:
    """Train the miniature on the train splits of its data sets; write a Hugging Face checkpoint and `pretrain.json`.

    Computes on GPUs if there are any, and saves bfloat16. Raises `PretrainError`, and writes nothing, if the saved
    policy's accuracy on the first data set lies outside `accepted`.
    """
    if not start_processes(job.settings.processes, _pretrain, job):
        _pretrain(job)
    if job.work.is_dir():
        shutil.rmtree(job.work)


def _pretrain(job: PretrainJob) -> None:
    """Pre-train in one process; the first writes the results."""
    settings, processes = job.settings, Processes()
    tasks = {name: Task.of(job.data[name]) for name in settings.datasets}
    checked = {name: replace(task, problems=read_split(job.data[name], "validation")) for name, task in tasks.items()}
    for split, found in (("train", tasks), ("validation", checked)):
        for name, task in found.items():
            if not task.problems:
                folder = job.data[name]
                raise PretrainError(f"{folder} has no {split} problems; pre-training needs both train and validation")
    trained = train_tokenizer(tasks.values(), settings.vocab_size) if processes.writes else None
    tokenizer = processes.from_first(trained)
    assert tokenizer is not None
    torch.manual_seed(settings.seed)
    model = build_model(settings, tokenizer).to(choose_device())  # type: ignore[arg-type]
    # Fused norms and attention make passes on an H200 1.7 times as fast. Their gradients round otherwise than those of
    # transformers, so a small base, which needs no speed, keeps its bits.
    if settings.batch_tokens:
        use_own_modules(model)
    progress = _Progress(settings, model, processes, _checkpoints(job, tokenizer))
    if settings.batch_tokens is None:
        examples = [example for task in tasks.values() for example in _examples(tokenizer, task)]
        losses = _losses_of_batches(model, examples, settings)
    else:
        losses = _losses_of_rows(model, _Rows.of(job, tasks, tokenizer), settings, processes, len(progress.losses))

    def solved_share() -> float:
        found = accuracy(model.eval(), tokenizer, checked[settings.datasets[0]], settings.seed)
        model.train()
        return found

    # Without checkpoints a signal ends the process at once.
    with announced(alone=processes.count == 1) if progress.checkpoints else nullcontext(Announcement()) as end:
        _train(model, losses, solved_share, progress, end)
    if not processes.writes:
        return
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
        steps=progress.checks[-1].step,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        checks=progress.checks,
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


class _Float32OnCPU(TorchFunctionMode):
    """A block in which tensors on a CPU stay float32 where bfloat16 is asked for.

    Muon orthogonalizes in bfloat16, which takes 19 times as long on a CPU without instructions for its products (an AMD
    EPYC with AVX2): 1.16 of the 1.65 s of a step of the miniature.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.bfloat16 and args[0].device.type == "cpu":
            return args[0].clone()  # Muon divides the copy in place
        return func(*args, **(kwargs or {}))


@dataclass
class _Progress:
    """The optimizers and all else that a checkpoint has besides the weights."""

    settings: PretrainSettings
    model: Qwen2ForCausalLM
    processes: Processes
    checkpoints: Checkpoints | None
    #: The mean loss of each step.
    losses: list[float] = field(default_factory=list)
    checks: list[PretrainCheck] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Muon for the projections learns these problems in fewer steps than AdamW alone; embeddings, norms and biases
        # take twice its rate.
        named, rate = list(self.model.named_parameters()), self.settings.learning_rate
        projections = [parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name]
        others = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
        self.optimizers: dict[Optimizer, float] = {
            torch.optim.Muon(projections, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"): rate,
            torch.optim.AdamW(others, lr=2 * rate, betas=(0.9, 0.98), weight_decay=0.01): 2 * rate,
        }
        self.saved = time.monotonic()
        state = self.checkpoints.load() if self.checkpoints else None
        if state is None:
            return
        with torch.no_grad():
            for name, parameter in named:
                parameter.copy_(state["weights"][name])
        for optimizer, inner in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": inner})
        self.losses, self.checks = state["losses"], [PretrainCheck(**check) for check in state["checks"]]
        log.info("continues after step %d", len(self.losses))

    def save(self, ends: bool) -> None:
        """Write a checkpoint in the first process, if it is time or the pre-training ends."""
        seconds = self.settings.checkpoint_seconds
        if not self.checkpoints or seconds is None or not self.processes.writes:
            return
        if not ends and time.monotonic() < self.saved + seconds:
            return
        state = {
            "weights": {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            "optimizers": [optimizer.state_dict()["state"] for optimizer in self.optimizers],
            "losses": self.losses,
            "checks": [check.model_dump() for check in self.checks],
        }
        self.checkpoints.save(len(self.losses), state)
        self.saved = time.monotonic()


def _checkpoints(job: PretrainJob, tokenizer: Qwen2Tokenizer) -> Checkpoints | None:
    """The checkpoints of a pre-training with these settings, data and tokens."""
    if job.settings.checkpoint_seconds is None:
        return None
    sets = {name: read_meta(folder).sha256 for name, folder in job.data.items()}
    text = job.settings.model_dump_json(exclude=job.undeciding["settings"]) + repr(sets) + job.code
    text += tokenizer.backend_tokenizer.to_str()
    return Checkpoints(job.work, hashlib.sha256(text.encode()).hexdigest())


def _train(
    model: Qwen2ForCausalLM,
    losses: Iterator[float],
    solved: Callable[[], float],
    progress: _Progress,
    end: Announcement,
) -> None:
    """Train until the target accuracy or the last step. `losses` yields each step's, once its gradients are there.

    An announced end of any process raises `Interrupted` in all, after a checkpoint.
    """
    settings, processes = progress.settings, progress.processes
    # Warm-up, then linear decay to zero: at a high rate the shares of the two styles swing from step to step, and with
    # the decay they approach the data's shares.
    steps, warmup = settings.max_steps, max(1, settings.max_steps // 20)
    first = len(progress.losses)
    logged, said = time.monotonic(), first
    for step, loss in enumerate(islice(losses, steps - first), start=first + 1):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, rate in progress.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = rate * min(step / warmup, (steps - step + 1) / max(1, steps - warmup))
            with _Float32OnCPU():
                optimizer.step()
            optimizer.zero_grad()
        progress.losses.append(loss)
        now = time.monotonic()
        if settings.batch_tokens and processes.writes and now > logged + _LOG_SECONDS:
            each = (now - logged) / (step - said)
            logged, said = now, step
            speed, left = settings.batch_tokens / each, (steps - step) * each
            log.info("step %d of %d: loss %.3f, %.0f tokens/s, %.0f s left", step, steps, loss, speed, left)
        if step % settings.check_every == 0 or step == steps:
            right = processes.from_first(solved() if processes.writes else None)
            assert right is not None
            recent = progress.losses[progress.checks[-1].step if progress.checks else 0 :]
            check = PretrainCheck(step=step, loss=sum(recent) / len(recent), accuracy=right)
            progress.checks.append(check)
            if processes.writes:
                log.info("step %d: loss %.3f, accuracy %.3f", step, check.loss, right)
            if right >= settings.target_accuracy:
                break
        # The processes end after the same step, and wait for the one that writes, or the launcher would kill it.
        ends = progress.checkpoints is not None and sum(processes.sum([end.number])) > 0
        progress.save(ends)
        if ends:
            processes.wait()
            raise Interrupted(end.number or signal.SIGTERM)


def _losses_of_batches(
    model: Qwen2ForCausalLM, examples: list[_Example], settings: PretrainSettings
) -> Iterator[float]:
    """Compute the gradients of batches of examples, and yield their losses."""
    for batch in _batches(examples, settings.batch_size, random.Random(settings.seed)):
        loss = _loss(model, batch)
        loss.backward()
        yield loss.item()


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


# Rows of fresh problems. What a row has is decided by the seed and its number alone, so any number of processes and
# workers has the same rows, and a pre-training continues from the number of a step.


class _Row(NamedTuple):
    """Examples one after another."""

    ids: Tensor  # [L] int64
    positions: Tensor  # [L] int64, in each example
    targets: Tensor  # [L] int64, the next tokens, -100 where there is no loss
    lengths: list[int]


@dataclass(frozen=True)
class _Rows(Dataset[_Row]):
    """The rows by their numbers, without end."""

    tasks: list[Task]
    origins: list[CountdownData]
    tokenizer: Qwen2Tokenizer
    held_out: set[object]
    seed: int
    length: int

    @staticmethod
    def of(job: PretrainJob, tasks: Mapping[str, Task], tokenizer: Qwen2Tokenizer) -> _Rows:
        """The rows of a job. Raises `PretrainError` for a data set that isn't generated as countdown is."""
        settings, origins = job.settings, list[CountdownData]()
        for name in settings.all_datasets:
            origin = read_meta(job.data[name]).origin
            if origin["source"] != "countdown":
                raise PretrainError(f"batch_tokens draws problems of source: countdown, and {name} isn't one")
            origins.append(parse(CountdownData, origin, name))
        kept = {name: SPLITS if name in settings.held_out else ("validation", "test") for name in job.data}
        problems = [problem for name in kept for split in kept[name] for problem in read_split(job.data[name], split)]
        held_out = {core_of(Goal.read(problem.answer)) for problem in problems}
        trained = [tasks[name] for name in settings.datasets]
        return _Rows(trained, origins[: len(trained)], tokenizer, held_out, settings.seed, settings.row_tokens)

    def __getitem__(self, number: int) -> _Row:
        rng, examples, room = random.Random(f"{self.seed} row {number}"), list[_Example](), self.length
        given = list(zip(self.tasks, self.origins, strict=True))
        streams = [fresh_records(origin, task.format, self.held_out, rng) for task, origin in given]
        sizes = [len(task.problems) for task in self.tasks]
        while True:
            [place] = rng.choices(range(len(streams)), sizes)
            task = self.tasks[place]
            problem = parse_record(next(streams[place]), task.format, f"row {number}")
            [example] = _examples(self.tokenizer, replace(task, problems=[problem]))
            room -= len(example.ids)
            if len(example.ids) > self.length:
                raise PretrainError(f"row_tokens={self.length} has no room for a problem of {len(example.ids)} tokens")
            if room < 0:
                return _row(examples)
            examples.append(example)


def _row(examples: list[_Example]) -> _Row:
    targets = [[-100] * (one.prompt - 1) + one.ids[one.prompt :] + [-100] for one in examples]
    return _Row(
        ids=torch.tensor([token for one in examples for token in one.ids]),
        positions=torch.cat([torch.arange(len(one.ids)) for one in examples]),
        targets=torch.tensor(list(chain.from_iterable(targets))),
        lengths=[len(one.ids) for one in examples],
    )


def _losses_of_rows(
    model: Qwen2ForCausalLM, rows: _Rows, settings: PretrainSettings, processes: Processes, first: int
) -> Iterator[float]:
    """Compute the gradients of the steps after `first`, summed over the processes, and yield the steps' losses."""
    assert settings.batch_tokens is not None
    count = settings.batch_tokens // settings.row_tokens
    steps = range(first, settings.max_steps)
    own = [step * count + row for step in steps for row in range(processes.rank, count, processes.count)]
    workers = min(_WORKERS, max(len(os.sched_getaffinity(0)) // processes.count - 1, 0))
    # An item is a row as it is (batch_size=None).
    loader = DataLoader(
        rows,
        batch_size=None,
        sampler=own,  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        pin_memory=model.device.type == "cuda",
        worker_init_fn=_leave_group,
    )
    drawn = iter(loader)
    for _ in steps:
        total = torch.zeros((), device=model.device)
        for row in islice(drawn, count // processes.count):
            loss = _row_loss(model, row, getattr(torch, settings.dtype)) / count
            loss.backward()
            total += loss.detach()
        processes.add_gradients(model.parameters())
        yield from processes.sum([total.item()])


def _leave_group(worker: int) -> None:
    """Keep signals from a worker that a terminal or `timeout` sends to the process group of the training."""
    os.setsid()


def _row_loss(model: Qwen2ForCausalLM, row: _Row, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy of the completions' tokens of a row, computed in `dtype`."""
    use_attend(model)
    ids, positions, targets = (part.to(model.device, non_blocking=True) for part in row[:3])
    packing = Packing.of(row.lengths, [None] * len(row.lengths), model.device)
    wanted = targets >= 0
    with torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32):
        # Embeddings in `dtype` make the residual stream's; autocast would leave it in float32.
        hidden = model.model.embed_tokens(ids[None]).to(dtype)
        # As in `token_hidden`, transformers builds no mask beside an empty one.
        mask = ids.new_empty(1, 1, 0, 0, dtype=torch.bool)
        given = {"inputs_embeds": hidden, "position_ids": positions[None], "attention_mask": mask}
        states = model.model(**given, use_cache=False, packing=packing).last_hidden_state[0]
        return nn.functional.cross_entropy(model.lm_head(states[wanted]), targets[wanted])
