"""Stored samples for people: rollouts of runs by step and evaluations by data set, as one file of HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from qerl.checkpoints.files import RUN_FILE
from qerl.host.provenance import write_text
from qerl.report.format import rendered
from qerl.report_jobs import SamplesJob
from qerl.results import paths
from qerl.results.readers import StoredResults, listed
from qerl.results.schema import (
    EvaluationResult,
    OwnEvaluationResult,
    ResultError,
    RolloutRow,
    RunResult,
    SampleRow,
    Scores,
    StoredPolicyResult,
    read,
    read_rows,
)

# A source is a policy: a run, whose views are its stored steps and the data sets of its evaluation, or an untrained
# base.

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
    completions = [
        {
            "tokens": completion.tokens,
            "logprobs": [round(value, 2) for value in completion.logprobs],
            "entropies": [round(value, 2) for value in completion.entropies],
            "verdicts": [[TRAINING, completion.parts["correct"] == 1, completion.extracted]],
            **completion.model_dump(include={"parts", "reward", "advantage", "finished", "replies"}),
            "length": len(completion.tokens) - sum(end - begin for begin, end in completion.replies),
        }
        for completion in row.completions
    ]
    return {"id": row.problem, "prompt": row.prompt, "gold": row.gold, "completions": completions}


def _of_evaluation(rows: list[SampleRow]) -> Json:
    completions = []
    for row in rows:
        # Grader, verdict and the answer that it read, for each grader; the harness's, which counts, is the first.
        right = bool(row.correct)
        verdicts: list[list[Any]] = [[row.harness, right, row.extracted], [TRAINING, right == row.agrees, row.read]]
        if row.harness == "qerl":  # which is the grader of training
            verdicts = [[TRAINING, right, row.extracted]]
        elif row.flexible is not None:
            verdicts.append([f"{row.harness}, flexible", row.flexible])
        shown = {"text": row.completion, "verdicts": verdicts, "length": row.tokens, "finished": row.finished}
        completions.append(shown)
    return {"id": rows[0].problem, "prompt": rows[0].prompt, "gold": rows[0].gold, "completions": completions}


def sources_of(runs: Iterable[Path], evaluations: Iterable[Path]) -> list[Source]:
    """The sources of run.json files and result.json files, with the files beside them."""
    sources: dict[str, Source] = {}
    files = {path.parent.resolve().name: path for path in evaluations}
    results: dict[str, Scores] = {id: _read_evaluation(path) for id, path in files.items()}
    for id, path in files.items():
        result, before = results[id], _before(results[id], results)
        source = sources.setdefault(id, Source(id, _about(result), before))
        source.views += [View(dataset, path.parent / paths.SAMPLES, False) for dataset in result.tasks]
    for path in runs:
        run = read(RunResult, path)
        source = sources.setdefault(run.run, Source(run.run))
        settings = run.settings
        training = paths.training_name(settings.method, settings.noise.schedule)
        about = [paths.without_folders(settings.model), settings.base.weights_name, training, paths.variant(run.varied)]
        source.about = ", ".join([*filter(None, about), f"seed {settings.seed}"])
        source.views = [*steps_in(path.parent / paths.ROLLOUTS), *source.views]
    return [source for source in sources.values() if source.views]


def _read_evaluation(path: Path) -> Scores:
    """The result.json of the workflow, of `qerl eval` or of a committed policy."""
    content = json.loads(path.read_bytes())
    if "stored" in content:
        return read(StoredPolicyResult, path)
    return read(OwnEvaluationResult if "adapter" in content else EvaluationResult, path)


def _before(result: Scores, results: dict[str, Scores]) -> str | None:
    """The evaluation of the base that this policy was trained from, if it is among the results."""
    if isinstance(result, EvaluationResult) and result.run:
        others = ((id, other) for id, other in results.items() if isinstance(other, EvaluationResult))
        return next((id for id, other in others if other.run is None and other.base == result.base), None)
    if isinstance(result, OwnEvaluationResult) and result.trained:
        bases = [id for id, other in results.items() if isinstance(other, OwnEvaluationResult) and not other.trained]
        return bases[0] if len(bases) == 1 else None
    return None


def _about(result: Scores) -> str:
    if isinstance(result, EvaluationResult):
        about = result.arm if result.run else "untrained"
        return f"{paths.without_folders(result.model)}, {result.base.weights_name}, {about}"
    if isinstance(result, OwnEvaluationResult):
        return f"{paths.without_folders(result.model)}, {'trained' if result.trained else 'untrained'}"
    return "a committed policy"


def steps_in(folder: Path) -> list[View]:
    """The steps whose rollouts a folder has, in their order."""
    files = sorted(folder.glob("step-*.jsonl.gz"))
    return [View(str(int(file.name.removeprefix("step-").partition(".")[0])), file, True) for file in files]


# --- folders that people name


def sources_in(folders: Sequence[Path]) -> list[Source]:
    """The sources in folders of results, of runs and of evaluations. Raises ResultError if there are none.

    A run by hand that isn't finished has its rollouts beside its checkpoints.
    """
    found: dict[str, list[Path]] = {paths.RUN: [], paths.RESULT: []}
    unfinished = []
    for folder in folders:
        files = [*folder.glob(f"{paths.TRAIN}/*/{paths.RUN}"), *folder.glob(f"{paths.EVALUATE}/*/{paths.RESULT}")]
        files = sorted(files) + [file for file in (folder / paths.RUN, folder / paths.RESULT) if file.is_file()]
        for file in files:
            found[file.name].append(file)
        states = sorted(folder.glob(f"{paths.WORK}/*/{paths.ROLLOUTS}"), key=lambda path: path.stat().st_mtime_ns)
        if states and not files:
            unfinished.append(Source(folder.resolve().name, "a run in progress", views=steps_in(states[-1])))
        elif not files and (folder / RUN_FILE).is_file():
            raise ResultError(
                f"{folder} has no samples yet: the run has not finished its first step, or stores no rollouts "
                "(stored_rollouts.every: 0)"
            )
        elif not files:
            raise ResultError(f"{folder} has no samples: it is no folder of results, of a run or of an evaluation")
    for kind in found.values():  # no address could tell the samples of two folders of one name apart
        seen: dict[str, Path] = {}
        for file in kind:
            other = seen.setdefault(name := file.resolve().parent.name, file.parent)
            if other != file.parent:
                raise ResultError(
                    f"{other} and {file.parent} are both named {name}; rename one, or show them one by one"
                )
    sources = [*sources_of(found[paths.RUN], found[paths.RESULT]), *unfinished]
    if not sources:
        raise ResultError(f"{folders[0]} stores no samples; set stored_rollouts.every of its runs above 0")
    return sources


# The page of samples: one file of HTML with all data, which needs no network.
#
# The data of a view is a compressed part of the page, which the browser unpacks when somebody opens the view.
# Compressed parts are in Base64, so that no completion can end the element that holds it.

#: The largest size of a configuration's page, in 10^6 bytes.
MEGABYTES = 5.0
#: By how many halvings of its problems a view may be shortened.
_HALVINGS = 12
#: More bytes than a source or a view has in the index, with the elements of its parts.
_ENTRY = 300
_TEMPLATE, _STYLE, _SCRIPTS = "samples.j2", "samples.css", ("samples_data.js", "samples.js")
_HERE = Path(__file__).parent


class PageSizeError(ResultError):
    """Samples that don't fit into a page. The message is one sentence for the user."""


def write_page(job: SamplesJob) -> None:
    """Make the page of a configuration's samples."""
    stored = StoredResults(listed(job.results))
    make_page(
        job.name, sources_of(stored.named(paths.RUN), stored.named(paths.RESULT)), job.out, report=paths.REPORT_PAGE
    )


def make_page(
    title: str, sources: Sequence[Source], out: Path, megabytes: float = MEGABYTES, *, report: str = ""
) -> None:
    """Write the page, with as many problems of each view as fit into `megabytes`, and a link to the report, if any."""
    views = [_shortened(view) for source in sources for view in source.views]
    room = 1e6 * megabytes - len(_html(title, report, "", [])) - _ENTRY * (len(sources) + len(views))
    for halvings in range(_HALVINGS + 1):
        shown = [parts[min(halvings, len(parts) - 1)] for parts in views]
        # Equal parts, such as the prompts of one data set, are there once.
        parts = list(dict.fromkeys(view[name] for view in shown for name in ("prompts", "samples")))
        if sum(map(len, parts)) <= room:
            break
    else:
        raise PageSizeError(
            f"{len(views)} steps and evaluations don't fit into a page of this size; name fewer runs, or raise "
            "--megabytes"
        )
    places, left = {text: place for place, text in enumerate(parts)}, iter(shown)
    index = []
    for source in sources:
        entries = []
        for view, packed in zip(source.views, left, strict=False):
            where = {name: places[packed[name]] for name in ("prompts", "samples")}
            entries.append({"step": view.step, "trained": view.trained, **packed, **where})
        index.append({"id": source.id, "about": source.about, "before": source.before, "views": entries})
    write_text(out, _html(title, report, _pack({"title": title, "sources": index}), parts))


def _html(title: str, report: str, index: str, parts: Sequence[str]) -> str:
    own_style, *scripts = ((_HERE / file).read_text(encoding="utf-8") for file in (_STYLE, *_SCRIPTS))
    script = "\n".join(scripts)
    # Nothing else of the page may run, whatever a completion says.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    files = {"own_style": own_style, "script": script, "script_hash": f"sha256-{digest}"}
    return rendered(_TEMPLATE, title=title, report=report, index=index, parts=parts, **files)


def _pack(value: Any) -> str:
    """JSON, compressed, in Base64; the script unpacks it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shortened(view: View) -> list[Json]:
    """A view at each number of halvings of its problems, until one is left: packed prompts, all else, and counts.

    The prompts are apart, because views share them.
    """
    problems, packed = list(view.problems()), []
    for count in dict.fromkeys(max(len(problems) >> halving, 1) for halving in range(_HALVINGS + 1)):
        first = problems[:count]
        completions = [completion for problem in first for completion in problem["completions"]]
        rest = [{key: value for key, value in problem.items() if key != "prompt"} for problem in first]
        packed.append(
            {
                "prompts": _pack([problem["prompt"] for problem in first]),
                "samples": _pack(rest),
                "problems": len(first),
                "stored": len(problems),
                "completions": len(completions),
                "right": sum(completion["verdicts"][0][1] for completion in completions),
                "reward": _mean([each["reward"] for each in completions if each.get("reward") is not None]),
            }
        )
    return packed
