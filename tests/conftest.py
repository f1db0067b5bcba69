"""The number of examples in property-based tests: the same in every run, and more where the profile asks for them."""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from qerl.host.imports import imports
from qerl.host.process import ANNOUNCEMENTS

#: `nightly` draws other examples on every run; it prints how to repeat the one that failed.
PROFILE = "QERL_TEST_PROFILE"
NIGHTLY = os.environ.get(PROFILE) == "nightly"
#: For tests that take long and guard what a change seldom breaks, such as how times grow with sizes.
nightly = pytest.mark.skipif(not NIGHTLY, reason=f"runs with {PROFILE}=nightly")


def in_nightly(*cases: object) -> list[object]:
    """Cases of a parametrized test for nightly runs alone; each is a tuple, or the value of a single parameter."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=nightly) for case in cases]


#: The number of modules when objects were last exempted from garbage collection, and by how many more it is done again.
MODULES, MANY = pytest.StashKey[int](), 50

# `make test ARGS=...` hands its options to each make that a test starts, by both.
for _name in ("MAKEFLAGS", "ARGS"):
    os.environ.pop(_name, None)
# Stamps of results have this commit: no test asks git for one, nor depends on the state of the checkout.
os.environ["QERL_COMMIT"] = "test"
# What hypothesis looks up in the sources is kept out of the working tree.
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / f"hypothesis-{os.getuid()}")
# Times on a busy machine say nothing of an example; the whole test has pytest's limit.
settings.register_profile(
    "default",
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile(
    "nightly", settings.get_profile("default"), max_examples=500, derandomize=False, print_blob=True
)
settings.load_profile(os.environ.get(PROFILE, "default"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Skip the garbage collector while collection imports every library, in each process of the suite."""
    with imports():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """The collector passes over what a test imported, too: after vLLM's engine it takes half a second else.

    A quantization collects after every shard, and an engine of vLLM a dozen times.
    """
    yield
    if len(sys.modules) > item.config.stash.get(MODULES, 0) + MANY:
        gc.collect()
        gc.freeze()
        item.config.stash[MODULES] = len(sys.modules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that neither of two processes ends with a long file alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """No signal is ignored, as SIGINT is in what a shell starts in the background, and SIGHUP under `nohup`."""
    ignored = [number for number in (signal.SIGINT, *ANNOUNCEMENTS) if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
