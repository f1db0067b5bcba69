"""How often the workflow tries a training: again after a kill, once where an error of its own ended it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

RULE = Path(__file__).parents[2] / "workflow/rules/train.smk"
#: Ends as the next word of the file `ends` says, and leaves a line for each try.
PYTHON = """#!/bin/sh
echo "$@" >> tries
end=$(sed -n "$(wc -l < tries)p" ends)
[ "$end" = kill ] && kill -9 $$
exit $end
"""


@pytest.mark.parametrize(
    ("ends", "tries", "status"),
    [
        (["0"], 1, 0),
        (["2"], 1, 2),
        (["1"], 1, 1),
        (["130"], 1, 130),
        (["143"], 1, 143),
        (["kill", "0"], 2, 0),
        (["kill", "1"], 2, 1),
        (["kill", "kill", "kill"], 3, 137),
    ],
)
def test_only_a_kill_is_tried_again(tmp_path, ends, tries, status):
    shell = "".join(re.findall(r'"(.*)"', RULE.read_text().partition("    shell:")[2]))
    command = re.sub(r"\{log[^}]*\}", "log", shell)
    (tmp_path / "ends").write_text("\n".join(ends))
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-c", f"set -euo pipefail; {command}"], cwd=tmp_path, env=environment, check=False)
    assert len((tmp_path / "tries").read_text().splitlines()) == tries
    assert run.returncode == status
    assert "retries" not in RULE.read_text()
