"""Imports that the garbage collector leaves alone."""

import gc

import pytest

from qerl.imports import imports


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
