"""Samples and evaluations by hand."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.checkpoints.context import context_length
from qerl.checkpoints.folder import RUN_FILE
from qerl.data.by_hand import local_dataset
from qerl.data.given import GIVEN, GivenData, given
from qerl.host.imports import check_installed
from qerl.prepare.run_parts import DATA, whole
from qerl.provenance.files import check_writable, writing
from qerl.results.files import read, read_rows
from qerl.results.paths import DATASET, OUTCOMES, RESULT, SAMPLES
from qerl.results.schema.evaluation import OwnEvaluationResult, SampleRow
from qerl.settings.base import ConfigError, check_count, check_seed, check_unicode, parse, path_argument
from qerl.settings.data import AnswerForm, DatasetSettings
from qerl.settings.evaluation import STOCK_TASKS, EvaluationSettings, StockTask, TaskSettings, harness_of
from qerl.settings.rollout import EngineSettings, SamplingSettings

if TYPE_CHECKING:
    import pandas as pd

    from qerl.evals.policy import Drawn
    from qerl.policy.policy import Policy
    from qerl.results.intervals import Interval
from qerl.by_hand.models import PathLike
from qerl.by_hand.runs import Run, load

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
        from qerl.results.intervals import accuracy_interval

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
    from qerl.evals.job import score_policy

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
