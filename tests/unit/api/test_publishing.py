"""Publishing on the hub: what goes there, what its card says, and what is refused before anything goes."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
from safetensors.torch import save_file

import qerl
from qerl import __main__
from qerl.settings.base import ConfigError

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
            return SimpleNamespace(card_data=ModelCardData(license=self.licenses[repo_id]))
        if repo_id not in self.private:
            raise httpx.ConnectError("no network")
        return SimpleNamespace(private=self.private[repo_id], card_data=None)

    def create_repo(self, repo_id, *, private, **_):
        self.private[repo_id] = private

    def upload_folder(self, *, repo_id, folder_path, **_):
        files = (file for file in Path(folder_path).rglob("*") if file.is_file())
        self.files[repo_id] = {file.relative_to(folder_path).as_posix(): file.read_bytes() for file in files}


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


def test_a_dry_run_uploads_nothing_and_needs_neither_login_nor_network(run, monkeypatch):
    monkeypatch.setattr("qerl.api.hub_unreachable", lambda: "no connection to X")
    said = qerl.publish(run.folder, REPO, dry_run=True)
    assert (said.url, said.private, set(said.files)) == (None, None, FILES)
    assert any("tiny-model, without its path" in note for note in said.notes)


def test_without_a_network_nothing_is_staged_and_the_client_not_asked(run, monkeypatch):
    monkeypatch.setattr("qerl.api.hub_unreachable", lambda: "no connection to X")
    monkeypatch.setattr("qerl.publishing.upload", lambda *_: pytest.fail("the client was asked"))
    with pytest.raises(ConfigError, match="someone/tiny-policy wasn't uploaded: no connection to X; start again when"):
        qerl.publish(run.folder, REPO)


def test_an_existing_repository_keeps_its_visibility(run):
    hub = Hub(**{REPO: False})
    assert qerl.publish(run.folder, REPO, hub=hub).private is False
    hub.files.clear()
    with pytest.raises(ConfigError, match="tiny-policy is public already; leave out --private"):
        qerl.publish(run.folder, REPO, private=True, hub=hub)
    assert hub.files == {}
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


@pytest.mark.parametrize("before", ["", "file://", "notes:"])
def test_a_private_path_in_the_settings_is_refused(copy, before):
    file = copy / "data/dataset.json"
    file.write_text(file.read_text().replace("Let's think", f"See {before}/home/someone/notes.txt, then think"))
    hub = Hub()
    with pytest.raises(ConfigError, match=r"README.md would tell (file://)?/home/someone/notes.txt, a path of this"):
        qerl.publish(copy, REPO, hub=hub)
    assert hub.files == {}


@pytest.mark.parametrize("name", ["policy/adapter_model.safetensors", "policy/adapter_config.json", "metrics.jsonl"])
def test_a_link_in_a_run_is_not_followed(copy, tmp_path, name):
    """Also where the file behind it is of the right kind, and where a folder is the link."""
    hub = Hub()
    (tmp_path / "elsewhere").write_bytes((copy / name).read_bytes())
    (copy / name).unlink()
    (copy / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{name} is a link or no regular file"):
        qerl.publish(copy, REPO, hub=hub)
    (copy / name).unlink()
    shutil.copyfile(tmp_path / "elsewhere", copy / name)
    shutil.move(copy / "policy", tmp_path / "policy")
    (copy / "policy").symlink_to(tmp_path / "policy")
    with pytest.raises(ConfigError, match="is a link or no regular file"):
        qerl.publish(copy, REPO, hub=hub, dry_run=True)
    assert hub.files == {}


def test_what_is_no_file_of_tensors_is_not_published_as_one(copy):
    """A hard link to another file can't be told from a file, but its content can."""
    hub = Hub()
    weights = copy / "policy/adapter_model.safetensors"
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
    (copy / "card.md").write_bytes(hub.files[REPO]["README.md"])
    card = ModelCard.load(copy / "card.md").data
    assert (card.datasets, card.eval_results[0].dataset_type) == (["openai/gsm8k"], "openai/gsm8k")
    # Of other problems than the data set's test split, the card can't say whose they are.
    rows = (copy / "trained/samples.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if json.loads(row)["problem"] != json.loads(rows[0])["problem"]]
    (copy / "trained/samples.jsonl").write_text("".join(kept))
    qerl.publish(copy, "someone/other", hub=hub)
    (copy / "card.md").write_bytes(hub.files["someone/other"]["README.md"])
    assert ModelCard.load(copy / "card.md").data.eval_results[0].dataset_type != "openai/gsm8k"


def test_a_model_trained_in_full_goes_whole(run, tmp_path, monkeypatch):
    monkeypatch.setenv("QERL_COMMIT", "test")
    names = ("dataset", "dtype", "rollout", "optimizer")
    values = {name: value for name, value in run.settings.model_dump(mode="json").items() if name in names}
    base = run.settings.model
    whole = qerl.train({**values, "model": base, "method": "full", "weights": "bf16", "steps": 1}, tmp_path / "whole")
    hub = Hub()
    (whole.adapter / "README.md").write_text("notes of the author")
    qerl.publish(whole.folder, REPO, hub=hub)
    assert (whole.adapter / "README.md").read_text() == "notes of the author"
    assert {file.name for file in whole.adapter.iterdir()} | {"README.md", "metrics.jsonl"} == set(hub.files[REPO])
    assert hub.files[REPO]["model.safetensors"] == (whole.adapter / "model.safetensors").read_bytes()
    text = hub.files[REPO]["README.md"].decode()
    assert "All weights of a model, trained by reinforcement learning" in text
    assert "on `tiny-model` (a folder" in text
    assert f"from_pretrained('{REPO}', dtype=\"auto\")" in text
    for name in ("id_rsa", "notes.txt", "train.py"):
        (whole.adapter / name).write_text("mine")
        with pytest.raises(ConfigError, match=f"{name} is no file of a model trained in full; move it out"):
            qerl.publish(whole.folder, "someone/other", hub=hub)
        (whole.adapter / name).unlink()
    (tmp_path / "secret").write_text("{}")
    (whole.adapter / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"vocab\.json is a link or no regular file"):
        qerl.publish(whole.folder, "someone/other", hub=hub)
    (whole.adapter / "vocab.json").unlink()
    config = whole.adapter / "config.json"
    config.write_text(config.read_text().replace("{", '{"_name_or_path": "/home/someone/model",', 1))
    with pytest.raises(ConfigError, match=r"config\.json would tell /home/someone/model"):
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
    hub.licenses["org/base"] = "mit"
    qerl.publish(copy, REPO, hub=hub)
    (copy / "card.md").write_bytes(hub.files[REPO]["README.md"])
    card = ModelCard.load(copy / "card.md")
    assert (card.data.base_model, card.data.license) == ("org/base", "mit")
    assert f"qerl quantize org/base@{'0' * 40} --weights nvfp4 --out base" in card.text
    del hub.licenses["org/base"]  # the hub can't be asked
    qerl.publish(copy, REPO, hub=hub)
    text = hub.files[REPO]["README.md"].decode()
    assert "license:" not in text
    assert "The licence of org/base isn't stated here" in text
