"""Checks of a model before any long work: with the settings of a run, and with its problems.

Of problems these are chat template, lengths and test splits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.checkpoints.files import CONFIG, check_room, read_config, usable_length, weights_format_of
from qerl.data.prompts import Thinking, check_lengths, check_template, longer_than
from qerl.data.records import DataError
from qerl.data.sources import read_meta
from qerl.evals.evaluate import open_task
from qerl.host.console import log
from qerl.jobs import CheckJob
from qerl.models.loading import check_attention_dropout, checkpoint_structure, config_of, load_tokenizer
from qerl.models.policy import lora_config
from qerl.models.quantize import check_equalised, linear_layers
from qerl.rl.noise import check_noise
from qerl.rl.rollouts import Task
from qerl.rollout.sampler import check_served
from qerl.settings.run import RunSettings
from qerl.settings.workflow import EvaluationSettings


def check_settings(model: Path, settings: RunSettings) -> None:
    """Raise the error with which a run would fail on the base `model` later, as far as its config.json tells.

    Of the settings, `FITTED` is read.
    """
    structure, config = checkpoint_structure(model), config_of(model)
    check_attention_dropout(model)
    if settings.method == "lora":
        lora_config(settings.adapter, structure)
    check_noise(settings.noise, {role for _, role in structure.noisy_norms().values()})
    if weights_format_of(model) != settings.weights or settings.base.error:
        config.name_or_path = ""  # of images and text, the base that is written has the text model alone
    check_served(config, settings.rollout)
    if settings.recipe == "awq":
        check_equalised(model)
    linear_layers(model, settings.base.packed_nets)  # raises an error if there are no delta nets to pack


def check_problems(job: CheckJob) -> None:
    """Check a model with the settings and problems of runs and with an evaluation.

    An empty file is written if all checks pass.
    """
    for run in job.runs:
        check_settings(job.model, run)
    check_runs(job.model, ((job.data[run.dataset], run) for run in job.runs))
    check_evaluation(job.model, job.evaluation, job.data)
    job.out.touch()


def check_runs(model: Path, runs: Iterable[tuple[Path, RunSettings]]) -> None:
    """Raise an error if the checkpoint `model` can't be trained on a run's prepared problems."""
    architecture, tokenizer = read_config(model), load_tokenizer(model)
    check_template(tokenizer, architecture["vocab_size"])
    _warn_of_unused_end(model, tokenizer)
    lines: set[str] = set()
    for data, run in runs:
        rollout = run.rollout
        rows = read_meta(data).rows
        if not rows["train"]:
            others = sum(rows.values())
            why = f"all {others} are held out" if others else "all were dropped, as their answers contradict each other"
            raise DataError(f"dataset has no training problems, since {why}; give it more problems, or a split train")
        context = usable_length(architecture, rollout)
        check_room(context, rollout.sampling.max_tokens, "rollout.sampling.max_tokens")
        task = Task.of(data, run.validation)
        lacking = sum(not problem.answer for problem in task.problems)
        if lacking and run.reward.correct:
            raise DataError(
                f"{lacking} of {len(task.problems)} training problems state no answer, which reward.correct="
                f"{run.reward.correct:g} compares completions with; name its column in `columns`, or set "
                "reward.correct to 0"
            )
        unscored, validation = sum(not problem.answer for problem in task.held_out), run.validation
        if unscored and validation.measure == "pass@1" and (validation.keep == "best" or validation.patience):
            raise DataError(
                f"{unscored} of {len(task.held_out)} held-out problems state no answer, and validation.measure=pass@1 "
                "compares policies by right answers; set validation.measure to reward"
            )
        if (line := Thinking(tokenizer, task.thinking, task.given).summary) not in lines:
            log.info("%s", line)
            lines.add(line)
        given, left = len(task.problems), len(task.fitting(tokenizer, rollout, context).problems)
        if left < given:
            most = rollout.max_prompt_tokens
            log.info("rollout.max_prompt_tokens=%d leaves %d of %d training problems", most, left, given)
        if left < rollout.prompts:
            log.warning(
                "%d training problems are fewer than rollout.prompts=%d, so each step draws some of them several "
                "times; lower rollout.prompts, or give more problems",
                left,
                rollout.prompts,
            )


def _warn_of_unused_end(model: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if the tokenizer's end of text doesn't end completions, as after fine-tuning a base on a chat template."""
    file = next(path for path in (model / "generation_config.json", model / CONFIG) if path.is_file())
    stated: dict[str, Any] = read_config(model) if file.name == CONFIG else json.loads(file.read_text(encoding="utf-8"))
    ends: Any = stated.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    if ends is not None and tokenizer.eos_token_id not in (None, *ids):
        log.warning(
            "%s ends completions at %s alone, and the tokenizer's end %s (%d) doesn't end them; if the chat template "
            "ends turns with it, add it to eos_token_id there",
            file,
            ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in ids),
            tokenizer.eos_token,
            tokenizer.eos_token_id,
        )


def check_evaluation(model: Path, settings: EvaluationSettings, datasets: Mapping[str, Path]) -> None:
    """Raise an error if the engine doesn't serve the model, or a task has no problems or prompts that are too long.

    The harness makes the prompts of stock tasks, so these are checked when completions are drawn.
    """
    config = config_of(model)
    config.name_or_path = ""  # of images and text, only some weights have the text model alone
    check_served(config, settings)
    context, tokenizer = usable_length(read_config(model), settings), load_tokenizer(model)
    for task in settings.tasks:
        problems, limit = open_task(task, dict(datasets)), settings.sampling_of(task).max_tokens
        check_room(context, limit, f"max_tokens of the evaluation on {task.label}")
        if context is not None and problems.stock is None:
            longer = longer_than(context - limit, tokenizer, problems.problems, problems.instruction, problems.given)
            remedy = f"or take these problems out of the test split of {task.dataset}"
            check_lengths(longer.values(), len(problems.problems), context, limit, remedy)
