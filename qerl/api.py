"""The library: quantize, train, load, sample, evaluate. The command line calls these functions.

A model is a folder in the hub's layout, the folder of a finished run, or `org/name` of the hub. `@revision` after the
name takes another revision than the main branch. Mistakes raise a `ValueError` of one sentence before anything long
starts.
"""

from __future__ import annotations

from qerl.by_hand.evaluations import Evaluation, Problems, asked_by, check_evaluation, evaluate, sample, stock_task
from qerl.by_hand.exports import LOSS_PROBLEMS, export, export_merged
from qerl.by_hand.models import Dtype, Packed, PathLike, quantize
from qerl.by_hand.publishing import publish
from qerl.by_hand.runs import Run, load, train
from qerl.settings.data import Split
from qerl.settings.models import MergedFormat

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
