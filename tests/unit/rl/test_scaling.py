"""The table of runs on several GPUs is that of the page, and of the stored results."""

from tests.scaling import CASES, PAGE, RESULTS, page


def test_the_page_has_the_table_of_the_stored_results():
    assert PAGE.read_text() == page(), "run `python -m tests.scaling`"
    missing = [name for name in CASES if not (RESULTS / name).exists()]
    assert page().count("not measured") == len(missing)


def test_every_case_is_a_run_on_as_many_gpus():
    for case in CASES.values():
        assert case.run().gpus == case.gpus
        assert case.compared is None or CASES[case.compared[0]].size == case.size
