"""Results of benches have a stamp, whose commit is this one."""

import pytest


@pytest.fixture(autouse=True)
def commit(monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "test")
