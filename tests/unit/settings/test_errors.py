"""Mistakes in settings: one plain line with the key as written, the accepted values and the nearest known key."""

import re
from pathlib import Path

import pytest
import yaml

from qerl.settings.base import ConfigError, UserError, _keys, parse, parse_yaml
from qerl.settings.data import DatasetSettings
from qerl.settings.models import LockedRepo
from qerl.settings.run import RunFile, RunSettings
from qerl.settings.workflow import EvaluationSettings, Experiment
from qerl.workflow.plan import plan_from
from tests.properties.values import PHRASES
from tests.tiny import edit_config, tiny_qwen2

MINI = Path(__file__).parents[3] / "config/mini.yaml"
WHOLE = MINI.read_text()
IN_FULL = "method: full\nweights: bf16"


def sentence_of(call) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    said = str(refused.value)
    assert "\n" not in said
    assert not any(phrase in said for phrase in PHRASES), said
    return said


# All types of errors: missing and unknown keys, words, numbers, ranges, text, truth, lists, mappings, unions, null.
@pytest.mark.parametrize(
    ("settings", "text", "sentence"),
    [
        (RunSettings, "dataset: d", "`model` is missing"),
        (RunSettings, "modle: m", "unknown key `modle`; did you mean `model`?"),
        (RunSettings, "adapter: {rnk: 8}", "unknown key `adapter.rnk`; did you mean `adapter.rank`?"),
        (
            RunFile,
            "dataset: {format: math, origin: {source: hub, path: a.jsonl, repo: a/b}}",
            "unknown key `dataset.origin.path`; the keys here are source, repo",
        ),
        (RunSettings, "reward: {x: 1}", "unknown key `reward.x`; the keys here are preset, correct, format, functions"),
        (RunSettings, "loss: {name: cispo}", "loss.name=cispo needs loss.ratio_cap"),
        (RunSettings, "loss: {name: dr_grpo}\nreward: {aggregation: normalize_then_sum}", "scales rewards by groups"),
        (RunSettings, "reward: {functions: {std: 'a:b'}}", "'std' can't name a reward; use letters, digits and _"),
        (RunSettings, "noise.schedule: linear", "a key with dots is written so: noise: {schedule: ...}"),
        (RunSettings, "weights: nf4\nmethod: full", "use weights=bf16 or method=lora"),
        (RunSettings, "noise: {schedule: linear, sigma_end: 1.0}", "sigma_end must be above 0 and not above"),
        (RunSettings, "rollout: {group_size: 1}", "use at least 2, or loss.name=ppo"),
        (RunSettings, "rollout: {group_size: 1, resample: 1}\nloss: {name: ppo}", "use rollout.group_size >= 2"),
        (RunSettings, f"loss: {{name: ppo}}\n{IN_FULL}", "loss.name=ppo needs method=lora"),
        (RunSettings, f"rollout: {{engine: vllm}}\n{IN_FULL}", "takes adapters and norms only"),
        (RunSettings, f"processes: 2\ngradient_checkpointing: auto\n{IN_FULL}", "use true or false"),
        (RunSettings, "rollout: {sampling: {temperature: 0}}", "is greedy: all completions of a problem are the same"),
        (RunSettings, "weights: nf5", "must be 'bf16', 'nf4', 'mxfp4' or 'nvfp4', not 'nf5'; did you mean `nf4`?"),
        (RunSettings, "steps: many", "`steps` must be a whole number, not 'many'"),
        (RunSettings, "steps: 0", "`steps` must be greater than 0, not 0"),
        (RunSettings, f"steps: {10**30}", f"`steps` must be less than {2**63}"),
        (RunSettings, "seed: -1", "`seed` must be greater than or equal to 0, not -1"),
        (RunSettings, "optimizer: {betas: [true, 0.9]}", "`optimizer.betas[0]` must be a number, not true"),
        (RunSettings, "optimizer: {learning_rate: .nan}", "`optimizer.learning_rate` must be a finite number"),
        (RunSettings, "adapter: {targets: [7]}", "`adapter.targets[0]` must be a string, not 7; put it in quotes"),
        (RunFile, "out: $SCRATCH/run", "`out`: $SCRATCH isn't replaced in a path, as a shell would do"),
        (RunSettings, "[]", "it must be a mapping of the keys model, dataset"),
        (RunFile, "model: m", "`out` is missing (A new folder for all that the run makes)"),
        (DatasetSettings, "origin: {}", "`origin.source` is missing; give one of generated, countdown, reasoning_gym,"),
        (DatasetSettings, "origin: {source: locl}", "'locl'; give one of generated, countdown, reasoning_gym, local,"),
        (DatasetSettings, "origin: {source: local}", "`origin.path` is missing"),
        (DatasetSettings, "columns: {off: x}", "a key of `columns` must be a string, not false; put it in quotes"),
        (EvaluationSettings, "tasks: [{dataset: x, harness: lm_eval}]", "`tasks[0].harness` must be 'lm-eval', "),
        (Experiment, "grid: {seed: 3}", "`grid.seed` must be a list, not 3"),
        (LockedRepo, "revision: main", "`revision` must match pattern '^[0-9a-f]{40}$', not 'main'"),
    ],
)  # fmt: skip
def test_every_kind_of_mistake_is_one_sentence_in_plain_words(settings, text, sentence):
    needed = {
        RunSettings: {"model": "m", "dataset": "d"},
        DatasetSettings: {"format": "gsm8k", "origin": {"source": "generated"}},
        RunFile: {"dataset": {"format": "gsm8k", "origin": {"source": "generated"}}, "model": "m"},
        Experiment: {"base": {}},
        LockedRepo: {"files": {}},
    }.get(settings, {})
    given = parse_yaml(text, "here")
    values = given if isinstance(given, list) else {**needed, **given}
    values = {key: value for key, value in values.items() if key in given} if text == "dataset: d" else values
    said = sentence_of(lambda: parse(settings, values, "file.yaml"))
    assert said.startswith("file.yaml: ")
    assert sentence in said


@pytest.mark.parametrize("word", ["off", "none", "Off", "no", "'off'", "'False'", "null"])
def test_every_word_for_off_is_off(word):
    reward = f"{{preset: {word}, functions: {{own: {{function: 'a:b', timeout: {word}}}}}}}"
    text = f"{{noise: {{schedule: {word}}}, loss: {{correction: {word}}}, reward: {reward}}}"
    run = parse(RunSettings, {"model": "m", "dataset": "d", **parse_yaml(text, "here")}, "here")
    assert (run.noise.schedule, run.loss.correction) == ("off", "off")
    assert (run.reward.preset, run.reward.functions["own"].timeout) == (None, None)


EXPERIMENT = """
experiments:
  main:
    base: {model: miniature, dataset: arithmetic, %s}
    arms: {x: {%s}}
    grid: {seed: [0], %s}
"""


def configuration(tmp_path, base="", arm="", grid="", rest="") -> Path:
    """config/mini.yaml with another experiment, in a file."""
    values = {**yaml.safe_load(WHOLE), "benches": {}}
    values |= yaml.safe_load(EXPERIMENT % (base, arm, grid)) | (yaml.safe_load(rest) or {})
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def planned(file: Path):
    return plan_from(yaml.safe_load(file.read_text()), MINI, [file])


@pytest.mark.parametrize("word", ["off", "none", "false", "'off'"])
def test_runs_are_named_alike_whichever_word_says_off(tmp_path, word):
    made = planned(configuration(tmp_path, base=f"loss.correction: {word}", grid=f"noise.schedule: [{word}, linear]"))
    assert list(made.runs) == ["main-x-seed0-scheduleoff", "main-x-seed0-schedulelinear"]
    assert made.runs["main-x-seed0-scheduleoff"].varied == {"seed": 0, "noise.schedule": "off"}
    whole = planned(configuration(tmp_path, grid=f"noise: [{{schedule: {word}}}]"))
    assert list(whole.runs) == ["main-x-seed0-noise-schedule-off-"]


def test_a_number_that_yaml_reads_as_text_is_a_number_of_the_grid(tmp_path):
    [run] = planned(configuration(tmp_path, grid="optimizer.learning_rate: [1e-5]")).runs.values()
    assert (run.id, run.varied["optimizer.learning_rate"]) == ("main-x-seed0-learning_rate1e-05", 1e-5)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ({"arm": "noise.schedule: lineer"}, "`experiments.main.arms.x.noise.schedule` must be 'off'"),
        ({"base": "steps: true"}, "`experiments.main.base.steps` must be a whole number, not true"),
        ({"base": "adapter.rnk: 8"}, "unknown key `experiments.main.base.adapter.rnk`; did you mean `experiments."),
        ({"arm": "method: full, weights: nf4"}, "`experiments.main.arms.x`: method=full can't train weights=nf4"),
        ({"arm": "dataset: arithmetc"}, "experiments.main.arms.x.dataset names 'arithmetc', which is not in"),
        ({"rest": "{experiments: {e: {base: {}, arms: {a: null}}}}"}, "`experiments.e.arms`: no arm is left"),
        ({"rest": "evaluation: {tasks: [{dataset: definitions, harness: lm-eval}]}"}, "use harness: lighteval"),
        ({"arm": "adapter.rank: 0"}, "adapter.rank=0 leaves method=lora nothing to train"),
        ({"grid": "optimizer.learning_rate: [1e-5, 1.0e-5]"}, "two runs are named main-x-seed0-learning_rate1e-05"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_configuration_names_its_file_and_its_place(tmp_path, where, sentence):
    file = configuration(tmp_path, **where)
    said = sentence_of(lambda: planned(file))
    assert said.startswith(f"{file}: ")
    assert sentence in said


def test_a_configuration_file_needs_a_name_and_the_command_line_none(tmp_path, monkeypatch):
    file = configuration(tmp_path)
    values = {key: value for key, value in yaml.safe_load(file.read_text()).items() if key != "name"}
    monkeypatch.chdir(tmp_path)
    assert sentence_of(lambda: plan_from(values, MINI, [file])).startswith("my.yaml has no `name`; give it a `name`")
    said = sentence_of(lambda: plan_from({"modle": "m"}, MINI))
    assert said.startswith(f"{MINI} with modle of the command line: unknown key `modle`; did you mean `model")
    assert plan_from({"protocol": "paper"}, MINI).config.name == "mini"


READ = "YAML reads `{}` as {}; write the number in decimal digits"
TWICE = "the key `{}` is given twice, in lines 1 and 1; keep one"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: 1\nb: 2\na: 3\n", ": the key `a` is given twice, in lines 1 and 3; keep one"),
        ("x: {a: 1, a: 1}\n", ": the key `a` is given twice, in lines 1 and 1; keep one"),
        ("x:\n- {off: 1,\n  off: 2}\n", ": the key `off` is given twice, in lines 2 and 3; keep one"),
        *((text, ", line 2: this is not valid YAML: ") for text in ("a: 1\nb: [", "a: 1\nb: c: d", "a: 1\n\tb: 2")),
        ("steps: 0123", READ.format("0123", 83)),
        ("steps: -010", READ.format("-010", -8)),
        ("levels: [1, 00]", READ.format("00", 0)),
        ("017: x", READ.format("017", 15)),
        ("timeout: 1:30", READ.format("1:30", 90)),
        ("timeout: 1:30.5", READ.format("1:30.5", 90.5)),
        ("a: {b: [2:00:00]}", READ.format("2:00:00", 7200)),
        ("name: 2024_01", READ.format("2024_01", 202401)),
        ("base: {rollout: {prompts: 2}, rollout.prompts: 3}", TWICE.format("rollout.prompts")),
        ("base: {rollout.prompts: 3, rollout: {prompts: 3}}", TWICE.format("rollout.prompts")),
        ("base: {rollout: {sampling.top_p: 1.0, sampling: {top_p: 0.9}}}", TWICE.format("sampling.top_p")),
        ("{rollout.sampling: {top_p: 1.0}, rollout: {sampling: {top_p: 0.9}}}", TWICE.format("rollout.sampling.top_p")),
    ],
)
def test_yaml_that_is_invalid_or_ambiguous_is_named_with_its_line(text, sentence):
    said = sentence_of(lambda: parse_yaml(text, "my.yaml"))
    assert said.startswith("my.yaml")
    assert sentence in said


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{b: &b {a: 1, b: 1}, o: {<<: *b, a: 2}}", {"b": {"a": 1, "b": 1}, "o": {"a": 2, "b": 1}}),
        ("{b: &b {n: {s: 4}}, o: {<<: *b, n.s: 5}}", {"b": {"n": {"s": 4}}, "o": {"n": {"s": 4}, "n.s": 5}}),
        ("{a.b: 8, a: {c: 16}, q: a, q.5: b}", {"a.b": 8, "a": {"c": 16}, "q": "a", "q.5": "b"}),
    ],
)
def test_a_merged_mapping_may_be_overridden_and_names_may_begin_alike(text, values):
    assert parse_yaml(text, "x") == values
    assert text.count("<<") == 0 or Experiment(base=parse_yaml(text, "x")["o"]).base != values["b"]


def test_a_protocol_replaces_a_key_in_either_spelling(tmp_path):
    rest = "protocols: {upstream-scripts: {experiments: {main: {base: {rollout: {prompts: 3}}}}}}"
    file = configuration(tmp_path, base="rollout: {group_size: 4}, rollout.prompts: 2", rest=rest)
    plan_ = plan_from({**yaml.safe_load(file.read_text()), "protocol": "upstream-scripts"}, file, [file])
    assert {run.settings.rollout.prompts for run in plan_.runs.values()} == {3}


@pytest.mark.parametrize(
    ("settings", "text", "key"),
    [
        (RunSettings, "num_generations: 8", "rollout.group_size"),
        *((RunSettings, text, "adapter.rank") for text in ("r: 16", "adapter: {r: 16}")),
        (RunSettings, "load_in_4bit: true", "weights"),
        (RunSettings, "rollout: {max_completion_length: 512}", "rollout.sampling.max_tokens"),
        (RunSettings, "lr: 1e-5", "optimizer.learning_rate"),
        (RunSettings, "loss: {learning_rate: 1e-5}", "loss.ppo.learning_rate"),
        (RunFile, "output_dir: x", "out"),
        (EvaluationSettings, "sampling: {max_new_tokens: 512}", "sampling.max_tokens"),
    ],
)
def test_the_name_of_another_library_gets_the_key_that_it_means(settings, text, key):
    said = sentence_of(lambda: parse(settings, parse_yaml(text, "x"), ""))
    assert f"; did you mean `{key}`" in said


def test_every_name_of_another_library_means_a_key():
    names = yaml.safe_load((MINI.parents[1] / "qerl/settings/other_names.yaml").read_text())
    keys = {*_keys(RunFile), *_keys(EvaluationSettings)}
    assert not [key for key in names if not any(known == key or known.endswith(f".{key}") for known in keys)]


@pytest.mark.parametrize("invisible", ["\u200b", "\u00a0", "\u2060", "\ufeff", "\u3164", "\ufe0f", "\x07"])
def test_an_invisible_character_of_a_key_is_shown(invisible):
    said = sentence_of(lambda: parse(RunSettings, {"model": "m", "dataset": "d", f"steps{invisible}": 3}, ""))
    assert f"unknown key `steps{ascii(invisible)[1:-1]}`; did you mean `steps`?" in said


@pytest.mark.parametrize(
    ("section", "name", "changes", "sentence"),
    [
        ("models", "miniature", {"hidden_size": 100}, "hidden_size=100 must be a multiple of 64"),
        ("models", "miniature", {"source": "local", "path": "no/such/folder"}, "no/such/folder"),
        ("models", "miniature", {"source": "local", "path": "odd"}, "hidden_size=72 is not a multiple of 64"),
        ("models", "miniature", {"source": "local", "path": "mute"}, "has no chat template"),
        ("datasets", "arithmetic", {"origin": {"source": "local", "path": "no/such.jsonl"}}, "no/such.jsonl"),
        ("datasets", "arithmetic", {"origin": {"source": "local", "path": "bad.jsonl"}}, "bad.jsonl, line 1 "),
    ],
)
def test_local_files_that_cant_be_used_are_named(tmp_path, monkeypatch, section, name, changes, sentence):
    monkeypatch.chdir(tmp_path)
    tiny_qwen2(tmp_path / "mute")
    edit_config(tiny_qwen2(tmp_path / "odd"), hidden_size=72)
    (tmp_path / "bad.jsonl").write_text('{"question": "2 + 2?", "answer": "four"}\n')
    values = yaml.safe_load(WHOLE)
    values[section][name] = changes if "source" in changes else values[section][name] | changes
    with pytest.raises(UserError, match=re.escape(sentence)):
        plan_from(values, MINI)
