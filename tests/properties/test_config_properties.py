"""Configurations: any YAML is accepted or refused in one sentence, and any accepted one can be planned."""

import copy
import itertools
import math
import re
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from qerl.data.hub import read_lock
from qerl.data.sources import parse_run
from qerl.settings.base import ConfigError, parse, parse_yaml, read_yaml
from qerl.settings.data import DatasetSettings
from qerl.settings.run import RunFile, RunSettings
from qerl.settings.workflow import Config, Experiment, TaskSettings, merged, nested
from qerl.workflow.plan import plan, plan_from
from tests.properties.values import keys, refused_in_one_sentence, texts, values

MINI = Path(__file__).parents[2] / "config/mini.yaml"
WHOLE = read_yaml(MINI)
RUN = {"model": "miniature", "dataset": "arithmetic"}


def places(tree, above=()):
    """Every path to a value in nested mappings and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*above, key)
        yield from places(value, (*above, key))


def changed(tree, place, value):
    """A copy of `tree` with another value at `place`."""
    copied = copy.deepcopy(tree)
    branch = copied
    for key in place[:-1]:
        branch = branch[key]
    branch[place[-1]] = value
    return copied


def assert_same_when_read_again(settings):
    """Accepted settings are complete: written as YAML and read again, they are the same."""
    dumped = yaml.safe_dump(settings.model_dump(mode="json"))
    assert parse(type(settings), parse_yaml(dumped, "again"), "again") == settings


@given(values=st.dictionaries(keys, values, max_size=5))
@example({"protocol": "upstream-scripts"})
@example({"protocol": "upstream-scripts", "name": "x", "protocols": {"upstream-scripts": None}})
@example({"protocol": [], "name": "x", "protocols": {"a": {}}})
@example({"protocol": "paper\n", "name": "x", "protocols": {1: {}}})
@example({"[key]": None})
@pytest.mark.parametrize("settings", [Config, RunSettings, RunFile, Experiment, DatasetSettings, TaskSettings])
def test_any_mapping_is_settings_or_one_sentence(settings, values):
    fields = settings.model_fields
    with refused_in_one_sentence("some place", one_of=[*map(str, values), *fields]):
        made = parse(settings, values, "some place")
        assert set(values) <= set(fields)
        assert all(name in values for name, field in fields.items() if field.is_required())
        assert_same_when_read_again(made)


@given(place=st.sampled_from(list(places(WHOLE))), value=values)
@example(("name",), "x" * 300)
@example(("name",), "é" * 200)
@example(("models",), {"../../x": WHOLE["models"]["miniature"], **WHOLE["models"]})
@example(("experiments", "main", "arms"), {"../../x": {}})
@example(("experiments", "main", "grid"), {"seed": [10**400]})
@example(("experiments", "main", "base"), parse_yaml("&a {x: *a}", "an alias that contains itself"))
@example(("experiments", "main", "grid"), {"seed": [0, -0, False]})
@example(("experiments", "main", "grid"), {"adapter.targets": [["x" * 300]]})
@example(("experiments", "main", "base"), {"": {"": 1}})
@example(("experiments", "main", "base", "model"), {0: None})
@example(("experiments", "main", "base"), {**RUN, "unknown\nkey": 1})
@example(("lock",), "x" * 300)
@example(("evaluation", "tasks", 0, "name"), "two\nlines")
def test_one_wrong_value_of_a_configuration_is_planned_or_one_sentence(place, value):
    with refused_in_one_sentence():
        made = plan_from(changed(WHOLE, place, value), MINI)
        for name in (*made.runs, *made.timed, *made.checkpoints, *made.evaluations):
            assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]*", name)
            assert len(name) <= 250


def means(value, taken):
    """Whether a value of YAML says what was taken: a number may be text, a word may be off, a mapping may leave out."""
    if isinstance(value, dict) and isinstance(taken, dict):
        return all(key in taken and means(inner, taken[key]) for key, inner in value.items())
    off = {str(one).lower() for one in (value, taken)} <= {"off", "none", "false"}
    return value == taken or off or (isinstance(value, str) and not isinstance(taken, str) and float(value) == taken)


@given(place=st.sampled_from(list(places(RunSettings(**RUN).model_dump(mode="json")))), value=values)
@example(("adapter", "rank"), "8")
@example(("adapter", "rank"), True)
@example(("noise", "schedule"), False)
@example(("rollout", "vllm", "adapters"), "\0")
@example(("reward", "preset"), [])
@example(("reward", "function"), "os:system\n")
def test_one_wrong_value_of_a_run_is_taken_or_named(place, value):
    changes = changed(RunSettings(**RUN).model_dump(mode="json"), place, value)
    with refused_in_one_sentence("run.yaml: ", one_of=[str(key) for key in place if isinstance(key, str)][-1:]):
        made = parse(RunSettings, changes, "run.yaml")
        taken = made.model_dump(mode="json")
        for key in place:
            taken = taken[key]
        assert means(value, taken), (place, taken, value)
        assert_same_when_read_again(made)


@pytest.fixture(scope="module", autouse=True)
def _in_an_empty_folder(tmp_path_factory):
    """Relative paths of the values lead nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


def is_folder_above(value):
    return isinstance(value, str) and set(value) <= set("/.~")


@given(model=texts, dataset=(texts | values).filter(lambda value: not is_folder_above(value)), out=texts)
@example(model="x" * 300, dataset="x" * 300, out="x" * 300)
@example(model="\0", dataset="\0", out="\0")
@example(model="m", dataset="\ud800", out="o")
def test_a_run_by_hand_with_odd_paths_is_taken_or_one_sentence(model, dataset, out):
    with refused_in_one_sentence("run.yaml: ", one_of=["model", "dataset", "out"]):
        made = parse_run({"model": model, "dataset": dataset, "out": out}, "run.yaml")
        assert made.model in (model, str(Path(model).resolve()))
        assert made.out == Path(out).resolve()
        assert_same_when_read_again(made)


@given(content=st.binary(max_size=60) | texts.map(lambda text: text.encode(errors="replace")))
@example(content=b"a: 2020-99-99")
@example(content=b"a: " + b"9" * 5000)
@example(content=b"[" * 1500)
@example(content=b"a: &a [*a]")
@example(content=b"? [1]\n: 2")
@example(content=b"\xff\xfe\xff")
@example(content=b"a: !!python/object/apply:os.getcwd []")
def test_any_bytes_of_a_yaml_file_are_a_mapping_or_one_sentence(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    with refused_in_one_sentence(str(path)):
        assert isinstance(read_yaml(path), dict)
    with refused_in_one_sentence(str(path)):
        read_lock(path)
    with refused_in_one_sentence():
        plan_from({}, path)


#: Keys of a run with values that are valid together, whatever the others are.
OVERRIDES = {
    "seed": st.integers(0, 2**32 - 1),
    "adapter.rank": st.integers(1, 512),
    "adapter.alpha": st.integers(1, 512),
    "noise.schedule": st.sampled_from(["off", "linear", "cosine"]),
    "noise.sigma_start": st.floats(1e-2, 10),
    "optimizer.learning_rate": st.floats(1e-12, 10),
    "weights": st.sampled_from(["bf16", "nf4", "mxfp4", "nvfp4"]),
    "loss.name": st.sampled_from(["grpo", "dapo", "dr_grpo", "gspo"]),
    "rollout.group_size": st.integers(2, 64),
    "rollout.sampling.temperature": st.floats(0.1, 2),
    "gradient_checkpointing": st.sampled_from([True, False, "auto"]),
    "adapter.targets": st.lists(st.sampled_from(["q_proj", "k_proj", "o_proj"]), min_size=1, max_size=3),
}
grids = st.lists(st.sampled_from(list(OVERRIDES)), unique=True, max_size=3).flatmap(
    lambda keys: st.fixed_dictionaries(
        {key: st.lists(OVERRIDES[key], min_size=1, max_size=3, unique_by=str) for key in keys}
    )
)
names = st.text(string.ascii_letters + string.digits + "._+-", min_size=1, max_size=8).filter(
    lambda name: name[0] not in ".+-"
)


def any_equal(arms, grid) -> bool:
    """Whether two arms have the same settings at a point of the grid."""
    for point in itertools.product(*grid.values()):
        over = nested(dict(zip(grid, point, strict=True)))
        made = [parse(RunSettings, merged(merged(nested(RUN), nested(arm)), over), "") for arm in arms.values()]
        if any(one == other for one, other in itertools.combinations(made, 2)):
            return True
    return False


@given(
    name=names,
    arms=st.dictionaries(names, st.fixed_dictionaries({}, optional=OVERRIDES), min_size=1, max_size=3),
    grid=grids,
)
def test_valid_overrides_expand_to_runs_that_differ_in_name_and_hold_them(name, arms, grid):
    experiments = {name: {"base": RUN, "arms": arms, "grid": grid}}
    values = {**WHOLE, "experiments": experiments, "benches": {}}
    if any_equal(arms, grid):
        with pytest.raises(ConfigError, match="has the same settings as the arm"):
            plan(parse(Config, values, "made"))
        return
    made = plan(parse(Config, values, "made"))
    assert len(made.runs) == math.prod(map(len, grid.values())) * len(arms)
    for id, run in made.runs.items():
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]*", id)
        overrides = merged(merged(nested(RUN), nested(arms[run.arm])), nested(run.varied))
        assert merged(run.settings.model_dump(mode="json"), overrides) == run.settings.model_dump(mode="json")
        assert_same_when_read_again(run.settings)


trees = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3), max_leaves=12
)
mappings = st.dictionaries(st.sampled_from("abcd"), trees, max_size=3)


def leaves(tree, above=()):
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


@given(mappings, mappings)
def test_what_is_written_over_stands_and_the_rest_stays(base, over):
    assert merged(base, {}) == merged({}, base) == merged(base, base) == base
    before, found = copy.deepcopy((base, over)), dict(leaves(merged(base, over)))
    assert (base, over) == before
    assert all(found[place] == value for place, value in leaves(over))
    heads = {place[:length] for place, _ in leaves(over) for length in range(1, len(place) + 1)}
    for place, value in leaves(base):
        assert found.get(place) == value or any(place[:length] in heads for length in range(1, len(place) + 1))
    assert nested({".".join(place): value for place, value in leaves(base)}) == nested(base) == base
