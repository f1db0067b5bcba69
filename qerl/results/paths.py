"""Names of the files and folders of results; `qerl.plan.files` knows where those of a configuration lie."""

from __future__ import annotations

RUN = "run.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
SAMPLES = "samples.jsonl"
REPORT = "report.json"
PRETRAIN = "pretrain.json"
MEASURED = "measured.json"
VERDICT = "verdict.json"
#: What a run trained, in its folder, and a base in one format, in that of its report.
POLICY = "policy"
CHECKPOINT = "checkpoint"
#: Of a measurement and of a file of the speed grid: the folder tells them from other JSON files.
PROFILE = "profile"
POINTS = "points"
#: Folder of the token ids of logged completions.
TRACES = "traces"
#: A file that each task of the workflow leaves: the paths of the results that tables are made of.
LISTED = "results.txt"
