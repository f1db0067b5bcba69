"""The lock file, written by the hub's own client from a hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from qerl.data.hub import check_pinned, read_lock, verify, with_locked_revisions
from qerl.settings.base import ConfigError, parse
from qerl.settings.models import LockedRepo
from qerl.settings.workflow import Config

ROOT = Path(__file__).parents[3]
COMMIT = {"Qwen/tiny": "a" * 40, "org/sums": "b" * 40}
LARGE = "c" * 64
FILES = {
    "Qwen/tiny": {
        "config.json": b"{}",
        "model.safetensors": None,
        "README.md": b"no part of a model",
        "original/model.safetensors": None,  # as gpt-oss has it for other software
        "consolidated.safetensors": None,  # as Mistral has it for other software
    },
    "org/sums": {"main/train-00000-of-00001.parquet": None, "README.md": b"sums"},
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for two repositories; a file of None is a large one, of which it knows the hash."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/":
            return self.send_error(404)
        repo = next(name for name in FILES if name in path)
        if path.startswith("/api/"):
            body = json.dumps(
                {"id": repo, "sha": COMMIT[repo], "siblings": list(map(self.sibling, FILES[repo].items()))}
            )
            return self.answer(body.encode(), "application/json", repo)
        name = path.split(f"/resolve/{COMMIT[repo]}/")[1]
        return self.answer(FILES[repo][name], "text/plain", repo)

    def sibling(self, item):
        name, content = item
        about = {"rfilename": name, "blobId": "0" * 40, "size": len(content or b"x")}
        return about | ({"lfs": {"sha256": LARGE, "size": 1, "pointerSize": 1}} if content is None else {})

    def answer(self, body, kind, repo):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT[repo])
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def values(tmp_path, **changes):
    return {
        "name": "locked",
        "lock": str(tmp_path / "lock.yaml"),
        "models": {"tiny": {"source": "hub", "repo": "Qwen/tiny", "revision": "main"}},
        "datasets": {"sums": {"format": "gsm8k", "origin": {"source": "hub", "repo": "org/sums", "revision": "main"}}},
        "experiments": {"e": {"base": {"model": "tiny", "dataset": "sums"}}},
        "evaluation": {"tasks": [{"dataset": "sums", "harness": "lm-eval"}]},
        **changes,
    }


def config(tmp_path, **changes) -> Config:
    return parse(Config, values(tmp_path, **changes), "test")


def qerl(tmp_path, hub, *arguments):
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-m", "qerl", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_qerl_lock_writes_commits_and_hashes(tmp_path, hub):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values(tmp_path)))
    run = qerl(tmp_path, hub, "lock", str(tmp_path / "c.yaml"))
    assert run.returncode == 0, run.stderr
    lock = read_lock(tmp_path / "lock.yaml")
    assert lock["Qwen/tiny"].revision == COMMIT["Qwen/tiny"]
    assert lock["Qwen/tiny"].files == {"config.json": hashlib.sha256(b"{}").hexdigest(), "model.safetensors": LARGE}
    assert lock["datasets/org/sums"].files["main/train-00000-of-00001.parquet"] == LARGE
    locked = with_locked_revisions(config(tmp_path))
    assert locked.models["tiny"].revision == COMMIT["Qwen/tiny"]
    assert locked.datasets["sums"].origin.revision == COMMIT["org/sums"]
    check_pinned(locked, "c.yaml")


def test_without_network_one_sentence_says_so(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(values(tmp_path)))
    run = qerl(tmp_path, "http://127.0.0.1:9", "lock", str(tmp_path / "c.yaml"))
    assert run.returncode == 2
    assert "`qerl lock` needs network" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "lock.yaml").exists()


def test_a_branch_that_is_not_locked_is_refused_with_the_command(tmp_path):
    with pytest.raises(ConfigError, match=r"Qwen/tiny@main, datasets/org/sums@main: .*`qerl lock c.yaml`"):
        check_pinned(with_locked_revisions(config(tmp_path)), "c.yaml")


def test_configuration_and_lock_file_must_name_the_same_commit(tmp_path):
    (tmp_path / "lock.yaml").write_text(yaml.safe_dump({"Qwen/tiny": {"revision": "a" * 40, "files": {}}}))
    models = {"tiny": {"source": "hub", "repo": "Qwen/tiny", "revision": "d" * 40}}
    with pytest.raises(ConfigError, match="the configuration names commit d"):
        with_locked_revisions(config(tmp_path, models=models))


def test_a_file_that_differs_is_named(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    verify(
        LockedRepo(revision="a" * 40, files={"config.json": hashlib.sha256(b"{}").hexdigest(), "x": "0" * 64}), tmp_path
    )
    with pytest.raises(ConfigError, match=r"config\.json has SHA-256 44136fa3.*download it again"):
        verify(LockedRepo(revision="a" * 40, files={"config.json": "0" * 64}), tmp_path)
