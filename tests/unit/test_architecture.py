"""docs/architecture.md: its picture of the house and its table of rooms match the code."""

import re

import pytest

from tests import house


def test_the_page_shows_the_rooms_and_their_imports():
    found = house.section_of_the_house(house.PAGE.read_text())
    assert found == house.house(), "run `python -m tests.house`"


def test_imports_run_downwards_in_the_picture():
    order = house.rooms()
    assert house.drawn("The house")
    assert all(order.index(above) < order.index(below) for above, below in house.drawn("The house"))


def test_the_reduction_keeps_what_can_be_reached():
    edges = {("a", "b"), ("b", "c"), ("a", "c"), ("c", "d"), ("a", "d"), ("e", "d")}
    assert house.reduced(edges) == {("a", "b"), ("b", "c"), ("c", "d"), ("e", "d")}


def test_every_rule_is_in_the_picture():
    files = [*(house.ROOT / "workflow/rules").glob("*.smk"), house.ROOT / "workflow/Snakefile"]
    rules = {name for file in files for name in re.findall(r"^rule (\w+):", file.read_text(), re.MULTILINE)}
    text = house.PAGE.read_text()
    assert {name for edge in house.drawn("The DAG") for name in edge} == rules
    rows = re.findall(r"^\| (`.*`) \|", text.split("## The DAG")[1].split("## The house")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == rules


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md"])
def test_places_that_a_page_names_exist(page):
    text = re.sub(r"^```.*?^```", "", (house.ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    files = set(re.findall(r"`((?:qerl|tests|docs|config|profiles|results|workflow)/[\w./-]+)`", text))
    assert not [file for file in files if not (house.ROOT / file).exists()]
    for name in set(re.findall(r"`(qerl(?:\.\w+)+)`", text)):
        assert stands(name), name


def stands(name: str) -> bool:
    """Whether a dotted name is a module, or a name that the module above it defines."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        place = house.ROOT / "/".join(parts[:end])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            text = file.read_text()
            return all(re.search(rf"\b(class|def) {part}\b|^{part}\b", text, re.MULTILINE) for part in parts[end:])
    return False
