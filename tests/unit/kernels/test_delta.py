"""The kernels of delta nets in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_compute_what_pytorch_does_in_the_interpreter():
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("delta_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    ran = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
