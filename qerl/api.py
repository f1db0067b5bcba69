"""The library: quantize, train, load, sample, evaluate. The command line calls these functions.

A model is a folder in the hub's layout, the folder of a finished run, or `org/name` of the hub. `@revision` after the
name takes another revision than the main branch. Mistakes raise a `ValueError` of one sentence before anything long
starts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from qerl.checkpoints.context import context_length
from qerl.checkpoints.folder import (
    RUN_FILE,
    CheckpointError,
    check_base,
    check_checkpoint,
    check_tokenizer,
    weights_format_of,
)
from qerl.data.by_hand import local_dataset, parse_run
from qerl.data.given import GIVEN, Given, GivenData, given
from qerl.evals import RESULT, SAMPLES
from qerl.formats.group_size import GROUP_SIZE
from qerl.host.gpu_lease import alone
from qerl.host.imports import check_engine, check_installed
from qerl.host.plugins import check as check_function
from qerl.host.plugins import check_unchanged, path_of
from qerl.host.progress import log
from qerl.jobs.train import HubBase, TrainJob
from qerl.prepare.run_parts import CHECKPOINT, DATA, REPORT, check_inputs, make_base, make_data, tell_reward, whole
from qerl.provenance.files import check_writable, write_text
from qerl.settings.base import ConfigError, check_seed, parse
from qerl.settings.data import AnswerForm, DatasetSettings, FunctionData
from qerl.settings.evaluation import STOCK_TASKS, EvaluationSettings, StockTask, TaskSettings, harness_of
from qerl.settings.reading import read_yaml
from qerl.settings.rollout import EngineSettings, SamplingSettings
from qerl.settings.run import UNDECIDING, RunFile

if TYPE_CHECKING:
    import pandas as pd

    from qerl.evals.policy import Drawn
    from qerl.policy.policy import Policy
    from qerl.results.intervals import Interval

PathLike = str | Path
Packed = Literal["nvfp4", "mxfp4", "nf4"]
Dtype = Literal["float32", "bfloat16"]
Problems = PathLike | Mapping[str, Any] | DatasetSettings | GivenData

METRICS = "metrics.jsonl"
#: The state of a run that isn't finished, in its folder.
WORK = "work"


# --- a run -----------------------------------------------------------------------------------------------------------


_MAIN = "main"
_OF_THE_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Run:
    """A training run in its folder: run.yaml, inputs.json, data, checkpoint, policy, metrics.jsonl, run.json."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))

    @cached_property
    def settings(self) -> RunFile:
        """Its run.yaml, every setting resolved."""
        return _read_run(self.folder / RUN_FILE, self.folder)

    @property
    def finished(self) -> bool:
        """Whether it was trained to its last step."""
        return (self.folder / "run.json").is_file()

    @property
    def checkpoint(self) -> Path:
        """The base in the run's format. It is a link if the model had that format already."""
        return self.folder / CHECKPOINT

    @property
    def adapter(self) -> Path:
        """The trained tensors: an adapter in PEFT's layout, or a whole model after method=full."""
        return self.folder / "policy"

    @property
    def data(self) -> Path:
        """The prepared problems: train.jsonl, validation.jsonl, test.jsonl, dataset.json."""
        return self.folder / DATA

    @property
    def metrics(self) -> pd.DataFrame:
        """One row a step, of an unfinished run those so far: reward and its parts, loss, entropy, lengths, ..."""
        import pandas as pd

        # While it is trained, they lie beside its checkpoints.
        found = [self.folder / METRICS, *self.folder.glob(f"{WORK}/*/{METRICS}")]
        there = [file for file in found if file.is_file()]
        if not there:
            raise ConfigError(
                f"{self.folder} has no metrics: none of its steps is finished; train it with `qerl train`"
                if (self.folder / RUN_FILE).is_file()
                else f"{self.folder} is not the folder of a run: it has no {RUN_FILE}"
            )
        return pd.read_json(max(there, key=lambda file: file.stat().st_mtime_ns), lines=True)

    @cached_property
    def policy(self) -> Policy:
        """The trained policy, loaded on first use."""
        return load(self.folder)


def train(run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None = None) -> Run:
    """Prepare the problems, fetch and quantize the model, and train it. `out` overrides the `out` of `run`.

    `run` is a `RunFile`, its values, or a YAML file with them. Among values, `dataset` (or its `origin`) may be the
    records themselves: a list, a generator, a function or a `datasets.Dataset`. A mapping from splits to these works
    too, and `reward.function` may be a function of a module. Finished parts are kept: a killed run continues where it
    stopped, and a finished run does nothing. A part that was made of other files, functions or code is made anew. A
    finished run whose inputs have changed is refused with a `ConfigError` that names them.
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
    from qerl.prepare.preflight import check_runs
    from qerl.rl.data_parallel import check_processes

    check_processes(settings.processes)
    if settings.reward.function is not None:
        check_function(settings.reward.function, "reward.function")
        check_unchanged(settings.reward.function)
    if isinstance(settings.dataset.origin, FunctionData):
        check_function(settings.dataset.origin.function, "origin.function")
        check_unchanged(settings.dataset.origin.function)
    check_engine(settings.rollout, "rollout.engine")
    source = _source(settings.model, settings.weights)
    if weights_format_of(source) != settings.weights:
        check_installed("train")
    elif settings.recipe == "awq":
        raise ConfigError(f"recipe=awq quantizes a dense model, and {source} is quantized already; leave recipe out")
    with alone(made.folder / WORK):
        records.write()
        _write_run_file(settings)
        if not made.checkpoint.exists():  # settings may have been corrected
            shutil.rmtree(made.data, ignore_errors=True)
        make_data(settings)
        check_runs(source, [(made.data, settings.rollout)])
        make_base(settings, source)
        tell_reward(settings)
        _train(made)
    return made


def _without_objects(
    run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None
) -> tuple[RunFile | Mapping[str, Any] | PathLike, Given]:
    """The settings with Python objects in them replaced: records by files that are still to be written."""
    if not isinstance(run, Mapping):
        return run, Given(None, {})
    values, folder = dict(run), run.get("out") if out is None else out
    if isinstance(reward := values.get("reward"), Mapping) and callable(reward.get("function")):
        values["reward"] = {**reward, "function": path_of(reward["function"], "reward.function")}
    if "dataset" not in values or not isinstance(folder, (str, Path)):
        return values, Given(None, {})  # which is no run, as its fields will say
    records = given(values["dataset"], Path(folder).resolve())
    return {**values, "dataset": records.values}, records


def _read_run(run: RunFile | Mapping[str, Any] | PathLike, out: PathLike | None) -> RunFile:
    if isinstance(run, RunFile):
        values, where = {name: getattr(run, name) for name in RunFile.model_fields}, "run"
    elif isinstance(run, Mapping):
        values, where = dict(run), "run"
    else:
        values, where = read_yaml(Path(run)), str(run)
    return parse_run({**values, **({} if out is None else {"out": out})}, where)


def _check_same(folder: Path, settings: RunFile) -> None:
    """Refuse a folder that belongs to another run."""
    if not (folder / RUN_FILE).is_file():
        # Killed while it was written, run.yaml is there under a name of its own.
        begun = {WORK, GIVEN, f"{RUN_FILE}.partial"}
        if folder.exists() and (not folder.is_dir() or {f.name for f in folder.iterdir()} - begun):
            raise ConfigError(f"{folder} exists and is not the folder of a run; give a new folder as `out`")
        return
    if not Run(folder).checkpoint.exists():  # nothing was made that took time: settings may still be corrected
        return
    import pandas as pd

    there, here = (
        pd.json_normalize(s.model_dump(mode="json", exclude=UNDECIDING)).loc[0].to_dict()
        for s in (Run(folder).settings, settings)
    )
    for key in {**here, **there}:
        if there.get(key) != here.get(key):
            raise ConfigError(
                f"{folder} holds a run with other settings ({key}: {there.get(key)} there, {here.get(key)} here); "
                "give another folder as `out`, or delete this one"
            )


def _write_run_file(settings: RunFile) -> None:
    write_text(settings.out / RUN_FILE, yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False))


def _train(run: Run) -> None:
    from qerl.rl.train import train_run

    name = run.folder.name
    job = TrainJob(
        id=name,
        experiment=name,
        arm="run",
        varied={},
        settings=run.settings.settings,
        on_failure="stop",
        time_limit=None,
        base=_hub_base(run),
        checkpoint=run.checkpoint,
        data=run.data,
        work=run.folder / WORK,
        out=run.folder,
    )
    train_run(job)


def _hub_base(run: Run) -> HubBase | None:
    """Name and revision of the base, where it is one of the hub as it is there; one quantized here is a folder."""
    named = _OF_THE_HUB.fullmatch(run.settings.model)
    if named is None or Path(run.settings.model).is_dir() or (run.checkpoint / REPORT).exists():
        return None
    return HubBase(name=named["repo"], revision=named["revision"] or _MAIN)


# --- models ----------------------------------------------------------------------------------------------------------


def quantize(model: PathLike, out: PathLike, weights: Packed = "nvfp4") -> Path:
    """Write the dense `model` into the new folder `out` in 4 bits, with report.json on size and error.

    The format is that of compressed-tensors (NVFP4, MXFP4) or bitsandbytes (NF4): Transformers and vLLM load it.
    """
    from qerl.prepare.base_checkpoint import make_checkpoint

    target = Path(out)
    if weights not in GROUP_SIZE:
        raise ConfigError(f"weights={weights!r} is no 4-bit format; use one of {', '.join(GROUP_SIZE)}")
    check_installed("train")
    if target.exists():
        raise CheckpointError(f"{target} exists already; remove it or give another folder")
    check_writable(target)
    source = _source(str(model))
    whole(target, lambda folder: make_checkpoint(str(model), weights, source, folder, folder / REPORT))
    return target


def export(run: PathLike, out: PathLike) -> Path:
    """Write a finished run's policy into the new folder `out` for stock vLLM: a checkpoint `base`, a LoRA `adapter`.

    Trained norms, which no engine takes as an adapter, are in the base, in float32: an engine that computes in 16 bits
    rounds them as it loads them.
    """
    trained = Run(Path(run))
    _check_finished(trained)
    if trained.settings.method == "full":
        raise ConfigError(f"{run} was trained in full: {trained.adapter} is a checkpoint already, which vLLM loads")
    target = Path(out)
    check_writable(target)
    check_checkpoint(trained.checkpoint)
    from qerl.policy.export import export as write

    write(trained.checkpoint, trained.adapter, target)
    return target


def _check_finished(run: Run) -> None:
    if not (run.folder / RUN_FILE).is_file():
        raise ConfigError(f"{run.folder} is not the folder of a run: it has no {RUN_FILE}")
    if not run.finished:
        raise ConfigError(f"{run.folder} isn't finished; go on with `qerl train {run.folder / RUN_FILE}`")


def load(model: PathLike, dtype: Dtype | None = None) -> Policy:
    """A policy to sample from and to evaluate: a checkpoint as it is, or a finished run's adapter on its checkpoint.

    `dtype` is that of activations and dense weights; by default a run's own, else bfloat16.
    """
    run = Run(Path(model)) if (Path(model) / RUN_FILE).is_file() else None
    if run:
        _check_finished(run)
    checkpoint = run.checkpoint if run else _folder(str(model))
    check_checkpoint(checkpoint)
    check_tokenizer(checkpoint)
    from qerl.data.prompts import check_template
    from qerl.policy.policy import load_policy

    policy = load_policy(checkpoint, run.adapter if run else None, dtype or (run.settings.dtype if run else "bfloat16"))
    check_template(policy.tokenizer, policy.lm.config.vocab_size)
    return policy


def _folder(model: str) -> Path:
    """The folder of a model. A model of the hub is downloaded to the hub's cache."""
    if (folder := Path(model)).is_dir():
        return folder
    named = _OF_THE_HUB.fullmatch(model)
    # Where the folder that it would lie in is there, it is a folder that was misspelt.
    if named is None or not (named["revision"] or not folder.parent.is_dir()):
        raise CheckpointError(
            f"model folder {model} doesn't exist; give a folder in the hub's layout, or a model of the hub: org/name, "
            "or org/name@revision"
        )
    from qerl.prepare.base_checkpoint import fetch_model

    fetched = fetch_model(named["repo"], named["revision"] or _MAIN)
    log.info("%s of the hub is commit %s", named["repo"], fetched.name)
    return fetched


def _source(model: str, weights: str | None = None) -> Path:
    """The folder of a base, checked: dense, or in the format `weights` already."""
    folder = _folder(model)
    if weights is None or weights_format_of(folder) != weights:
        check_base(folder)
    else:
        check_checkpoint(folder)
        check_tokenizer(folder)
    return folder


# --- sampling and evaluation -----------------------------------------------------------------------------------------


def sample(
    policy: Policy, prompts: Sequence[str], *, count: int = 1, seed: int = 0, instruction: str = "", **sampling: float
) -> list[list[Drawn]]:
    """Draw `count` completions of each prompt; each has `text`, `tokens` (how many) and `finished`.

    A prompt becomes a user's message, with `instruction` on a line of its own, in the policy's chat template.
    `sampling`: temperature, top_p, top_k, max_tokens, with the defaults of `SamplingSettings`.
    """
    from qerl.data.prompts import prompt_ids
    from qerl.evals.policy import EvaluatedPolicy
    from qerl.rollout.factory import make_sampler
    from qerl.rollout.sampler import SamplingParams

    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of strings, not one string")
    settings = parse(SamplingSettings, sampling, "sampling")
    check_seed(seed)
    params = SamplingParams(**settings.model_dump(), count=count, seed=seed)
    ids = [prompt_ids(policy.tokenizer, prompt, instruction) for prompt in prompts]
    context = context_length(policy.lm.config.to_dict())
    return EvaluatedPolicy(make_sampler(policy, EngineSettings()), policy.tokenizer, params, context).draw(ids)


@dataclass(frozen=True)
class Evaluation:
    """The outcome of an evaluation in its folder: result.json and samples.jsonl."""

    folder: Path

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The harness and its version, accuracy, accuracy of each repeat, tokens, share of truncated completions."""
        [metrics] = json.loads((self.folder / RESULT).read_text())["tasks"].values()
        return metrics

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row a completion: problem, repeat, prompt, completion, extracted, gold, correct, tokens, finished."""
        import pandas as pd

        text_columns = {"problem": str, "extracted": str, "gold": str}
        return pd.read_json(self.folder / "samples.jsonl", lines=True, dtype=text_columns)

    @property
    def accuracy(self) -> Interval:
        """Mean over problems and repeats, with its 95 % interval over problems."""
        from qerl.results.intervals import accuracy_interval

        by_problem = self.samples.groupby("problem", sort=False)["correct"].mean()
        return accuracy_interval(by_problem.to_numpy(dtype=float)[None])


def evaluate(
    policy: Policy,
    problems: Problems,
    out: PathLike,
    *,
    repeats: int | None = None,
    seed: int = 0,
    instruction: str | None = None,
    answer: AnswerForm = "native",
    units: Sequence[str] = (),
    task: StockTask | TaskSettings | None = None,
    **sampling: float,
) -> Evaluation:
    """Score `policy` by the harness of the record format: lm-eval for gsm8k, lighteval for math and aime.

    `task` names a stock task of the harness, with its prompt, gold answer and metric. As `TaskSettings`, it may also
    set `fewshot`, `chat`, sampling and repeats, which win; its data set is ignored.

    `problems` is a file of records, or records as `train` takes them. All of these are asked, for an answer of the form
    `answer` whose number `units` may follow, and with `instruction`, by default that of `DatasetSettings`. `problems`
    may also be a folder with a file test.jsonl (as the data of a run), or the values of `DatasetSettings`. Then the
    test split is asked. `sampling` and `repeats` have the defaults of `EvaluationSettings`: temperature 0.6, top_p
    0.95, four repeats.
    """
    check_installed("eval")
    from qerl.data.sources import read_meta
    from qerl.evals.job import score_policy

    folder = Path(out)
    if isinstance(task, str):
        task = stock_task(task)
    if task and task.task and (instruction or answer != "native" or units):
        raise ConfigError(
            f"task {task.task} has a prompt and a form of answers of its own; leave out instruction, answer and units"
        )
    check_evaluation(problems, folder, task)
    asked = {"answer": answer, "units": [*units], **({} if instruction is None else {"instruction": instruction})}
    data = _problem_folder(problems, asked, folder)
    dtype = str(policy.lm.dtype).removeprefix("torch.")
    scored = task.model_dump() if task else {"harness": harness_of(read_meta(data)["format"])}
    settings = _evaluation_settings({**scored, "dataset": _TASK}, repeats, seed, dtype, sampling)
    about = {"model": policy.tokenizer.name_or_path, "adapter": policy.peft is not None}
    row = {"eval": folder.name, **about, "settings": settings.model_dump(mode="json")}
    score_policy(policy, settings, row, {_TASK: data}, folder)
    return Evaluation(folder)


_TASK = "problems"


def check_evaluation(problems: Problems, out: PathLike, task: TaskSettings | None = None) -> None:
    """Raise `ConfigError` for an impossible evaluation, before a policy is loaded."""
    folder = Path(out)
    if (folder / RESULT).exists():
        raise ConfigError(f"{folder} holds an evaluation already; give another folder as `out`")
    # What an evaluation leaves that was killed.
    left = {DATA, GIVEN, f".{DATA}.partial", SAMPLES, f"{RESULT}.partial"}
    others = {file.name for file in folder.iterdir()} - left if folder.is_dir() else set()
    data = folder / DATA
    if others or (folder.exists() and not folder.is_dir()) or (data.exists() and not (data / "dataset.json").is_file()):
        raise ConfigError(f"{folder} exists and is not the folder of an evaluation; give a new folder as `out`")
    check_writable(folder)
    asks_all = isinstance(problems, (str, Path)) and Path(problems).is_file()
    if task and task.task == "gsm8k" and task.fewshot != 0 and asks_all:
        raise ConfigError(
            f"task gsm8k shows {task.fewshot or 5} solved problems of a training split, and {problems} is all asked; "
            "set fewshot to 0 (--fewshot 0), or give a data set with both splits"
        )


def stock_task(name: str, **settings: Any) -> TaskSettings:
    """The settings of a harness's own task."""
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
    """A folder of prepared problems: the one given, or one made in `out`."""
    from qerl.data.sources import prepare

    records = given(problems, out)
    records.write()
    # All records of a list are asked, as those of a file.
    as_file = records.files and not isinstance(problems, Mapping)
    asked_of: Any = records.values["origin"]["path"] if as_file else records.values
    if isinstance(asked_of, (str, Path)) and (Path(asked_of) / "dataset.json").is_file():
        return Path(asked_of)
    if isinstance(asked_of, DatasetSettings):
        settings = asked_of
    elif isinstance(asked_of, Mapping):
        settings = parse(DatasetSettings, asked_of, "problems")
    else:
        all_of_it = {"validation_fraction": 0, "test_fraction": 1}
        values = {**local_dataset(Path(asked_of), **all_of_it), **asked}
        settings = parse(DatasetSettings, values, "problems")
    shutil.rmtree(out / DATA, ignore_errors=True)
    whole(out / DATA, lambda folder: prepare(settings, folder))
    return out / DATA
