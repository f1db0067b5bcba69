"""Settings: sentences for mistakes, and a reference page in step with the models."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import get_args

import pytest
import yaml
from jsonschema import Draft202012Validator

from qerl import settings
from qerl.cli import workflow
from qerl.data.grading import well_formed
from qerl.host import imports
from qerl.settings.base import Part, Settings, parse, parse_yaml
from qerl.settings.data import DatasetSettings, RecordFormat
from qerl.settings.run import RunSettings
from qerl.settings.workflow import Config
from qerl.workflow.plan import plan

ROOT = Path(__file__).parents[3]


CONFIGS = sorted((ROOT / "config").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_configuration_of_the_repository_is_valid(file):
    values = yaml.safe_load(file.read_text())
    config = parse(Config, values, file.name)
    again = yaml.safe_dump(config.model_dump(mode="json"))
    assert parse(Config, parse_yaml(again, "again"), "again") == config
    planned = plan(config)
    assert planned.runs or planned.points
    for function in {path for run in planned.runs.values() for path in run.settings.own_functions}:
        assert not function.startswith("tests"), "a configuration must run without the tests"
        imports.check(function, "reward.functions.own")


def test_the_reference_page_is_made_from_the_settings():
    assert (ROOT / "config/README.md").read_text() == workflow.keys_page(), "run `qerl keys > config/README.md`"


def test_the_schema_is_made_from_the_settings():
    stored = (ROOT / "workflow/schemas/config.schema.yaml").read_text()
    assert stored == workflow.keys_schema(), "run `qerl keys --schema > workflow/schemas/config.schema.yaml`"


@pytest.mark.parametrize("file", [*CONFIGS, ROOT / ".test/config/config.yaml"], ids=lambda file: file.name)
def test_the_schema_accepts_every_configuration_and_refuses_unknown_keys(file):
    """By the validator that Snakemake itself uses."""
    validator = Draft202012Validator(yaml.safe_load(workflow.keys_schema()))
    values = yaml.safe_load(file.read_text())
    assert not list(validator.iter_errors(values))
    [error] = validator.iter_errors(values | {"evaluaton": {}})
    assert "'evaluaton' was unexpected" in error.message


def test_the_reference_page_knows_every_settings_class():
    modules = [import_module(f"{settings.__name__}.{module.name}") for module in iter_modules(settings.__path__)]
    classes = {
        c
        for module in modules
        for c in vars(module).values()
        if isinstance(c, type) and issubclass(c, Settings) and not issubclass(c, Part) and c is not Settings
    }
    assert set(workflow.sections()) == classes


RUN = {"model": "m", "dataset": "d"}


@pytest.mark.parametrize(
    ("loss", "scaled"),
    [
        *(({}, True), ({"name": "dapo"}, True), ({"name": "grpo", "scale_advantages": False}, False)),
        *(({"name": "dr_grpo"}, False), ({"name": "dr_grpo", "scale_advantages": True}, True)),
    ],
)
def test_dr_grpo_divides_by_the_standard_deviation_only_on_request(loss, scaled):
    settings = parse(RunSettings, {**RUN, "loss": loss}, "run.yaml")
    assert settings.loss.scale_advantages is scaled
    stored = settings.model_dump(mode="json")  # as run.yaml and the rows of runs have it
    assert stored["loss"]["scale_advantages"] is scaled
    assert parse(RunSettings, stored, "row") == settings


#: How a policy that does as it is told states 18, and what the instruction must name for that.
STATED = {
    ("native", "gsm8k"): ("9 + 9 = 18\n#### 18", "####"),
    ("native", "math"): ("So it is \\boxed{18}.", "\\boxed{}"),
    ("native", "aime"): ("So it is \\boxed{18}.", "\\boxed{}"),
    ("native", "countdown"): ("9 + 9 = 18\n#### 9+9", "####"),
    **{("tags", name): ("<think>9 + 9</think><answer>18</answer>", "<answer>") for name in get_args(RecordFormat)},
}


@pytest.mark.parametrize(("form", "record_format"), STATED)
def test_by_default_a_data_set_asks_for_what_its_grader_reads(record_format, form):
    values = {"format": record_format, "answer": form, "origin": {"source": "local", "path": "records.jsonl"}}
    text, marker = STATED[form, record_format]
    assert well_formed(text, record_format, form)
    assert marker in parse(DatasetSettings, values, "").instruction
    if form == "native":
        assert parse(DatasetSettings, {**values, "instruction": ""}, "").instruction == ""
