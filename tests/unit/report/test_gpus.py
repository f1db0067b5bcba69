"""Rows of several GPUs in a table of the speed grid are told apart by a column; rows of one GPU have none."""

from pathlib import Path

import pandas as pd
import pytest

from qerl.jobs import ShapesJob
from qerl.report import speed_tables
from qerl.report.format import gpu_label
from tests.synthetic_results import decode_file, moved, step_file

H200, H100 = "1x NVIDIA H200", "1x NVIDIA H100 80GB HBM3"
SPEEDS = {1: [100.0, 100.0]}


def gpus_of(folder: Path, name: str) -> list[str]:
    """The column GPU of a table for readers, which stands before its values."""
    head, _, *rows = (folder / f"{name}.md").read_text().split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows)]
    place = cells[0].index("GPU")
    return [line[place] for line in cells[1:]]


@pytest.mark.parametrize(
    ("machine", "label"),
    [
        (H200, "H200"),
        (H100, "H100 80GB HBM3"),
        ("11x NVIDIA H200 + 1x NVIDIA L40S", "11x H200 + L40S"),
        ("AMD EPYC 9B14, 8 cores", "AMD EPYC 9B14, 8 cores"),
    ],
)
def test_a_gpu_has_a_short_name(machine, label):
    assert gpu_label(machine) == label


def test_decode_speeds_of_several_gpus(tmp_path):
    files = [
        decode_file(tmp_path, engine, "nvfp4", SPEEDS, rank=rank, machine=machine)
        for engine, rank, machine in (
            ("native", 0, H100),
            ("native", 16, H100),
            ("native", 32, H100),
            ("native", 64, H200),
            ("vllm", 16, H100),
            ("vllm", 32, H200),
            ("vllm", 64, H200),
        )
    ]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path))
    of_each = ["H100 80GB HBM3"] * 3 + ["H200", "H100 80GB HBM3"] + ["H200"] * 2
    assert gpus_of(tmp_path, "decode-7B-128x256") == gpus_of(tmp_path, "floor-7B-128x256") == of_each
    assert gpus_of(tmp_path, "ratio-7B-128x256") == ["H100 80GB HBM3", "H100 80GB HBM3, H200", "H200"]
    assert gpus_of(tmp_path, "adapters-128x256") == ["H100 80GB HBM3"] * 2 + ["H200, H100 80GB HBM3"]
    stored = pd.read_csv(tmp_path / "decode-7B-128x256.csv")
    assert list(stored) == ["engine", "weights", "rank", "GPU", "1"]
    assert list(stored["GPU"]) == of_each


def test_rows_of_one_gpu_have_no_column(tmp_path):
    files = [decode_file(tmp_path, engine, "nvfp4", SPEEDS, machine=H200) for engine in ("native", "vllm")]
    files += [decode_file(tmp_path, "native", "nvfp4", SPEEDS, rank=0, machine=H200)]
    files += [moved(step_file(tmp_path, "qerl NVFP4 LoRA", "7B", [1.0], "auto", rest=1e9), H200, memory_gb=12.0)]
    speed_tables.write_shapes(ShapesJob(files=files, out=tmp_path / "out"))
    tables = {file: pd.read_csv(file) for file in (tmp_path / "out").glob("*.csv")}
    assert len(tables) >= 6
    assert not [file.name for file, table in tables.items() if {"GPU", "machine"} & set(table)]
