"""The measurements of decode speed on a tiny shape, and their file."""

import json
import sys
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from qerl.bench.ceilings import ceilings, gpu_state, parse_state
from qerl.bench.decode import engine as decode
from qerl.bench.decode import hf as decode_hf
from qerl.bench.decode import points as decode_points
from qerl.bench.decode import vllm as decode_vllm
from qerl.bench.decode.points import Timing
from qerl.checkpoints.published import PUBLISHED, SIZES
from qerl.host.profiling import Seconds
from qerl.jobs.shapes import DecodeJob, DecodePart, Decoding, enough_runs
from qerl.policy.policy import choose_device, weight_bytes
from qerl.random_models.policy import random_policy
from qerl.report import grid_tables
from qerl.results import speed_readers
from qerl.results.schema import speed
from qerl.results.schema.speed import GpuState
from qerl.rollout.engine.engine import EngineSampler
from qerl.settings.base import ConfigError
from tests.families import FAMILIES

SETTINGS = {"size": "tiny", "rank": 4, "kernels": "auto", "prompt": 4, "tokens": 5}
NAMES = {"bench", "engine", "weights", "pack_delta_nets", *SETTINGS, "ceilings", "gpu", "points", "provenance"}
PROMPTS = {"prompt_seconds", "prompt_samples"}
POINT = {"sequences", "status", "samples", *PROMPTS, "sampler", "peak_memory_bytes", "weight_bytes"}
#: Weights of q and o, k and v, gate, up and down in both blocks.
PROJECTIONS = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def commit(monkeypatch):
    """A commit for stamps."""
    monkeypatch.setenv("QERL_COMMIT", "test")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that only drawing moves: 2 s for the prompts with their first token, 0.25 s for each further one.

    Every engine is timed by it. The fixture is a `draw` that draws nothing and moves it.
    """
    now = [0.0]

    @contextmanager
    def seconds():
        taken, start = Seconds(), now[0]
        yield taken
        taken.value = now[0] - start

    def draw(prompts, count, seed):
        now[0] += 2.0 + 0.25 * (count - 1)
        return len(prompts) * count

    def timed(drawn, *sizes):
        return decode_points.timed(lambda *asked: (draw(*asked), drawn(*asked))[1], *sizes)

    monkeypatch.setattr(decode_points, "seconds", seconds)
    for engine in (decode, decode_hf, decode_vllm):
        monkeypatch.setattr(engine, "timed", timed)
    return draw


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
    assert result.items() >= ({"engine": engine, "weights": weights} | SETTINGS).items()
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
    for module in (speed, speed_readers):
        monkeypatch.setattr(module, "SIZES", (*SIZES, "mixture"))
    out = tmp_path / "out.json"
    work = Decoding(engine="native", weights="nvfp4", **SETTINGS | {"size": "mixture"})
    decode.measure_points(DecodeJob(parts=[DecodePart(file=out.name, work=work, sequences=[2])], out=tmp_path))
    result = read(out)
    assert (result["size"], [point["samples"] for point in result["points"]]) == ("mixture", [[2 / 0.25] * 3])
    points = speed_readers.load_points([out])
    assert (points["tokens_per_second"].tolist(), points["percent_of_floor"].isna().tolist()) == ([8.0], [True])


def test_packed_delta_nets_are_points_of_their_own(tmp_path, monkeypatch):
    """A file without the key has dense ones, as those that were committed before there was the key."""
    monkeypatch.setitem(PUBLISHED, "hybrid", FAMILIES["qwen3_5"].config(vocab_size=256).to_dict())
    for module in (speed, speed_readers):
        monkeypatch.setattr(module, "SIZES", (*SIZES, "hybrid"))
    files = [tmp_path / "dense.json", tmp_path / "packed.json"]
    for file, packed in zip(files, (False, True), strict=True):
        work = Decoding(engine="native", weights="nvfp4", pack_delta_nets=packed, **SETTINGS | {"size": "hybrid"})
        decode.measure_points(DecodeJob(parts=[DecodePart(file=file.name, work=work, sequences=[2])], out=tmp_path))
    dense, packed = map(read, files)
    numbers = 64 * (96 + 64) + 64 * 64
    saved = dense["points"][0]["weight_bytes"] - packed["points"][0]["weight_bytes"]
    assert saved == pytest.approx(numbers * (2 - 4.5 / 8), rel=0.01)
    older = {key: value for key, value in dense.items() if key != "pack_delta_nets"}
    files[0].write_text(json.dumps(older))
    points = speed_readers.load_points(files)
    assert points["weights"].tolist() == ["nvfp4", "nvfp4-delta-nets"]
    table = grid_tables.decode_table(points, "hybrid")
    assert table["weights"].tolist() == ["nvfp4", "nvfp4-delta-nets"]
    other = work.model_copy(update={"pack_delta_nets": False})
    with pytest.raises(ConfigError, match="points of pack_delta_nets=True, not False"):
        decode_points.DecodePoints(files[1], other)


@pytest.mark.parametrize("tokens", [100, 32000, 151936])
def test_ids_of_prompts_are_in_the_vocabulary(clock, tokens):
    seen = []

    def draw(prompts, count, seed):
        seen.extend(prompts)
        return clock(prompts, count, seed)

    decode_points.timed(draw, 3, 50, 5, tokens)
    ids = [one for prompt in seen for one in prompt]
    assert min(1000, tokens // 2) <= min(ids)
    assert tokens // 3 <= max(ids) < min(100000, tokens)


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
    assert [one[2] for one in made] == [0]
    first = {file.name: file.read_text() for file in tmp_path.glob("*.json")}
    decode.measure_points(DecodeJob(parts=parts, out=tmp_path))
    assert len(made) == 2  # no more than once for each call
    assert {name: (tmp_path / name).read_text() for name in first} == first
    for part in parts:
        result, rank = read(tmp_path / part.file), part.work.rank
        assert (result["rank"], result["prompt"], bool(result["sync_seconds"])) == (rank, part.work.prompt, rank > 0)
        assert [point["sequences"] for point in result["points"]] == [1, 2]
        alone = weight_bytes(random_policy("tiny", "nvfp4", rank, choose_device()))
        assert {point["weight_bytes"] for point in result["points"]} == {alone}


def job(**other):
    values = {"engine": "native", "size": "7B", "weights": "nvfp4", "rank": 16, "prompt": 128, "tokens": 256}
    values |= {"kernels": "auto"}
    return Decoding(**values | other)


def point(sequences):
    return Timing([10.0 * sequences], [1.0]).point(sequences, "s", weight_bytes=1, peak_memory_bytes=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file with a point of one sequence."""
    out = tmp_path_factory.mktemp("written") / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QERL_COMMIT", "test")
        decode_points.DecodePoints(out, job()).run([1], lambda: point)
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
    out, held, measured = tmp_path / "out.json", [], decode.measure

    def scarce(policy, sequences, *sizes):
        if sequences == 1:
            return measured(policy, sequences, *sizes)
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        try:
            raise torch.cuda.OutOfMemoryError("tried to allocate 1 GiB")
        except torch.cuda.OutOfMemoryError as error:
            if sequences == 3:
                raise
            raise RuntimeError("lower max_tokens") from error

    monkeypatch.setattr(decode, "measure", scarce)
    measure(decode, out, [3, 2, 1])
    last, *failed = read(out)["points"]
    assert [(point["sequences"], point["status"], point["samples"]) for point in failed] == [
        (2, "out of memory", []),
        (3, "out of memory", []),
    ]
    assert all(set(point) == POINT for point in failed)
    assert (last["sequences"], last["status"], len(last["samples"])) == (1, "ok", 3)
    assert [reference() for reference in held] == [None, None]


def test_weights_that_do_not_fit_are_rows_that_stay(tmp_path):
    out = tmp_path / "out.json"

    def load():
        raise torch.cuda.OutOfMemoryError("tried to allocate 1 GiB")

    decode_points.DecodePoints(out, job()).run([8, 1], load)
    assert [(point["sequences"], point["status"]) for point in read(out)["points"]] == [
        (1, "out of memory"),
        (8, "out of memory"),
    ]
    assert decode_points.DecodePoints(out, job()).missing([1, 8]) == []


@pytest.mark.parametrize(("pages", "status"), [(6, "ok"), (5, "out of memory")])
def test_sequences_that_would_wait_for_each_other_are_a_row(tmp_path, pages, status):
    """Three sequences of 17 tokens take two pages of 16 each."""
    out = tmp_path / "out.json"

    def measure(sequences):
        decode_points.check_room(pages, 16, sequences, 17)
        return point(sequences)

    decode_points.DecodePoints(out, job()).run([3], lambda: measure)
    assert [point["status"] for point in read(out)["points"]] == [status]


def test_another_error_is_no_row(tmp_path):
    def measure(sequences):
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        decode_points.DecodePoints(tmp_path / "out.json", job()).run([1], lambda: measure)
    assert read(tmp_path / "out.json")["points"] == []


def test_prompts_do_not_count(clock):
    lengths = set()

    def draw(prompts, count, seed):
        lengths.update((len(prompts), len(prompt)) for prompt in prompts)
        return clock(prompts, count, seed)

    assert decode_points.timed(draw, 6, 10, 5, 100) == Timing([24.0] * 3, [2.0] * 3)
    assert lengths == {(6, 10)}


def test_a_busy_phase_of_the_machine_does_not_move_the_median(clock):
    runs = iter(range(7))

    def draw(prompts, count, seed):
        if next(runs) < 3:  # the warm-up, and the first round: prompts, all
            clock(prompts, 1, seed)
        return clock(prompts, count, seed)

    # 6 * 5 tokens; those of the first round took 2 s longer, its prompts too.
    timing = decode_points.timed(draw, 6, 10, 5, 100)
    assert timing == Timing([30 / 3.25, 24.0, 24.0], [4.0, 2.0, 2.0])
    assert timing.point(6, "s", weight_bytes=1, peak_memory_bytes=2).prompt_seconds == 2.0


def test_what_prompts_take_longer_throughout_is_not_decoding(clock):
    def draw(prompts, count, seed):
        clock(prompts, 1, seed)
        return clock(prompts, count, seed)

    assert decode_points.timed(draw, 6, 10, 5, 100).samples == [24.0] * 3


@pytest.mark.parametrize(
    ("seconds", "runs"), [(0.01, 9), (0.6, 9), (0.7, 8), (1.2, 5), (1.7, 3), (9.9, 3), (10.0, 1), (60.0, 1)]
)
def test_short_runs_are_repeated_more_often_and_long_ones_not_at_all(seconds, runs):
    assert [count for count in range(12) if enough_runs([seconds] * count)] == [*range(runs, 12)]


def test_a_long_run_is_timed_once(clock):
    """By that clock, 33 tokens take 10 s, the first one with the prompts."""
    assert decode_points.timed(clock, 6, 10, 32, 100).samples == [24.0]
    assert decode_points.timed(clock, 6, 10, 31, 100).samples == [24.0] * 3


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


def test_work_that_was_not_done_is_not_timed(clock):
    with pytest.raises(RuntimeError, match="35 tokens were drawn instead of 36"):
        decode_points.timed(lambda *arguments: clock(*arguments) - 1, 6, 10, 5, 100)


def test_time_within_that_of_the_prompts_is_no_speed(clock):
    with pytest.raises(RuntimeError, match="decode more of them"):
        decode_points.timed(lambda prompts, count, seed: clock(prompts, 1, seed) * count, 6, 10, 5, 100)


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


@pytest.mark.skipif(GPU, reason="there is a GPU")
def test_a_cpu_has_neither_ceilings_nor_state():
    assert ceilings(torch.device("cpu")) is None
    assert gpu_state() is None


def test_figures_that_a_driver_does_not_tell_are_none():
    state = GpuState(sm_mhz=1980.0, memory_mhz=3201.0, celsius=40.0, watts=305.61)
    assert parse_state("1980, 3201, 40, 305.61\n") == state
    assert parse_state("1980, 3201, 40, [N/A]\n").watts is None
