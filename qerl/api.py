"""The library: quantize, train, load, sample, evaluate. The command line calls these functions.

A model is a folder in the hub's layout, the folder of a finished run, or `org/name` of the hub. `@revision` after the
name takes another revision than the main branch. Mistakes raise a `ValueError` of one sentence before anything long
starts.
"""

from __future__ import annotations

from qerl.by_hand.evaluations import Evaluation, Problems, check_evaluation, evaluate, sample, stock_task
from qerl.by_hand.models import Dtype, Packed, PathLike, quantize
from qerl.by_hand.runs import Run, export, load, train

__all__ = [
    "Dtype",
    "Evaluation",
    "Packed",
    "PathLike",
    "Problems",
    "Run",
    "check_evaluation",
    "evaluate",
    "export",
    "load",
    "quantize",
    "sample",
    "stock_task",
    "train",
]
