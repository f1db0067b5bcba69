"""Texts of cards that no run of the tests' size has: origins of data, and bases of every kind."""

import json
import re
import shlex
from html import unescape

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from qerl.checkpoints.files import StockLoading
from qerl.models.adapter_files import code_span, plain
from qerl.publishing import BaseModel, RunFacts, check_folder, check_private, data_name, run_card
from qerl.results.schema import Machine, PreparedDataset, Provenance, Quartiles, RunResult, RunSummary
from qerl.settings.base import ConfigError, parse
from qerl.settings.run import RunSettings

HUB = {"source": "hub", "repo": "openai/gsm8k", "subset": "main", "revision": None}
LICENSE = {
    "license": "other",
    "license_name": "qwen-research",
    "license_link": "https://huggingface.co/org/base/blob/main/LICENSE",
}


def facts(base, **settings):
    parsed = parse(RunSettings, {"model": "m", "dataset": "d", "weights": "nvfp4", **settings}, "settings")
    seconds = Quartiles(p25=1, median=1, p75=1)
    summary = RunSummary(
        steps=1, seconds=1, peak_memory_bytes=None, trainable_parameters=1, weight_bytes=1,
        rollout_tokens_per_second=1, update_tokens_per_second=1, step_seconds=seconds,
    )  # fmt: skip
    stamp = Provenance(commit="c" * 40, dirty=False, machine=Machine(label="1x H100"), time="2026-11-23")
    result = RunResult(run="r", experiment="e", arm="a", varied={}, settings=parsed, summary=summary, provenance=stamp)
    data = PreparedDataset(
        format="gsm8k", instruction="Think.", answer="native", rows={"train": 7}, sha256={}, columns={}, filter={},
        origin=HUB, repository_files={},
    )  # fmt: skip
    return RunFacts(result, base, data, StockLoading(unpacked_by="CompressedTensorsConfig"))


@pytest.mark.parametrize(
    ("origin", "name"),
    [
        (HUB, "openai/gsm8k"),
        ({"source": "local", "path": "/home/me/mine.jsonl"}, "mine.jsonl"),
        ({"source": "python", "function": "mine:sums"}, "mine:sums"),
        ({"source": "generated"}, "arithmetic (made by qerl)"),
        ({"source": "countdown"}, "countdown (made by qerl)"),
    ],
)
def test_data_is_named_as_others_can_know_it(origin, name):
    about = facts(BaseModel("org/base", True, None, True)).data
    assert data_name(about.model_copy(update={"origin": origin})) == name


def card(text, folder):
    (folder / "README.md").write_text(text)
    return ModelCard.load(folder / "README.md")


def test_an_unchanged_base_of_the_hub_is_linked_with_licence_and_data(tmp_path):
    made = card(run_card(facts(BaseModel("org/base", True, "v1", True, LICENSE)), "me/mine"), tmp_path)
    assert (made.data.base_model, made.data.datasets) == ("org/base", ["openai/gsm8k"])
    assert (made.data.license, made.data.license_name) == ("other", "qwen-research")
    assert "[org/base](https://huggingface.co/org/base) at revision `v1`" in made.text
    assert "qerl quantize" not in made.text
    assert 'from_pretrained(base, revision="v1")' in made.text
    assert "The policy wasn't evaluated" in made.text
    check_private({"README.md": (tmp_path / "README.md").read_text()})


def test_a_model_trained_in_full_loads_by_itself(tmp_path):
    settings = {"weights": "bf16", "method": "full"}
    made = card(run_card(facts(BaseModel("org/base", True, None, True), **settings), "me/mine"), tmp_path)
    assert made.data.base_model_relation == "finetune"
    assert re.search(r"from_pretrained\('me/mine', dtype=\"auto\"\)", made.text)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("see /home/me/x", "/home/me/x"),
        ("path: /srv/a.b/c-d", "/srv/a.b/c-d"),
        ("(/mnt/data/set)", "/mnt/data/set"),
        ("key in /secrets", "/secrets"),
        ("'/.netrc'", "/.netrc"),
        ("see ~/notes.txt", "~/notes.txt"),
        ("~alice/notes", "~alice/notes"),
        ("$HOME/keys", "$HOME/keys"),
        (r"C:\Users\me", r"C:\Users"),
        ("D:/models", "D:/models"),
        (r'"C:\\Users\\me"', r"C:\\Users"),
        (r"on \\server\share", r"\\server\share"),
        (r"%USERPROFILE%\keys", r"%USERPROFILE%\keys"),
    ],
)
def test_paths_are_found_and_named(text, path):
    with pytest.raises(ConfigError, match=re.escape(f"README.md would tell {path}") + ".*nothing was uploaded"):
        check_private({"README.md": text})


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "a" * 30,
        "hf_oauth_" + "eyJhbGciOiJFZERTQSJ9.a-b_c",
        "sk-proj-" + "Ab1_" * 8,
        "sk-ant-" + "a1" * 20,
        "github_pat_" + "a1" * 20,
        "AKIA" + "ABCDEFGH" * 2,
        "wandb_v1_" + "a1" * 20,
        "WANDB_API_KEY=" + "0123456789" * 4,
        '"api_key": "' + "0123456789" * 3 + '"',
        "https://me:pass@host.org/x",
        "postgresql://me:pass@host/db",
        "https://0123abcd@host.org",
        "https://host.org/x?access_token=0123456789",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
    ],
)
def test_secrets_are_found_and_not_repeated(secret):
    with pytest.raises(ConfigError, match=r"README.md would tell a token, a key or a password") as error:
        check_private({"README.md": f"with {secret} in it"})
    assert secret not in str(error.value)


def test_the_value_of_a_secret_variable_is_found_whatever_its_form(monkeypatch):
    text = {"README.md": f"commit {'c0ffee' * 6}"}
    check_private(text)
    monkeypatch.setenv("SOME_TRACKER_KEY", "c0ffee" * 6)
    with pytest.raises(ConfigError, match="would tell a token, a key"):
        check_private(text)


def test_strings_of_json_are_read_as_they_are_and_not_as_they_are_escaped(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"template": "A:\nB:\tC", "eos_token": "<|endoftext|>"}))
    check_folder(tmp_path)
    (tmp_path / "a.json").write_text(r'{"deep": [{"x": "\u002fhome\/me"}]}')
    with pytest.raises(ConfigError, match=r"a\.json would tell /home/me"):
        check_folder(tmp_path)


def test_names_of_folders_are_no_markup_and_no_commands(tmp_path):
    name = "a`b`|c <img src=x>*d*; rm -rf x\n# Title"
    made = card(run_card(facts(BaseModel(name, False, None, False)), "me/mine"), tmp_path)
    html = MarkdownIt("gfm-like", {"linkify": False}).render(made.text)
    assert "<img" not in html
    assert "<h1>Title" not in html
    assert "<em>" not in html
    [command] = re.findall(r"```sh\n(qerl quantize .*?)\n```", made.text, re.DOTALL)
    assert shlex.split(command)[2] == name
    for written in (plain(name), code_span(name)):
        shown = MarkdownIt("gfm-like", {"linkify": False}).renderInline(written)
        assert unescape(re.sub("</?code>", "", shown)) == name.replace("\n", " ")


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/org/base/blob/main/LICENSE",
        "<think>a</think>",
        "8-3 / 4",
        "and/or/both",
        "/x",
        "/no_think",
        "A: / B",
        "~5/3",
        "me@host.org",
        "https://host.org/@me",
        "task-specific-settings-of-it",
        "mailto:me@host",
    ],
)
def test_addresses_and_fractions_are_no_paths(text):
    check_private({"README.md": text})
