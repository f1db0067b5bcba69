"""Rooms of the package, their purposes and imports. `python -m tests.house` draws them in docs/architecture.md."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
Edges = set[tuple[str, str]]


@cache
def rooms() -> list[str]:
    """The rooms from the top floor to the lowest, in the order of import-linter's layers."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return layers


def purpose(room: str) -> str:
    """The first line of the docstring of a room, which is a folder or a module."""
    place = ROOT / "qerl" / room
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def imports() -> Edges:
    """The pairs (importing room, imported room), including imports within functions."""
    edges = set()
    for file in (ROOT / "qerl").rglob("*.py"):
        own = file.relative_to(ROOT / "qerl").parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            edges |= {(own, name.split(".")[1]) for name in names if name.startswith("qerl.")}
    return {(own, other) for own, other in edges if own in rooms() and other in rooms() and own != other}


def reduced(edges: Edges) -> Edges:
    """The edges that no longer path implies: the least graph with the same reachability, if there is no circle."""

    def reach(start: str) -> set[str]:
        below = {to for source, to in edges if source == start}
        return below.union(*map(reach, below))

    ways = {start: reach(start) for start, _ in edges}
    return {
        (start, to)
        for start, to in edges
        if not any(to in ways.get(other, ()) for source, other in edges if source == start)
    }


def block(edges: Edges, order: list[str]) -> str:
    """A Mermaid flowchart of the edges."""
    place = {name: number for number, name in enumerate(order)}
    lines = [f"    {a} --> {b}" for a, b in sorted(edges, key=lambda edge: (place[edge[0]], place[edge[1]]))]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def drawn(title: str) -> Edges:
    """The edges of the Mermaid flowchart in a section of the page."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^    (\w+) --> (\w+)$", section, re.MULTILINE))


def house() -> str:
    """The section on the house: the picture and the table of rooms."""
    lines = [f"| `{room}` | {purpose(room)} |" for room in rooms()]
    return "\n\n".join([block(reduced(imports()), rooms()), "\n".join(["| room | purpose |", "| --- | --- |", *lines])])


def section_of_the_house(page: str) -> str:
    """The page's present text in place of `house()`."""
    return page.partition("<!-- house -->\n")[2].partition("\n<!-- end -->")[0]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(section_of_the_house(text), house()))
