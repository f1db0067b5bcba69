"""Every key of a configuration, from the models of `qerl.settings.workflow`: config/README.md for people, with type,
default and meaning, and a JSON schema for editors and the catalog of Snakemake's workflows.
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from qerl.settings import base, data, models, run, workflow

HEAD = """# Configuration

A configuration is one YAML file: data sets, models, experiments, evaluation and measurements. It describes the science;
files in `profiles/` describe cores, GPUs and clusters. An unknown key, or one given twice, is an error, also
once with dots and once nested. So is a number that YAML reads otherwise than by its digits, such as `0123` (83) and
`1:30` (90), and a second trained arm with the same settings. Where a setting can be off, `off`, `none` and `false` all
mean off; for a list that may be empty they mean the empty list. `qerl keys` prints this page from the settings' code,
and `qerl keys --schema` the JSON schema in `workflow/schemas/config.schema.yaml`. An editor with a
YAML language server checks and completes keys by it, if the file begins with `# yaml-language-server: $schema=PATH`.

* `mini.yaml`: the whole workflow on two CPU cores, without GPU or network. It is the default, unless the working
  directory has a `config/config.yaml`.
* `own.yaml`: a real model of your own, with settings that follow from its checkpoint (`fit_to_model`). It is the
  default if the command line sets `model`.
* `paper.yaml`: the grid of the QeRL paper. It needs GPUs, and the hub or local folders (docs/paper.md).
* `ci.yaml`: the regression gates of speed and accuracy, in minutes on two CPU cores (docs/gates.md).
* `shapes.yaml`: the paper's tables of speed and memory, on the sizes of Qwen2.5 with random weights. It needs a GPU to
  measure, and no network (docs/results/paper-speeds.md).
* `peers.yaml`: rollouts, decoding and steps beside vLLM and TRL, on the same sizes (docs/results/h200.md).
* `families.yaml`: decoding and steps of other families of models beside vLLM (docs/results/h200.md).
* `cards.yaml`: those of Qwen2.5 with the portable kernels, which serve other GPUs than Hopper's, and under caps of
  memory.
* `walk.yaml`: the whole DAG on random weights of Qwen2.5-1.5B's size, in files as on the hub (docs/paper.md).

An experiment expands into one run for each arm and each point of its grid. Keys of arms and grid may be dotted
(`adapter.rank: 16`). On the command line, `--config model=FOLDER problems=FILE` replaces the checkpoint and the
problems of every run by your own.

An example that compares three ranks at two learning rates, with three seeds each:

```yaml
experiments:
  ranks:
    base: {model: miniature, dataset: arithmetic, weights: nvfp4, dtype: float32}
    grid:
      adapter.rank: [8, 16, 32]
      optimizer.learning_rate: [1.0e-3, 3.0e-3]
      seed: [0, 1, 2]
```

These keys of a run decide no result, so changing them reruns nothing: UNDECIDING. The same holds for the keys of an
evaluation's engine.

Another workflow imports the rules of a clone, with a configuration of its own. Results go to its working directory:

```python
module qerl:
    snakefile: "path/to/clone/workflow/Snakefile"
    config: config["qerl"]

use rule * from qerl as qerl_*
```

Any key of a run may be a key of a grid. `qerl plan CONFIG` prints the table of runs with their cost at measured speeds
and their state.

Models and data sets of the hub are pinned by commit. `qerl lock CONFIG` asks the hub and writes commits and SHA-256
hashes to the file that the key `lock` names. A workflow doesn't start with a branch or tag that isn't locked.

The next example has answers in tags, a data set and a reward of your own. Data set and reward are functions in
`mine.py` in the working directory. A change of that file reruns all that depends on it:

```yaml
datasets:
  sums:
    format: gsm8k
    answer: tags
    instruction: "Reason in <think></think>, then give the number in <answer></answer>."
    origin: {source: python, function: "mine:problems"}
experiments:
  short:
    base:
      model: miniature
      dataset: sums
      reward: {preset: upstream-gsm8k, function: "mine:brevity", custom: 0.5}
```

```python
def problems():
    return [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(1000)]


def brevity(answer, problem):  # answer: text, tokens, limit; problem: question, answer, solution, level
    return 1 - answer.tokens / answer.limit
```
"""

SECTIONS = (
    workflow.Config,
    data.DatasetSettings,
    data.FilterSettings,
    data.GeneratedSplits,
    data.Generated,
    data.CountdownData,
    data.ComparisonData,
    data.LocalData,
    data.HubData,
    data.FunctionData,
    models.PretrainSettings,
    models.LocalModel,
    models.HubModel,
    models.LockedRepo,
    workflow.Experiment,
    run.RunSettings,
    run.StoredRollouts,
    run.RunFile,
    models.CalibrationSettings,
    models.RandomErrorSettings,
    run.AdapterSettings,
    run.NoiseSettings,
    run.ThermostatSettings,
    run.EngineSettings,
    run.NativeSettings,
    run.VllmSettings,
    run.RolloutSettings,
    run.SamplingSettings,
    run.RewardSettings,
    run.LossSettings,
    run.PPOSettings,
    run.OptimizerSettings,
    workflow.EvaluationSettings,
    workflow.TaskSettings,
    workflow.TaskSampling,
    workflow.RolloutBench,
    workflow.StepBench,
    workflow.GateSettings,
    workflow.ShapesSettings,
    workflow.DecodeGrid,
    workflow.MixGrid,
    workflow.StepGrid,
    workflow.PromptGrid,
    workflow.StudySettings,
    workflow.StudiedExperiment,
)


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if isinstance(annotation, type) and not get_args(annotation):
        return "none" if annotation is type(None) else annotation.__name__
    names = [_type_name(part) if not isinstance(part, str) else f"`{part}`" for part in get_args(annotation)]
    if origin in (list, dict, tuple):
        return f"{origin.__name__} of {', '.join(dict.fromkeys(names))}"
    return " or ".join(dict.fromkeys(names))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "by the keys before it"
    if isinstance(field.default, base.Settings):
        return "its defaults"
    return "none" if field.default is None else f"`{field.default}`"


def _row(name: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())
    return f"| `{name}` | {_type_name(field.annotation)} | {_default(field)} | {meaning} |"


def _section(settings: type[base.Settings]) -> str:
    # Inherited keys stand in the section of the parent.
    annotations = inspect.get_annotations(settings)
    rows = [_row(name, field) for name, field in settings.model_fields.items() if name in annotations]
    head = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join([f"## {settings.__name__}", "", inspect.getdoc(settings) or "", "", *head, *rows])


def _dotted(keys: Any) -> list[str]:
    """Dotted keys of a mapping of keys to sets of keys, to mappings of the same kind, or to True."""
    if not isinstance(keys, dict):
        return sorted(keys)
    inner = {key: [""] if value is True else [f".{rest}" for rest in _dotted(value)] for key, value in keys.items()}
    return [f"{key}{rest}" for key, rests in inner.items() for rest in rests]


def markdown() -> str:
    """The whole page."""
    undeciding = ", ".join(f"`{key}`" for key in _dotted(run.UNDECIDING))
    return (
        "\n\n".join([HEAD.strip().replace("UNDECIDING", undeciding), *(_section(settings) for settings in SECTIONS)])
        + "\n"
    )


def schema() -> str:
    """The JSON schema of a configuration file, as YAML. It leaves the keys of runs to the workflow's own checks."""
    made = workflow.Config.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["required"] = ["name"]  # `shapes` need no other key, and a protocol may give them
    made["$defs"]["Experiment"]["properties"]["arms"]["additionalProperties"] = {"type": ["object", "null"]}
    return f"# Made by `qerl keys --schema`.\n{yaml.safe_dump(made, sort_keys=False, width=118)}"
