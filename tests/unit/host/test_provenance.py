"""The stamp and the code version."""

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from qerl import __version__
from qerl.host import provenance as code


@pytest.mark.parametrize(
    ("name", "old", "new", "counts"),
    [
        ("rl/losses.py", '"""Policy losses', '# a remark\n"""Other words: policy losses', False),
        ("host/console.py", "LOG_EVERY = 15.0", "LOG_EVERY = 20.0", False),  # it only reports
        ("rl/rewards.py", "eps: float = 1e-4", "eps: float = 1e-6", True),
    ],
)
def test_a_changed_module_counts_unless_it_only_reports(tmp_path, monkeypatch, name, old, new, counts):
    shutil.copytree(code.PACKAGE, tmp_path / "qerl", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code, "PACKAGE", tmp_path / "qerl")
    before = code.code_version.__wrapped__("qerl.rl.train")
    text = (tmp_path / "qerl" / name).read_text()
    assert old in text
    (tmp_path / "qerl" / name).write_text(text.replace(old, new, 1))
    assert (code.code_version.__wrapped__("qerl.rl.train") != before) == counts


def git(*arguments: str, folder: Path) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git project with one commit; a small package is installed into its .venv, which it ignores."""
    monkeypatch.delenv("QERL_COMMIT")
    package = tmp_path / ".venv/lib/qerl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("a = 1\n")
    (tmp_path / ".gitignore").write_text(".venv\n")
    git("init", "-q", folder=tmp_path)
    git("add", ".gitignore", folder=tmp_path)
    git("commit", "-q", "-m", "another project", folder=tmp_path)
    monkeypatch.setattr(code, "PACKAGE", package)
    return tmp_path


def test_the_commit_of_a_project_around_the_package_is_not_its_own(repository, monkeypatch):
    before = code.code_state()
    assert (before["commit"], before["dirty"]) == (None, None)
    (code.PACKAGE / "__init__.py").write_text("a = 2\n")
    after = code.code_state()
    assert (before["version"], after["version"]) == (__version__, __version__)
    assert before["files"] != after["files"]
    monkeypatch.setenv("PATH", "")  # no git
    assert code.code_state() == after


def test_a_checkout_that_tracks_the_package_tells_its_commit(repository, monkeypatch):
    git("add", "--force", ".venv", folder=repository)
    git("commit", "-q", "-m", "the package", folder=repository)
    commit = git("rev-parse", "HEAD", folder=repository)
    monkeypatch.setenv("GIT_DIR", str(repository / "nowhere"))  # as in a hook of another repository
    assert code.code_state().items() >= {"commit": commit, "dirty": False}.items()
    (code.PACKAGE / "__init__.py").write_text("a = 2\n")
    assert code.code_state().items() >= {"commit": commit, "dirty": True}.items()


def test_the_version_of_python_does_not_count():
    """Python 3.12 gave functions and classes an empty field `type_params`."""
    tree = ast.parse("class A:\n    def f(self, x=None): return [x]\n")
    before, _ = code._walk(tree)
    tree.body[0]._fields = (*tree.body[0]._fields, "of_a_newer_python")
    tree.body[0].of_a_newer_python = []
    assert code._walk(tree)[0] == before
    assert code._walk(ast.parse("class A:\n    def f(self, x=None): return [[]]\n"))[0] != before
