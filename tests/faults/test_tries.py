"""Attempts of a training in the workflow: another one after a kill, none after an error."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULE = ROOT / "workflow/rules/train.smk"
#: Ends as the next word of the file `ends` says, and leaves a line for each try.
PYTHON = """#!/bin/sh
echo "$@" >> tries
end=$(sed -n "$(wc -l < tries)p" ends)
while [ "$end" = orphan ]; do grep -qx "PPid:.$PARENT" /proc/$PPID/status || end=kill; done
[ "$end" = kill ] && kill -9 $$
exit $end
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The rule's shell command in an empty folder, with a Python that ends as it is told to."""
    text = RULE.read_text().partition("    shell:")[2].partition("\n\n")[0]
    shell = "".join(re.findall(r'"(.*)"', text))
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    shell = shell.replace("{params.launcher} ", "")  # empty on one machine
    return "set -euo pipefail; " + re.sub(r"\{log[^}]*\}", "log", shell)


@pytest.mark.parametrize(
    ("ends", "tries", "status"),
    [("0", 1, 0), ("2", 1, 2), ("143", 1, 143), ("kill 0", 2, 0), ("kill 1", 2, 1), ("kill kill kill", 3, 137)],
)
def test_only_a_kill_is_tried_again(command, tmp_path, ends, tries, status):
    (tmp_path / "ends").write_text("\n".join(ends.split()))
    run = subprocess.run(["bash", "-c", command], check=False)
    assert len((tmp_path / "tries").read_text().splitlines()) == tries
    assert run.returncode == status


def test_nothing_is_tried_again_for_a_snakemake_that_is_gone(command, tmp_path):
    """The shell's parent ends while the first try runs, as a killed Snakemake does, and then that try is killed."""
    (tmp_path / "ends").write_text("orphan\n0")
    parent = 'export PARENT=$$; bash -c "$0" & while [ ! -e tries ]; do :; done'
    # Its output ends when the last process that has it does.
    subprocess.run(["bash", "-c", parent, command], check=True, stdout=subprocess.PIPE)
    assert len((tmp_path / "tries").read_text().splitlines()) == 1
