"""The site's files (`hooks` of mkdocs.yml): the repository's pages and what they link to, at their own paths.

So links are the same on the site, in a clone and on a forge.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("*.md", "docs/**/*.md", "config/**/*.md", "qerl/**/*.md", "profiles/*.md", "results/reference/**/*.md")
_LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)#\s\":]+)")


def linked(page: Path) -> set[Path]:
    """The files of the repository that a page links to or shows."""
    return {file for link in _LINK.findall(page.read_text()) if (file := (page.parent / link).resolve()).is_file()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace what MkDocs found in `docs_dir`; keep what the theme brings."""
    root = Path(config.config_file_path).resolve().parent
    pages = {page for pattern in PAGES for page in root.glob(pattern)}
    shown = sorted(pages.union(*map(linked, pages)))
    own = [File.generated(config, str(file.relative_to(root)), abs_src_path=str(file)) for file in shown]
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *own])
