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
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from filelock import FileLock

from qerl.checkpoints.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    RUN_FILE,
    CheckpointError,
    check_base,
    check_checkpoint,
    check_no_file,
    check_tokenizer,
    context_length,
    stock_loading,
    weight_files,
    weights_format_of,
)
from qerl.data.hub import hub_unreachable
from qerl.data.sources import GIVEN, Given, GivenData, given, is_given, local_dataset, parse_run
from qerl.formats.group_size import GROUP_SIZE
from qerl.host.console import console, log, quiet
from qerl.host.imports import check as check_function
from qerl.host.imports import check_engine, check_installed, check_trackers, check_unchanged, path_of
from qerl.host.lease import alone, join_free_memory
from qerl.host.nodes import own_lock
from qerl.host.provenance import check_writable, write_text, writing
from qerl.jobs import HubBase
from qerl.results.paths import (
    CHECKPOINT,
    DATA,
    DATASET,
    LOG,
    MERGED,
    METRICS,
    OUTCOMES,
    POLICY,
    REPORT,
    RESULT,
    RUN,
    SAMPLES,
    WORK,
)
from qerl.results.schema import (
    Dose,
    MergedExport,
    OwnEvaluationResult,
    PreparedDataset,
    Provenance,
    RunResult,
    SampleRow,
    StepMetrics,
)
from qerl.results.store import read, read_rows, write
from qerl.settings.base import (
    ConfigError,
    check_count,
    check_kind,
    check_seed,
    check_unicode,
    parse,
    path_argument,
    read_yaml,
)
from qerl.settings.data import AnswerForm, DatasetSettings, FunctionData, LocalData, Split
from qerl.settings.models import Base, MergedFormat
from qerl.settings.run import UNDECIDING, EngineSettings, RunFile, SamplingSettings
from qerl.settings.workflow import STOCK_TASKS, EvaluationSettings, StockTask, TaskSettings, harness_of
from qerl.workflow.prepare import INPUTS, check_inputs, make_base, make_data, tell_reward, train_job, whole

if TYPE_CHECKING:
    import pandas as pd
    from huggingface_hub import HfApi

    from qerl.evals.policy import Drawn
    from qerl.models.policy import Policy
    from qerl.publishing import BaseModel, Published, RunFacts, RunScore
    from qerl.results.statistics import Interval


# Models by hand: a folder, or a model of the hub, and its quantization.

PathLike = str | Path


Packed = Literal["nvfp4", "mxfp4", "nf4"]


Dtype = Literal["float32", "bfloat16"]


MAIN_BRANCH = "main"


HUB_MODEL = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def quantize(model: PathLike, out: PathLike, weights: Packed = "nvfp4", pack_delta_nets: bool = False) -> Path:
    """Write the dense `model` into the new folder `out` in 4 bits, with report.json on size and error.

    `pack_delta_nets` packs the delta nets of a hybrid too, which otherwise stay bfloat16.
    The format is that of compressed-tensors (NVFP4, MXFP4) or bitsandbytes (NF4): Transformers and vLLM load it.
    """
    from qerl.workflow.bases import make_checkpoint

    target, given_model = path_argument(out, "out"), path_argument(model, "model")
    if not isinstance(weights, str) or weights not in GROUP_SIZE:
        raise ConfigError(f"weights={weights!r} is no 4-bit format; use one of {', '.join(GROUP_SIZE)}")
    check_installed("train")
    if target.exists():
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    check_writable(target)
    source = base_folder(str(given_model))
    base = Base(str(given_model), weights, packed_nets=pack_delta_nets)
    whole(target, lambda folder: make_checkpoint(base, source, folder, folder / REPORT))
    return target


def model_folder(model: str, check: Callable[[Path], object] | None = None) -> Path:
    """The folder of a model. A model of the hub is downloaded to the hub's cache, if its configuration passes `check`.

    By default its structure is checked.
    """
    if (folder := Path(model)).is_dir():
        return folder
    check_no_file(folder)
    named = HUB_MODEL.fullmatch(model)
    # If the parent folder exists, the name is a misspelt folder and not a model of the hub.
    if named is None or not (named["revision"] or not folder.parent.is_dir()):
        raise CheckpointError(
            f"model folder {model} doesn't exist; give a folder in the hub's layout, or a model of the hub: org/name, "
            "or org/name@revision"
        )
    from qerl.workflow.bases import fetch_model

    with redirect_stderr(console().file):  # the bars of a download belong on the screen
        fetched = fetch_model(named["repo"], named["revision"] or MAIN_BRANCH, check=check)
    log.info("%s of the hub is commit %s", named["repo"], fetched.name)
    return fetched


def base_folder(model: str, weights: str | None = None, check: Callable[[Path], object] | None = None) -> Path:
    """The folder of a base, checked: dense, or in the format `weights` already.

    A model of the hub is downloaded if its configuration passes `check`.
    """
    folder = model_folder(model, check)
    if weights is not None:
        check_weights(folder, weights)
    if weights != weights_format_of(folder):
        check_base(folder)
    else:
        check_checkpoint(folder)
        check_tokenizer(folder)
    return folder


def check_weights(folder: Path, weights: str) -> None:
    """Raise `CheckpointError` unless the configuration in `folder` is that of dense weights, or of the format asked."""
    stored = weights_format_of(folder)
    if stored not in (weights, "bf16"):
        raise CheckpointError(
            f"{folder} is quantized already ({stored}), and the run asks for weights={weights}; set weights={stored}, "
            "which uses it as it is, or give the dense checkpoint"
        )


# Runs by hand: `qerl train`, the folder of a run, and the use of a finished run.


@dataclass(frozen=True)
class Run:
    """A training run in its folder: run.yaml, inputs.json, data, checkpoint, policy, metrics.jsonl, run.json, log."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", path_argument(self.folder, "the folder of a run"))

    @cached_property
    def settings(self) -> RunFile:
        """The settings in run.yaml, with all defaults."""
        return _read_run(self.folder / RUN_FILE, self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run was trained to its last step."""
        return (self.folder / RUN).is_file()

    @property
    def checkpoint(self) -> Path:
        """The base in the run's weight format, which is a link if the model already had that format."""
        return self.folder / CHECKPOINT

    @property
    def adapter(self) -> Path:
        """The trained tensors: an adapter in PEFT's layout, or a whole model after method=full."""
        return self.folder / POLICY

    @property
    def data(self) -> Path:
        """The prepared problems: train.jsonl, validation.jsonl, test.jsonl, dataset.json."""
        return self.folder / DATA

    @property
    def metrics(self) -> pd.DataFrame:
        """One row per finished step: reward and its parts, loss, entropy, lengths, ..."""
        import pandas as pd

        # During training the metrics are beside the checkpoints.
        candidates = [self.folder / METRICS, *self.folder.glob(f"{WORK}/*/{METRICS}")]
        metrics_files = [file for file in candidates if file.is_file()]
        if not metrics_files:
            raise ConfigError(
                f"{self.folder} has no metrics: none of its steps is finished; train it with `qerl train`"
                if (self.folder / RUN_FILE).is_file()
                else f"{self.folder} is not the folder of a run: it has no {RUN_FILE}"
            )
        latest = max(metrics_files, key=lambda file: file.stat().st_mtime_ns)
        return pd.DataFrame([row.content() for row in read_rows(StepMetrics, latest)])

    @cached_property
    def policy(self) -> Policy:
        """The trained policy, loaded on first use."""
        return load(self.folder)


def train(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None = None, *, log_to_file: bool = False
) -> Run:
    """Prepare the problems, fetch and quantize the model, and train it. `out` overrides the `out` of `run`.

    `run` is a `RunFile`, its values, or a YAML file with them. Among values, `dataset` (or its `origin`) may be the
    records themselves: a list, a generator, a function or a `datasets.Dataset`. A mapping from splits to these works
    too, and `reward.function` may be a function of a module. Finished parts are kept: a killed run continues where it
    stopped, and a finished run does nothing. A part that was made of other files, functions or code is made anew. A
    finished run whose inputs have changed is refused with a `ConfigError` that names them.

    With `log_to_file`, all that the process and its libraries print goes to log.txt in the run's folder. The screen
    shows progress and the project's own lines.
    """
    values, records = _without_objects(run, out)
    settings = _read_run(values, out)
    made = Run(settings.out)
    _check_same(made.folder, settings)
    if made.finished:
        records.write(replace=False)
        check_inputs(made.settings)
        log.info("%s is finished: nothing to do", made.folder)
        return made
    check_writable(made.folder)
    with quiet(made.folder / LOG) if log_to_file else nullcontext(), writing(made.folder):
        source = _checked_source(settings)
        if settings.joins_free_memory:
            join_free_memory()
        from qerl.rl.train import train_run
        from qerl.workflow.preflight import check_runs

        with alone(made.folder / WORK, own_lock(settings.nodes)):
            # Machines may share the folder, and torchrun's processes do: one after the other finds what is made.
            with FileLock(made.folder / WORK / "parts"):
                records.write()
                _write_run_file(settings)
                make_data(settings)
                check_runs(source, [(made.data, settings.rollout)])
                make_base(settings, source)
                tell_reward(settings)
            train_run(train_job(made.settings, _hub_base(made)))
    return made


def _checked_source(settings: RunFile) -> Path:
    """The folder of the model, after all checks that need no work; of a model of the hub config.json comes first."""
    import torch

    from qerl.rl.parallel import check_processes

    if not torch.is_grad_enabled():
        raise ConfigError(
            "training needs gradients, which torch.inference_mode() or torch.no_grad() turns off here; call it outside"
        )
    check_processes(settings.processes, settings.nodes)
    if settings.reward.function is not None:
        check_function(settings.reward.function, "reward.function")
        check_unchanged(settings.reward.function)
    if isinstance(settings.dataset.origin, FunctionData):
        check_function(settings.dataset.origin.function, "origin.function")
        check_unchanged(settings.dataset.origin.function)
    check_engine(settings.rollout, "rollout.engine")
    check_trackers(settings.track, "track")
    source = base_folder(settings.model, settings.weights, lambda folder: _check_config(folder, settings))
    if weights_format_of(source) != settings.weights:
        check_installed("train")
    elif key := "recipe" if settings.recipe == "awq" else "pack_delta_nets" if settings.pack_delta_nets else None:
        asked = f"{key}={str(getattr(settings, key)).lower()}"
        raise ConfigError(f"{asked} quantizes a dense model, and {source} is quantized already; leave {key} out")
    _check_config(source, settings)
    return source


def _check_config(folder: Path, settings: RunFile) -> None:
    """Check the configuration of a model with the settings."""
    from qerl.workflow.preflight import check_settings  # after the checks that need no large library

    check_weights(folder, settings.weights)
    check_settings(folder, settings.settings)


def _without_objects(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None
) -> tuple[RunFile | Mapping[str, Any] | PathLike, Given]:
    """The settings with Python objects in them replaced: records by files that are still to be written."""
    if not isinstance(run, Mapping):
        return run, Given(None, {})
    values, folder = dict(run), run.get("out") if out is None else out
    if isinstance(reward := values.get("reward"), Mapping) and callable(reward.get("function")):
        values["reward"] = {**reward, "function": path_of(reward["function"], "reward.function")}
    if is_given(values.get("dataset")) and not isinstance(folder, (str, Path)):
        raise ConfigError(f"run: `out` must be the path of a new folder for all that the run makes, not {folder!r}")
    if "dataset" not in values or not isinstance(folder, (str, Path)):
        return values, Given(None, {})  # which is no run, as its fields will say
    records = given(values["dataset"], Path(folder).resolve())
    return {**values, "dataset": records.values}, records


def _read_run(run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None) -> RunFile:
    if isinstance(run, RunFile):
        values, where = {name: getattr(run, name) for name in RunFile.model_fields}, "run"
    elif isinstance(run, Mapping):
        values, where = dict(run), "run"
    elif isinstance(run, (str, PathLike)):
        if (stored := Path(run) / RUN_FILE).is_file():
            raise ConfigError(f"{run} is the folder of a run; go on with its file: qerl train {stored}")
        values, where = read_yaml(Path(run)), str(run)
        check_kind(values, where, of_run=True)
        if _is_stored(Path(run), values):
            return _read_run(_where_it_is(parse_run(values, where), Path(run).resolve().parent), out)
    else:
        raise ConfigError(f"a run is a RunFile, a mapping of its keys or a path of a YAML file, not {run!r}")
    return parse_run({**values, **({} if out is None else {"out": out})}, where)


def _is_stored(file: Path, values: Mapping[str, Any]) -> bool:
    """Whether a file is the one that a run keeps in its folder, with every key, and not one that a user wrote."""
    return file.name == RUN_FILE and file.with_name(INPUTS).is_file() and values.keys() >= RunFile.model_fields.keys()


def _where_it_is(stored: RunFile, folder: Path) -> RunFile:
    """The stored settings of a run in its present folder, with records of Python there, as a folder may be moved."""
    dataset, origin = stored.dataset, stored.dataset.origin
    if isinstance(origin, LocalData) and origin.path.is_relative_to(stored.out / GIVEN):
        path = folder / origin.path.relative_to(stored.out)
        dataset = dataset.model_copy(update={"origin": origin.model_copy(update={"path": path})})
    return stored.model_copy(update={"out": folder, "dataset": dataset})


def _check_same(folder: Path, settings: RunFile) -> None:
    """Refuse a folder that belongs to another run."""
    if not (folder / RUN_FILE).is_file():
        # Killed while it was written, run.yaml is there under a name of its own.
        begun = {WORK, GIVEN, LOG, f"{RUN_FILE}.partial"}
        if folder.exists() and (not folder.is_dir() or {f.name for f in folder.iterdir()} - begun):
            raise ConfigError(f"{folder} exists and is not the folder of a run; give a new folder as `out`")
        return
    if not _trained(Run(folder)):  # a start that failed: settings may still be corrected
        return
    import pandas as pd

    stored, asked = (
        pd.json_normalize(s.model_dump(mode="json", exclude=UNDECIDING)).loc[0].to_dict()
        for s in (Run(folder).settings, settings)
    )
    for key in {**asked, **stored}:
        if stored.get(key) != asked.get(key):
            raise ConfigError(
                f"{folder} holds a run with other settings ({key}: {stored.get(key)} there, {asked.get(key)} here); "
                "give another folder as `out`, or delete this one"
            )


def _trained(run: Run) -> bool:
    """Whether at least one step of the run is done."""
    return run.finished or any(run.folder.glob(f"{WORK}/*/{METRICS}"))


def _write_run_file(settings: RunFile) -> None:
    write_text(settings.out / RUN_FILE, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))


def _hub_base(run: Run) -> HubBase | None:
    """Name and revision of the base, where it is one of the hub as it is there; one quantized here is a folder."""
    named = HUB_MODEL.fullmatch(run.settings.model)
    if named is None or Path(run.settings.model).is_dir() or (run.checkpoint / REPORT).exists():
        return None
    return HubBase(name=named["repo"], revision=named["revision"] or MAIN_BRANCH)


def check_finished(run: Run) -> None:
    """Raise `ConfigError` unless the folder is that of a run which was trained to its last step."""
    if not (run.folder / RUN_FILE).is_file():
        raise ConfigError(f"{run.folder} is not the folder of a run: it has no {RUN_FILE}")
    if not run.finished:
        raise ConfigError(f"{run.folder} isn't finished; go on with `qerl train {run.folder / RUN_FILE}`")


def load(model: PathLike, dtype: Dtype | None = None) -> Policy:
    """A policy to sample from and to evaluate: a checkpoint as it is, or a finished run's adapter on its checkpoint.

    `dtype` is that of activations and dense weights; by default a run's own, else bfloat16.
    """
    if dtype not in (None, *get_args(Dtype)):
        raise ConfigError(f"dtype={dtype!r} isn't supported; use {' or '.join(get_args(Dtype))}")
    folder = path_argument(model, "a model or a run")
    run = Run(folder) if (folder / RUN_FILE).is_file() else None
    if run:
        check_finished(run)
    checkpoint = run.checkpoint if run else model_folder(str(folder))
    check_checkpoint(checkpoint)
    check_tokenizer(checkpoint)
    from qerl.data.prompts import check_template
    from qerl.models.policy import load_policy

    policy = load_policy(checkpoint, run.adapter if run else None, dtype or (run.settings.dtype if run else "bfloat16"))
    check_template(policy.tokenizer, policy.lm.config.vocab_size)
    return policy


# Samples and evaluations by hand.

Problems = PathLike | Mapping[str, Any] | DatasetSettings | GivenData


def sample(
    policy: Policy | PathLike,
    prompts: Iterable[str],
    *,
    count: int = 1,
    seed: int = 0,
    instruction: str | None = None,
    date: datetime.date | None = None,
    **sampling: float,
) -> list[list[Drawn]]:
    """Draw `count` completions of each prompt; each has `text`, `tokens` (how many) and `finished`.

    `policy` is what `load` returns, or the model or run that `load` takes. A prompt becomes a user's message, with
    `instruction` on a line of its own, in the policy's chat template, which may state `date` (by default today's). The
    defaults of both are those of the run, if `policy` is the folder of one. In `text`, thinking stands between
    `<think>` and `</think>`. `sampling`: temperature, top_p, top_k, max_tokens, with the defaults of
    `SamplingSettings`. Raises `ConfigError` for prompts that aren't strings, such as chats.
    """
    from qerl.data.prompts import prompt_ids
    from qerl.evals.policy import EvaluatedPolicy
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
    check_seed(seed)
    asked = "" if instruction is None else instruction
    if isinstance(policy, (str, Path)):
        of_run = asked_by(policy)
        asked = of_run.get("instruction", "") if instruction is None else asked
        date = date or of_run.get("date")
        policy = load(policy)
    _check_policy(policy)
    params = SamplingParams(**settings.model_dump(), count=count, seed=seed)
    ids = [prompt_ids(policy.tokenizer, prompt, asked, date) for prompt in texts]
    context = context_length(policy.lm.config.to_dict())
    return EvaluatedPolicy(make_sampler(policy, EngineSettings()), policy.tokenizer, params, context).draw(ids)


def asked_by(model: PathLike) -> dict[str, Any]:
    """What a run's data set asks for: instruction, form of answers, and the date that chat templates state.

    A model that isn't a run has none.
    """
    from qerl.data.sources import read_meta

    if not (Path(model) / RUN_FILE).is_file():
        return {}
    run = Run(Path(model))
    asked = run.settings.dataset.asked
    return {**asked, "date": read_meta(run.data).date} if run.data.is_dir() else asked


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
        [score] = read(OwnEvaluationResult, self.folder / RESULT).tasks.values()
        return score.content()

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row per completion: problem, repeat, prompt, completion, extracted, gold, correct, tokens, finished."""
        import pandas as pd

        return pd.DataFrame([row.content() for row in read_rows(SampleRow, self.folder / SAMPLES)])

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
    **sampling: float,
) -> Evaluation:
    """Score a policy by the harness of the record format: lm-eval (gsm8k), lighteval (math, aime) or the own grader.

    `policy` is what `sample` takes.

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
    from qerl.data.sources import read_meta
    from qerl.evals.evaluate import score_policy

    if not isinstance(policy, (str, Path)):
        _check_policy(policy)
    folder = path_argument(out, "out")
    check_unicode(instruction or "", "instruction")
    if isinstance(units, str) or not (units is None or isinstance(units, Iterable)):
        raise ConfigError(f"units must be a list of words and signs, not {units!r}")
    of_call = {
        "instruction": instruction,
        "answer": answer,
        "units": None if units is None else [*units],
        "thinking": thinking,
        "date": date,
    }
    asked = {key: value for key, value in of_call.items() if value is not None}
    if isinstance(task, str):
        task = stock_task(task)
    if task and task.task and (instruction or units or answer not in (None, "native")):
        raise ConfigError(
            f"task {task.task} has a prompt and a form of answers of its own; leave out instruction, answer and units"
        )
    check_evaluation(problems, folder, task)
    if isinstance(policy, (str, Path)):
        asked = asked if task and task.task else {**asked_by(policy), **asked}
        policy = load(policy)
    with writing(folder):
        data = _problem_folder(problems, asked, folder)
    dtype = str(policy.lm.dtype).removeprefix("torch.")
    scored = task.model_dump() if task else {"harness": harness_of(read_meta(data).format)}
    settings = _evaluation_settings({**scored, "dataset": _TASK}, repeats, seed, dtype, sampling)
    about = {"model": policy.tokenizer.name_or_path, "adapter": policy.peft is not None}
    row = {"eval": folder.name, **about, "settings": settings.model_dump(mode="json")}
    with writing(folder):
        score_policy(policy, settings, row, {_TASK: data}, folder)
    return Evaluation(folder)


def measure_dose(
    model: PathLike,
    problems: Problems,
    *,
    weights: Packed = "nvfp4",
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
        packed = quantize(model, folder / "packed", weights)
        exact, rounded = load(model, dtype), load(packed, dtype)
        task = {"dataset": _TASK, "harness": "qerl"}
        settings = _evaluation_settings(task, completions, seed, dtype, {"max_tokens": max_tokens})
        # The engine's cache is freed before the models are compared.
        native = settings.native.model_copy(update={"sleep": True})
        from qerl.evals.divergence import Assay

        assay = Assay(exact, data, settings.model_copy(update={"native": native}), count)
        return {sigma: assay.dose(rounded, sigma) for sigma in (0.0, *sigmas)}


_TASK = "problems"


def check_evaluation(problems: Problems, out: PathLike, task: TaskSettings | None = None) -> None:
    """Raise `ConfigError` for an impossible evaluation, before a policy is loaded."""
    if problems is None:
        raise ConfigError("nothing to evaluate on: `problems` must be records, or a file or folder of them")
    folder = path_argument(out, "out")
    if (folder / RESULT).exists():
        raise ConfigError(f"{folder} holds an evaluation already; give another folder as `out`")
    # Files of a killed evaluation.
    left = {DATA, GIVEN, f".{DATA}.partial", SAMPLES, OUTCOMES, f"{RESULT}.partial"}
    others = {file.name for file in folder.iterdir()} - left if folder.is_dir() else set()
    data = folder / DATA
    if others or (folder.exists() and not folder.is_dir()) or (data.exists() and not (data / DATASET).is_file()):
        raise ConfigError(f"{folder} exists and is not the folder of an evaluation; give a new folder as `out`")
    check_writable(folder)
    asks_all = isinstance(problems, (str, Path)) and Path(problems).is_file()
    if task and task.task == "gsm8k" and task.fewshot != 0 and asks_all:
        raise ConfigError(
            f"task gsm8k shows {task.fewshot or 5} solved problems of a training split, and {problems} is all asked; "
            "set fewshot to 0 (--fewshot 0), or give a data set with both splits"
        )


def stock_task(name: str, **settings: Any) -> TaskSettings:
    """The settings of a stock task."""
    if name not in STOCK_TASKS:
        raise ConfigError(f"there is no stock task {name!r}; use one of {', '.join(STOCK_TASKS)}")
    harness, _ = STOCK_TASKS[name]  # type: ignore[index]
    return parse(TaskSettings, {"dataset": _TASK, "harness": harness, "task": name, **settings}, "task")


def _evaluation_settings(
    task: Mapping[str, Any], repeats: int | None, seed: int, dtype: str, sampling: Mapping[str, float]
) -> EvaluationSettings:
    default: SamplingSettings = EvaluationSettings.model_fields["sampling"].default
    values: dict[str, Any] = {
        "tasks": [task],
        "sampling": {**default.model_dump(), **sampling},
        "dtype": dtype,
        "seed": seed,
    }
    return parse(EvaluationSettings, values if repeats is None else {**values, "repeats": repeats}, "evaluation")


def _problem_folder(problems: Problems, asked: Mapping[str, Any], out: Path) -> Path:
    """A folder of prepared problems: the given folder, or one that is made in `out`."""
    from qerl.data.sources import prepare

    records = given(problems, out)
    records.write()
    # All records of a list are asked, as those of a file.
    as_file = records.files and not isinstance(problems, Mapping)
    asked_of: Any = records.values["origin"]["path"] if as_file else records.values
    if isinstance(asked_of, (str, Path)) and (Path(asked_of) / DATASET).is_file():
        return Path(asked_of)
    if isinstance(asked_of, DatasetSettings):
        settings = asked_of
    elif isinstance(asked_of, Mapping):
        settings = parse(DatasetSettings, asked_of, "problems")
    else:
        all_of_it = {} if Path(asked_of).is_dir() else {"validation_fraction": 0, "test_fraction": 1}
        values = {**local_dataset(Path(asked_of), **all_of_it), **asked}
        settings = parse(DatasetSettings, values, "problems")
    shutil.rmtree(out / DATA, ignore_errors=True)
    whole(out / DATA, lambda folder: prepare(settings, folder))
    return out / DATA


# Exports of finished runs: a base with an adapter for stock vLLM, or one checkpoint with its measured loss.

#: The most problems on which the loss of a merge is measured.
LOSS_PROBLEMS = 64


def export(run: PathLike, out: PathLike) -> Path:
    """Write a finished run's policy into the new folder `out` for stock vLLM: a checkpoint `base`, a LoRA `adapter`.

    Trained norms, which no engine takes as an adapter, are in the base, in float32: an engine that computes in 16 bits
    rounds them as it loads them.
    """
    trained, target = _with_adapter(run), path_argument(out, "out")
    check_writable(target)
    check_checkpoint(trained.checkpoint)
    from qerl.models.export import export as write_parts

    write_parts(trained.checkpoint, trained.adapter, target)
    return target


def export_merged(
    run: PathLike,
    out: PathLike,
    weights: MergedFormat = "bf16",
    *,
    problems: int = LOSS_PROBLEMS,
    split: Split = "validation",
) -> MergedExport:
    """Merge a finished run's policy into one checkpoint in the new folder `out`, and measure what that costs.

    All tensors are bfloat16; with `nvfp4` the linear layers of the blocks are then rounded to NVFP4. `problems` of the
    run's `split` are asked (`qerl.results.schema.MergeLoss`). The loss is in merged.json and in the card.
    Both models are in memory for it.
    """
    trained, target = _with_adapter(run), path_argument(out, "out")
    if weights != "bf16":
        check_installed("train")
    if target.exists():
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    check_writable(target)
    check_checkpoint(trained.checkpoint)
    _check_asked(trained, split, problems)
    whole(target, lambda folder: _write_merged(trained, folder, weights, split, problems))
    return read(MergedExport, target / MERGED)


def _with_adapter(run: PathLike) -> Run:
    """The finished run, which has an adapter."""
    trained = Run(path_argument(run, "run"))
    check_finished(trained)
    if trained.settings.method == "full":
        raise ConfigError(f"{run} was trained in full: {trained.adapter} is a checkpoint already, which vLLM loads")
    return trained


def _check_asked(run: Run, split: Split, problems: int) -> None:
    from qerl.data.sources import read_meta

    check_count(problems, "problems")
    rows = read_meta(run.data).rows
    if not rows[split]:
        others = ", ".join(name for name in ("validation", "test") if rows[name])  # type: ignore[index]
        raise ConfigError(f"{run.data} has no {split} problems to measure on; give another split ({others})")


def _write_merged(run: Run, folder: Path, weights: MergedFormat, split: Split, problems: int) -> None:
    from qerl.evals.divergence import merge_loss
    from qerl.models.adapter_files import CARD
    from qerl.models.export import merge
    from qerl.publishing import merged_card

    merge(run.checkpoint, run.adapter, folder, weights)
    policies = load(run.folder), load(folder, run.settings.dtype)
    settings = run.settings
    loss = merge_loss(*policies, run.data, _loss_settings(run, split), problems)
    made = MergedExport(
        run=run.folder.resolve().name,
        base_weights=settings.weights,
        weights=weights,
        size_bytes=sum(path.stat().st_size for path in weight_files(folder)),
        loss=loss,
        provenance=Provenance.of_now(),
    )
    write(folder / MERGED, made)
    write_text(folder / CARD, merged_card(facts_of(run), made, folder.name))


def _loss_settings(run: Run, split: Split) -> EvaluationSettings:
    """The default evaluation, with the run's length of completions and dtype, by the grader of training."""
    default: EvaluationSettings = EvaluationSettings(tasks=[TaskSettings(dataset=_TASK, harness="qerl", split=split)])
    sampling = default.sampling.model_copy(update={"max_tokens": run.settings.rollout.sampling.max_tokens})
    native = default.native.model_copy(update={"sleep": True})  # the other model needs the memory of a sampler's cache
    return default.model_copy(update={"sampling": sampling, "native": native, "dtype": run.settings.dtype})


# Publishing of a finished run on the hub: its adapter with a card, scores and metrics.


def publish(
    run: PathLike,
    repo: str,
    *,
    evaluations: Sequence[PathLike] = (),
    private: bool | None = None,
    dry_run: bool = False,
    hub: HfApi | None = None,
) -> Published:
    """Upload a finished run's adapter, card, metrics and scores to the repository `repo` of the hub (`user/name`).

    `evaluations` are folders of `qerl eval`; by default those within the run's folder. A new repository is private
    unless `private` is False; one that is there stays as it is. `dry_run` uploads nothing, and needs neither login nor
    network. Folders of this machine are published by their last name only. Raises `ConfigError` if the run isn't
    finished, the hub can't be reached, nobody is logged in, or a file would tell a path of this machine or a token.
    """
    from huggingface_hub import HfApi

    from qerl.publishing import check_folder, upload

    trained = Run(path_argument(run, "run"))
    check_finished(trained)
    if HUB_MODEL.fullmatch(repo) is None or "@" in repo:
        raise ConfigError(f"{repo!r} names no repository of the hub; give it as user/name")
    unreachable = None if hub else hub_unreachable()
    if unreachable and not dry_run:
        raise ConfigError(f"{repo} wasn't uploaded: {unreachable}; start again when the hub can be reached")
    hub = hub or HfApi()
    facts = facts_of(trained, [*map(Path, evaluations)], None if unreachable else hub)
    with TemporaryDirectory() as scratch:
        _stage(trained, facts, repo, Path(scratch))
        check_folder(Path(scratch))
        return upload(hub, repo, Path(scratch), private, _notes(facts), dry_run)


def facts_of(run: Run, evaluations: Sequence[Path] = (), hub: HfApi | None = None) -> RunFacts:
    """What a card tells of a run, with its evaluations: those in the folders given, or all in the run's folder.

    The licence of a base that is a folder is looked up there, that of a repository on `hub`.
    """
    from qerl.publishing import RunFacts

    return RunFacts(
        run=read(RunResult, run.folder / RUN),
        base=_base(run, hub),
        data=read(PreparedDataset, run.data / DATASET),
        stock=stock_loading(run.checkpoint),
        scores=[*_scores(run, evaluations)],
    )


def _base(run: Run, hub: HfApi | None) -> BaseModel:
    from qerl.publishing import BaseModel, license_of

    as_it_is = not (run.checkpoint / REPORT).exists()
    named = HUB_MODEL.fullmatch(run.settings.model)
    if named is None:  # run.yaml has the absolute path of a folder
        folder = Path(run.settings.model)
        return BaseModel(folder.name, False, None, as_it_is, license_of(folder, hub))
    return BaseModel(named["repo"], True, named["revision"], as_it_is, license_of(named["repo"], hub))


def _scores(run: Run, evaluations: Sequence[Path]) -> Iterator[RunScore]:
    for folder in evaluations or sorted(file.parent for file in run.folder.glob(f"*/{RESULT}")):
        result = read(OwnEvaluationResult, folder / RESULT)
        trained = _is_trained(run, result)
        if trained is not None:
            yield from _scores_of(run, folder, result, trained)
        elif evaluations:
            raise ConfigError(f"{folder} evaluates {result.model}, which is not {run.folder}; give its own evaluations")


def _is_trained(run: Run, result: OwnEvaluationResult) -> bool | None:
    """Whether an evaluation is of the run's policy (True) or of its base (False); None if it is of neither."""
    place = Path(result.model).parts[-2:]
    if place == (run.folder.resolve().name, CHECKPOINT):
        return result.adapter
    return True if place == (run.folder.resolve().name, POLICY) else None


def _scores_of(run: Run, folder: Path, result: OwnEvaluationResult, trained: bool) -> Iterator[RunScore]:
    from qerl.publishing import RunScore, data_name

    evaluation = Evaluation(folder)
    data = _asked(run, folder, set(evaluation.samples["problem"]))
    for score in result.tasks.values():
        label = data_name(data) if data else result.eval
        yield RunScore(label, trained, score, evaluation.accuracy, data, result.provenance)


def _asked(run: Run, folder: Path, problems: set[str]) -> PreparedDataset | None:
    """The data set of an evaluation: its own, or the run's if just the test problems of that were asked."""
    from qerl.data.sources import read_split

    if (folder / DATA / DATASET).is_file():
        return read(PreparedDataset, folder / DATA / DATASET)
    held_out = {problem.id for problem in read_split(run.data, "test")}
    return read(PreparedDataset, run.data / DATASET) if problems == held_out else None


def _stage(run: Run, facts: RunFacts, repo: str, folder: Path) -> None:
    """Fill the folder with what is uploaded; weights are links to the run's own files."""
    from qerl.models.adapter_files import CARD
    from qerl.publishing import model_files, own_file, run_card

    texts = {CARD: run_card(facts, repo)}
    if run.settings.method == "full":
        for file in model_files(run.folder, run.adapter, ours=(CARD, METRICS)):  # which are written here
            os.symlink(file, folder / file.name)
    else:
        os.symlink(own_file(run.folder, run.adapter / ADAPTER), folder / ADAPTER)
        texts[ADAPTER_CONFIG] = _config(run, facts.base)
    shutil.copyfile(own_file(run.folder, run.folder / METRICS), folder / METRICS)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _config(run: Run, base: BaseModel) -> str:
    """PEFT's adapter_config.json, in which the base has its public name."""
    from qerl.publishing import own_file

    config = json.loads(own_file(run.folder, run.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return json.dumps({**config, "base_model_name_or_path": base.name, "revision": base.revision}, indent=2) + "\n"


def _notes(facts: RunFacts) -> list[str]:
    """What a person should know of before others read it."""
    from qerl.publishing import data_name

    notes = []
    if not facts.base.on_hub:
        notes.append(f"the base is told by the name of its folder, {facts.base.name}, without its path")
    if facts.data.origin["source"] in ("local", "python"):
        notes.append(f"the data set is told by its name, {data_name(facts.data)}; its problems are not published")
    if not facts.base.license:
        notes.append(f"the licence of {facts.base.name} isn't known here, so the card states none")
    if not facts.scores:
        notes.append("no evaluation of this run was found, so the card has no scores; name one with --evaluation")
    return notes


# The library: quantize, train, load, sample, evaluate. The command line calls these functions.
#
# A model is a folder in the hub's layout, the folder of a finished run, or `org/name` of the hub. `@revision` after the
# name takes another revision than the main branch. Mistakes raise a `ValueError` of one sentence before anything long
# starts.

__all__ = [
    "LOSS_PROBLEMS",
    "Dtype",
    "Evaluation",
    "MergedFormat",
    "Packed",
    "PathLike",
    "Problems",
    "Run",
    "Split",
    "asked_by",
    "check_evaluation",
    "evaluate",
    "export",
    "export_merged",
    "load",
    "publish",
    "quantize",
    "sample",
    "stock_task",
    "train",
]
