"""Names of the files and folders of results; `qerl.plan.files` has the paths of a configuration's results."""

from __future__ import annotations

DATASET = "dataset.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
#: What libraries print in a run by hand.
LOG = "log.txt"
#: The folder of a run's stored rollouts, with a file for each stored step.
ROLLOUTS = "rollouts"
#: The folder, within that of a run by hand, of the state of an unfinished run.
WORK = "work"
RESULT = "result.json"
SAMPLES = "samples.jsonl"
#: The right completions of each problem of an evaluation.
OUTCOMES = "outcomes.jsonl"
REPORT = "report.json"
PRETRAIN = "pretrain.json"
MERGED = "merged.json"
NUMERICS = "numerics.json"
SPEED = "speed.json"
MEASURED = "measured.json"
VERDICT = "verdict.json"
VERDICT_TABLE = "verdict.html"
#: The folder of a trained policy within its run's, and of a base in one weight format within that of its report.
POLICY = "policy"
CHECKPOINT = "checkpoint"
#: Folders of a configuration's results, by what is in them.
DATA = "data"
MODELS = "models"
CHECKED = "checked"
QUANTIZE = "quantize"
TRAIN = "train"
EVALUATE = "evaluate"
PROFILE = "profile"
POINTS = "points"
TABLES = "tables"
FIGURES = "figures"
#: The end of the name of a figure's file for narrow screens.
NARROW = ".narrow.svg"
#: The page that shows all results of a configuration.
REPORT_PAGE = "report.html"
GATES = "gates"
#: Logs of jobs and Snakemake's measurements of their time, each in a folder of its rule.
LOGS = "logs"
BENCHMARKS = "benchmarks"
#: The records of trackers, in their own formats, for all runs.
TRACKED = "tracked"
#: Evaluations of committed policies, within the folder of the gates.
STORED = "stored"
#: Folder of the token ids of logged completions.
TRACES = "traces"
#: Folder of a study; its files of runs, steps and outcomes; its page, and the folder of the page's tables and figures.
STUDY = "study"
STUDY_RUNS = "runs.parquet"
STUDY_STEPS = "steps.parquet"
STUDY_OUTCOMES = "outcomes.parquet"
STUDY_FILES = (STUDY_RUNS, STUDY_STEPS, STUDY_OUTCOMES)
STUDY_PAGE = "exploration.md"
STUDY_PARTS = "exploration"
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
