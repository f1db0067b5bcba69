"""The tables of families in docs/models.md and README.md are those that the code makes."""

from tests.families import FAMILIES, pages, row
from tests.parity.family_models import NORMS


def test_the_pages_have_the_tables_of_the_code():
    for page, text in pages().items():
        assert page.read_text() == text, "run `python -m tests.families`"


def test_every_family_that_is_not_refused_is_compared_with_other_libraries():
    assert {name for name, family in FAMILIES.items() if row(family).refusal is None} == NORMS.keys()


def test_the_rows_of_families_that_differ():
    """Read off the models' code by hand: which norms feed projections, and which samplers the tests cover."""
    gemma, phi, windows = (row(FAMILIES[name]) for name in ("gemma3", "phi3", "mistral-sliding"))
    assert "`pre_feedforward_layernorm`, of the form 1 + w" in gemma.norms
    assert {*phi.lora.split(", ")} == {"`qkv_proj`", "`o_proj`", "`gate_up_proj`", "`down_proj`"}
    assert all(one.has(sampler) for one in (gemma, phi, windows) for sampler in ("engine", "vLLM"))
    assert [row(FAMILIES["qwen3_moe"]).has(sampler) for sampler in ("engine", "vLLM")] == [True, False]
