"""The command line: commands for people call the library, rules have a separate command, a mistake is one sentence."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.logging import enable_progress_bar
from typer.testing import CliRunner

import qerl
from qerl import __main__
from qerl.cli import commands as cli
from qerl.host.console import configure_logging
from qerl.host.lease import alone
from qerl.settings.base import ConfigError
from tests.forks import call as call_in_fork
from tests.tiny import tiny_qwen2, write_sums, write_template

ROOT = Path(__file__).parents[3]
MINI = str(ROOT / "config/mini.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, problems, and a finished run of them."""
    folder = tmp_path_factory.mktemp("cli")
    model = write_template(tiny_qwen2(folder / "model"))
    (model / "README.md").write_text("---\nlicense: mit\n---\n")
    origin = {"source": "local", "path": str(write_sums(folder / "sums.jsonl", 30))}
    values = {
        "model": str(model),
        "dataset": {"format": "gsm8k", "origin": origin, "instruction": "Be brief.", "units": ["plums"]},
        "weights": "bf16",
        "dtype": "float32",
        "steps": 1,
        "rollout": {"prompts": 2, "group_size": 2, "sampling": {"max_tokens": 4}},
    }
    (folder / "run.yaml").write_text(json.dumps(values))
    qerl.train(folder / "run.yaml", folder / "run")
    return folder


@pytest.fixture
def call(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(cli.app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return call


def test_a_file_beside_the_configuration_is_not_imported_by_a_rule(tmp_path):
    (tmp_path / "typer.py").write_text("raise SystemExit('imported from the working directory')")
    (tmp_path / "qerl.py").write_text("raise SystemExit('imported from the working directory')")
    text = "".join(file.read_text() for file in (ROOT / "workflow/rules").glob("*.smk"))
    starts = set(re.findall(r"\bpython [^{\n]*?qerl (?:rule|gate show)", text))
    assert len(starts) == 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for start in starts:
        command = [sys.executable, *start.split()[1:], "--help"]
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)


def test_keys_of_the_command_line_are_over_those_of_the_file(call, folder):
    call("train", "run.yaml", "rollout.sampling.max_tokens=3", "adapter.rank=4", "--out", "changed")
    settings = qerl.Run(folder / "changed").settings
    assert (settings.rollout.sampling.max_tokens, settings.rollout.group_size, settings.adapter.rank) == (3, 2, 4)
    with pytest.raises(ConfigError, match=r"^run\.yaml with seed, adapter\.rnk: unknown key `adapter\.rnk`"):
        call("train", "run.yaml", "seed=1", "adapter.rnk=4", "--out", "misspelt")
    moved = (folder / "changed").rename(folder / "moved")
    call("train", "moved/run.yaml", "gradient_checkpointing=true")
    assert not (folder / "changed").exists()
    assert qerl.Run(moved).finished


def test_version_and_help(call):
    assert call("--version").strip() == qerl.__version__
    assert call("help") == call("-h") == call("--help")


@pytest.mark.filterwarnings("ignore:You passed")
def test_export_writes_what_stock_libraries_load(call, folder, capsys, monkeypatch):
    """The trained policy, and the command that serves it."""
    said = call("export", "run", "exported").split()
    assert said[:4] == ["vllm", "serve", "exported/base", "--enable-lora"]
    assert said[4:] == ["--max-lora-rank", "32", "--lora-modules", "policy=exported/adapter"]
    stored = json.loads((folder / "exported/adapter/adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(folder / "exported/base")
    stock = AutoModelForCausalLM.from_pretrained(folder / "exported/base", dtype=torch.float32)
    stock = PeftModel.from_pretrained(stock, folder / "exported/adapter").eval()
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(stock(input_ids=ids).logits, qerl.Run(folder / "run").policy.lm(ids).logits)
    for arguments, sentence in {
        ("run", "exported"): "exported exists already",
        ("run", "exported", "--merged", "bf16"): "exported exists already",
        ("model", "other"): "model is not the folder of a run: it has no run.yaml",
    }.items():
        monkeypatch.setattr(sys, "argv", ["qerl", "export", *arguments])
        with pytest.raises(SystemExit):
            __main__.main()
        assert sentence in capsys.readouterr().err
    assert sorted(path.name for path in (folder / "exported").iterdir()) == ["adapter", "base"]
    with alone(folder / ".busy.partial"), pytest.raises(ConfigError, match=r"is at work in \.busy\.partial"):
        call("export", "run", "busy")


@torch.no_grad()
def test_a_merged_export_is_one_checkpoint_for_stock_libraries(call, folder):
    """Trained norms are in it; other bases and formats: `tests/parity/test_merge_parity.py`."""
    assert call("export", "run", "merged", "--merged", "bf16").splitlines()[-1] == "vllm serve merged"
    stock = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    ids, policy = torch.tensor([[5, 6, 7]]), qerl.Run(folder / "run").policy
    torch.testing.assert_close(stock(ids).logits, policy.lm(ids).logits, atol=2e-3, rtol=0)
    card = ModelCard.load(folder / "merged/README.md")
    about = {"library_name": "transformers", "base_model_relation": "finetune", "license": "mit"}
    assert card.data.to_dict().items() >= about.items()
    assert "model = LLM('merged')" in card.text
    assert str(folder) not in card.content


def test_publish_shows_what_would_go(call, folder):
    said = call("publish", "run", "someone/tiny", "--dry-run", "--out", "would-go")
    assert "would go to someone/tiny (private" in said
    assert all(name in said for name in ("README.md", "adapter_config.json", "adapter_model.safetensors"))
    assert "note: the card names the base by its folder, model, without the path" in said
    assert "`pip install qerl`" in (folder / "would-go/README.md").read_text()
    weights = (folder / name / "adapter_model.safetensors" for name in ("would-go", "run/policy"))
    assert len({file.read_bytes() for file in weights}) == 1
    assert not any(file.is_symlink() for file in (folder / "would-go").iterdir())
    for words in (["--dry-run", "--out", "would-go"], ["--out", "other"]):
        with pytest.raises(ConfigError, match="must be a new folder, and is for a dry run"):
            call("publish", "run", "someone/tiny", *words)


def test_sample_prints_one_json_object_a_completion(call):
    said = call("sample", "run", "first", "second", "--count", "2", "--max-tokens", "3", "--json")
    rows = [json.loads(line) for line in said.splitlines()]
    assert [row["prompt"] for row in rows] == ["first", "first", "second", "second"]
    policy = qerl.Run(Path("run")).policy
    expected = qerl.sample(policy, ["first", "second"], count=2, max_tokens=3, instruction="Be brief.")
    assert [row["completion"] for row in rows] == [drawn.text for group in expected for drawn in group]


def test_sample_reads_prompts_from_a_file_and_prints_them_for_people(call, folder):
    (folder / "prompts.txt").write_text("one [bold]\n\ntwo\n")
    said = call("sample", "model", "--prompts", "prompts.txt", "--max-tokens", "3")
    assert said.index("one [bold]") < said.index("two")
    assert said.count("token") == 2


def test_eval_asks_a_stock_task_with_its_own_prompt(call, folder):
    arguments = ("--repeats", "1", "--max-tokens", "3", "--task", "gsm8k", "--fewshot", "2")
    said, outcome = call("eval", "run", "--out", "stock", *arguments), qerl.Evaluation(folder / "stock")
    assert f"{100 * outcome.accuracy.mean:.1f} [" in said
    prompt = "".join(outcome.samples["prompt"][0].split())
    assert (prompt.count("Question:"), "Bebrief." in prompt) == (3, False)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "run.yaml", "steps"], "'steps' is no KEY=VALUE"),
        (["train", "run.yaml", ".rank=3"], "'.rank=3' is no KEY=VALUE"),
        (["train", "run.yaml", "reward.functions.own.weight=2"], "`reward.functions.own.function` is missing"),
        (["train", "run.yaml", "reward={correct: 0, format: 0}", "out=none"], "reward has no part with a weight"),
        (["train", "run.yaml", "dataset.origin={}"], "`dataset.origin.source` is missing"),
        (["train", "absent.yaml"], "configuration file absent.yaml doesn't exist"),
        (["train", "run.yaml"], "run.yaml: `out` is missing (A new folder for all that the run makes)"),
        (["sample", "model/config.json", "hello"], "model/config.json is a file, and a model is a folder"),
        (["plan", "run.yaml"], "run.yaml is the file of one run, which `qerl train` takes"),
        (["train", MINI, "--out", "e"], "mini.yaml is a configuration of the workflow"),
        (["train", "run"], "run is the folder of a run; go on with its file: qerl train run/run.yaml"),
        (["plan", MINI, "models={m: {source: local, path: 2024}}"], "needs its folder, as in ./NAME"),
        (["sample", "model"], "nothing to sample from"),
        (["sample", "model", "hello", "--seed", "-5"], "`--seed` must be greater than or equal to 0, not -5"),
        (["plan", MINI, "--machine", "a100"], "'a100'; use one of cpu, h100, h200"),
        (["eval", "model", "--out", "e", "--problems", "absent.jsonl"], "absent.jsonl doesn't exist"),
        (["eval", "model", "--out", "e", "--dataset", "{format: gsm}"], "--dataset: `format` must be 'gsm8k'"),
        (["plan", MINI, "modle=x"], "mini.yaml with modle of the command line: unknown key"),
        (["plan", "no\x1b[2J\u202e.yaml"], r"no\x1b[2J\u202e.yaml"),
        (["eval", "run", "--out", "run"], "run exists and is not the folder of an evaluation; give a new folder"),
    ],
)
def test_a_mistake_is_one_sentence(call, folder, monkeypatch, capsys, arguments, sentence):
    monkeypatch.setattr(sys, "argv", ["qerl", *arguments])
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("qerl: ")
    assert said.count("\n") == 1
    assert not (folder / "e").exists()


def test_the_installed_command_imports_from_the_working_directory(tmp_path):
    """A script's own folder is on the path, the working directory isn't; and it may not hide a package."""
    (tmp_path / "mine.py").write_text("def value():\n    return 7\n")
    (tmp_path / "pydantic.py").write_text("raise SystemExit('hidden')\n")
    (tmp_path / "bin").mkdir()
    code = "from qerl.host.imports import load\nimport pydantic\nprint(load('mine:value')())\n"
    (tmp_path / "bin/qerl").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "bin/qerl")]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "7"


def plan_rows(call, *keys: str) -> list[dict]:
    return [json.loads(line) for line in call("plan", MINI, *keys, "--json").splitlines()]


def test_plan_is_a_table_for_people_and_rows_for_programs(call):
    text = call("plan", MINI)
    [arm] = [line.split() for line in text.splitlines() if line.split()[:1] == ["main-nvfp4-lora-aqn"]]
    assert arm[1] == "3"
    assert "main-nvfp4-lora-aqn-seed" not in text
    assert "18 runs, 0 of them trained; 22 evaluations; 2 measurements" in text
    rows, table = plan_rows(call), call("plan", MINI, "--csv").splitlines()
    assert len(rows) == len(table) - 1 == 18
    assert table[0].split(",") == list(rows[0])
    assert {(row["weights"], row["training"]) for row in rows} >= {("nvfp4", "lora+aqn"), ("bf16", "full")}
    shorter = plan_rows(call, "experiments={main: {base: {steps: 3}}}")  # YAML over the file's
    assert [row["run"] for row in shorter] == [row["run"] for row in rows]
    assert {row["steps"] for row in shorter} == {3} != {row["steps"] for row in rows}
    assert call("where", MINI, "name=other") == "results/other\n"


@pytest.mark.parametrize(
    ("within", "command"),
    [
        ("qerl.rl.train.train_run", "train run.yaml --out {out}"),
        ("qerl.api.make_checkpoint", "quantize model --out {out}"),
        ("qerl.evals.evaluate.evaluate", "eval run --max-tokens 2 --repeats 1 --out {out}"),
    ],
)
def test_an_interrupted_command_says_how_to_go_on_and_does(call, monkeypatch, tmp_path, within, command):
    """Wherever Ctrl-C comes."""
    arguments = command.format(out=tmp_path / "out").split()
    with monkeypatch.context() as patch:
        patch.setattr(within, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        interrupted = CliRunner().invoke(cli.app, arguments)
    assert interrupted.exit_code == 130
    assert interrupted.stderr.splitlines()[-1] == "qerl: interrupted; run the same command to continue"
    assert "Traceback" not in interrupted.output
    call(*arguments)


def test_an_interruption_while_modules_are_imported_is_a_sentence_too(monkeypatch, capsys):
    class Interrupted:
        @staticmethod
        def find_spec(name, *_):
            if name == "qerl.cli.commands":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "qerl.cli.commands")
    monkeypatch.delattr("qerl.cli.commands")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 130
    assert capsys.readouterr().err == "qerl: interrupted; run the same command to continue\n"


def test_the_screen_of_a_training_has_its_progress_and_no_noise_of_libraries(folder, tmp_path):
    values = {**json.loads((folder / "run.yaml").read_text()), "method": "full"}
    (tmp_path / "run.yaml").write_text(json.dumps(values))

    def train():
        configure_logging()
        enable_progress_bar()  # which a harness may have disabled in this process
        sys.argv = ["qerl", "train", "run.yaml", "--out", "run"]
        __main__.main()

    done = call_in_fork(train, tmp_path, {**os.environ})
    assert done.returncode == 0, done.stderr
    *paths, view, score = [line[12:] for line in done.stdout.splitlines()]
    assert all(Path(path).exists() for path in paths)
    assert len(paths) == 4
    # What is to be typed next: the first of them is done.
    assert CliRunner().invoke(cli.app, shlex.split(view)[1:]).exit_code == 0
    assert (tmp_path / "run/samples.html").is_file()
    assert shlex.split(score)[:3] == ["qerl", "eval", str(tmp_path / "run")]
    thinking, unreadable, steps, flat = done.stderr.splitlines()
    assert "thinking ends at </think> (a completion may begin it)" in thinking
    assert unreadable.startswith("warning: step 1: no completion states an answer that the grader reads.")
    assert re.fullmatch(r"steps: 1 of 1, reward 0\.000, length \d, sampler KL \S+, [\d,]+ tokens/s", steps)
    assert flat.startswith("warning: reward 0.000 -> 0.000 in 1 step: nothing was learned")
    assert "Writing model shards" in (tmp_path / "run/log.txt").read_text()


def test_a_file_of_prompts_may_begin_with_a_mark_and_must_be_utf_8(tmp_path):
    (tmp_path / "marked.txt").write_bytes("\ufeffWie hoch?\r\nÜber 3?\r\n".encode())
    assert cli._lines(tmp_path / "marked.txt") == ["Wie hoch?", "Über 3?"]
    (tmp_path / "latin.txt").write_bytes("Über 3?\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"prompts .*latin\.txt is not in UTF-8 .*save it as UTF-8"):
        cli._lines(tmp_path / "latin.txt")
