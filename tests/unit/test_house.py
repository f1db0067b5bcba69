"""The structure of the package, read from its syntax trees: the direction of imports, and unique names."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import qerl

ROOT = Path(qerl.__file__).parent


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the package by its name."""
    return {
        ".".join(file.relative_to(ROOT.parent).with_suffix("").parts): ast.parse(file.read_text())
        for file in sorted(ROOT.rglob("*.py"))
    }


def imported(tree: ast.Module) -> set[str]:
    """The modules that a module imports anywhere in it."""
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_the_noise_schedule_needs_no_torch():
    assert imported(trees()["qerl.rl.noise_schedule"]) == {"__future__", "math", "qerl.settings.training"}


def test_architectures_need_no_torch():
    """The workflow reads them on every call."""
    assert imported(trees()["qerl.checkpoints.architectures"]) == {"__future__", "typing"}


def test_a_name_of_a_class_names_one_class():
    names = Counter(node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def texts_without_encoding(tree: ast.Module) -> list[str]:
    """The calls that read or write text by the encoding of the machine's locale, which isn't UTF-8 everywhere."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    methods = [call for call in calls if getattr(call.func, "attr", "") in ("read_text", "write_text")]
    opened = [call for call in calls if "open" in (getattr(call.func, "attr", ""), getattr(call.func, "id", ""))]
    texts = [*methods, *filter(of_text, opened)]
    return [ast.unparse(call) for call in texts if not {"encoding", "errors"} & {word.arg for word in call.keywords}]


def of_text(call: ast.Call) -> bool:
    modes = [word.value for word in call.args if isinstance(word, ast.Constant)]
    system = isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "os"
    return not system and not any("b" in str(mode) and len(str(mode)) < 4 for mode in modes)


def test_files_of_text_are_in_utf_8_whatever_the_locale():
    assert {name: calls for name, tree in trees().items() if (calls := texts_without_encoding(tree))} == {}
    assert texts_without_encoding(
        ast.parse("a.read_text(); open('notes'); c.open('rb'); d.open('w', encoding='utf-8')")
    ) == [
        "a.read_text()",
        "open('notes')",
    ]


#: Words that say nothing of what a variable holds.
EMPTY_WORDS = {"told", "held", "own", "there", "found"}


def bound_names(tree: ast.Module) -> set[str]:
    """Variables that a module assigns anywhere in it, and parameters."""
    nodes = list(ast.walk(tree))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return assigned | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_variables_have_names_of_the_field():
    for name, tree in trees().items():
        assert not bound_names(tree) & EMPTY_WORDS, name


def test_a_module_can_be_read_in_one_sitting():
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in ROOT.rglob("*.py")}
    assert not {name: lines for name, lines in lengths.items() if lines > 400}


def test_no_room_has_the_name_of_a_public_function():
    """Importing a room binds its name on the package, in place of a function of that name."""
    assert not set(qerl.__all__) & {folder.name for folder in ROOT.iterdir()}


def test_what_a_gpu_can_is_asked_of_a_named_one():
    """Without a device PyTorch answers for the process's present GPU, which needn't be the tensors'."""
    for name, tree in trees().items():
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            asked = getattr(call.func, "attr", "")
            if asked in ("get_device_capability", "get_device_properties", "get_device_name"):
                assert call.args, f"{name}: {asked}() names no device"


def test_rules_keep_their_python_in_the_package():
    """common.smk looks jobs up; what it needs for that is typed and tested in qerl/plan."""
    assert len((ROOT.parent / "workflow/rules/common.smk").read_text().splitlines()) <= 120
