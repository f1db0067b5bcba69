"""Publishing of a finished run on the hub: its adapter with a card, scores and metrics."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from qerl.by_hand.evaluations import Evaluation
from qerl.by_hand.models import HUB_MODEL, PathLike
from qerl.by_hand.runs import Run, check_finished
from qerl.checkpoints.folder import ADAPTER, ADAPTER_CONFIG
from qerl.checkpoints.stock import stock_loading
from qerl.host.hub import hub_unreachable
from qerl.prepare.run_parts import CHECKPOINT
from qerl.results.files import read
from qerl.results.paths import DATA, DATASET, METRICS, POLICY, REPORT, RESULT, RUN
from qerl.results.schema.evaluation import OwnEvaluationResult
from qerl.results.schema.preparation import PreparedDataset
from qerl.results.schema.training import RunResult
from qerl.settings.base import ConfigError, path_argument

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from qerl.publishing.cards import BaseModel, RunFacts, RunScore
    from qerl.publishing.upload import Published


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

    from qerl.publishing.upload import check_folder, upload

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
    from qerl.publishing.cards import RunFacts

    return RunFacts(
        run=read(RunResult, run.folder / RUN),
        base=_base(run, hub),
        data=read(PreparedDataset, run.data / DATASET),
        stock=stock_loading(run.checkpoint),
        scores=[*_scores(run, evaluations)],
    )


def _base(run: Run, hub: HfApi | None) -> BaseModel:
    from qerl.publishing.cards import BaseModel
    from qerl.publishing.upload import license_of

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
    from qerl.publishing.cards import RunScore, data_name

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
    from qerl.policy.card import CARD
    from qerl.publishing.cards import run_card
    from qerl.publishing.upload import model_files, own_file

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
    from qerl.publishing.upload import own_file

    config = json.loads(own_file(run.folder, run.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    return json.dumps({**config, "base_model_name_or_path": base.name, "revision": base.revision}, indent=2) + "\n"


def _notes(facts: RunFacts) -> list[str]:
    """What a person should know of before others read it."""
    from qerl.publishing.cards import data_name

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
