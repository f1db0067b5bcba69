"""What is refused before Snakemake starts a job."""

import os
import sys
from pathlib import Path

import pytest

from qerl.workflow.checks import check_interpreter


def interpreter(folder: Path, command: str) -> str:
    folder.mkdir()
    script = folder / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)
    return str(folder)


def test_an_environment_that_is_not_activated_is_refused(tmp_path, monkeypatch):
    """A Python without packages, as that of a system."""
    monkeypatch.setenv("PATH", interpreter(tmp_path / "bin", f'exec {sys.executable} -I -S "$@"'))
    with pytest.raises(ValueError, match=rf"first, {tmp_path}/bin/python, can't import qerl: activate the environment"):
        check_interpreter()


def test_a_path_without_python_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="no python is on the PATH: activate"):
        check_interpreter()


def test_the_active_environment_and_another_with_the_package_are_accepted(tmp_path, monkeypatch):
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{os.environ['PATH']}")
    check_interpreter()
    monkeypatch.setenv("PATH", interpreter(tmp_path / "bin", f'exec {sys.executable} "$@"'))
    check_interpreter()
