"""The screen has the project's lines and progress; what libraries print is in the log."""

import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from qerl.host.console import VisibleConsole, visible

ROOT = Path(__file__).parents[3]
NOISE = """
import os, subprocess, sys, warnings
from pathlib import Path
from qerl.host.console import configure_logging, log, showing
from qerl.host.console import quiet
configure_logging()
def noise():
    print("of Python")
    warnings.warn("of a library")
    os.write(2, b"of C\\n")
    subprocess.run([sys.executable, "-c", "print('of a process')"])
"""
NOISES = ("of Python", "of a library", "of C", "of a process")
#: A process of a run: its standard error is the log, but the project's lines are on the screen too.
CHILD = """
import subprocess
from qerl.host.console import configure_logging, log
configure_logging()
log.warning("from a process of the run")
print("noise of it")
"""


def run(program: str, folder: Path, **streams) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, text=True, check=False, **streams)


def test_noise_of_every_origin_goes_to_the_log(tmp_path):
    body = (
        "with quiet(Path('run/log.txt')):\n    noise()\n    log.info('begun')\n    log.warning('odd')\nprint('made')\n"
    )
    seen = run(NOISE + body, tmp_path, capture_output=True)
    assert (seen.returncode, seen.stdout, seen.stderr) == (0, "made\n", "begun\nwarning: odd\n")
    stored = (tmp_path / "run/log.txt").read_text()
    assert all(noise in stored for noise in NOISES)
    assert "INFO qerl: begun\n" in stored
    assert "WARNING qerl: odd\n" in stored


def test_without_a_file_noise_is_shown_only_where_it_may_explain_an_error(tmp_path):
    body = "with quiet():\n    noise()\n    log.info('begun')\n    {}\n"
    assert run(NOISE + body.format("pass"), tmp_path, capture_output=True).stderr == "begun\n"
    mistake = run(NOISE + body.format("raise ValueError('no such model')"), tmp_path, capture_output=True)
    assert not any(noise in mistake.stderr.partition("Traceback")[0] for noise in NOISES)
    failed = run(NOISE + body.format("raise RuntimeError('kernel')"), tmp_path, capture_output=True)
    assert all(noise in failed.stderr for noise in NOISES)
    assert "RuntimeError: kernel" in failed.stderr


def test_processes_of_a_run_share_the_screen_even_if_it_is_a_file(tmp_path):
    body = f"with quiet(Path('log.txt')):\n    log.info('one')\n    subprocess.run([sys.executable, '-c', {CHILD!r}])\n"
    with (tmp_path / "screen").open("w") as screen:
        assert (
            run(
                NOISE + body + "    log.info('two')\nprint('three')\n", tmp_path, stdout=screen, stderr=screen
            ).returncode
            == 0
        )
    assert (tmp_path / "screen").read_text() == "one\nwarning: from a process of the run\ntwo\nthree\n"
    assert "noise of it" in (tmp_path / "log.txt").read_text()


def on_terminal(program: str, folder: Path) -> str:
    """What a terminal of 100 columns shows of a program."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=folder, env=environment, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65536):
            shown += part
    except OSError:  # which the end of a terminal is
        pass
    os.close(leader)
    assert process.wait() == 0, shown
    return shown.decode()


STEPS = """
with quiet(Path("log.txt")), showing(3, "steps", start=1) as advance:
    for reward in (0.25, 0.5):
        noise()
        advance(f"reward {reward}")
"""


def test_a_terminal_has_one_live_line(tmp_path):
    shown = on_terminal(NOISE + STEPS, tmp_path)
    assert "reward 0.5" in shown.rpartition("3/3")[2]
    assert shown.count("\n") == 1  # the line is drawn over itself, and ends once
    assert not any(noise in shown for noise in NOISES)
    assert all(noise in (tmp_path / "log.txt").read_text() for noise in NOISES)


#: Two runs take turns.
TURNS = """
from contextlib import ExitStack
import qerl.host.console as p
p.LOG_EVERY = -1
bars = {}
with quiet(Path("log.txt")), ExitStack() as open_bars:
    for run, steps in {"one": 2, "two": 3}.items():
        with p.naming(run):
            bars[run] = open_bars.enter_context(showing(steps, "steps"))
    for step, run in enumerate(["one", "two", "one", "two", "two"]):
        with p.naming(run):
            log.info("%s %d%%", "at", step)
            bars[run](f"reward {step}")
"""


def test_runs_side_by_side_have_lines_with_their_names_on_a_terminal_too(tmp_path):
    shown, stored = on_terminal(NOISE + TURNS, tmp_path).splitlines(), (tmp_path / "log.txt").read_text()
    for line in ("one: at 0%", "two: at 4%", "one: steps: 2 of 2, reward 2", "two: steps: 3 of 3, reward 4"):
        assert line in shown
        assert f"INFO qerl: {line}\n" in stored


def test_without_a_terminal_steps_are_plain_lines(tmp_path):
    setting = "import qerl.host.console as p\np.LOG_EVERY = -1\n"
    first, last = run(NOISE + setting + STEPS, tmp_path, capture_output=True).stderr.splitlines()
    assert re.fullmatch(r"steps: 2 of 3, reward 0\.25, \d+ s left", first)
    assert last == "steps: 3 of 3, reward 0.5"


#: Clears the screen, sets the window's title, the same by C1, overwrites the line, and reorders what is read.
HOSTILE = "a\x1b[2Jb\x1b]0;title\x07c\x9b2Jd\u202ee\u2066f\U000e0041g"


def assert_shown(text: str, letters: str = "abcdefg"):
    kept = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c not in "\n\t"]
    assert kept == []
    assert [letter for letter in letters if letter not in text] == []
    for number in (r"\x1b", r"\x9b", r"\u202e", r"\u2066", r"\U000e0041"):
        assert number in text


def test_what_a_model_or_file_says_can_not_control_the_terminal():
    """On consoles with and without a terminal, in text, in cells of tables, and beside rich's own colors."""
    for terminal in (False, True):
        screen = VisibleConsole(file=io.StringIO(), force_terminal=terminal, color_system=None, width=200)
        table = Table()
        table.add_column(HOSTILE)
        table.add_row(Text(HOSTILE))
        for shown in (Text(HOSTILE), HOSTILE, table, Group(Text(HOSTILE))):
            screen.print(shown, soft_wrap=isinstance(shown, (Text, str)))
            assert_shown(screen.file.getvalue())
    colored = VisibleConsole(file=io.StringIO(), force_terminal=True, color_system="standard")
    colored.print(Text("bold", style="bold"))
    assert colored.file.getvalue() == "\x1b[1mbold\x1b[0m\n"


@pytest.mark.parametrize("text", ["\n\tπ ≤ 4", "नमस्ते", "می\u200cخواهم", "👩\u200d🚀", "한국어"])
def test_text_of_any_language_stays_as_it_is(text):
    assert visible(text) == text


def test_lines_of_the_log_and_of_libraries_can_not_control_the_terminal(tmp_path):
    body = f"log.warning({HOSTILE!r})\nwith quiet(Path('log.txt')):\n    log.warning({HOSTILE!r})\n"
    assert_shown(run(NOISE + body, tmp_path, capture_output=True).stderr)
    assert_shown((tmp_path / "log.txt").read_text())
    body = f"with quiet():\n    print({HOSTILE!r})\n    1 / 0\n"
    assert_shown(run(NOISE + body, tmp_path, capture_output=True).stderr)
