"""Host memory while a checkpoint is read onto a GPU."""

import json
import subprocess
import sys

from qerl.checkpoints.files import weight_files
from tests.tiny import tiny_qwen2

MB = 1e6
MEASURE = """
import json, sys
from pathlib import Path
import torch
from qerl.host.gpus import PROCESS
from qerl.models.loading import load_model

def peak():
    lines = (PROCESS / "status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024

load_model(Path(sys.argv[1]), torch.bfloat16, "cuda")  # CUDA itself, and code that is loaded once
(PROCESS / "clear_refs").write_text("5")
before = peak()
model = load_model(Path(sys.argv[2]), torch.bfloat16, "cuda")
assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
print(json.dumps(peak() - before))
"""


def test_host_memory_is_bounded_by_the_largest_file(tmp_path):
    tiny = tiny_qwen2(tmp_path / "tiny")
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
    big = tiny_qwen2(tmp_path / "big", shard_size="64MB", **shape)
    files = [path.stat().st_size for path in weight_files(big)]
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(big)], capture_output=True, text=True, check=True
    )
    assert sum(files) > 4 * max(files)
    assert json.loads(run.stdout.splitlines()[-1]) < max(files) + 32 * MB
