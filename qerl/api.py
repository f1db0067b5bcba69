"""The library: quantize, train, load, sample, evaluate, export and publish. The command line calls these functions.

A model is a folder in the hub's layout, the folder of a finished run, or `org/name` of the hub. `@revision` after the
name takes another revision than the main branch. Mistakes raise a `ValueError` of one sentence before anything long
starts.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, get_args

from filelock import FileLock

from qerl.checkpoints.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    RUN_FILE,
    CheckpointError,
    check_checkpoint,
    context_length,
    stock_loading,
)
from qerl.data.hub import hub_unreachable
from qerl.data.sources import (
    RECORDS,
    RecordFiles,
    RecordObjects,
    as_files,
    local_dataset,
    prepare,
    prepare_data,
    read_meta,
    read_split,
)
from qerl.host.console import log, quiet
from qerl.host.imports import check_installed
from qerl.host.lease import alone, join_free_memory, own_lock
from qerl.host.provenance import check_writable, make_folder, writing
from qerl.jobs import DataJob, QuantizeJob, TrainJob
from qerl.results import paths
from qerl.results.schema import (
    Dose,
    OwnEvaluationResult,
    PreparedDataset,
    RunResult,
    SampleRow,
    read,
    read_rows,
)
from qerl.settings.base import SEEDS, ConfigError, PathLike, check_count, check_unicode, parse, path_argument
from qerl.settings.data import AnswerForm, DatasetSettings
from qerl.settings.models import FORMATS, Base, MergedFormat, PackedFormat
from qerl.settings.run import EngineSettings, RunFile, SamplingSettings
from qerl.settings.workflow import STOCK_TASKS, EvaluationSettings, StockTask, TaskSettings, harness_of
from qerl.workflow import run_folder
from qerl.workflow.bases import HUB_MODEL, base_folder, make_checkpoint
from qerl.workflow.run_folder import Dtype, Run, Stage, check_finished, load

if TYPE_CHECKING:
    import pandas as pd
    from huggingface_hub import HfApi

    from qerl.evals.harness import Drawn
    from qerl.models.policy import Policy
    from qerl.publishing import Published, RunFacts, RunScore
    from qerl.results.statistics import Interval


# Models and runs by hand.


def quantize(model: PathLike, out: PathLike, weights: PackedFormat = "nvfp4", pack_delta_nets: bool = False) -> Path:
    """Write the dense `model` into the new folder `out` in 4 bits, with report.json on size and error.

    `pack_delta_nets` packs the delta nets of a hybrid too, which otherwise stay bfloat16.
    The format is that of compressed-tensors (NVFP4, MXFP4) or bitsandbytes (NF4): Transformers and vLLM load it.
    """
    name = str(path_argument(model, "model"))
    if not isinstance(weights, str) or weights not in FORMATS:
        raise ConfigError(f"weights={weights!r} is no 4-bit format; use one of {', '.join(FORMATS)}")
    check_installed("train")
    target, source = _new_folder(out), base_folder(name)
    base = Base(name, weights, packed_nets=pack_delta_nets)

    def fill(folder: Path) -> None:
        make_checkpoint(QuantizeJob(base=base, source=source, data=None, report=folder / paths.REPORT, out=folder))

    make_folder(target, fill)
    return target


def _new_folder(out: PathLike) -> Path:
    """The path `out`, at which a new folder can be made."""
    target = path_argument(out, "out")
    if target.exists():
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    check_writable(target)
    return target


def train(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None = None, *, log_to_file: bool = False
) -> Run | Any:
    """Prepare the problems, fetch and quantize the model, and train it. `out` overrides the `out` of `run`.

    `run` is a `RunFile`, its values, or a YAML file with them. Among values, `dataset` (or its `origin`) may be the
    records themselves: a list, a generator, a function or a `datasets.Dataset`. A mapping from splits to these works
    too, and `reward.functions` may hold functions of a module. Finished parts are kept: a killed run continues where it
    stopped, and a finished run does nothing. A part that was made of other files, functions or code is made anew. A
    finished run whose inputs have changed is refused with a `ConfigError` that names them.

    With `seeds` or `runs` there are several runs in folders of `out`, and the result is the list of them. Those of one
    base and engine train side by side, and others one after another; several free GPUs share them out, in processes of
    their own. A run that fails leaves the others as they are, and its error is raised once they have ended.

    With `log_to_file`, all that the process and its libraries print goes to log.txt in `out`. The screen shows progress
    and the project's own lines.
    """
    values, records = run_folder.without_objects(run, out)
    settings = run_folder.read_run(values, out)
    runs = run_folder.members(settings)
    if runs != [settings] and (settings.out / RUN_FILE).is_file():
        raise ConfigError(f"{settings.out} is the folder of one run, not of several; give another folder as `out`")
    for one in runs:
        run_folder.check_same(one)
    waiting = [one for one in runs if not Run(one.out).finished]
    for finished in (Run(one.out) for one in runs if one not in waiting):
        records.write(replace=False)
        run_folder.check_inputs(finished.settings)
        log.info("%s is finished: nothing to do", finished.folder)
    if waiting:
        check_writable(settings.out)
        with quiet(settings.out / paths.LOG) if log_to_file else nullcontext(), writing(settings.out):
            sources = [run_folder.checked_source(one) for one in waiting]
            if all(one.joins_free_memory for one in waiting):
                join_free_memory()
            from qerl.rl.shares import train_runs
            from qerl.rl.train import train_run

            with ExitStack() as locks:
                jobs = _prepared(waiting, sources, records, locks)
                if len(jobs) > 1:
                    train_runs(jobs)
                else:
                    train_run(jobs[0])
    result = [Run(one.out) for one in runs]
    return result if settings.seeds or settings.runs else result[0]


def _prepared(runs: list[RunFile], sources: list[Path], records: RecordFiles, locks: ExitStack) -> list[TrainJob]:
    """The trainings of runs, with their problems and bases made from models in `sources`, within `locks`."""
    from qerl.workflow.preflight import check_runs

    for one in runs:
        locks.enter_context(alone(one.out / paths.WORK, own_lock(one.nodes)))
        if Run(one.out).finished:  # by another process, since this one began
            raise ConfigError(f"{one.out} was finished by another process just now; start again")
    # Machines may share a folder, and torchrun's processes do: one after the other finds what is made.
    parts = [FileLock(one.out / paths.WORK / "parts") for one in runs]
    data = list[Stage[DataJob]]()
    for one, source, lock in zip(runs, sources, parts, strict=True):
        with lock:
            # Before its parts the folder has the records and settings that tell whose they are.
            records.write()
            run_folder.write_settings(one)
            data_stage = run_folder.data_stage(one)
            data_stage.make(prepare_data, data)
            data.append(data_stage)
            # Before any base, whose quantization may take an hour.
            check_runs(source, [(data_stage.job.out, one)])
    bases, jobs = list[Stage[QuantizeJob]](), list[TrainJob]()
    for one, source, lock in zip(runs, sources, parts, strict=True):
        with lock:
            base_stage = run_folder.base_stage(one, source)
            base_stage.make(make_checkpoint, bases)
            bases.append(base_stage)
            training = run_folder.train_stage(one)
            # Training keeps its own state, so its inputs are recorded as it begins, and not once it is done.
            training.write_inputs()
            jobs.append(training.job)
    return jobs


def rewards(runs: Iterable[Run]) -> pd.DataFrame:
    """The rewards of trained runs: of the first and of the last step, and for runs that differ in their seed the mean.

    A row per run and one per mean, with the columns run, steps, reward_first and reward_last. A mean has the ends of
    its 95 % interval over seeds (Student's t) in the last step, too: reward_last_low and reward_last_high.
    """
    import pandas as pd

    from qerl.results.statistics import seeds_interval

    rows, alike = [], dict[str, list[dict[str, Any]]]()
    for run in runs:
        found = run.metrics["reward"]
        name = run.folder.name
        row = {"run": name, "steps": len(found), "reward_first": found.iloc[0], "reward_last": found.iloc[-1]}
        rows.append(row)
        alike.setdefault(run.settings.model_dump_json(exclude={"seed", "out"}), []).append(row)
    for group in (group for group in alike.values() if len(group) > 1):
        last = seeds_interval([row["reward_last"] for row in group])
        first = statistics.fmean(row["reward_first"] for row in group)
        means = {"reward_first": first, **last.columns("reward_last")}
        name = f"mean of {group[0]['run']} to {group[-1]['run']}"
        rows.append({"run": name, "steps": group[0]["steps"], **means})
    return pd.DataFrame(rows)


# Samples and evaluations by hand.

Problems = PathLike | Mapping[str, Any] | DatasetSettings | RecordObjects


def sample(
    policy: Policy | PathLike,
    prompts: Iterable[str],
    *,
    count: int = 1,
    seed: int = 0,
    instruction: str | None = None,
    date: datetime.date | None = None,
    dtype: Dtype | None = None,
    **sampling: float,
) -> list[list[Drawn]]:
    """Draw `count` completions of each prompt; each has `text`, `tokens` (how many) and `finished`.

    `policy` is what `load` returns, or the model or run that `load` takes, with `dtype`. A prompt becomes a user's
    message, with `instruction` on a line of its own, in the policy's chat template, which may state `date` (by default
    today's). If `policy` is the folder of a run, the run's values are the defaults, and its `system` and
    `template_arguments` apply. In `text`, thinking is between `<think>` and `</think>`. `sampling`: temperature, top_p,
    top_k, max_tokens, with the defaults of `SamplingSettings`. Raises `ConfigError` for prompts that aren't strings,
    such as chats.
    """
    from qerl.data.prompts import TemplateInput, prompts_ids
    from qerl.data.records import Problem
    from qerl.evals.harness import EvaluatedPolicy
    from qerl.rollout.factory import make_sampler
    from qerl.rollout.sampler import SamplingParams

    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts must be a list of strings, not {prompts!r}")
    texts = list(prompts)  # a generator can be read once only
    for prompt in texts:
        if not isinstance(prompt, str):
            raise ConfigError(f"a prompt must be a string, the text of one user's message, not {prompt!r}")
        check_unicode(prompt, "a prompt")
    check_unicode(instruction or "", "instruction")
    check_count(count, "count")
    settings = parse(SamplingSettings, sampling, "sampling")
    check_count(seed, "seed", 0, SEEDS)
    added = "" if instruction is None else instruction
    system, arguments = "", dict[str, Any]()
    if isinstance(policy, (str, Path)):
        form = form_of(policy)
        added = form.get("instruction", "") if instruction is None else added
        date = date or form.get("date")
        system, arguments = form.get("system", ""), form.get("template_arguments", {})
        policy = load(policy, dtype)
    _check_policy(policy)
    params = SamplingParams(**settings.model_dump(), count=count, seed=seed)
    given = TemplateInput(date, arguments)
    asked = [Problem("", prompt, None, "").under(system) for prompt in texts]
    ids = prompts_ids(policy.tokenizer, asked, added, given)
    context = context_length(policy.lm.config.to_dict())
    sampler = make_sampler(policy, EngineSettings())
    return EvaluatedPolicy(sampler, policy.tokenizer, params, context, given=given).draw(ids)


def form_of(model: PathLike) -> dict[str, Any]:
    """What a run's data set asks for: instruction, form of answers, and the date that chat templates state.

    A model that isn't a run has none.
    """
    if not (Path(model) / RUN_FILE).is_file():
        return {}
    run = Run(Path(model))
    if run.settings.environment:
        log.warning("%s was trained in conversations (environment); here it has one turn, without replies", model)
    form = run.settings.dataset.form
    return {**form, "date": read_meta(run.data).date} if (run.data / paths.DATASET).is_file() else form


def _check_policy(policy: Any) -> None:
    if not hasattr(policy, "tokenizer"):
        raise ConfigError(
            f"a policy is a folder of a model or run, what qerl.load returns, or the `policy` of a run, not {policy!r}"
        )


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation in its folder: result.json and samples.jsonl."""

    folder: Path

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The harness and its version, accuracy, accuracy of each repeat, tokens, share of truncated completions."""
        [score] = read(OwnEvaluationResult, self.folder / paths.RESULT).tasks.values()
        return score.content()

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row per completion: problem, repeat, prompt, completion, extracted, gold, correct, tokens, finished."""
        import pandas as pd

        return pd.DataFrame([row.content() for row in read_rows(SampleRow, self.folder / paths.SAMPLES)])

    @property
    def accuracy(self) -> Interval:
        """Mean over problems and repeats, with its 95 % interval over problems."""
        from qerl.results.statistics import accuracy_interval

        by_problem = self.samples.groupby("problem", sort=False)["correct"].mean()
        return accuracy_interval(by_problem.to_numpy(dtype=float)[None])


def evaluate(
    policy: Policy | PathLike,
    problems: Problems,
    out: PathLike,
    *,
    repeats: int | None = None,
    seed: int = 0,
    instruction: str | None = None,
    answer: AnswerForm | None = None,
    units: Sequence[str] | None = None,
    thinking: Sequence[str] | None = None,
    date: datetime.date | None = None,
    task: StockTask | TaskSettings | None = None,
    dtype: Dtype | None = None,
    **sampling: float,
) -> Evaluation:
    """Score a policy by the harness of the record format: lm-eval (gsm8k), lighteval (math, aime) or the own grader.

    `policy` and `dtype` are what `sample` takes.

    `task` names a stock task of the harness, with its prompt, gold answer and metric. As `TaskSettings`, it may also
    set `fewshot`, `chat`, sampling and repeats, which win; its data set is ignored.

    `problems` is a file of records, or records as `train` takes them. All of these are asked, for an answer of the form
    `answer` whose number `units` may follow, and with `instruction`. `thinking` and `date` are keys of the data set
    too: delimiters of thinking, and the date that chat templates state. Give a base and the policies that are compared
    with it the same date. The defaults are those of the run, if `policy` is the folder of one, else of
    `DatasetSettings`. `problems` may also be a folder with a file test.jsonl (as the data of a run), or the values of
    `DatasetSettings`. Then the test split is asked. `sampling` and `repeats` have the defaults of `EvaluationSettings`:
    temperature 0.6, top_p 0.95, four repeats.
    """
    check_installed("eval")
    from qerl.evals.evaluate import open_task, score_policy

    if not isinstance(policy, (str, Path)):
        _check_policy(policy)
    folder = path_argument(out, "out")
    check_unicode(instruction or "", "instruction")
    given = {"instruction": instruction, "answer": answer, "thinking": thinking, "date": date, "units": units}
    form: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if isinstance(task, str):
        task = stock_task(task)
    if task and task.task and (instruction or units or answer not in (None, "native")):
        raise ConfigError(
            f"task {task.task} has a prompt and a form of answers of its own; leave out instruction, answer and units"
        )
    check_evaluation(problems, folder)
    if isinstance(policy, (str, Path)) and not (task and task.task):
        form = {**form_of(policy), **form}
    with writing(folder), _alone_in(folder):
        check_evaluation(problems, folder)  # which another process may have finished just now
        data = _problem_folder(problems, form, folder)
        scored: dict[str, Any] = task.model_dump() if task else {"harness": harness_of(read_meta(data).format)}
        scored["dataset"] = _TASK
        # Before the policy is loaded, whose dtype is known only then.
        open_task(parse(TaskSettings, scored, "task"), {_TASK: data})
        settings = _evaluation_settings(scored, repeats, seed, dtype or "bfloat16", sampling)
        if isinstance(policy, (str, Path)):
            policy = load(policy, dtype)
        settings = settings.model_copy(update={"dtype": str(policy.lm.dtype).removeprefix("torch.")})
        row: dict[str, Any] = {"eval": folder.name, "model": policy.tokenizer.name_or_path}
        row |= {"adapter": policy.peft is not None, "settings": settings.model_dump(mode="json")}
        score_policy(policy, settings, row, {_TASK: data}, folder)
    return Evaluation(folder)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """A context that locks the folder of an evaluation, and removes it if it made it and nothing was written there."""
    there = folder.exists()
    with alone(folder / paths.WORK):
        try:
            yield
        finally:
            shutil.rmtree(folder / paths.WORK)
            if not there and not any(folder.iterdir()):
                folder.rmdir()


def measure_dose(
    model: PathLike,
    problems: Problems,
    *,
    weights: PackedFormat = "nvfp4",
    sigmas: Sequence[float] = (),
    count: int = 64,
    completions: int = 4,
    max_tokens: int = 1024,
    seed: int = 0,
    dtype: Dtype = "bfloat16",
) -> dict[float, Dose]:
    """How far rounding to `weights` moves a dense `model` before training, by each σ of noise on its norms; 0 is none.

    The first `count` of `problems`, which are what `evaluate` takes, are asked, with some `completions` each of the
    exact model at temperature 1. A dose has KL(exact || rounded) of a completion and the change of its tokens' entropy,
    in nats (docs/dose-protocol.md).
    """
    check_installed("train")
    for key, value in {"count": count, "completions": completions, "max_tokens": max_tokens}.items():
        check_count(value, key)
    if any(not isinstance(sigma, (int, float)) or not 0 < sigma < math.inf for sigma in sigmas):
        raise ConfigError(f"sigmas={[*sigmas]!r} must be positive numbers")
    with TemporaryDirectory(prefix="qerl-dose-") as temporary:
        folder = Path(temporary)
        check_evaluation(problems, folder / "problems")
        data = _problem_folder(problems, {}, folder / "problems")
        task = {"dataset": _TASK, "harness": "qerl"}
        settings = _evaluation_settings(task, completions, seed, dtype, {"max_tokens": max_tokens}, sleep=True)
        from qerl.evals.divergence import Assay
        from qerl.evals.evaluate import open_task

        open_task(settings.tasks[0], {_TASK: data}, with_answers=False)  # before the model is rounded
        packed = quantize(model, folder / "packed", weights)
        exact, rounded = load(model, dtype), load(packed, dtype)
        assay = Assay(exact, data, settings, count)
        return {sigma: assay.dose(rounded, sigma) for sigma in (0.0, *sigmas)}


_TASK = "problems"


def check_evaluation(problems: Problems, out: PathLike) -> None:
    """Raise `ConfigError` for an impossible evaluation, before a policy is loaded."""
    if problems is None:
        raise ConfigError("nothing to evaluate on: `problems` must be records, or a file or folder of them")
    folder = path_argument(out, "out")
    if (folder / paths.RESULT).exists():
        raise ConfigError(f"{folder} holds an evaluation already; give another folder as `out`")
    # Files of a killed evaluation.
    written = {paths.WORK, paths.DATA, f".{paths.DATA}.partial", paths.SAMPLES, paths.OUTCOMES}
    written |= {f"{paths.RESULT}.partial"}
    others = {file.name for file in folder.iterdir()} - written - {RECORDS} if folder.is_dir() else set()
    data = folder / paths.DATA
    if others or (folder.exists() and not folder.is_dir()) or (data.exists() and not (data / paths.DATASET).is_file()):
        raise ConfigError(f"{folder} exists and is not the folder of an evaluation; give a new folder as `out`")
    check_writable(folder)


def stock_task(name: str, **settings: Any) -> TaskSettings:
    """The settings of a stock task."""
    if name not in STOCK_TASKS:
        raise ConfigError(f"there is no stock task {name!r}; use one of {', '.join(STOCK_TASKS)}")
    harness, _ = STOCK_TASKS[name]  # type: ignore[index]
    return parse(TaskSettings, {"dataset": _TASK, "harness": harness, "task": name, **settings}, "task")


def _evaluation_settings(
    task: Mapping[str, Any],
    repeats: int | None,
    seed: int,
    dtype: str,
    sampling: Mapping[str, float],
    sleep: bool = False,
) -> EvaluationSettings:
    """The default evaluation with one task; with `sleep` the memory of a sampler's cache is free for other models."""
    default: SamplingSettings = EvaluationSettings.model_fields["sampling"].default
    values: dict[str, Any] = {
        "tasks": [task],
        "sampling": {**default.model_dump(), **sampling},
        "dtype": dtype,
        "seed": seed,
        "native": {"sleep": sleep},
    }
    return parse(EvaluationSettings, values if repeats is None else {**values, "repeats": repeats}, "evaluation")


def _problem_folder(problems: Problems, form: Mapping[str, Any], out: Path) -> Path:
    """A folder of prepared problems: the given folder, or one that is made in `out`."""
    records = as_files(problems, out)
    records.write()
    # All records of a list are asked, as those of a file.
    as_file = records.files and not isinstance(problems, Mapping)
    source: Any = records.values["origin"]["path"] if as_file else records.values
    own = out / paths.DATA
    if isinstance(source, (str, Path)) and (Path(source) / paths.DATASET).is_file():
        if Path(source).resolve() != own.resolve():
            shutil.rmtree(own, ignore_errors=True)  # of a killed evaluation, for whose problems a card would take it
        return Path(source)
    if isinstance(source, DatasetSettings):
        settings = source
    elif isinstance(source, Mapping):
        settings = parse(DatasetSettings, source, "problems")
    else:
        all_of_it = {} if Path(source).is_dir() else {"validation_fraction": 0, "test_fraction": 1}
        values = {**local_dataset(Path(source), **all_of_it), **form}
        settings = parse(DatasetSettings, values, "problems")
    shutil.rmtree(own, ignore_errors=True)
    make_folder(own, lambda folder: prepare(settings, folder))
    return own


# Exports of finished runs: a base with an adapter for stock vLLM, or one checkpoint.


def export(run: PathLike, out: PathLike, merged: MergedFormat | None = None) -> Path:
    """Write a finished run's policy into the new folder `out` for stock vLLM: a checkpoint `base`, a LoRA `adapter`.

    Trained norms, which no engine takes as an adapter, are in the base, in float32: an engine that computes in 16 bits
    rounds them as it loads them. With `merged`, `out` is one checkpoint with a card in place of both. All its tensors
    are bfloat16, and with `nvfp4` the linear layers of the blocks are then rounded to NVFP4.
    """
    trained = Run(path_argument(run, "run"))
    check_finished(trained)
    if trained.settings.method == "full":
        raise ConfigError(f"{run} was trained in full: {trained.adapter} is a checkpoint already, which vLLM loads")
    if merged not in (None, *get_args(MergedFormat)):
        raise ConfigError(f"merged={merged!r} isn't supported; use {' or '.join(get_args(MergedFormat))}")
    if merged == "nvfp4":
        check_installed("train")
    target = _new_folder(out)
    check_checkpoint(trained.checkpoint)
    from qerl.models.adapter_files import CARD
    from qerl.models.export import export as write_parts
    from qerl.models.export import merge
    from qerl.publishing import merged_card

    if merged:
        card = merged_card(facts_of(trained, None), target.resolve().name, merged)

        def fill(folder: Path) -> None:
            merge(trained.checkpoint, trained.adapter, folder, merged)
            (folder / CARD).write_text(card, encoding="utf-8")

        make_folder(target, fill)
    else:
        write_parts(trained.checkpoint, trained.adapter, target)
    return target


# Publishing of a finished run on the hub: its adapter with a card, scores and metrics.


def publish(
    run: PathLike,
    repo: str,
    *,
    evaluations: Sequence[PathLike] = (),
    private: bool | None = None,
    dry_run: bool = False,
    out: PathLike | None = None,
    hub: HfApi | None = None,
) -> Published:
    """Upload a finished run's adapter, card, metrics and scores to the repository `repo` of the hub (`user/name`).

    `evaluations` are folders of `qerl eval`; by default those within the run's folder. A new repository is private
    unless `private` is False; one that is there stays as it is. `dry_run` uploads nothing, and needs neither login nor
    network; it writes what would go to the new folder `out`, if given. Folders of this machine are published by their
    last name only. Raises `ConfigError` if the run isn't finished, the hub can't be reached, nobody is logged in, or a
    file would tell a path of this machine or a token.
    """
    from huggingface_hub import HfApi

    from qerl.publishing import check_folder, upload

    trained = Run(path_argument(run, "run"))
    check_finished(trained)
    if HUB_MODEL.fullmatch(repo) is None or "@" in repo:
        raise ConfigError(f"{repo!r} names no repository of the hub; give it as user/name")
    if out is not None and (not dry_run or Path(out).exists()):
        raise ConfigError(f"{out} must be a new folder, and is for a dry run")
    unreachable = None if hub else hub_unreachable()
    if unreachable and not dry_run:
        raise ConfigError(f"{repo} wasn't uploaded: {unreachable}; start again when the hub can be reached")
    hub = hub or HfApi()
    facts = facts_of(trained, [*map(Path, evaluations)], None if unreachable else hub)
    with TemporaryDirectory() as scratch:
        _stage(trained, facts, repo, Path(scratch))
        check_folder(Path(scratch))
        if out is not None:
            shutil.copytree(scratch, out)
        return upload(hub, repo, Path(scratch), private, _notes(facts), dry_run)


def facts_of(run: Run, evaluations: Sequence[Path] | None = (), hub: HfApi | None = None) -> RunFacts:
    """What a card tells of a run, with its evaluations: those in these folders, or all in the run's folder, or none.

    The licence of a base that is a folder is looked up there, that of a repository on `hub`.
    """
    from qerl.publishing import BaseModel, RunFacts, license_of

    as_it_is = not (run.checkpoint / paths.REPORT).exists()
    if named := HUB_MODEL.fullmatch(run.settings.model):
        base = BaseModel(named["repo"], True, named["revision"], as_it_is, license_of(named["repo"], hub))
    else:  # run.yaml has the absolute path of a folder
        folder = Path(run.settings.model)
        base = BaseModel(folder.name, False, None, as_it_is, license_of(folder, hub))
    return RunFacts(
        run=read(RunResult, run.folder / paths.RUN),
        base=base,
        data=read(PreparedDataset, run.data / paths.DATASET),
        stock=stock_loading(run.checkpoint),
        scores=[] if evaluations is None else [*_scores(run, evaluations)],
    )


def _scores(run: Run, evaluations: Sequence[Path]) -> Iterator[RunScore]:
    """The scores of the run's policy and of its base in folders of evaluations."""
    from qerl.publishing import RunScore, data_name

    for folder in evaluations or sorted(file.parent for file in run.folder.glob(f"*/{paths.RESULT}")):
        result = read(OwnEvaluationResult, folder / paths.RESULT)
        name = run.folder.resolve().name
        if Path(result.model).parts[-2:] not in ((name, paths.CHECKPOINT), (name, paths.POLICY)):
            if evaluations:
                raise ConfigError(
                    f"{folder} evaluates {result.model}, which is not {run.folder}; give its own evaluations"
                )
            continue
        evaluation = Evaluation(folder)
        # Its data set is its own, or the run's if just the test problems of that have answers.
        data = None
        if (folder / paths.DATA / paths.DATASET).is_file():
            data = read(PreparedDataset, folder / paths.DATA / paths.DATASET)
        elif set(evaluation.samples["problem"]) == {problem.id for problem in read_split(run.data, "test")}:
            data = read(PreparedDataset, run.data / paths.DATASET)
        label = data_name(data) if data else result.eval
        for score in result.tasks.values():
            yield RunScore(label, result.trained, score, evaluation.accuracy, data, result.provenance)


def _stage(run: Run, facts: RunFacts, repo: str, folder: Path) -> None:
    """Fill the folder with what is uploaded; weights are links to the run's own files."""
    from qerl.models.adapter_files import CARD
    from qerl.publishing import model_files, own_file, run_card

    texts = {CARD: run_card(facts, repo)}
    if run.settings.method == "full":
        for file in model_files(run.folder, run.adapter, ours=(CARD, paths.METRICS)):  # which are written here
            os.symlink(file, folder / file.name)
    else:
        os.symlink(own_file(run.folder, run.adapter / ADAPTER), folder / ADAPTER)
        # PEFT's configuration, in which the base has its public name.
        config = json.loads(own_file(run.folder, run.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config |= {"base_model_name_or_path": facts.base.name, "revision": facts.base.revision}
        texts[ADAPTER_CONFIG] = json.dumps(config, indent=2) + "\n"
    shutil.copyfile(own_file(run.folder, run.folder / paths.METRICS), folder / paths.METRICS)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _notes(facts: RunFacts) -> list[str]:
    """What a person should know of before others read it."""
    from qerl.publishing import data_name

    base, data = facts.base, facts.data
    notes = {
        f"the card names the base by its folder, {base.name}, without the path": not base.on_hub,
        f"the card names the data set, {data_name(data)}; its problems are not published": data.origin["source"]
        in ("local", "python"),
        f"the licence of {base.name} isn't known here, so the card states none": not base.license,
        "no evaluation of this run was found, so the card has no scores; name one with --evaluation": not facts.scores,
    }
    return [note for note, holds in notes.items() if holds]
