"""Publishing on the hub: what goes there, what its card says, and what is refused before anything goes."""

import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import httpx
from markdown_it import MarkdownIt
from safetensors.torch import save_file

import qerl
from qerl import __main__
from qerl.api import facts_of
from qerl.models.adapter_files import code_span, plain
from qerl.models.policy import load_policy
from qerl.publishing import BaseModel, check_folder, check_private, data_name, license_of, run_card
from qerl.report.samples import sources_in
from qerl.settings.base import ConfigError
from tests.parity.family_models import by_the_card
from tests.unit.api.conftest import GRADED

REPO = "someone/tiny-policy"
FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "metrics.jsonl"}


class Hub(HfApi):
    """The hub in memory: repositories by name with their visibility, and the files of each."""

    def __init__(self, **private):
        super().__init__(token="hf_none")
        self.private = private
        self.files = {}
        self.licenses = {}

    def whoami(self, *_, **__):
        return {"name": "someone"}

    def repo_exists(self, repo_id, **_):
        return repo_id in self.private

    def model_info(self, repo_id, **_):
        if repo_id in self.licenses:
            return SimpleNamespace(card_data=ModelCardData(**self.licenses[repo_id]))
        if repo_id not in self.private:
            raise httpx.ConnectError("no network")
        return SimpleNamespace(private=self.private[repo_id], card_data=None)

    def create_repo(self, repo_id, *, private, **_):
        self.private[repo_id] = private

    def upload_folder(self, *, repo_id, folder_path, **_):
        files = (file for file in Path(folder_path).rglob("*") if file.is_file())
        self.files[repo_id] = {file.relative_to(folder_path).as_posix(): file.read_bytes() for file in files}


def card(text, folder):
    (folder / "card.md").write_text(text)
    return ModelCard.load(folder / "card.md")


@pytest.fixture(scope="module")
def published(run):
    """The hub after the run was published, and what was said of it."""
    hub = Hub()
    return hub, qerl.publish(run.folder, REPO, hub=hub)


@pytest.fixture(scope="module")
def folder(published, tmp_path_factory):
    """The repository as a person gets it."""
    folder = tmp_path_factory.mktemp("downloaded")
    for name, content in published[0].files[REPO].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_adapter_card_and_metrics_go_to_a_private_repository(run, published):
    hub, said = published
    assert hub.private == {REPO: True}
    assert (said.private, said.url) == (True, f"https://huggingface.co/{REPO}")
    assert dict(said.files) == {name: len(content) for name, content in hub.files[REPO].items()}
    assert set(said.files) == FILES
    assert hub.files[REPO]["adapter_model.safetensors"] == (run.adapter / "adapter_model.safetensors").read_bytes()


def test_no_file_tells_a_folder_of_this_machine_or_a_problem(run, published):
    for name, content in published[0].files[REPO].items():
        text = content.decode(errors="ignore")
        for part in (str(run.folder.parent), str(Path.home()), "What are 3 and 3"):
            assert part not in text, name
    config = json.loads(published[0].files[REPO]["adapter_config.json"])
    assert config["base_model_name_or_path"] == "tiny-model"
    own = json.loads((run.adapter / "adapter_config.json").read_text())
    assert {key for key in own if own[key] != config[key]} == {"base_model_name_or_path"}


def test_the_card_states_base_data_reward_scores_and_stamp(run, folder):
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.license) == ("peft", "apache-2.0")
    assert card.data.base_model is None  # the hub would link a folder's name to somebody's repository
    [entry] = card.data.eval_results
    accuracy = qerl.Evaluation(run.folder / "trained").accuracy
    assert (entry.dataset_name, entry.metric_value) == ("sums.jsonl", pytest.approx(accuracy.mean, abs=1e-4))
    interval = f"{100 * accuracy.mean:.1f} [{100 * accuracy.low:.1f}, {100 * accuracy.high:.1f}]"
    for part in (
        "on `tiny-model` (a folder of the author's),\nwhose linear weights were nvfp4",
        "Data: `sums.jsonl`, records of format gsm8k",
        f"× 2 | {interval} |",
        "| sums.jsonl | untrained base | qerl",
        "learning_rate: 0.01",
        "Code: qerl, test.",
    ):
        assert part in card.text, part


@torch.no_grad()
def test_the_code_of_the_card_loads_the_policy(run, folder, tmp_path, monkeypatch):
    """By PEFT on the base that the card's command makes."""
    text = (folder / "README.md").read_text()
    [command] = re.findall(r"```sh\n(qerl .*?)\n```", text)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run.settings.model, "tiny-model")
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert not ended.value.code
    shutil.copytree(folder, REPO)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    ids = torch.tensor([[5, 6, 7, 40, 41, 8]])
    ours = run.policy.lm(ids).logits
    torch.testing.assert_close(names["model"](input_ids=ids).logits, ours, atol=3e-3, rtol=0)


def test_without_a_network_a_run_is_shown_and_not_uploaded(run, monkeypatch):
    monkeypatch.setattr("qerl.api.hub_unreachable", lambda: "no connection to X")
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda *_: pytest.fail("the client was asked"))
    said = qerl.publish(run.folder, REPO, dry_run=True)
    assert (said.url, said.private, set(said.files)) == (None, None, FILES)
    assert any("tiny-model, without the path" in note for note in said.notes)
    with pytest.raises(ConfigError, match="someone/tiny-policy wasn't uploaded: no connection to X; start again when"):
        qerl.publish(run.folder, REPO)


def test_an_existing_repository_keeps_its_visibility(run):
    hub = Hub(**{REPO: False})
    with pytest.raises(ConfigError, match="tiny-policy is public already; leave out --private"):
        qerl.publish(run.folder, REPO, private=True, hub=hub)
    assert hub.files == {}
    assert qerl.publish(run.folder, REPO, hub=hub).private is False
    qerl.publish(run.folder, "someone/open", private=False, hub=hub)
    assert hub.private["someone/open"] is False


def refused(status):
    request = httpx.Request("GET", "https://huggingface.co")
    return HfHubHTTPError("refused", response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("method", "error", "sentence"),
    [
        ("whoami", LocalTokenNotFoundError(), "nobody is logged in to the hub; run `hf auth login`"),
        ("whoami", refused(401), "nobody is logged in to the hub; run `hf auth login`"),
        ("create_repo", refused(403), "someone/tiny-policy wasn't uploaded: refused"),
        ("whoami", httpx.ConnectError("no route"), "someone/tiny-policy wasn't uploaded: no route"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(run, method, error, sentence):
    def fails(*_, **__):
        raise error

    hub = Hub()
    setattr(hub, method, fails)
    with pytest.raises(ConfigError, match=sentence):
        qerl.publish(run.folder, REPO, hub=hub)
    assert hub.files == {}


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run that may be changed."""
    return shutil.copytree(run.folder, tmp_path / "run", symlinks=True)


@pytest.mark.parametrize("name", ["policy", "policy/adapter_config.json", "metrics.jsonl"])
def test_a_link_in_a_run_is_not_followed(copy, tmp_path, name):
    """Also where the file behind it is of the right kind, and where a folder is the link."""
    hub = Hub()
    shutil.move(copy / name, tmp_path / "elsewhere")
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link or no regular file"):
        qerl.publish(copy, REPO, hub=hub)
    assert hub.files == {}


def test_files_with_private_content_are_not_published(copy):
    """A hard link to another file can't be told from a file, but its content can."""
    hub, weights, about = Hub(), copy / "policy/adapter_model.safetensors", copy / "data/dataset.json"
    text = about.read_text()
    about.write_text(text.replace("Let's think", "See /home/someone/notes.txt, then think"))
    with pytest.raises(ConfigError, match=r"README.md would tell /home/someone/notes.txt, a path of this"):
        qerl.publish(copy, REPO, hub=hub)
    about.write_text(text)
    weights.unlink()
    weights.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors isn't what its name says"):
        qerl.publish(copy, REPO, hub=hub)
    save_file({"a": torch.zeros(1)}, weights, metadata={"made_in": "/home/someone/runs"})
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors would tell /home/someone/runs"):
        qerl.publish(copy, REPO, hub=hub)
    assert hub.files == {}


def test_an_unfinished_run_and_a_wrong_name_are_refused(copy):
    with pytest.raises(ConfigError, match="'tiny' names no repository of the hub; give it as user/name"):
        qerl.publish(copy, "tiny", hub=Hub())
    (copy / "run.json").unlink()
    with pytest.raises(ConfigError, match="isn't finished; go on with `qerl train"):
        qerl.publish(copy, REPO, hub=Hub())


def test_scores_on_other_problems_than_the_test_split_name_no_data_set(copy):
    file = copy / "data/dataset.json"
    splits = {"train": "train", "test": "test"}
    origin = {"source": "hub", "repo": "openai/gsm8k", "subset": "main", "revision": "a" * 40, "splits": splits}
    file.write_text(json.dumps({**json.loads(file.read_text()), "origin": origin}))
    hub = Hub()
    qerl.publish(copy, REPO, hub=hub)
    data = card(hub.files[REPO]["README.md"].decode(), copy).data
    assert (data.datasets, data.eval_results[0].dataset_type) == (["openai/gsm8k"], "openai/gsm8k")
    # Of other problems than the data set's test split, the card can't say whose they are.
    rows = (copy / "trained/samples.jsonl").read_text().splitlines(keepends=True)
    others = [row for row in rows if json.loads(row)["problem"] != json.loads(rows[0])["problem"]]
    (copy / "trained/samples.jsonl").write_text("".join(others))
    qerl.publish(copy, REPO, hub=hub)
    assert card(hub.files[REPO]["README.md"].decode(), copy).data.eval_results[0].dataset_type != "openai/gsm8k"


def test_a_model_trained_in_full_goes_whole(run, tmp_path):
    names = ("dataset", "dtype", "rollout", "optimizer")
    values = {name: value for name, value in run.settings.model_dump(mode="json").items() if name in names}
    base = run.settings.model
    whole = qerl.train({**values, "model": base, "method": "full", "weights": "bf16", "steps": 1}, tmp_path / "whole")
    hub = Hub()
    (whole.adapter / "README.md").write_text("notes of the author")
    qerl.publish(whole.folder, REPO, hub=hub)
    assert (whole.adapter / "README.md").read_text() == "notes of the author"
    assert {file.name for file in whole.adapter.iterdir()} | {"README.md", "metrics.jsonl"} == set(hub.files[REPO])
    text = hub.files[REPO]["README.md"].decode()
    assert "All weights of a model, trained by reinforcement learning" in text
    (tmp_path / "README.md").write_text(text.replace(REPO, str(whole.adapter)))
    shown, ours = by_the_card(tmp_path)["model"], load_policy(whole.adapter, None, "float32", torch.device("cpu")).lm
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(shown(ids).logits, ours(ids).logits, rtol=1e-6, atol=1e-6)
    scored = qerl.evaluate(whole.folder, run.data, tmp_path / "scored", task=GRADED, repeats=1, max_tokens=4)
    assert [source.about for source in sources_in([scored.folder])] == ["policy, trained"]
    (tmp_path / "secret").write_text("{}")
    (whole.adapter / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"vocab\.json is a link or no regular file"):
        qerl.publish(whole.folder, "someone/other", hub=hub)
    (whole.adapter / "vocab.json").rename(whole.adapter / "id_rsa")
    with pytest.raises(ConfigError, match="id_rsa is no file of a model trained in full; move it out"):
        qerl.publish(whole.folder, "someone/other", hub=hub)
    (whole.adapter / "id_rsa").unlink()
    config = (whole.adapter / "config.json").read_text()
    (whole.adapter / "config.json").write_text(config.replace("{", '{"_name_or_path": "/home/me/model",', 1))
    with pytest.raises(ConfigError, match="would tell /home/me/model"):
        qerl.publish(whole.folder, "someone/other", hub=hub)


def test_the_evaluation_of_another_policy_is_refused(copy, tmp_path):
    other = shutil.copytree(copy / "trained", tmp_path / "other")
    result = json.loads((other / "result.json").read_text())
    (other / "result.json").write_text(json.dumps({**result, "model": "/models/another"}))
    with pytest.raises(ConfigError, match=r"other evaluates /models/another, which is not .*run"):
        qerl.publish(copy, REPO, evaluations=[other], hub=Hub())


def test_a_base_of_the_hub_is_named_with_its_licence(copy):
    file = copy / "run.yaml"
    file.write_text(re.sub(r"(?m)^model: .*$", f"model: org/base@{'0' * 40}", file.read_text()))
    hub = Hub()
    hub.licenses["org/base"] = {"license": "mit"}
    qerl.publish(copy, REPO, hub=hub)
    shown = card(hub.files[REPO]["README.md"].decode(), copy)
    assert (shown.data.base_model, shown.data.license) == ("org/base", "mit")
    assert f"qerl quantize org/base@{'0' * 40} --weights nvfp4 --out base" in shown.text
    del hub.licenses["org/base"]  # the hub can't be asked
    qerl.publish(copy, REPO, hub=hub)
    text = hub.files[REPO]["README.md"].decode()
    assert "license:" not in text
    assert "The licence of org/base isn't stated here" in text


def test_a_licence_is_as_its_card_states_it_with_the_address_of_a_file_beside_it(tmp_path):
    """Of several licences all are stated, and a file's name alone would mean a file of the new repository."""
    named, hub = {"license": "other", "license_name": "own", "license_link": "LICENSE"}, Hub()
    hub.licenses |= {"org/base": named, "org/two": {"license": ["mit", "apache-2.0"]}}
    assert license_of("org/two", hub) == hub.licenses["org/two"]
    assert license_of("org/base", hub) == named | {"license_link": "https://huggingface.co/org/base/blob/main/LICENSE"}
    (tmp_path / "README.md").write_text(f"---\n{ModelCardData(**named).to_yaml()}\n---\n")
    assert license_of(tmp_path, None) == {"license": "other", "license_name": "own"}


# --- cards that no run of the tests' size has, and what is private

ORIGIN = {"source": "hub", "repo": "openai/gsm8k", "subset": "main", "revision": None}
LICENSE = {
    "license": "other",
    "license_name": "qwen-research",
    "license_link": "https://huggingface.co/org/base/blob/main/LICENSE",
}


def facts(run, base):
    """What a card tells of the run, if it had another base and its data were the hub's."""
    about = facts_of(run)
    return replace(about, base=base, scores=[], data=about.data.model_copy(update={"origin": ORIGIN}))


def test_an_unchanged_base_of_the_hub_is_linked_with_licence_and_data(run, tmp_path):
    about = facts(run, BaseModel("org/base", True, "v1", True, LICENSE))
    shown = card(run_card(about, "me/mine"), tmp_path)
    assert (shown.data.base_model, shown.data.datasets) == ("org/base", ["openai/gsm8k"])
    assert (shown.data.license, shown.data.license_name) == ("other", "qwen-research")
    assert "[org/base](https://huggingface.co/org/base) at revision `v1`" in shown.text
    assert "qerl quantize" not in shown.text
    assert 'from_pretrained(base, revision="v1")' in shown.text
    assert "The policy wasn't evaluated" in shown.text
    for name, origin in (
        ("mine:sums", {"source": "python", "function": "mine:sums"}),
        ("arithmetic (made by qerl)", {"source": "generated"}),
    ):
        assert data_name(about.data.model_copy(update={"origin": origin})) == name
    check_private({"README.md": (tmp_path / "card.md").read_text()})


def test_names_of_folders_are_no_markup_and_no_commands(run, tmp_path):
    name = "a`b`|c <img src=x>*d*; rm -rf x\n# Title"
    shown = card(run_card(facts(run, BaseModel(name, False, None, False)), "me/mine"), tmp_path)
    html = MarkdownIt("gfm-like", {"linkify": False}).render(shown.text)
    assert "<img" not in html
    assert "<h1>Title" not in html
    assert "<em>" not in html
    [command] = re.findall(r"```sh\n(qerl quantize .*?)\n```", shown.text, re.DOTALL)
    assert shlex.split(command)[2] == name
    for written in (plain(name), code_span(name)):
        inline = MarkdownIt("gfm-like", {"linkify": False}).renderInline(written)
        assert unescape(re.sub("</?code>", "", inline)) == name.replace("\n", " ")


#: Texts with a path of a machine, which the error names.
PATHS = {
    **{"see /home/me/x": "/home/me/x", "path: /srv/a.b/c-d": "/srv/a.b/c-d", "(/mnt/data/set)": "/mnt/data/set"},
    **{"key in /secrets": "/secrets", "'/.netrc'": "/.netrc", "see ~/notes.txt": "~/notes.txt"},
    **{
        "~alice/notes": "~alice/notes",
        "$HOME/keys": "$HOME/keys",
        r"C:\Users\me": r"C:\Users",
        "D:/models": "D:/models",
    },
    **{r'"C:\\Users\\me"': r"C:\\Users", r"on \\server\share": r"\\server\share", r"%USER%\keys": r"%USER%\keys"},
    **{"file:///home/me/x": "file:///home/me/x", "notes:/home/me/x": "/home/me/x"},
}
SECRETS = [
    *("hf_" + "a" * 30, "hf_oauth_eyJhbGciOiJFZERTQSJ9.a-b_c", "sk-proj-" + "Ab1_" * 8, "sk-ant-" + "a1" * 20),
    *("github_pat_" + "a1" * 20, "AKIA" + "ABCDEFGH" * 2, "wandb_v1_" + "a1" * 20, "WANDB_API_KEY=" + "0123456789" * 4),
    *('"api_key": "' + "0123456789" * 3 + '"', "https://me:pass@host.org/x", "postgresql://me:pass@host/db"),
    *("https://0123abcd@host.org", "https://host.org/x?access_token=0123456789", "-----BEGIN OPENSSH PRIVATE KEY-----"),
]
HARMLESS = [
    *(
        "https://huggingface.co/org/base/blob/main/LICENSE",
        "<think>a</think>",
        "8-3 / 4",
        "and/or/both",
        "/x",
        "A: / B",
    ),
    *("/no_think", "~5/3", "me@host.org", "https://host.org/@me", "task-specific-settings-of-it", "mailto:me@host"),
]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *((text, re.escape(path)) for text, path in PATHS.items()),
        *((f"with {secret} in it", "a token, a key or a password") for secret in SECRETS),
        *((text, None) for text in HARMLESS),
    ],
)
def test_paths_are_found_and_named_and_secrets_are_found_and_not_repeated(text, what):
    if what is None:
        check_private({"README.md": text})
        return
    with pytest.raises(ConfigError, match=f"README.md would tell {what}.*nothing was uploaded") as error:
        check_private({"README.md": text})
    assert not any(secret in str(error.value) for secret in SECRETS)


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
