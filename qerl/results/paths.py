"""Names of the files and folders of results; `qerl.plan.files` knows where those of a configuration lie."""

from __future__ import annotations

DATASET = "dataset.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
SAMPLES = "samples.jsonl"
REPORT = "report.json"
PRETRAIN = "pretrain.json"
NUMERICS = "numerics.json"
SPEED = "speed.json"
MEASURED = "measured.json"
VERDICT = "verdict.json"
VERDICT_TABLE = "verdict.md"
#: What a run trained, in its folder, and a base in one format, in that of its report.
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
GATES = "gates"
#: Evaluations of committed policies, within the folder of the gates.
STORED = "stored"
#: Folder of the token ids of logged completions.
TRACES = "traces"
#: A file that each task of the workflow leaves: the paths of the results that tables are made of.
LISTED = "results.txt"
