"""The table of GPUs in README.md and docs/doctor.md is the one that the code makes."""

from tests.gpus import NAMES, cells, other_makers, pages


def test_the_pages_have_the_table_of_the_code():
    for page, text in pages().items():
        assert page.read_text() == text, "run `python -m tests.gpus`"


def test_rows_by_hand():
    assert cells((9, 0)) == ("packed", "bitsandbytes' for few rows", "Triton", "engine with CUDA graphs", "yes")
    assert {cells(one)[0] for one in NAMES if one >= (8, 0) and one != (9, 0)} == {"packed, portable kernels"}
    assert cells(None)[2:] == ("PyTorch", "eager sampler, for small models", "no")
    assert [one for one in NAMES if cells(one)[-1] == "no"] == [(8, 0), (8, 6)]
    assert cells((7, 5))[0].startswith("not supported")
    assert other_makers() == ["AMD", "Apple"]
