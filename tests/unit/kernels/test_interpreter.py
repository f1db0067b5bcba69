"""Kernels in Triton's interpreter, which is chosen where Triton is imported and so has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted(set(Path("tests/gpu").glob("test_*.py")) - set(Path("tests/gpu").glob("test_*_gpu.py")))


@pytest.mark.slow
def test_kernels_compute_what_pytorch_does_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, CASES)]
    ran = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
