"""Whether the hub answers, with servers on this machine in its place."""

import re
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import close_session, constants

from qerl.data import hub
from qerl.data.hub import hub_unreachable


class Busy(BaseHTTPRequestHandler):
    """A hub that is there and can't answer now."""

    def do_HEAD(self):
        self.send_error(503)

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def port():
    """A port at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def serve(port):
    server = ThreadingHTTPServer(("127.0.0.1", port), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_silence_is_told_after_the_limit(monkeypatch):
    with socket.socket() as full, socket.socket() as waiting:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting.connect(full.getsockname())  # which fills the queue, so that the next connection hangs
        address = f"http://127.0.0.1:{full.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(hub, "_LIMIT", 1.0)
        assert "no connection to" in hub_unreachable()


def test_a_server_that_is_reached_and_slow_is_a_matter_of_its_client(monkeypatch):
    with socket.socket() as slow:
        slow.bind(("127.0.0.1", 0))
        slow.listen(8)  # connections are made, and nobody answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{slow.getsockname()[1]}")
        monkeypatch.setattr(hub, "_LIMIT", 1.0)
        assert hub_unreachable() is None


def test_a_proxy_is_asked_instead_of_the_hub(monkeypatch, port):
    close_session()
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    server = serve(port)
    assert hub_unreachable() is None
    server.shutdown()
    close_session()


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "unknown://127.0.0.1:9"])
def test_a_proxy_that_the_client_cannot_use_is_told_at_once(monkeypatch, proxy):
    """By SOCKS a package may be missing."""
    close_session()
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    assert re.match(r"no connection to http://hub\.invalid: .*(socksio|Unknown scheme)", hub_unreachable())
    close_session()
