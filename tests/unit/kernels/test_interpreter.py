"""Kernels in Triton's interpreter, which is chosen where Triton is imported and so has a process of its own."""

import os
import subprocess
import sys

import pytest

CASES = [f"tests/gpu/test_{name}.py" for name in ("attention", "cohort", "delta", "mixtures", "norms", "products")]


@pytest.mark.slow
def test_kernels_compute_what_pytorch_does_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *CASES]
    ran = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
