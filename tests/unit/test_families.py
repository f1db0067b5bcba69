"""The tables of families in docs/models.md and README.md are those that the code makes."""

from tests.families import FAMILIES, ROOT, pages, row
from tests.parity.family_models import NORMS


def test_the_pages_have_the_tables_of_the_code():
    for page, text in pages().items():
        assert page.read_text() == text, "run `python -m tests.families`"


def cells(lines):
    """The rows of a Markdown table by their first cell, each cell by the head of its column."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].partition(": ")[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_each_dash_and_each_no_awq_of_the_page_has_a_sentence():
    lines = [line for line in (ROOT / "docs/models.md").read_text().splitlines() if line.startswith("|")]
    second = lines.index("| part | sentence | families |")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[second + 2 :]]
    sentences = {(name, part) for part, _, names in rows for name in names.split(" · ")}
    lacking = set()
    for name, columns in cells(lines[:second]).items():
        parts = {"AWQ"} if "no AWQ" in columns["weights"] else set()
        parts |= {part for part, cell in columns.items() if cell == "–"}
        lacking |= {(name, "all" if columns["weights"] == "refused" else part) for part in parts}
    assert len(lacking) == 23
    assert lacking <= sentences


def test_every_family_that_is_not_refused_is_compared_with_other_libraries():
    assert {name for name, family in FAMILIES.items() if row(family).refusal is None} == NORMS.keys()


def test_the_rows_of_families_that_differ():
    """Read off the models' code by hand: which norms feed projections, and which samplers the tests cover."""
    gemma, phi, windows = (row(FAMILIES[name]) for name in ("gemma3", "phi3", "mistral-sliding"))
    assert "`pre_feedforward_layernorm`, of the form 1 + w" in gemma.norms
    assert {*phi.lora.split(", ")} == {"`qkv_proj`", "`o_proj`", "`gate_up_proj`", "`down_proj`"}
    assert all(one.has(sampler) for one in (gemma, phi, windows) for sampler in ("engine", "vLLM"))
    assert [row(FAMILIES["qwen3_moe"]).has(sampler) for sampler in ("engine", "vLLM")] == [True, False]
