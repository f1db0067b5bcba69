"""The page of samples: what it is made of, and what people do with it in a real browser."""

import json
import random
import re
import shutil

import pytest
from typer.testing import CliRunner

from qerl.cli import commands as cli
from qerl.report.samples import PageSizeError, make_page, sources_in
from qerl.results.schema import ResultError, RolloutRow, SampleRow, write_rows
from tests.browser import browser, needs_browser
from tests.pages import parts_of
from tests.synthetic_results import answers, write_evaluation, write_run

RUN, BASE = "main-nvfp4-lora-seed0", "base-nvfp4"
#: Completions that a page could break on: as HTML, as a script, in other directions, in size.
NASTY = [
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>",
    "<!-- <pre> &amp; &lt;b&gt; {{ title }} {% raw %} ${window.hacked = 3}",
    "\u202etxet eht si siht\u202c \u200f\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627\u200e\u2066 #### 41",
    "👩‍🔬🏳️‍🌈 🇩🇪 e\u0301 \u00a0\t\u0007\u001b[31m \U0001f9ee #### 42",
    "so " * 34_000,
]


def sample(problem: str, repeat: int, **changed) -> SampleRow:
    row = {"dataset": "sums", "harness": "lm-eval", "problem": problem, "repeat": repeat, "completion": "#### 1"}
    row |= {"prompt": f"<|user|>Add: what is {problem} and {problem}?<|assistant|>", "extracted": "1", "read": "1"}
    row |= {"gold": "2", "correct": 0, "agrees": True, "tokens": 5, "finished": True}
    return SampleRow(**row | changed)


def write_samples(root, name: str, rows: list[SampleRow], weights="nvfp4", run=None):
    """An evaluation whose samples are these rows."""
    correct = {"sums": answers(0.5, 0, problems=2, repeats=1)}
    path = write_evaluation(root, name, correct, weights, run)
    write_rows(path.parent / "samples.jsonl", rows)
    return path


def rollout(step: int, problem: str, texts: list[list[str]]) -> RolloutRow:
    verdict = {"reward": -0.15, "advantage": -0.707, "extracted": "41", "finished": False}
    verdict["parts"] = {"correct": 0.0, "format": 1.0, "overlong": -0.25}
    completions = [
        {"tokens": tokens, "logprobs": [-0.5] * len(tokens), "entropies": [1.5] * len(tokens)} | verdict
        for tokens in texts
    ]
    prompt = f"How much is {problem}?"
    return RolloutRow(step=step, problem=problem, prompt=prompt, gold="42", completions=completions)


def write_steps(run, steps: dict[int, list[RolloutRow]]) -> None:
    for step, rows in steps.items():
        folder = run.parent / "rollouts"
        folder.mkdir(exist_ok=True)
        write_rows(folder / f"step-{step:06d}.jsonl.gz", rows)


@pytest.fixture
def results(tmp_path):
    """A run with two stored steps and its evaluation, its base, and a base of other weights."""
    run = write_run(tmp_path, "nvfp4-lora", 0)
    problems = [f"train-{number}" for number in range(1, 9)]
    write_steps(run, {step: [rollout(step, name, [["#### ", "4", "1"]] * 2) for name in problems] for step in (1, 12)})
    before = [sample(str(problem), repeat) for problem in range(6) for repeat in range(2)]
    right = {"correct": 1, "extracted": "2", "read": "2", "completion": "#### 2"}
    after = [row.model_copy(update=right if row.problem < "3" else {}) for row in before]
    after[0] = after[0].model_copy(update={"agrees": False, "read": None, "completion": "it is 2"})
    after[11] = after[11].model_copy(update={"finished": False})
    write_samples(tmp_path, BASE, before)
    write_samples(tmp_path, "base-bf16", before, "bf16")
    write_samples(tmp_path, RUN, after, run=run)
    return tmp_path


def made(results, **options):
    make_page("a <b>name</b>", sources_in([results]), results / "samples.html", **options)
    return results / "samples.html"


# --- what the page is made of


def test_each_grader_has_its_verdict_and_what_it_read(results):
    rows = [
        sample("0", 0, correct=1, extracted="2", agrees=False, read=None),
        sample("1", 0, correct=0, extracted=None, agrees=True, flexible=True),
        sample("2", 0, harness="qerl", correct=1, extracted="2", read="2"),
    ]
    write_samples(results, BASE, rows)
    [view] = next(source for source in sources_in([results]) if source.id == BASE).views
    verdicts = [problem["completions"][0]["verdicts"] for problem in view.problems()]
    assert verdicts == [
        [["lm-eval", True, "2"], ["training", False, None]],
        [["lm-eval", False, None], ["training", False, "1"], ["lm-eval, flexible", True]],
        [["training", True, "2"]],
    ]


def test_the_page_has_all_samples_and_equal_prompts_once(results):
    page = parts_of(made(results))
    index = page["index"]
    assert index["title"] == "a <b>name</b>"
    before = {source["id"]: source["before"] for source in index["sources"]}
    assert before == {RUN: BASE, BASE: None, "base-bf16": None}  # the base of its weights
    views = {(source["id"], view["step"]): view for source in index["sources"] for view in source["views"]}
    assert {key: (v["trained"], v["problems"], v["completions"], v["right"]) for key, v in views.items()} == {
        (RUN, "1"): (True, 8, 16, 0),
        (RUN, "12"): (True, 8, 16, 0),
        (RUN, "sums"): (False, 6, 12, 6),
        (BASE, "sums"): (False, 6, 12, 0),
        ("base-bf16", "sums"): (False, 6, 12, 0),
    }
    assert len({view["prompts"] for view in views.values()}) == 2
    assert views[BASE, "sums"]["samples"] == views["base-bf16", "sums"]["samples"] != views[RUN, "sums"]["samples"]
    stored = page[f"part-{views[RUN, '12']['samples']}"]
    assert [problem["id"] for problem in stored] == [f"train-{number}" for number in range(1, 9)]
    assert stored[6]["completions"][1]["tokens"] == ["#### ", "4", "1"]


def test_a_page_that_is_too_large_has_fewer_problems_of_each_view_and_says_so(results):
    noise = random.Random(0)
    texts = [noise.randbytes(10_000).hex() for _ in range(12)]
    write_samples(results, BASE, [sample(str(n // 2), n % 2, completion=text) for n, text in enumerate(texts)])
    whole = made(results)
    size = len(whole.read_bytes())
    assert all(view["problems"] == view["stored"] for s in parts_of(whole)["index"]["sources"] for view in s["views"])
    shorter = made(results, megabytes=0.7 * size / 1e6)
    assert len(shorter.read_bytes()) <= 0.7 * size
    counts = {(v["problems"], v["stored"]) for s in parts_of(shorter)["index"]["sources"] for v in s["views"]}
    assert counts == {(4, 8), (3, 6)}
    with pytest.raises(PageSizeError, match="--megabytes"):
        made(results, megabytes=0.01)


def test_folders_that_cannot_be_shown_are_named(results, tmp_path):
    (mine := tmp_path / "mine").mkdir()
    with pytest.raises(ResultError, match="mine has no samples: it is no folder"):
        sources_in([mine])
    (mine / "run.yaml").write_text("model: m\n")
    with pytest.raises(ResultError, match="mine has no samples yet: the run has not finished its first step"):
        sources_in([mine])
    file = next(results.rglob("rollouts/*.gz"))
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ResultError, match=rf"{file.name} is damaged .*; make it again"):
        [list(view.problems()) for source in sources_in([results]) for view in source.views]
    shutil.copytree(results / "evaluate" / BASE, tmp_path / "other" / BASE)
    with pytest.raises(ResultError, match=f"are both named {BASE}"):
        sources_in([results, tmp_path / "other" / BASE])


def test_a_run_in_progress_is_read_from_its_work_and_a_base_is_named_without_its_folders(tmp_path):
    folder = tmp_path / "mine" / "work" / "abc"
    folder.mkdir(parents=True)
    write_steps(folder / "metrics.jsonl", {10: [rollout(10, "p", [["x"]])]})
    write_evaluation(tmp_path, BASE, {"sums": answers(0.5, 0, problems=2, repeats=1)}, "nvfp4", model="/srv/me/mini")
    base, run = sources_in([tmp_path, tmp_path / "mine"])
    assert (run.id, [view.step for view in run.views]) == ("mine", ["10"])
    assert base.about == "mini, nvfp4, untrained"


def test_view_prints_the_path_of_the_page_and_nothing_else(results, tmp_path):
    folders = [str(results / "train" / RUN), str(results / "evaluate" / RUN), str(results / "evaluate" / BASE)]
    told = CliRunner().invoke(cli.app, ["view", *folders, "--out", str(tmp_path / "page.html")])
    assert told.output == f"{tmp_path / 'page.html'}\n"
    assert "<a " not in (tmp_path / "page.html").read_text()
    (tmp_path / "report.html").touch()
    CliRunner().invoke(cli.app, ["view", *folders, "--out", str(tmp_path / "page.html")])
    assert '<a href="report.html">Report</a>' in (tmp_path / "page.html").read_text()
    ids = [source["id"] for source in parts_of(tmp_path / "page.html")["index"]["sources"]]
    assert sorted(ids) == [BASE, RUN]


# --- in a browser


@pytest.fixture(scope="module")
def tab():
    with browser() as tab:
        yield tab


def ready(tab):
    tab.wait_for("document.body.dataset.ready === (location.hash || '#')")


def opened(tab, page, address=""):
    tab.open(page, address)
    ready(tab)


@needs_browser
def test_what_the_policy_wrote_at_a_step_on_a_problem_and_why_it_is_wrong_is_three_clicks_away(results, tab):
    opened(tab, made(results), RUN)  # the first click, on the report
    tab.choose("#step", "12")
    ready(tab)
    tab.click("#problems a:nth-of-type(7)")
    ready(tab)
    assert tab.ask("decodeURIComponent(location.hash)") == f"#{RUN}/12/train-7"
    told = tab.text("#problem")
    for text in ("train-7 · step 12", "#### 41", "reads 41, expects 42", "cut off", "advantage", "−0.707"):
        assert text in told
    assert "−0.15 (correct 0, format 1, overlong −0.25)" in told
    opened(tab, made(results), f"{RUN}/12/train-7")
    assert tab.text("#problem") == told
    assert (tab.errors, tab.requests) == ([], [])


@needs_browser
def test_replies_of_an_environment_stand_apart_from_turns(results, tab):
    row = rollout(12, "p", [["2+3=", "<eos>", "[tool|", "5", "####", " 5"]])
    told = row.completions[0].model_copy(update={"replies": [(2, 4)]})
    write_steps(results / "train" / RUN / "run.json", {12: [row.model_copy(update={"completions": [told]})]})
    for shade in ("", "?shade=entropy"):
        opened(tab, made(results), f"{RUN}/12/p{shade}")
        assert tab.ask("[...document.querySelectorAll('.reply')].map(e => e.innerText)") == ["[tool|5"]
        assert tab.ask("document.querySelector('pre.text:not(.question-text)').innerText") == "2+3=<eos>[tool|5#### 5"
        assert "2 turns, 4 tokens" in tab.text("#problem")


@needs_browser
def test_before_and_after_stand_side_by_side_with_both_verdicts(results, tab):
    opened(tab, made(results), f"{RUN}/sums/0")
    columns = tab.ask("[...document.querySelectorAll('.column')].map(e => e.innerText)")
    assert [column.split("\n")[0] for column in columns] == [BASE, RUN]
    assert "before training" in columns[0]
    assert "reads 1, expects 2" in columns[0]
    assert "after training" in columns[1]
    verdicts = tab.ask("[...document.querySelectorAll('.column:last-child .facts dd')].map(e => e.innerText)")
    assert verdicts[:2] == ["✓ right, read 2", "✗ wrong, read no answer"]
    lefts = tab.ask("[...document.querySelectorAll('.column')].map(e => e.getBoundingClientRect().left)")
    assert lefts[0] < lefts[1]
    tab.choose("#other", "base-bf16")
    ready(tab)
    assert tab.ask("document.querySelector('.column h3').innerText") == "base-bf16"
    assert "beside=base-bf16" in tab.ask("location.hash")


@needs_browser
@pytest.mark.parametrize("text", NASTY, ids=["script", "markup", "directions", "emojis", "100 kB"])
def test_completions_are_shown_as_they_are_and_do_nothing(results, tab, text):
    write_samples(results, BASE, [sample("0", 0, completion=text, extracted=text[:50], prompt=text, gold=text[:20])])
    write_steps(results / "train" / RUN / "run.json", {12: [rollout(12, "p", [[text[:7], text[7:]]])]})
    page = made(results)
    for address in (f"{BASE}/sums", f"{RUN}/12?shade=entropy"):
        opened(tab, page, address)
        shown = f"document.querySelector('pre.text:not(.question-text)').textContent === {json.dumps(text)}"
        assert tab.ask(shown)
        assert tab.ask("window.hacked") is None
        assert tab.ask("document.querySelectorAll('#problem img, #problem script').length") == 0
        assert (tab.errors, tab.requests, tab.overflow()) == ([], [], 0)
    marks = tab.ask("[...document.querySelectorAll('.completion .text bdi')].map(e => e.dataset.name)")
    invisible = re.findall("[\u202a-\u202e\u2066-\u2069\u200e\u200f\u0007\u001b]", text)
    assert marks == [f"U+{ord(character):04X}" for character in invisible]


@needs_browser
def test_a_right_to_left_override_turns_nothing_around_outside_of_itself(results, tab):
    write_samples(results, BASE, [sample("0", 0, completion="\u202eabc", extracted="\u202e7", gold="8")])
    opened(tab, made(results), f"{BASE}/sums")
    script = "(() => { const [range, node] = [new Range(), document.querySelector('.why').lastChild];"
    script += "const at = (text) => { const place = node.data.indexOf(text); range.setStart(node, place);"
    script += "range.setEnd(node, place + 1); return range.getBoundingClientRect().left; };"
    assert tab.ask(script + "return at('e') < at('8'); })()")


@needs_browser
def test_an_address_of_what_is_not_there_leads_to_what_is_near_and_says_so(results, tab):
    opened(tab, made(results), f"{RUN}/14/train-99")
    told = tab.text("#problem")
    assert "Step 14 isn't stored; this is step 12." in told
    assert "Problem train-99 isn't among these samples." in told
    for address in ("unknown/3", "100%/3?find=%"):
        opened(tab, made(results), address)
        assert f"This page has no samples of {address.partition('/')[0]}." in tab.text("#problem")
    assert tab.errors == []


@needs_browser
def test_a_place_in_the_list_is_an_address_and_the_list_begins_with_what_was_cut_off(results, tab):
    opened(tab, made(results), f"{RUN}/12/3")
    assert "train-3 · step 12" in tab.text("#problem")
    assert "0 % of 16 completions right, 16 cut off." in tab.text("#problems p")
    assert tab.ask("document.getElementById('step').selectedOptions[0].text") == "step 12 · 0 % · reward −0.15"


@needs_browser
@pytest.mark.parametrize("shade", ["", "?shade=entropy"])
def test_what_the_grader_read_is_marked_where_it_stands_last(results, tab, shade):
    write_steps(results / "train" / RUN / "run.json", {12: [rollout(12, "p", [["41 or ", "#### 4", "1."]])]})
    opened(tab, made(results), f"{RUN}/12{shade}")
    marked = "[...CSS.highlights.get('read')].map(range => range.toString())"
    assert tab.ask(marked) == ["41"]
    assert tab.ask("[...CSS.highlights.get('read')][0].startContainer.data") in ("#### 4", "41 or #### 41.")


@needs_browser
def test_a_script_that_is_not_the_pages_own_does_not_run(results, tab):
    page = made(results)
    page.write_text(page.read_text().replace("</body>", "<script>window.hacked = 4</script></body>"))
    opened(tab, page)
    assert tab.ask("window.hacked") is None
