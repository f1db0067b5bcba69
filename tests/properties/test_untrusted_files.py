"""Untrusted files: checkpoints, adapters, data sets and configurations never run code."""

import hashlib
import json
import pickle
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from qerl.checkpoints.files import CheckpointError, check_base, check_checkpoint, read_headers, weights_format_of
from qerl.data.hub import hub_files, read_lock
from qerl.data.prompts import prompt_ids
from qerl.data.records import DataError
from qerl.data.sources import check_problem_file
from qerl.models.export import export
from qerl.models.loading import load_model, load_tokenizer
from qerl.models.policy import load_policy, with_adapter
from qerl.rl.checkpoint import Checkpoints
from qerl.settings.base import ConfigError, parse, read_yaml
from qerl.settings.data import HubData
from qerl.settings.run import AdapterSettings, RunFile
from qerl.settings.workflow import Config
from qerl.workflow.plan import plan_from
from tests.properties.values import refused_in_one_sentence, values
from tests.tiny import edit_config, tiny_qwen2

ROOT = Path(__file__).parents[2]
MINI = ROOT / "config/mini.yaml"


@pytest.fixture
def canary(tmp_path):
    """The path of a file that the attacks' code would write; it must not exist after the test."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "the file of a stranger ran code"
    assert "evil" not in sys.modules


class Attack:
    """An object that writes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.write_text, (self.canary, "pickle"))


def code(canary: Path) -> str:
    return f"import pathlib\npathlib.Path({str(canary)!r}).write_text('code')\nclass Evil:\n    pass\n"


@pytest.fixture
def folder(tmp_path):
    """A good checkpoint with a chat template."""
    made = tiny_qwen2(tmp_path / "model")
    (made / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    check_base(made)
    return made


def test_the_canary_sings(tmp_path):
    """Without a guard the attacks write the canary, so its absence elsewhere means something."""
    pickle.loads(pickle.dumps(Attack(tmp_path / "canary")))
    assert (tmp_path / "canary").read_text() == "pickle"
    (tmp_path / "canary").unlink()
    exec(code(tmp_path / "canary"), {})
    assert (tmp_path / "canary").read_text() == "code"


# --- checkpoints -----------------------------------------------------------------------------------------------------


def load_whole(folder):
    check_base(folder)
    return load_policy(folder, None, "float32", torch.device("cpu"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_no_weights(folder, canary, name):
    (folder / name).write_bytes(pickle.dumps(Attack(canary)))
    assert load_whole(folder).lm is not None  # beside safetensors it's ignored
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors format"):
        load_whole(folder)
    with pytest.raises(CheckpointError, match="safetensors format"):
        load_model(folder, torch.float32)


AUTO = {name: f"evil.{kind}" for name, kind in (("AutoConfig", "Evil"), ("AutoModelForCausalLM", "Evil"))}


@pytest.mark.parametrize("model_type", ["qwen2", "evil"])
def test_code_beside_a_model_is_not_run(folder, canary, model_type):
    (folder / "evil.py").write_text(code(canary))
    edit_config(folder, auto_map=AUTO, model_type=model_type, custom_pipelines={"evil": {"impl": "evil.Evil"}})
    if model_type == "qwen2":
        assert load_whole(folder).lm is not None
    else:
        with pytest.raises(CheckpointError, match="model_type='evil'"):
            load_whole(folder)


@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "Qwen2Tokenizer", "Evil", None])
def test_code_beside_a_tokenizer_is_not_run(folder, canary, tokenizer_class, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "evil.py").write_text(code(canary))
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text())
    told |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "tokenizer_class": tokenizer_class}
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    with refused_in_one_sentence(str(folder)):
        load_tokenizer(folder)


def header_file(path: Path, header: bytes, length: int | None = None, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def entry(**changes):
    return {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | changes}


@given(header=values, data=st.binary(max_size=8))
@example(header=[], data=b"")
@example(header={"w": None}, data=b"")
@example(header=entry(data_offsets=[0]), data=b"1234")
@example(header=entry(data_offsets=[0, -4]), data=b"")
@example(header=entry(data_offsets=[4, 0]), data=b"")
@example(header=entry(data_offsets=[0, "4"]), data=b"1234")
@example(header=entry(shape=None), data=b"1234")
@example(header=entry(shape=[2**62, 2**62]), data=b"1234")
def test_any_header_is_read_or_one_sentence(tmp_path_factory, header, data):
    path = tmp_path_factory.getbasetemp() / "header"
    path.mkdir(exist_ok=True)
    text = json.dumps(header, default=str, skipkeys=True).encode()
    header_file(path / "model.safetensors", text, data=data)
    with refused_in_one_sentence(str(path)):
        # The data are those of the tensors, and nothing else.
        assert sum(info.size_bytes for info in read_headers(path).values()) == len(data)


BROKEN = [b"[" * 100_000, b"\xff\xfe", b"9" * 5000, b'{"a":' * 50_000]


@pytest.mark.parametrize("attack", [*BROKEN, 2**64 - 1, 10**12, 100_000_001, "pickle"])
def test_what_is_no_whole_safetensors_file_is_refused_unread(folder, canary, attack):
    file = folder / "model.safetensors"
    if attack == "pickle":
        file.write_bytes(pickle.dumps(Attack(canary)))
    elif isinstance(attack, int):
        header_file(file, b"{}", attack)
    else:
        header_file(file, attack)
    with pytest.raises(CheckpointError, match=r"not a whole safetensors file.*download it again"):
        check_checkpoint(folder)


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_broken_json_is_one_sentence(folder, name, text):
    (folder / name).write_bytes(text)
    with refused_in_one_sentence(name):
        check_base(folder)
        pytest.fail("it was taken")


@pytest.mark.parametrize(
    "shard",
    ["../../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", None, 7, "x.bin", "\0.safetensors"],
)
def test_an_index_cannot_lead_out_of_its_folder(folder, shard):
    (folder.parent.parent / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no safetensors file of this folder"):
        check_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no safetensors file of this folder"):
        load_model(folder, torch.float32)


@given(config=st.dictionaries(st.sampled_from(["quantization_config", "model_type", "hidden_size"]), values))
@example(config={"quantization_config": []})
@example(config={"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}})
@example(config={"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": None}}})
def test_any_configuration_of_a_model_is_read_or_one_sentence(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config"
    path.mkdir(exist_ok=True)
    good = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 64, "vocab_size": 9}
    good |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    (path / "config.json").write_text(json.dumps(good | config, default=str, skipkeys=True))
    with refused_in_one_sentence(str(path)):
        assert weights_format_of(path) in ("bf16", "nf4", "nvfp4", "mxfp4")


# --- adapters and the states of runs ---------------------------------------------------------------------------------


def test_a_pickled_adapter_is_refused(folder, tmp_path, canary):
    trained = tmp_path / "trained"
    with_adapter(folder, AdapterSettings(rank=2), "float32", 0).save(trained)
    (trained / "adapter_model.bin").write_bytes(pickle.dumps(Attack(canary)))
    assert load_policy(folder, trained, "float32").peft is not None  # beside safetensors it's ignored
    (trained / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        load_policy(folder, trained, "float32")
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors"):
        export(folder, trained, tmp_path / "exported")


def test_an_adapter_cannot_name_modules_to_import(folder, tmp_path, canary, monkeypatch):
    trained = tmp_path / "trained"
    with_adapter(folder, AdapterSettings(rank=2), "float32", 0).save(trained)
    (tmp_path / "evil.py").write_text(code(canary))
    monkeypatch.syspath_prepend(tmp_path)
    path = trained / "adapter_config.json"
    told = json.loads(path.read_text())
    auto = {"base_model_class": "Evil", "parent_library": "evil"}
    path.write_text(json.dumps(told | {"auto_mapping": auto}))
    assert load_policy(folder, trained, "float32").peft is not None
    path.write_text(json.dumps(told | {"megatron_config": {"a": 1}, "megatron_core": "evil"}))
    with pytest.raises(CheckpointError, match=r"megatron_config=.*, which isn't supported"):
        load_policy(folder, trained, "float32")
    path.write_text(json.dumps(told | {"peft_type": "XLORA"}))
    with pytest.raises(CheckpointError, match="only LORA"):
        load_policy(folder, trained, "float32")


def test_the_state_of_a_run_is_no_code(tmp_path, canary):
    states = Checkpoints(tmp_path / "states", "fingerprint")
    states.save(1, {"tensor": torch.ones(2)})
    assert states.load()["step"] == 1
    file = tmp_path / "states/step-000002.pt"
    torch.save({"fingerprint": "fingerprint", "attack": Attack(canary)}, file)
    file.write_bytes(file.read_bytes() + hashlib.sha256(file.read_bytes()).digest())
    with pytest.raises(ValueError, match="contains other data than tensors and numbers"):
        states.load()


# --- templates -------------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ self.__init__.__globals__['__builtins__']['open']('CANARY', 'w').write('x') }}",
    "{{ raise_exception.__globals__['os'].system('touch CANARY') }}",
    "{{ ('{0.__class__.__init__.__globals__}').format(raise_exception) }}",
    "{% include '/etc/passwd' %}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{{ raise_exception('no') }}",
    "{% broken",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_chat_template_reaches_nothing_but_text(folder, canary, template):
    (folder / "chat_template.jinja").write_text(template.replace("CANARY", str(canary)))
    tokenizer = load_tokenizer(folder)
    with refused_in_one_sentence("chat template"):
        ids = prompt_ids(tokenizer, "hello", "")
        assert "__globals__" not in (text := tokenizer.decode(ids))
        assert "root:" not in text


# --- configurations and data -----------------------------------------------------------------------------------------

TAGS = [
    "!!python/object/apply:os.system ['touch CANARY']",
    "!!python/object/new:os.system ['touch CANARY']",
    "!!python/name:os.system",
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("read", [read_yaml, read_lock, lambda path: plan_from({}, path)])
def test_tags_of_yaml_make_no_objects(tmp_path, canary, tag, read):
    path = tmp_path / "tagged.yaml"
    for text in (tag, f"name: {tag}", f"- {tag}"):
        path.write_text(text.replace("CANARY", str(canary)))
        with pytest.raises(ConfigError, match="not valid YAML"):
            read(path)


@pytest.mark.parametrize(
    "path", ["evil", "evil.py:f", "evil:f()", "__import__('evil'):f", "../evil:f", "evil:f;g", ":f", "evil:"]
)
def test_code_of_a_user_is_named_by_an_import_path_alone(tmp_path, canary, monkeypatch, path):
    (tmp_path / "evil.py").write_text(code(canary))
    monkeypatch.chdir(tmp_path)
    values = read_yaml(MINI)
    values["datasets"]["arithmetic"]["origin"] = {"source": "python", "function": path}
    with pytest.raises(ConfigError, match=r"`module:function`"):
        plan_from(values, MINI)


def test_parsing_a_configuration_imports_no_code_of_the_user(tmp_path, canary, monkeypatch):
    """Functions are imported by who plans or trains; to read a run's settings is no reason to. `canary` looks."""
    (tmp_path / "evil.py").write_text(code(canary))
    monkeypatch.chdir(tmp_path)
    values = read_yaml(MINI)
    values["datasets"]["arithmetic"]["origin"] = {"source": "python", "function": "evil:f"}
    parse(Config, values, "x")
    origin = {"source": "python", "function": "evil:f"}
    run = {"model": "m", "out": "o", "dataset": {"format": "gsm8k", "origin": origin}, "reward": {"function": "evil:f"}}
    parse(RunFile, run, "x")


def test_code_in_a_repository_of_data_is_not_run(tmp_path, canary):
    repository = tmp_path / "evil_data"
    repository.mkdir()
    for name in ("evil_data.py", "__init__.py", "dataset_infos.py"):
        (repository / name).write_text(code(canary))
    with pytest.raises(DataError, match=r"evil_data\.py"):
        hub_files(HubData(source="hub", repo="a/evil_data", folder=repository))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".pkl", ".pt", ".npy", ".csv", ".py"])
def test_a_pickle_is_no_file_of_problems(tmp_path, canary, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(pickle.dumps(Attack(canary)))
    with pytest.raises(DataError, match=f"data{suffix}"):
        check_problem_file(path)
