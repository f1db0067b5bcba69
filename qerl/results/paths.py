"""Names of the files and folders of results, and the names that identify a result. It imports no large library.

The jobs of `qerl.jobs` and `qerl.report_jobs` have the paths of a configuration's results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from qerl.settings.models import Base, Recipe, WeightFormat

DATASET = "dataset.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
#: What libraries print in a run by hand.
LOG = "log.txt"
#: The folder of a run's stored rollouts, with a file for each stored step.
ROLLOUTS = "rollouts"
#: The folder of an unfinished run's state, within the folder of a run by hand.
WORK = "work"
RESULT = "result.json"
SAMPLES = "samples.jsonl"
#: The right completions of each problem of an evaluation.
OUTCOMES = "outcomes.jsonl"
REPORT = "report.json"
PRETRAIN = "pretrain.json"
NUMERICS = "numerics.json"
SPEED = "speed.json"
MEASURED = "measured.json"
VERDICT = "verdict.json"
VERDICT_TABLE = "verdict.html"
#: The folder of a trained policy within its run's, and of a base in one weight format beside its report.
POLICY = "policy"
CHECKPOINT = "checkpoint"
#: The file beside a run's results that tells the workflow what they were made of.
VERSION = "version.txt"
#: Folders of a configuration's results, by what is in them.
DATA = "data"
MODELS = "models"
TRAIN = "train"
EVALUATE = "evaluate"
PROFILE = "profile"
TABLES = "tables"
FIGURES = "figures"
#: The end of the name of a figure's file for narrow screens.
NARROW = ".narrow.svg"
#: The page that shows all results of a configuration.
REPORT_PAGE = "report.html"
GATES = "gates"
#: Logs of jobs, each in a folder of its rule.
LOGS = "logs"
#: The records of trackers, in their own formats, for all runs.
TRACKED = "tracked"
#: Evaluations of committed policies, within the folder of the gates.
STORED = "stored"
#: Folder of a study, and its files of runs, steps and outcomes.
STUDY = "study"
STUDY_RUNS = "runs.parquet"
STUDY_STEPS = "steps.parquet"
STUDY_OUTCOMES = "outcomes.parquet"
STUDY_FILES = (STUDY_RUNS, STUDY_STEPS, STUDY_OUTCOMES)
#: The page of a study, and the folder of its tables and figure beside it.
STUDY_PAGE = "dose.md"
STUDY_PARTS = "dose"
#: The folder of the doses of untrained bases in a study, and the file of one of them.
DOSES = "doses"
#: The file that lists the paths of the results from which tables are made.
LISTED = "results.txt"
#: The mark that all results exist, from which tables, figures and the report are made.
COLLECTED = "results.done"
#: The page on which people read samples. An address within it is `#RUN_OR_EVALUATION/STEP/PROBLEM`, where the step of
#: an evaluation is the name of its data set. An address may end after any part.
SAMPLES_PAGE = "samples.html"


def rollouts_file(step: int) -> str:
    """The name of the file of a stored step's rollouts."""
    return f"step-{step:06d}.jsonl.gz"


# The names that identify a result: weights, training and the grid's values.

#: Columns that identify an arm, apart from its seeds.
KEY = ["model", "experiment", "arm", "variant", "weights", "training"]


def weights_names() -> list[str]:
    """All names of weights, in the order of tables."""
    options = [*((recipe, False) for recipe in get_args(Recipe)), ("rtn", True)]
    return [Base("", weights, *option).weights_name for weights in get_args(WeightFormat) for option in options]


def without_folders(value: Any) -> Any:
    """A setting, or settings in lists and mappings, in which an absolute path of this machine is its last name."""
    match value:
        case str() if Path(value).is_absolute():
            return Path(value).name
        case Mapping():
            return {key: without_folders(of_key) for key, of_key in value.items()}
        case list() | tuple():
            return [without_folders(each) for each in value]
    return value


def variant(varied: dict[str, Any]) -> str:
    """The values of the grid besides the seed, such as "adapter.rank=16"."""
    return ", ".join(f"{key}={value}" for key, value in varied.items() if key != "seed")


def training_name(method: str, schedule: str) -> str:
    """The training of a run, named as in the paper's Table 1: full, lora, lora+aqn or full+aqn."""
    return method + ("" if schedule == "off" else "+aqn")


def dose_file(model: str) -> str:
    """The name of the file of a base's doses."""
    return f"dose-{model}.json"


# Files of points that are measured, on this machine or elsewhere.


def measured_files(samples: Sequence[Path], files: Sequence[Path]) -> list[Path]:
    """The `files` of points that this machine measured, else the committed files of the same names.

    Other committed files follow, whose jobs are no longer in the grid.
    """
    existing = (measured_file(samples, file) for file in files)
    names = {file.name for file in files}
    return [*filter(None, existing), *(file for file in committed_files(samples) if file.name not in names)]


def measured_file(samples: Sequence[Path], file: Path) -> Path | None:
    """A file of points, if it is measured on this machine, or else the committed one."""
    places = (file, *(folder / file.name for folder in samples))
    return next((one for one in places if one.is_file()), None)


# The first folder with a file counts; ratios are of points of one kind of GPU, and tables name the GPU where it
# differs.
def committed_files(folders: Sequence[Path]) -> list[Path]:
    """The result files of the folders, sorted by name. Of files with the same name, the first folder's counts."""
    named = {file.name: file for folder in reversed(folders) for file in folder.glob("*.json")}
    return [named[name] for name in sorted(named)]
