"""The site that `make site` builds, opened from files."""

import re
from collections import Counter
from os.path import relpath
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import qerl
from tests.browser import browser, needs_browser

ROOT = Path(__file__).parents[2]
#: Tables beside pages, which link to them.
BESIDE = re.compile(r"results/reference/.*/(tables|gates)/.*")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


def test_every_page_is_in_the_navigation_once(site):
    text = (
        (site / "docs/runs.html").read_text().partition('data-md-type="navigation"')[2].partition("</nav>\n  </div>")[0]
    )
    links = Counter(re.findall(r'<a href="([^"#]+)" class="md-nav__link', text))
    assert {count for link, count in links.items() if link not in ("../index.html", "runs.html")} == {1}
    pages = {
        relpath(page, site / "docs") for page in site.rglob("*.html") if not BESIDE.match(str(page.relative_to(site)))
    }
    assert pages - {"../404.html"} == {*links} | {"runs.html"}


def test_the_pages_that_are_made_of_the_code_have_all_of_it(site):
    library, commands, files = ((site / f"docs/{name}.html").read_text() for name in ("api", "commands", "files"))
    assert all(f'id="{name}"' in files for name in ("runresult", "samplerow", "rolloutrow", "stepmetrics"))
    assert all(f'id="qerl.{name}"' in library for name in set(qerl.__all__) - {"__version__"})
    assert all(f">qerl {name}<" in commands for name in ("train", "sample", "eval", "archive", "verify", "gate show"))


def test_every_formula_is_drawn_without_a_script(site):
    page = (ROOT / "docs/algorithms.md").read_text()
    blocks = re.findall(r"^ *\$\$(.+)\$\$$", page, flags=re.MULTILINE)
    drawn = (site / "docs/algorithms.html").read_text()
    assert len(blocks) == page.count("$$") / 2 == drawn.count('display="block"') > 0
    for built in site.glob("docs/**/*.html"):
        formulas = re.findall(r"<math.*?</math>", built.read_text(), flags=re.DOTALL)
        assert not [formula for formula in formulas if "\\" in formula], "a command that latex2mathml doesn't know"
        assert "$$" not in built.read_text()
        assert 'class="arithmatex"' not in built.read_text()


@needs_browser
def test_the_search_works_on_files_and_asks_no_server(site):
    with browser() as tab:
        tab.open(site / "docs/scaling.html")
        tab.page.locator(".md-search__input").press_sequentially("advantage of a group")
        tab.wait_for("document.querySelector('.md-search-result__item a')")
        assert tab.ask("document.querySelector('.md-search-result__item a').href").endswith("docs/algorithms.html")
        assert not tab.requests
        assert not tab.errors
