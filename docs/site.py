"""The site's files (`hooks` of mkdocs.yml): the repository's pages and what they link to, at their own paths.

So links are the same on the site, in a clone and on a forge. Two pages exist on the site alone, made of the code: the
commands of `qerl`, and the files of results. The page of the library is mkdocstrings'.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import typer.main
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("*.md", "docs/**/*.md", "config/**/*.md", "qerl/**/*.md", "profiles/*.md", "results/reference/**/*.md")
#: A formula as pymdownx.arithmatex leaves it.
_FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[(\[](.+?)\\[)\]]</\1>', re.DOTALL)
_LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)#\s\":]+)")


def linked(page: Path) -> set[Path]:
    """The files of the repository that a page links to or shows."""
    return {file for link in _LINK.findall(page.read_text()) if (file := (page.parent / link).resolve()).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what MkDocs found in `docs_dir`; keep what the theme brings."""
    root = Path(config.config_file_path).resolve().parent
    pages = {page for pattern in PAGES for page in root.glob(pattern)}
    styles = [css for css in config.extra_css if not css.startswith("assets/")]  # mkdocstrings writes its own there
    shown = sorted(pages.union(map(root.joinpath, [*config.extra["polyfills"], *styles]), *map(linked, pages)))
    own = [File.generated(config, str(file.relative_to(root)), abs_src_path=str(file)) for file in shown]
    for name, paragraphs in {"commands": commands_page(), "files": files_page()}.items():
        own.append(File.generated(config, f"docs/{name}.md", content="\n\n".join(paragraphs)))
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *own])


def on_page_content(html: str, **_: Any) -> str:
    """Make MathML of the formulas, which browsers draw without a script or fonts from elsewhere."""
    shown = {"div": "block", "span": "inline"}
    return _FORMULA.sub(lambda found: convert(unescape(found[2]).strip(), display=shown[found[1]]), html)


def commands_page() -> Iterator[str]:
    """The paragraphs of the page of the command line: each command, its arguments and options."""
    from qerl.cli.commands import app

    yield "# Commands"
    yield from _commands("qerl", typer.main.get_command(app))


def files_page() -> Iterator[str]:
    """The paragraphs of the page of results: the keys of each file and of each line."""
    from qerl.cli.workflow import section
    from qerl.results import schema

    yield "# Files of results"
    yield inspect.getdoc(schema) or ""
    for _, model in inspect.getmembers(schema, inspect.isclass):
        if issubclass(model, schema.Stored) and model is not schema.Stored:
            yield section(model)


def _commands(name: str, command: Any) -> Iterator[str]:
    if inner := getattr(command, "commands", None):
        for word, one in inner.items():
            if not one.hidden:
                yield from _commands(f"{name} {word}", one)
        return
    yield f"## {name}"
    yield inspect.cleandoc(command.help or "")
    rows = [("option", "meaning"), ("---", "---"), *((_written(one), one.help or "") for one in command.params)]
    yield "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows)


def _written(parameter: Any) -> str:
    names = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or parameter.name.upper()]
    return ", ".join(f"<code>{name}</code>" for name in names)
