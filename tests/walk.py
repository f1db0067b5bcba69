"""Inputs of config/walk.yaml: a random checkpoint and made-up problems, in the layouts of their repositories.

`python -m tests.walk work/walk --size 1.5B` writes both into a new folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from qerl.data.generated import generate
from qerl.models.random import SHARD_BYTES, write_checkpoint
from qerl.settings.data import Generated
from tests.hub_layouts import REPOSITORIES

DATASETS = ("openai/gsm8k", "HuggingFaceH4/MATH-500")


def write_walk(folder: Path, size: str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the checkpoint into `folder`/model and each data set into a folder of its name."""
    texts = [json.dumps(record) for record in generate(Generated(train=2000, validation=1, test=1), "gsm8k")["train"]]
    write_checkpoint(folder / "model", size, texts, shard_bytes)
    for name in DATASETS:
        REPOSITORIES[name](folder / name)


def main(
    folder: Path, size: Annotated[str, typer.Option(help="A key of qerl.checkpoints.shapes.QWEN.")] = "1.5B"
) -> None:
    """Write the checkpoint and the data sets of config/walk.yaml."""
    write_walk(folder, size)


if __name__ == "__main__":
    typer.run(main)
