"""Imports that the garbage collector leaves alone, and extras that are missing."""

import gc
from importlib import metadata

import pytest

from qerl import api
from qerl.host.imports import check_installed, imports
from qerl.settings.base import ConfigError


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_before_and_passes_over_what_was_imported(collects):
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        frozen = gc.get_freeze_count()
        with imports():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() == collects
        assert gc.get_freeze_count() >= frozen + len(made)
    finally:
        (gc.enable if before else gc.disable)()


def test_an_import_that_fails_leaves_the_collector_on():
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), imports():
        import no_such_module  # noqa: F401
    assert gc.isenabled()


@pytest.fixture
def without(monkeypatch):
    """Make a distribution look as if it weren't installed."""

    def hide(name: str) -> None:
        find = metadata.distribution
        monkeypatch.setattr(
            metadata, "distribution", lambda asked: find("no-such-distribution" if asked == name else asked)
        )

    return hide


@pytest.mark.parametrize(
    ("missing", "extra", "use"),
    [
        ("llmcompressor", "train", lambda folder: api.quantize(folder, folder / "out")),
        ("lm-eval", "eval", lambda folder: api.evaluate(None, folder, folder / "out")),
        ("lighteval", "eval", lambda folder: api.evaluate(None, folder, folder / "out")),
    ],
)
def test_a_missing_extra_is_said_first_of_all(tmp_path, without, missing, extra, use):
    without(missing)
    with pytest.raises(ConfigError, match=rf"{missing} isn't installed; .*pip install 'qerl\[{extra}\]'"):
        use(tmp_path)


@pytest.mark.parametrize(("missing", "extra"), [("lm-eval", "train"), ("llmcompressor", "eval")])
def test_training_needs_no_harness_and_evaluation_no_quantizer(without, missing, extra):
    without(missing)
    check_installed(extra)
