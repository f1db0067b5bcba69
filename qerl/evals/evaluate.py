"""The evaluation of one policy."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedTokenizerBase

from qerl.checkpoints.files import usable_length
from qerl.data.grading import Verdict, solution_key
from qerl.data.prompts import TemplateInput, prompts_ids
from qerl.data.records import Problem
from qerl.data.sources import read_meta, read_records, read_split
from qerl.evals.harness import STOCK_COLUMNS, Drawn, EvaluatedPolicy, EvaluationSet, GradedCompletion, Stock
from qerl.host.console import log
from qerl.host.imports import imports
from qerl.host.provenance import VERSION
from qerl.jobs import EvaluateJob
from qerl.models.blocks import noise_norm
from qerl.models.policy import Policy, load_policy
from qerl.results.paths import OUTCOMES, RESULT, RUN, SAMPLES
from qerl.results.schema import OK, OutcomeRow, RunResult, SampleRow, TaskScore, evaluation_of, read, write
from qerl.results.statistics import KS, pass_at_k
from qerl.rollout.factory import make_sampler
from qerl.rollout.sampler import Sampler, SamplingParams
from qerl.settings.data import Split
from qerl.settings.run import SamplingSettings
from qerl.settings.workflow import EvaluationSettings, Harness, StockTask, TaskSettings, check_scored

# Evaluation of data sets of every format by the grader and the prompt of training.


def score(policy: EvaluatedPolicy, dataset: EvaluationSet) -> list[list[GradedCompletion]]:
    """Draw and score completions; returns them by problem, then by repeat."""
    prompts = prompts_ids(policy.tokenizer, dataset.problems, dataset.instruction, policy.given)
    return [
        [
            GradedCompletion(drawn, read, judged == "right", timeout=judged == "timeout")
            for drawn, (read, judged) in zip(completions, grader_verdicts(completions, problem, dataset), strict=True)
        ]
        for problem, completions in zip(dataset.problems, policy.draw(prompts), strict=True)
    ]


def grader_verdicts(
    completions: Iterable[Drawn], problem: Problem, dataset: EvaluationSet
) -> Iterator[tuple[str | None, Verdict]]:
    """The answer that each completion of a problem states, and the verdict on it; equal texts are graded once."""
    known: dict[str, tuple[str | None, Verdict]] = {}
    for text in (drawn.text for drawn in completions):
        if text not in known:
            known[text] = dataset.read(text), dataset.judge(text, problem)
        yield known[text]


# The evaluation of one policy: `repeats` completions of each task's problems, scored by the task's harness.


class EvaluationError(ValueError):
    """An evaluation that can't run. The message is one sentence for the user."""


def evaluate(
    sampler: Sampler,
    tokenizer: PreTrainedTokenizerBase,
    settings: EvaluationSettings,
    datasets: dict[str, Path],
    out: Path,
    progress: Callable[[str], None],
    context: int | None = None,
) -> dict[str, TaskScore]:
    """Score the policy on the problems of every task (paper section 4.1: temperature 0.6, top-p 0.95, noise-free).

    `datasets` maps the names in `settings.tasks` to folders made by `qerl.data.sources`. The completion of repeat r
    depends only on (settings.seed, problem, r). All samples are written to `out` (samples.jsonl), and each problem's
    right ones are counted in outcomes.jsonl. The score of each task is returned under its name. Prompts that leave no
    room for `max_tokens` in the model's `context` are an error.
    """
    tasks = [(task, open_task(task, datasets)) for task in settings.tasks]
    out.mkdir(parents=True, exist_ok=True)
    scores: dict[str, TaskScore] = {}
    with (
        (out / SAMPLES).open("w", encoding="utf-8") as samples,
        (out / OUTCOMES).open("w", encoding="utf-8") as counted,
    ):
        for task, dataset in tasks:
            sampling, count = settings.sampling_of(task), settings.repeats_of(task)
            params = SamplingParams(**sampling.model_dump(), count=count, seed=settings.seed)
            policy = EvaluatedPolicy(sampler, tokenizer, params, context, dataset.thinking, dataset.given)
            rows = list(_samples(task, dataset, scorer(task.harness)(policy, dataset)))
            outcomes = outcomes_of(rows, dataset.format == "countdown")
            for file, lines in ((samples, rows), (counted, outcomes)):
                file.writelines(json.dumps(line.content()) + "\n" for line in lines)
            scores[task.label] = score = _score(rows, outcomes, task, sampling, dataset)
            late = f"; the comparison of {score.timeouts} exceeded its limit of CPU time" if score.timeouts else ""
            progress(f"{task.label}: {score.accuracy:.1%} of {len(rows)} completions correct{late}")
    return scores


def outcomes_of(rows: Sequence[SampleRow], has_ways: bool) -> list[OutcomeRow]:
    """The right completions of each problem of one task; distinct formulas are counted if the task `has_ways`."""
    drawn = Counter(row.problem for row in rows)
    right = Counter(row.problem for row in rows if row.correct)
    ways: dict[str, set[str]] = {problem: set() for problem in drawn}
    for row in rows if has_ways else ():
        if row.correct and row.extracted is not None:
            ways[row.problem].add(solution_key(row.extracted))
    return [
        OutcomeRow(
            dataset=rows[0].dataset,
            problem=problem,
            right=right[problem],
            drawn=count,
            distinct=len(ways[problem]) if has_ways else None,
        )
        for problem, count in drawn.items()
    ]


def _score(
    rows: Sequence[SampleRow],
    outcomes: Sequence[OutcomeRow],
    task: TaskSettings,
    sampling: SamplingSettings,
    dataset: EvaluationSet,
) -> TaskScore:
    repeats = sorted({row.repeat for row in rows})
    flexible = [row.flexible for row in rows if row.flexible is not None]
    distinct = [outcome.distinct for outcome in outcomes if outcome.distinct is not None]
    right = [outcome.right for outcome in outcomes]
    return TaskScore(
        harness=task.harness,
        harness_version=VERSION if task.harness == "qerl" else version(task.harness),
        problems=len(outcomes),
        repeats=len(repeats),
        accuracy=fmean(row.correct for row in rows),
        accuracies=[fmean(row.correct for row in rows if row.repeat == r) for r in repeats],
        extracted=fmean(row.extracted is not None for row in rows),
        flexible=fmean(flexible) if flexible else None,
        agreement=fmean(row.agrees for row in rows),
        completion_tokens=fmean(row.tokens for row in rows),
        truncated=fmean(not row.finished for row in rows),
        pass_at={k: float(pass_at_k(right, len(repeats), k).mean()) for k in KS if k <= len(repeats)},
        distinct_solutions=fmean(distinct) if distinct else None,
        task=task.task,
        sampling=sampling,
        timeouts=sum(row.timeout for row in rows),
        date=dataset.given.date,
    )


def open_task(task: TaskSettings, datasets: dict[str, Path], with_answers: bool = True) -> EvaluationSet:
    """The problems of a task. Raises `EvaluationError` if there are none, or some that its harness can't score."""
    if task.dataset not in datasets:
        raise EvaluationError(f"evaluation.tasks names {task.dataset!r}, but no folder of that data set was given")
    folder = datasets[task.dataset]
    about = read_meta(folder)
    check_scored(task, about.format, "evaluation.tasks")
    problems = read_split(folder, task.split)
    if not problems:
        raise EvaluationError(
            f"{folder} has no {task.split} problems to evaluate on; give a file, all of which is asked, or an origin "
            f"with a {task.split} split"
        )
    if with_answers and (lacking := sum(not problem.answer for problem in problems)):
        raise EvaluationError(
            f"{lacking} of {len(problems)} {task.split} problems of {folder} state no answer to compare completions "
            "with; give records with `answer`, or name its column in `columns` of the data set"
        )
    if task.task is None:
        form, units = about.answer, tuple(about.units)
        opened = EvaluationSet(task.label, about.format, about.instruction, problems, form, units)
    else:
        opened = EvaluationSet(task.label, about.format, "", problems, stock=_stock(task, folder))
    # A folder that was prepared before data sets had a date takes the day on which the evaluation starts.
    given = TemplateInput.of(about)
    return replace(opened, thinking=about.thinking, given=replace(given, date=given.date or datetime.date.today()))


def _stock(task: TaskSettings, folder: Path) -> Stock:
    assert task.task is not None
    examples = _stock_records(task.task, folder, "train") if task.task == "gsm8k" and task.fewshot != 0 else None
    if examples == []:
        raise EvaluationError(
            f"task gsm8k takes its examples from the training split, which {folder} lacks; set fewshot: 0, or prepare "
            "the data set from an origin with a training split"
        )
    return Stock(task.task, _stock_records(task.task, folder, "test"), task.chat, task.fewshot, examples or ())


def _stock_records(task: StockTask, folder: Path, split: Split) -> list[dict[str, str]]:
    """The records of a split as the stock task reads them: text, as in the task's repository."""
    columns, records = STOCK_COLUMNS[task], read_records(folder, split)
    for column in columns:
        if any(record.get(column) is None for record in records):
            raise EvaluationError(
                f"task {task} reads the column `{column}`, which records of {folder} lack; name theirs in `columns` "
                "of the data set, or leave `task` out"
            )
    return [{column: str(record[column]) for column in columns} for record in records]


# lm-eval runs each filter once a completion, so that 64 completions of a problem are slow, and lighteval has no task
# for formulas. The harness `qerl` scores in one pass, with the numbers that the reward is made of. Benchmarks of the
# paper keep their harnesses.
def scorer(name: Harness) -> Callable[[EvaluatedPolicy, EvaluationSet], list[list[GradedCompletion]]]:
    """The function that scores a policy by a harness."""
    # Importing a harness takes seconds, so only the ones in use are imported.
    if name == "lm-eval":
        from qerl.evals import lm_eval

        return lm_eval.score
    if name == "lighteval":
        from qerl.evals import lighteval

        return lighteval.score
    return score


def _samples(task: TaskSettings, dataset: EvaluationSet, verdicts: list[list[GradedCompletion]]) -> Iterator[SampleRow]:
    for problem, repeats in zip(dataset.problems, verdicts, strict=True):
        ours = grader_verdicts((verdict.drawn for verdict in repeats), problem, dataset)
        for repeat, (stock, (found, judged)) in enumerate(zip(repeats, ours, strict=True)):
            drawn = stock.drawn
            yield SampleRow(
                dataset=task.label,
                harness=task.harness,
                problem=problem.id,
                repeat=repeat,
                prompt=drawn.prompt,
                completion=drawn.text,
                extracted=stock.extracted,
                read=found,
                gold=problem.answer,
                correct=int(stock.correct),
                flexible=stock.flexible,
                agrees=stock.correct == (judged == "right"),
                timeout=stock.timeout or judged == "timeout",
                tokens=drawn.tokens,
                finished=drawn.finished,
            )


# The job of an evaluation, from and to files.


def evaluate_policy(job: EvaluateJob) -> None:
    """Score a base or a run's policy on every task.

    The result of a failed run has its status and no task.
    """
    about = job.policy
    file = job.trained and job.trained.parent / RUN
    if file and file.is_file() and (status := read(RunResult, file).status) != OK:
        job.out.mkdir(parents=True, exist_ok=True)
        for name in (SAMPLES, OUTCOMES):
            (job.out / name).write_text("", encoding="utf-8")
        write(job.out / RESULT, evaluation_of(about, job.settings.seed, tasks={}, status=status))
        log.warning("not evaluated: the run is %s", status)
        return
    with imports():
        for task in job.settings.tasks:
            scorer(task.harness)
    policy = load_policy(job.checkpoint, job.trained, job.settings.dtype)
    score_policy(policy, job.settings, about, job.data, job.out)


def score_policy(
    policy: Policy, settings: EvaluationSettings, row: dict[str, Any], datasets: dict[str, Path], out: Path
) -> None:
    """Score a policy, noise-free, on every task of `settings`; `out` gets samples, outcomes, and then result.json."""
    sampler = make_sampler(policy, settings)
    context = usable_length(policy.lm.config.to_dict(), settings)
    tasks = evaluate(sampler, policy.tokenizer, settings, datasets, out, log.info, context)
    # The result states the measured noise, which should be 0.
    noise = noise_norm(policy.lm)
    write(out / RESULT, evaluation_of(row, settings.seed, tasks=tasks, sampler=sampler.served, noise_norm=noise))
