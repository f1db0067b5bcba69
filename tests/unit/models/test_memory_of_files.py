"""Checkpoints larger than the memory in which they are read and quantized."""

import json
import subprocess
import sys

import pytest

from qerl.checkpoints.files import read_headers, weight_files
from qerl.models.quantize import linear_layers
from tests.tiny import tiny_qwen2

MB = 1e6
#: What the process itself may grow by, whatever the checkpoint: lazily loaded code, the allocator's reserve.
SLACK = 16 * MB

MEASURE = """
import json, sys
from pathlib import Path
from qerl.host.imports import imports
with imports():
    import bitsandbytes, llmcompressor.entrypoints.model_free.converter
    from qerl.host.gpus import peak_memory_bytes, reset_peak_memory
    from qerl.checkpoints.files import read_headers
    from qerl.models.loading import stream
    from qerl.models.quantize import write_packed
    from qerl.models.quantize import quantization_report

tiny, big, out = map(Path, sys.argv[1:4])

def read(source):
    # As copies to a GPU would: each byte is touched, nothing is kept.
    for _, tensor in stream(read_headers(source)):
        tensor.sum()

def pack(weights, source):
    write_packed(source, out / f"{source.name}-{weights}", weights)

def report(weights, source):
    quantization_report(source, out / f"{source.name}-{weights}", weights)

def growth(action, *given):
    action(*given, tiny)  # imports and buffers that come once
    reset_peak_memory()
    before = peak_memory_bytes()
    action(*given, big)
    return peak_memory_bytes() - before

found = {"read": growth(read)}
for weights in ("nvfp4", "nf4"):
    found |= {f"pack {weights}": growth(pack, weights), f"report {weights}": growth(report, weights)}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_memory_is_bounded_by_a_file_and_a_layer_not_by_the_model(tmp_path):
    tiny = tiny_qwen2(tmp_path / "tiny")
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 40}
    big = tiny_qwen2(tmp_path / "big", shard_size="4MB", **shape)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(big), str(tmp_path)], capture_output=True, text=True, check=True
    )
    grown = json.loads(run.stdout.splitlines()[-1])
    headers = read_headers(big)
    whole = sum(info.size_bytes for info in headers.values())
    file = max(path.stat().st_size for path in weight_files(big))
    layer = max(headers[f"{name}.weight"].size_bytes for name in linear_layers(big))
    assert whole > 2 * (file + layer + SLACK)
    for what, grown_by in grown.items():
        assert grown_by < file + layer + SLACK, what
