"""The table of tasks in docs/runs.md has what runs of two steps find."""

import re
from pathlib import Path

import pytest

import qerl
from qerl.data.sources import read_split
from qerl.evals.evaluate import EvaluationError
from tests.workflow.test_readme import ENVIRONMENT_OF_VERIFIERS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/runs.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("| task |")[2].partition("\n\n")[0].splitlines()[2:]
]
CHATS = [{"prompt": [{"role": "user", "content": f"{n}+{n}?"}], "answer": str(2 * n)} for n in range(40)]
SIZES = {"train": 8, "validation": 4, "test": 4}


def test_the_table_of_the_readme_is_that_of_the_page():
    table = (
        (ROOT / "README.md").read_text().partition("| [task](docs/runs.md#what-tasks-work) |")[2].partition("\n\n")[0]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    shown = {tuple(cells): names.split(", ") for names, *cells in rows}
    tasks = [(re.sub(r"\]\([^)]*\)|\[", "", task), tuple(cells)) for task, *cells in ROWS]
    assert shown.keys() == {cells for _, cells in tasks}
    for task, cells in tasks:
        assert any(name in task for name in shown[cells])
    for cells, names in shown.items():
        for name in names:
            assert any(name in task for task, found in tasks if found == cells)


def letters(completions, **columns):
    return [float(len(set(chat[0]["content"]))) for chat in completions]


def generated(source, record_format=None, **task):
    return {"format": record_format or source, "origin": {"source": source, **SIZES, **task}}


OWN = {"functions": {"own": letters}}
ENVIRONMENT = {"format": "prompt", "origin": {"source": "python", "function": "environment:problems"}}
#: By the beginning of its row, a task's data set, its rewards in place of the grader, and the library that it needs.
TASKS = {
    "math": (generated("generated", "math"), None, "qerl"),
    "countdown": (generated("countdown"), None, "qerl"),
    "[records and chats]": (CHATS, None, "qerl"),
    "the same without": ([{"prompt": row["prompt"]} for row in CHATS], OWN, "qerl"),
    "[tasks of reasoning-gym]": (generated("reasoning_gym", task="basic_arithmetic"), None, "reasoning_gym"),
    "[turns and tools]": (generated("generated", "gsm8k"), None, "qerl"),
    "[environments of verifiers]": (ENVIRONMENT, {"functions": {"rubric": "environment:rubric"}}, "verifiers"),
}
#: Further keys of a task's run.
KEYS = {"[turns and tools]": {"environment": {"name": "calculator:Calculator", "turns": 2}}}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:24])
def test_the_table_of_tasks_is_what_runs_find(row, values, tmp_path, monkeypatch):
    task, *cells = row
    name = next((name for name in TASKS if task.startswith(name)), None)
    if name is None:
        assert cells == ["no"] * 3
        return
    dataset, reward, library = TASKS[name]
    pytest.importorskip(library)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    (tmp_path / "my_env.py").write_text(ENVIRONMENT_OF_VERIFIERS)
    (tmp_path / "environment.py").write_text(PAGE.partition("# environment.py\n")[2].partition("```")[0])
    reward = {**reward, "correct": 0, "format": 0} if reward else {}
    validation = {"every": 1, "problems": 2}
    run = qerl.train({**values, "dataset": dataset, "reward": reward, "validation": validation, **KEYS.get(name, {})})
    assert len(run.metrics) == 2
    assert run.metrics["reward"].notna().all()
    assert run.metrics["validation/reward"].notna().all()
    by_answers = not reward and all(problem.answer for problem in read_split(run.data, "validation"))
    try:
        qerl.evaluate(run.policy, run.data, tmp_path / "eval", repeats=1, max_tokens=4)
        evaluates = "one turn" if name in KEYS else "yes"
    except EvaluationError:
        evaluates = "no"
    assert cells == ["yes", "yes" if by_answers else "by the reward", evaluates]
