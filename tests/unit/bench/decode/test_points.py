"""The measurements of decode speed on a tiny shape, and their file."""

import json
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from qerl.bench import decode
from qerl.bench import hf as decode_hf
from qerl.bench import timing as decode_points
from qerl.bench import vllm as decode_vllm
from qerl.bench.timing import Engine
from qerl.checkpoints.shapes import PUBLISHED, SIZES
from qerl.jobs import DecodeJob, DecodePart
from qerl.models.policy import choose_device, weight_bytes
from qerl.models.random import random_policy
from qerl.report import speed_tables
from qerl.results import speeds
from qerl.results.speeds import DecodePoint
from qerl.rollout.engine import EngineSampler
from qerl.settings.base import ConfigError
from qerl.settings.models import Base
from qerl.settings.workloads import Decoding
from tests.families import FAMILIES

SETTINGS = {"size": "tiny", "rank": 4, "kernels": "auto", "prompt": 4, "tokens": 5}
NAMES = {"bench", "work", "ceilings", "gpu", "points", "provenance"}
PROMPTS = {"prompt_seconds", "prompt_samples"}
POINT = {"sequences", "status", "samples", *PROMPTS, "sampler", "peak_memory_bytes", "weight_bytes"}
#: Weights of q and o, k and v, gate, up and down in both blocks.
PROJECTIONS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
GPU = torch.cuda.is_available()


def measure(module, out, sequences, engine="native", weights="nvfp4"):
    """Do a job on the tiny shape."""
    work = Decoding(engine=engine, weights=weights, **SETTINGS)
    part = DecodePart(file=out.name, work=work, sequences=sequences)
    module.measure_points(DecodeJob(parts=[part], out=out.parent))


def read(out):
    return json.loads(out.read_text())


def assert_job(result, engine, weights, sequences):
    """The measurement succeeded and states its work."""
    assert result["bench"] == "decode"
    assert result["work"].items() >= ({"engine": engine, "weights": weights} | SETTINGS).items()
    assert (result["ceilings"] is None, result["gpu"] is None) == (not GPU, not GPU)
    assert result["provenance"]["commit"] == "test"
    assert [point["sequences"] for point in result["points"]] == sequences
    for point in result["points"]:
        assert set(point) == POINT
        assert point["status"] == "ok"
        assert point["samples"] == [point["sequences"] / 0.25] * 3
        assert point["prompt_seconds"] == 2.0
        assert point["peak_memory_bytes"] > point["weight_bytes"] > 0


@pytest.mark.parametrize("weights", ["bf16", "nf4", "mxfp4"])
def test_a_job_of_the_native_engine(tmp_path, weights):
    out = tmp_path / "out.json"
    measure(decode, out, [1], weights=weights)
    result = read(out)
    assert set(result) == NAMES | {"sync_seconds"}
    assert_job(result, "native", weights, [1])
    assert len(result["sync_seconds"]) == 20
    assert ("bfloat16" if weights == "bf16" else weights) in result["points"][0]["sampler"]


def test_a_job_of_a_published_shape(tmp_path, monkeypatch):
    """A mixture's, in small; its vocabulary bounds the prompts."""
    monkeypatch.setitem(PUBLISHED, "mixture", FAMILIES["qwen3_moe"].config(vocab_size=256).to_dict())
    for module in (speeds,):
        monkeypatch.setattr(module, "SIZES", (*SIZES, "mixture"))
    out = tmp_path / "out.json"
    work = Decoding(engine="native", weights="nvfp4", **SETTINGS | {"size": "mixture"})
    decode.measure_points(DecodeJob(parts=[DecodePart(file=out.name, work=work, sequences=[2])], out=tmp_path))
    result = read(out)
    assert (result["work"]["size"], [point["samples"] for point in result["points"]]) == ("mixture", [[2 / 0.25] * 3])
    points = speeds.load([out], "decode")
    assert (points["tokens_per_second"].tolist(), points["percent_of_floor"].isna().tolist()) == ([8.0], [True])


def test_packed_delta_nets_are_points_of_their_own(tmp_path, monkeypatch):
    """A file without the key has dense ones, as those that were committed before there was the key."""
    monkeypatch.setitem(PUBLISHED, "hybrid", FAMILIES["qwen3_5"].config(vocab_size=256).to_dict())
    for module in (speeds,):
        monkeypatch.setattr(module, "SIZES", (*SIZES, "hybrid"))
    files = [tmp_path / "dense.json", tmp_path / "packed.json"]
    for file, packed in zip(files, (False, True), strict=True):
        work = Decoding(engine="native", weights="nvfp4", pack_delta_nets=packed, **SETTINGS | {"size": "hybrid"})
        decode.measure_points(DecodeJob(parts=[DecodePart(file=file.name, work=work, sequences=[2])], out=tmp_path))
    dense, packed = map(read, files)
    numbers = 64 * (96 + 64) + 64 * 64
    saved = dense["points"][0]["weight_bytes"] - packed["points"][0]["weight_bytes"]
    assert saved == pytest.approx(numbers * (2 - 4.5 / 8), rel=0.01)
    del dense["work"]["pack_delta_nets"]
    files[0].write_text(json.dumps(dense))
    points = speeds.load(files, "decode")
    assert points["weights"].tolist() == ["nvfp4", "nvfp4-delta-nets"]
    table = speed_tables.decode_table(points)
    assert table["weights"].tolist() == ["nvfp4", "nvfp4-delta-nets"]
    other = work.model_copy(update={"pack_delta_nets": False})
    with pytest.raises(ConfigError, match="points of pack_delta_nets=True, not False"):
        decode_points.DecodePoints(files[1], other)


def test_a_job_continues_where_its_file_ends(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    measure(decode, out, [2])
    first = read(out)["points"]
    measure(decode, out, [2, 1, 2])
    assert_job(read(out), "native", "nvfp4", [1, 2])
    assert read(out)["points"][1:] == first
    text = out.read_text()
    monkeypatch.setattr(decode, "random_policy", None)
    measure(decode, out, [1, 2])
    assert out.read_text() == text


def test_ranks_and_lengths_share_one_base_and_a_killed_job_continues(tmp_path, monkeypatch):
    """Each file is as if its points had been measured alone: rank 0 has no adapter, and no longer one of rank 4."""
    made = []
    monkeypatch.setattr(decode, "random_policy", lambda *asked: made.append(asked) or random_policy(*asked))
    asked = [(4, 4), (0, 4), (8, 4), (8, 6)]
    works = [Decoding(engine="native", weights="nvfp4", **SETTINGS | {"rank": r, "prompt": p}) for r, p in asked]
    parts = [DecodePart(file=f"{work.rank}-{work.prompt}.json", work=work, sequences=[1, 2]) for work in works]
    decode.measure_points(DecodeJob(parts=parts[:2], out=tmp_path))
    assert [rank for _, rank, _ in made] == [0]
    first = {file.name: file.read_text() for file in tmp_path.glob("*.json")}
    decode.measure_points(DecodeJob(parts=parts, out=tmp_path))
    assert len(made) == 2  # no more than once for each call
    assert {name: (tmp_path / name).read_text() for name in first} == first
    for part in parts:
        result, rank = read(tmp_path / part.file), part.work.rank
        assert (result["work"]["rank"], result["work"]["prompt"], bool(result["sync_seconds"])) == (
            rank,
            part.work.prompt,
            rank > 0,
        )
        assert [point["sequences"] for point in result["points"]] == [1, 2]
        alone = weight_bytes(random_policy(Base("tiny", "nvfp4"), rank, choose_device()))
        assert {point["weight_bytes"] for point in result["points"]} == {alone}


def job(**other):
    values = {"engine": "native", "size": "7B", "weights": "nvfp4", "rank": 16, "prompt": 128, "tokens": 256}
    values |= {"kernels": "auto"}
    return Decoding(**values | other)


def engine(_):
    return Engine(lambda prompts, count, seed: len(prompts) * count, "s", lambda: 1)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file with a point of one sequence."""
    out = tmp_path_factory.mktemp("written") / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QERL_COMMIT", "test")
        point = DecodePoint(sequences=1, status="ok", samples=[10.0], prompt_seconds=1.0, prompt_samples=[1.0])
        patch.setattr(decode_points, "timed", lambda *_: point)
        decode_points.DecodePoints(out, job()).run([1], lambda: engine)
    return out


@pytest.mark.parametrize(
    "other",
    [
        *({"engine": "vllm"}, {"size": "3B"}, {"weights": "nf4"}, {"rank": 0}, {"kernels": "portable"}),
        *({"prompt": 64}, {"tokens": 64}),
    ],
    ids=lambda other: next(iter(other)),
)
def test_points_of_other_settings_are_refused(written, other):
    [(name, value)] = other.items()
    with pytest.raises(ConfigError, match=rf"{written} has points of {name}=.*, not {value}; delete it"):
        decode_points.DecodePoints(written, job(**other))
    assert decode_points.DecodePoints(written, job()).missing([1, 8]) == [8]


def test_points_of_another_machine_are_refused(tmp_path, written):
    out, result = tmp_path / "out.json", read(written)
    result["provenance"]["machine"]["label"] = "8x another GPU"
    out.write_text(json.dumps(result))
    with pytest.raises(ConfigError, match="another machine, 8x another GPU; delete it"):
        decode_points.DecodePoints(out, job())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": []}'])
def test_another_file_is_refused(tmp_path, text):
    out = tmp_path / "out.json"
    out.write_text(text)
    with pytest.raises(ConfigError, match=rf"{out} is not a DecodeResult: .*; delete it"):
        decode_points.DecodePoints(out, job())


def test_a_point_out_of_memory_is_a_row_and_the_next_is_measured(tmp_path, monkeypatch):
    """The native engine raises a sentence of its own from the error; what the point held is given back."""
    out, held, measured = tmp_path / "out.json", [], decode.engine_of

    def scarce(policy, work, sequences):
        if sequences == 1:
            return measured(policy, work, sequences)
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        try:
            raise torch.cuda.OutOfMemoryError("tried to allocate 1 GiB")
        except torch.cuda.OutOfMemoryError as error:
            if sequences == 3:
                raise
            raise RuntimeError("lower max_tokens") from error

    monkeypatch.setattr(decode, "engine_of", scarce)
    measure(decode, out, [3, 2, 1])
    last, *failed = read(out)["points"]
    assert [(point["sequences"], point["status"], point["samples"]) for point in failed] == [
        (2, "out of memory", []),
        (3, "out of memory", []),
    ]
    assert all(set(point) == POINT for point in failed)
    assert (last["sequences"], last["status"], len(last["samples"])) == (1, "ok", 3)
    assert [reference() for reference in held] == [None, None]


@pytest.mark.parametrize(("pages", "status"), [(6, "ok"), (5, "out of memory")])
def test_sequences_that_would_wait_for_each_other_are_a_row(tmp_path, pages, status):
    """Three sequences of 17 tokens take two pages of 16 each."""
    out = tmp_path / "out.json"

    def measure(sequences):
        decode_points.check_room(pages, 16, sequences, 17)
        return engine(sequences)

    decode_points.DecodePoints(out, job()).run([3], lambda: measure)
    assert [point["status"] for point in read(out)["points"]] == [status]


def test_another_error_is_no_row(tmp_path):
    def measure(sequences):
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        decode_points.DecodePoints(tmp_path / "out.json", job()).run([1], lambda: measure)
    assert read(tmp_path / "out.json")["points"] == []


def test_the_warm_up_of_a_long_run_is_short_and_has_room_for_all_its_tokens(clock, tmp_path, monkeypatch):
    """The engine captures its graphs by the tokens that there is room for, so that no timed run captures any."""
    asked, generate = [], EngineSampler.generate

    def seen(self, prompts, params):
        asked.append((params.max_tokens, params.lengths))
        return generate(self, prompts, params)

    monkeypatch.setattr(EngineSampler, "generate", seen)
    monkeypatch.setattr(decode_points, "WARM_UP", 3)
    measure(decode, tmp_path / "out.json", [2])
    whole = SETTINGS["tokens"] + 1
    assert asked == [(whole, ((4,), (4,))), *[(1, None), (whole, None)] * 3]


@pytest.mark.parametrize("weights", ["bf16", "nf4"])
def test_a_job_of_transformers(tmp_path, weights):
    out = tmp_path / "out.json"
    measure(decode_hf, out, [2], "transformers", weights)
    result = read(out)
    assert set(result) == NAMES
    assert_job(result, "transformers", weights, [2])
    assert ("bitsandbytes" in result["points"][0]["sampler"]) == (weights == "nf4")


def test_weights_of_transformers_are_in_the_format_that_was_asked_for():
    cpu = torch.device("cpu")
    dense, nf4 = (decode_hf.random_model("tiny", weights, 0, cpu) for weights in ("bf16", "nf4"))
    # Half a byte a weight and a float32 scale for 64, instead of two bytes.
    saved = PROJECTIONS * 2 - PROJECTIONS // 2 - 4 * PROJECTIONS // 64
    assert decode_hf.weight_bytes(dense) - decode_hf.weight_bytes(nf4) == saved
    adapted = decode_hf.random_model("tiny", "nf4", 4, cpu)
    adapter = 2 * 4 * (128 + 96 + 96 + 128 + 3 * 192)
    assert decode_hf.weight_bytes(adapted) - decode_hf.weight_bytes(nf4) == 2 * adapter
    layer = adapted.model.layers[0].mlp.down_proj.base_layer.weight
    assert layer.quant_state.quant_type == "nf4"
    assert not layer.quant_state.nested


def test_vllm_without_room_for_its_cache_is_a_row(tmp_path, monkeypatch):
    def engine(*_, **__):
        raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=None))
    measure(decode_vllm, tmp_path / "out.json", [1], "vllm")
    [point] = read(tmp_path / "out.json")["points"]
    assert point["status"] == "out of memory"
