"""Stored samples as sources and views for people: rollouts of runs by step, and evaluations by data set.

A source is a policy: a run, whose views are its stored steps and the data sets of its evaluation, or an untrained base.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from qerl.checkpoints.folder import RUN_FILE
from qerl.results.catalogue import schema_of
from qerl.results.files import ResultError, read, read_rows
from qerl.results.names import training_name, variant, weights_name, without_folders
from qerl.results.paths import EVALUATE, RESULT, ROLLOUTS, RUN, SAMPLES, TRAIN, WORK
from qerl.results.schema.evaluation import EvaluationResult, OwnEvaluationResult, SampleRow, Scores
from qerl.results.schema.training import RolloutRow, RunResult, StoredCompletion

#: The name of the grader of training on the page.
TRAINING = "training"
Json = dict[str, Any]


@dataclass(frozen=True)
class View:
    """The samples of one step or data set, in a file of rows that is read on demand."""

    step: str
    """A step's number, or the name of an evaluation's data set."""
    file: Path
    trained: bool
    """Whether these are rollouts of training."""

    def problems(self) -> Iterator[Json]:
        """The problems with their completions, as the page has them."""
        if self.trained:
            yield from map(_of_rollout, read_rows(RolloutRow, self.file))
            return
        rows = (row for row in read_rows(SampleRow, self.file) if row.dataset == self.step)
        for _, repeats in groupby(rows, key=lambda row: row.problem):
            yield _of_evaluation(list(repeats))


@dataclass
class Source:
    """A policy with its views; `before` names the source of its base before training."""

    id: str
    about: str = ""
    before: str | None = None
    views: list[View] = field(default_factory=list)


def _of_rollout(row: RolloutRow) -> Json:
    completions = [_stored_completion(completion) for completion in row.completions]
    return {"id": row.problem, "prompt": row.prompt, "gold": row.gold, "completions": completions}


def _stored_completion(completion: StoredCompletion) -> Json:
    return {
        "tokens": completion.tokens,
        "logprobs": [round(value, 2) for value in completion.logprobs],
        "entropies": [round(value, 2) for value in completion.entropies],
        "verdicts": [[TRAINING, completion.parts["correct"] == 1, completion.extracted]],
        "parts": completion.parts,
        "reward": completion.reward,
        "advantage": completion.advantage,
        "length": len(completion.tokens),
        "finished": completion.finished,
    }


def _of_evaluation(rows: list[SampleRow]) -> Json:
    completions = [
        {"text": row.completion, "verdicts": _verdicts(row), "length": row.tokens, "finished": row.finished}
        for row in rows
    ]
    return {"id": rows[0].problem, "prompt": rows[0].prompt, "gold": rows[0].gold, "completions": completions}


def _verdicts(row: SampleRow) -> list[list[Any]]:
    """Grader, verdict and the answer that it read, for each grader; the harness's, which counts, is the first."""
    right = bool(row.correct)
    if row.harness == "qerl":  # which is the grader of training
        return [[TRAINING, right, row.extracted]]
    further = [] if row.flexible is None else [[f"{row.harness}, flexible", row.flexible]]
    return [[row.harness, right, row.extracted], [TRAINING, right == row.agrees, row.read], *further]


def sources_of(runs: Iterable[Path], evaluations: Iterable[Path]) -> list[Source]:
    """The sources of run.json files and result.json files, with the files beside them."""
    sources: dict[str, Source] = {}
    results = {path.parent.resolve().name: (path, _evaluation(path)) for path in evaluations}
    for id, (path, result) in results.items():
        before = _before(result, {id: result for id, (_, result) in results.items()})
        source = sources.setdefault(id, Source(id, _about(result), before))
        source.views += [View(dataset, path.parent / SAMPLES, False) for dataset in result.tasks]
    for path in runs:
        run = read(RunResult, path)
        source = sources.setdefault(run.run, Source(run.run))
        source.about = _about_run(run)
        source.views = [*steps_in(path.parent / ROLLOUTS), *source.views]
    return [source for source in sources.values() if source.views]


def _evaluation(path: Path) -> Scores:
    return read(schema_of(path) or EvaluationResult, path)  # type: ignore[return-value]


def _before(result: Scores, results: dict[str, Scores]) -> str | None:
    """The evaluation of the base that this policy was trained from, if it is among the results."""
    if isinstance(result, EvaluationResult) and result.run:
        bases = [id for id, other in results.items() if isinstance(other, EvaluationResult) and _is_base(other, result)]
        return bases[0] if bases else None
    if isinstance(result, OwnEvaluationResult) and result.adapter:
        bases = [id for id, other in results.items() if isinstance(other, OwnEvaluationResult) and not other.adapter]
        return bases[0] if len(bases) == 1 else None
    return None


def _is_base(base: EvaluationResult, trained: EvaluationResult) -> bool:
    named, other = ((one.model, weights_name(one.weights, one.recipe, one.pack_delta_nets)) for one in (base, trained))
    return base.run is None and named == other


def _about(result: Scores) -> str:
    if isinstance(result, EvaluationResult):
        named = (
            f"{without_folders(result.model)}, {weights_name(result.weights, result.recipe, result.pack_delta_nets)}"
        )
        return f"{named}, {result.arm}" if result.run else f"{named}, untrained"
    if isinstance(result, OwnEvaluationResult):
        return f"{without_folders(result.model)}, {'trained' if result.adapter else 'untrained'}"
    return "a committed policy"


def _about_run(run: RunResult) -> str:
    settings = run.settings
    training = training_name(settings.method, settings.noise.schedule)
    parts = [
        without_folders(settings.model),
        weights_name(settings.weights, settings.recipe, settings.pack_delta_nets),
        training,
        variant(run.varied),
    ]
    return ", ".join([*filter(None, parts), f"seed {settings.seed}"])


def steps_in(folder: Path) -> list[View]:
    """The steps whose rollouts a folder has, in their order."""
    return [View(str(_number(file)), file, True) for file in sorted(folder.glob("step-*.jsonl.gz"))]


def _number(file: Path) -> int:
    return int(file.name.removeprefix("step-").partition(".")[0])


# --- folders that people name


def sources_in(folders: Sequence[Path]) -> list[Source]:
    """The sources in folders of results, of runs and of evaluations. Raises ResultError if there are none."""
    runs, evaluations, unfinished = [], [], []
    for folder in folders:
        files = [
            *sorted([*folder.glob(f"{TRAIN}/*/{RUN}"), *folder.glob(f"{EVALUATE}/*/{RESULT}")]),
            *(file for file in (folder / RUN, folder / RESULT) if file.is_file()),
        ]
        begun = [] if files else _unfinished(folder)
        if not files and not begun and (folder / RUN_FILE).is_file():
            raise ResultError(
                f"{folder} has no samples yet: the run has not finished its first step, or stores no rollouts "
                "(stored_rollouts.every: 0)"
            )
        if not files and not begun:
            raise ResultError(f"{folder} has no samples: it is no folder of results, of a run or of an evaluation")
        runs += [file for file in files if file.name == RUN]
        evaluations += [file for file in files if file.name == RESULT]
        unfinished += begun
    _check_names(runs, evaluations)
    sources = [*sources_of(runs, evaluations), *unfinished]
    if not sources:
        raise ResultError(f"{folders[0]} stores no samples; set stored_rollouts.every of its runs above 0")
    return sources


def _unfinished(folder: Path) -> list[Source]:
    """A run by hand that isn't finished yet, whose rollouts are beside its checkpoints."""
    states = sorted(folder.glob(f"{WORK}/*/{ROLLOUTS}"), key=lambda path: path.stat().st_mtime_ns)
    return [Source(folder.resolve().name, "a run in progress", views=steps_in(states[-1]))] if states else []


def _check_names(*files: list[Path]) -> None:
    """Refuse two folders of one name, whose samples no address could tell apart."""
    for kind in files:
        named = defaultdict(list)
        for file in kind:
            named[file.resolve().parent.name].append(file.parent)
        for name, same in named.items():
            if len(same) > 1:
                raise ResultError(f"{same[0]} and {same[1]} are both named {name}; rename one, or show them one by one")
