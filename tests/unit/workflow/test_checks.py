"""Settings that don't fit the model are refused before long work: lengths, chat template, targets, engine, splits."""

import functools
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import qerl
from qerl.checkpoints.files import CheckpointError
from qerl.cli import commands as cli
from qerl.data.prompts import longer_than, prompt_ids
from qerl.data.records import DataError, Problem
from qerl.data.sources import prepare
from qerl.evals.evaluate import EvaluationError
from qerl.models.loading import load_tokenizer
from qerl.models.policy import load_policy
from qerl.rl.rollouts import Task
from qerl.settings.base import ConfigError, UserError, parse
from qerl.settings.data import DatasetSettings
from qerl.settings.run import CHECKED, FITTED, RolloutSettings, RunSettings
from qerl.settings.workflow import EvaluationSettings
from qerl.workflow.checks import check_engines, check_local_models
from qerl.workflow.plan import plan_from
from qerl.workflow.preflight import check_evaluation, check_runs, check_settings
from qerl.workflow.rules import parse_job
from tests.tiny import tiny_decoder, tiny_of_images, tiny_qwen2, write_template

CONTEXT = 256
LONG = "Howmany?" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_template(tiny_qwen2(tmp_path_factory.mktemp("preflight") / "model", max_position_embeddings=CONTEXT))


@pytest.fixture
def settings(model, tmp_path) -> dict:
    """A run by hand on forty problems, one of which is longer than the context."""
    rows = [{"question": f"What is {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(39)]
    folder = tmp_path / "problems"
    folder.mkdir()
    for split, records in {"train": [*rows, {"question": LONG, "answer": "#### 1"}], "test": rows[:2]}.items():
        records = [record | {"question": f"{split}: {record['question']}"} for record in records]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    return {
        "model": str(model),
        "dataset": {"format": "gsm8k", "instruction": "", "origin": {"source": "local", "path": str(folder)}},
        "out": str(tmp_path / "run"),
        "steps": 1,
        "dtype": "float32",
        "rollout": {"prompts": 1, "group_size": 2, "sampling": {"max_tokens": 4}},
    }


def refused(settings: dict, said: str, kind: type[UserError] = ConfigError) -> None:
    with pytest.raises(kind, match=said):
        qerl.train(settings)
    assert not (Path(settings["out"]) / "checkpoint").exists()


def with_max_tokens(settings: dict, max_tokens: int, **rollout) -> dict:
    return settings | {"rollout": settings["rollout"] | rollout | {"sampling": {"max_tokens": max_tokens}}}


def test_problems_left_out_and_fewer_than_a_step_draws_are_told(settings, model, tmp_path, caplog):
    prepare(parse(DatasetSettings, settings["dataset"], ""), tmp_path / "data")
    caplog.set_level("INFO", logger="qerl")
    rollout = {"prompts": 39, "max_prompt_tokens": 40, "sampling": {"max_tokens": 4}}

    def run(rollout):
        return parse(RunSettings, {"model": "m", "dataset": "d", "rollout": rollout}, "")

    check_runs(model, [(tmp_path / "data", run(rollout))])
    assert caplog.messages[1:] == ["rollout.max_prompt_tokens=40 leaves 39 of 40 training problems"]
    caplog.clear()
    check_runs(model, [(tmp_path / "data", run(rollout | {"prompts": 40}))])
    assert "39 training problems are fewer than rollout.prompts=40" in caplog.messages[-1]


def test_prompts_without_answers_are_no_problems_for_the_grader(model, tmp_path):
    lines = [json.dumps({"prompt": f"Say {n}.", "answer": "1" if n < 3 else None}) for n in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for split, shares in {"train": (0, 0), "test": (0, 1), "scored": (0.5, 0)}.items():
        origin = {"source": "local", "path": str(tmp_path / "a.jsonl")}
        origin |= {"validation_fraction": shares[0], "test_fraction": shares[1]}
        prepare(parse(DatasetSettings, {"format": "prompt", "origin": origin}, ""), tmp_path / split)
    values = {"model": "m", "dataset": "d", "rollout": {"sampling": {"max_tokens": 4}}}
    with pytest.raises(DataError, match=r"5 of 8 training problems state no answer, which reward\.correct=1"):
        check_runs(model, [(tmp_path / "train", parse(RunSettings, values, ""))])
    values |= {"reward": {"correct": 0}}
    check_runs(model, [(tmp_path / "train", parse(RunSettings, values, ""))])
    for keys in ({"keep": "best"}, {"patience": 2}):
        best = values | {"validation": {"every": 1, **keys}}
        with pytest.raises(DataError, match=r"2 of 4 held-out problems state no answer, .*measure=pass@1"):
            check_runs(model, [(tmp_path / "scored", parse(RunSettings, best, ""))])
    best["validation"]["measure"] = "reward"
    check_runs(model, [(tmp_path / "scored", parse(RunSettings, best, ""))])
    evaluation = parse(EvaluationSettings, {"tasks": [{"dataset": "d", "harness": "qerl"}]}, "")
    with pytest.raises(EvaluationError, match=r"5 of 8 test problems .* state no answer to compare"):
        check_evaluation(model, evaluation, {"d": tmp_path / "test"})


@pytest.mark.parametrize("max_tokens", [CONTEXT, 4096])
def test_completions_as_long_as_the_context_are_refused(settings, max_tokens):
    refused(
        with_max_tokens(settings, max_tokens), rf"rollout.sampling.max_tokens={max_tokens} .* context has 256 tokens"
    )


def test_prompts_too_long_are_counted_and_settings_can_be_corrected_in_the_same_folder(settings, model):
    tokens = len(prompt_ids(load_tokenizer(model), f"train: {LONG}", ""))
    said = rf"1 of 40 prompts are too long: the longest has {tokens} .* rollout.max_prompt_tokens=252"
    refused(settings, said, DataError)
    run = qerl.train(with_max_tokens(settings, 4, max_prompt_tokens=252))
    assert run.finished


def test_prompts_are_left_out_by_their_tokens(model):
    tokenizer = load_tokenizer(model)
    problems = [Problem(str(n), "x" * n, None, "1") for n in (5, 100, 300)]
    fitting = Task(problems, "gsm8k", "Be brief.").fitting
    settings = parse(RolloutSettings, {"max_prompt_tokens": 200, "sampling": {"max_tokens": 50}}, "")
    assert [problem.id for problem in fitting(tokenizer, settings, CONTEXT).problems] == ["5", "100"]
    none = settings.model_copy(update={"max_prompt_tokens": 3})
    with pytest.raises(DataError, match=r"max_prompt_tokens=3 leaves none of 3 problems"):
        fitting(tokenizer, none, CONTEXT)
    unlimited = settings.model_copy(update={"max_prompt_tokens": None})
    assert len(fitting(tokenizer, unlimited, None).problems) == 3


@pytest.mark.parametrize("most", [0, 5, 20, 21, 22, 60, 500])
def test_only_long_texts_are_tokenized_and_none_is_missed(model, most):
    tokenizer = load_tokenizer(model)
    texts = ["a", "a b", "äöü" * 9, "日本語" * 5, "word " * 10, "x" * 80, ""]
    problems = [Problem(str(number), text, None, "1") for number, text in enumerate(texts)]
    every = {problem.id: len(prompt_ids(tokenizer, problem.question, "Go.")) for problem in problems}
    expected = {id: tokens for id, tokens in every.items() if tokens > most}
    assert longer_than(most, tokenizer, problems, "Go.") == expected


def test_sampling_and_evaluating_keep_to_the_context(model, settings, tmp_path, monkeypatch):
    policy = qerl.load(model, dtype="float32")
    with pytest.raises(DataError, match=r"1 of 2 prompts are too long: .* room for 56"):
        qerl.sample(policy, ["short", LONG], max_tokens=200)
    with pytest.raises(ConfigError, match=r"max_tokens=256 leaves no room"):
        qerl.evaluate(policy, settings["dataset"], tmp_path / "e", max_tokens=CONTEXT)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["sample", str(model), "short"])
    assert "max_tokens=4096 leaves no room" in str(result.exception)


def test_a_template_that_fails_and_a_tokenizer_that_does_not_load_come_before_quantization(settings, tmp_path):
    broken = tiny_qwen2(tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{{ raise_exception('no user') }}")
    refused(settings | {"model": str(broken)}, "chat template of .* fails", DataError)
    (broken / "chat_template.jinja").write_text("{{ 'You are helpful:' }}")
    refused(settings | {"model": str(broken)}, "drops the question", DataError)
    (broken / "tokenizer.json").write_text("{}")
    refused(settings | {"model": str(broken)}, "tokenizer", CheckpointError)


NO_NORMS = {"adapter": {"train_norms": False}}
#: Kinds of models with settings of a run that don't fit their structure.
UNFIT = [
    ("olmo2", {}, "adapter.train_norms needs an RMSNorm .*; set adapter.train_norms=false"),
    ("gpt_neox", {}, "adapter.train_norms needs an RMSNorm"),
    ("starcoder2", {}, "adapter.train_norms needs an RMSNorm"),
    ("exaone4", {}, "adapter.train_norms needs an RMSNorm"),
    ("olmo2", {**NO_NORMS, "noise": {"schedule": "constant"}}, "noise.schedule=constant needs an RMSNorm"),
    ("starcoder2", {"adapter": {"train_norms": False, "targets": ["up_proj"]}}, "targets has up_proj, and the blocks"),
    ("phi3", {"adapter": {"targets": ["q_proj", "k_proj"]}}, "targets has q_proj without v_proj"),
    ("qwen2", {"adapter": {"targets": ["experts.down_proj"]}}, "targets has experts.down_proj, and stock PEFT"),
    ("olmo2", {**NO_NORMS, "rollout": {"engine": "vllm"}}, "sampling by vLLM is tested with .*not 'olmo2'"),
    ("olmo2", {**NO_NORMS, "recipe": "awq"}, "recipe: awq divides the weights of norms"),
    ("qwen2", {"pack_delta_nets": True}, "has no delta nets"),
]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    root = tmp_path_factory.mktemp("decoders")
    return functools.cache(lambda kind: tiny_decoder(root / kind, kind))


@pytest.mark.parametrize("keys", [FITTED, CHECKED])
@pytest.mark.parametrize(("kind", "changes", "said"), UNFIT)
def test_the_keys_by_which_runs_differ_decide_what_is_refused(decoders, keys, kind, changes, said):
    values = parse(RunSettings, {"model": "m", "dataset": "d", **changes}, "").model_dump(include=keys)
    values |= {"model": "m", "dataset": "d"}
    with pytest.raises(UserError, match=said):
        check_settings(decoders(kind), parse(RunSettings, values, ""))


def test_vllm_serves_the_text_model_of_a_base_that_is_quantized(tmp_path):
    model = tiny_of_images(tmp_path, "gemma3", "gemma3")
    values = {"model": "m", "dataset": "d", "rollout": {"engine": "vllm"}}
    check_settings(model, parse(RunSettings, values, ""))
    with pytest.raises(ConfigError, match="models of text alone"):
        check_settings(model, parse(RunSettings, values | {"weights": "bf16"}, ""))


def test_an_evaluation_by_vllm_of_a_model_that_it_does_not_serve_is_refused_before_problems_are_read(decoders):
    settings = parse(EvaluationSettings, {"tasks": [], "engine": "vllm"}, "")
    check_evaluation(decoders("llama"), settings, {})
    with pytest.raises(ConfigError, match=r"not 'olmo2'; use evaluation\.engine=native"):
        check_evaluation(decoders("olmo2"), settings, {})


def test_vllm_must_be_installed_where_it_is_asked_for(settings, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "vllm" else find(name, *a))
    refused(settings | {"rollout": settings["rollout"] | {"engine": "vllm"}}, "rollout.engine=vllm needs vLLM, which")


# --- the workflow's plan ---------------------------------------------------------------------------------------------


@pytest.fixture
def configuration(model, settings) -> dict:
    values = yaml.safe_load((Path(__file__).parents[3] / "tests/config/micro.yaml").read_text())
    values["models"] = {"miniature": {"source": "local", "path": str(model)}}
    values["datasets"]["arithmetic"] = settings["dataset"]
    values["evaluation"]["tasks"] = [{"dataset": "arithmetic", "harness": "lm-eval"}]
    return values


def planned(values: dict):
    return plan_from(values, Path("configuration"))


def test_the_plan_knows_test_splits(configuration, tmp_path):
    file = tmp_path / "problems/train.jsonl"
    origin = {"source": "local", "path": str(file), "test_fraction": 0}
    arithmetic = configuration["datasets"]["arithmetic"]
    with pytest.raises(ConfigError, match=r"arithmetic has no test split, since its origin.test_fraction is 0"):
        planned(configuration | {"datasets": {"arithmetic": arithmetic | {"origin": origin}}})
    hub = {"source": "hub", "repo": "a/b", "revision": "0" * 40, "splits": {"train": "train"}}
    with pytest.raises(ConfigError, match=r"arithmetic has no test split; name one of the repository's"):
        planned(configuration | {"datasets": {"arithmetic": arithmetic | {"origin": hub}}})


@pytest.mark.parametrize(("ends", "told"), [([1, 5], False), (1, False), (None, False), ([7, 5], True), (7, True)])
def test_an_end_of_the_tokenizer_that_ends_no_completion_is_told(model, tmp_path, caplog, ends, told):
    """Completions end at the tokens of the generation config alone (`Policy.stop_token_ids`)."""
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert (1 not in load_policy(folder, None, "float32").stop_token_ids) == told
    check_runs(folder, [])
    assert ("the tokenizer's end <eos> (1) doesn't end them" in caplog.text) == told


def test_engines_are_looked_for_where_jobs_start(configuration, monkeypatch):
    configuration["evaluation"]["engine"] = "vllm"
    made = planned(configuration)
    check_engines(made)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(ConfigError, match=r"evaluation.engine=vllm needs vLLM"):
        check_engines(made)


@pytest.mark.parametrize("case", [UNFIT[0], UNFIT[-1]])
def test_runs_of_a_local_model_that_they_do_not_fit_are_refused_where_jobs_start(decoders, configuration, case):
    kind, changes, said = case
    configuration["models"]["miniature"]["path"] = str(decoders(kind))
    [experiment] = configuration["experiments"].values()
    experiment["base"] |= {"method": "lora", "weights": "nvfp4"}
    experiment["arms"] = {"a": changes}
    made = planned(configuration)
    with pytest.raises(ConfigError, match=f"experiment main, arm a: .*{said}"):
        check_local_models(made)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", "this is no JSON"),
        *((text, "is no job; use one of data,") for text in ("{}", "[]", '{"kind": []}', '{"kind": "x"}')),
        ('{"kind": "data", "lock_file": null, "out": 3}', "job data: `out` must be a path, not 3"),
    ],
)
def test_a_rule_says_what_is_wrong_with_its_job(text, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_job(text)


def test_the_rule_that_checks_says_what_does_not_fit(model, settings, tmp_path):
    data = tmp_path / "data"
    job = {"kind": "data", "settings": settings["dataset"], "lock_file": None, "out": str(data)}
    CliRunner().invoke(cli.app, ["rule", json.dumps(job)])
    rollout = settings["rollout"]
    evaluation = {"tasks": [{"dataset": "d", "harness": "lm-eval"}], "sampling": {"max_tokens": 8}}
    out = tmp_path / "checked"

    def check(rollout: dict, evaluation: dict, **settings):
        job = {"kind": "check", "model": str(model), "data": {"d": str(data)}, "out": str(out)}
        run = {"model": "m", "dataset": "d", "rollout": rollout, **settings}
        job |= {"runs": [run], "evaluation": evaluation}
        return CliRunner().invoke(cli.app, ["rule", json.dumps(job)])

    assert "1 of 40 prompts are too long" in str(check(rollout, evaluation).exception)
    rollout = rollout | {"max_prompt_tokens": 200}
    short = evaluation | {"sampling": {"max_tokens": CONTEXT - 10}}
    assert "2 of 2 prompts are too long" in str(check(rollout, short).exception)
    unfit = check(rollout, evaluation, adapter={"targets": ["fc1"]})
    assert "targets has fc1, and the blocks" in str(unfit.exception)
    assert not out.exists()
    assert check(rollout, evaluation).exit_code == 0
    assert out.exists()
