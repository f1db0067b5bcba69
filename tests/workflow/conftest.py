"""A copy of the working tree in which Snakemake may write."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import snakemake.cli

from tests.forks import call, hash_code, use_package
from tests.job_forks import commands

ROOT = Path(__file__).parents[2]
#: Jobs of one thread, whatever they ask for: threads that wait for a core that another test has would wait busily.
CORES = ("--cores", "2", "--max-threads", "1")


class Tree:
    """A copied tree; `snakemake` runs in it with the copied package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """The variables of Snakemake and its jobs, which are forks (`tests.job_forks`)."""
        path = os.pathsep.join((str(commands()), str(Path(sys.executable).parent), os.environ["PATH"]))
        variables = {**os.environ, "PATH": path, "PYTHONPATH": str(self.folder)}
        # Jobs share the compiled modules of the copy, which nobody else writes to; each would compile them anew.
        variables.pop("PYTHONDONTWRITEBYTECODE", None)
        return variables

    def snakemake(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
        """Snakemake in a fork."""
        run = call(partial(self._main, [*CORES, *arguments]), self.folder, self.environment)
        assert not check or run.returncode == 0, run.stdout + run.stderr
        return run

    def _main(self, arguments: list[str]) -> None:
        """Snakemake as `python -m snakemake` has it, with this tree's package in place of the tests'."""
        use_package(self.folder)
        snakemake.cli.main(arguments)

    def planned(self, *arguments: str) -> dict[str, int]:
        """The number of jobs in a dry run, by rule."""
        run = self.snakemake("--dry-run", "--quiet", "rules", *arguments)
        lines = [line.split() for line in (run.stdout + run.stderr).splitlines()]
        table = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
        table.pop("total", None)
        return table


def copy_tree(folder: Path) -> Tree:
    hash_code()
    shutil.copytree(ROOT, folder, ignore=_left_out)
    return Tree(folder)


def _left_out(folder: str, names: list[str]) -> set[str]:
    """The names that a clone lacks; `qerl/results` is a room of the package."""
    made = {"results", "work"} if Path(folder) in (ROOT, ROOT / ".test") else set()
    return (made | shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")(folder, names)) - {".test"}


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Tree:
    """A shared copy, for runs that write nothing."""
    return copy_tree(tmp_path_factory.mktemp("tree") / "qerl")
