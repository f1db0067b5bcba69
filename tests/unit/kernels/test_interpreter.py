"""Kernels in Triton's interpreter, which is chosen where Triton is imported, and so in a fork that imports it anew."""

import os
import sys

import pytest

from tests.forks import call, forget

CASES = [f"tests/gpu/test_{name}.py" for name in ("attention", "cohort", "delta", "mixtures", "norms", "products")]


@pytest.mark.slow
def test_kernels_compute_what_pytorch_does_in_the_interpreter(pytestconfig):
    pytest.importorskip("triton")

    def interpret() -> None:
        binaries = {name: module for name, module in sys.modules.items() if name.startswith("triton._C")}
        forget("triton", "qerl", "tests")
        sys.modules.update(binaries)  # compiled modules can't be imported twice
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *CASES]))

    ran = call(interpret, pytestconfig.rootpath, {**os.environ, "TRITON_INTERPRET": "1"})
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
