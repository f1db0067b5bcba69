"""Decode speed on a tiny shape by each engine, the timing of points, and the file that a killed job continues."""

import gc
import json
import sys
import weakref
from contextlib import contextmanager, nullcontext
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch

from qerl.bench import native, timing
from qerl.bench.timing import Engine, Point, enough_runs, run_points
from qerl.bench.timing import timed as time_point
from qerl.checkpoints.shapes import PUBLISHED, SIZES
from qerl.host.gpus import Seconds
from qerl.models.policy import choose_device, weight_bytes
from qerl.models.random import random_policy
from qerl.report_jobs import PointJob
from qerl.results import speeds
from qerl.results.schema import ResultError
from qerl.rollout.engine import EngineSampler
from qerl.settings.models import Base
from qerl.settings.workloads import Decoding
from tests.families import FAMILIES
from tests.jobs import measured, part_of

SETTINGS = {"size": "tiny", "rank": 4, "kernels": "auto", "prompt": 4, "tokens": 5}
NAMES = {"bench", "work", "ceilings", "gpu", "points", "provenance", "sync_seconds"}
PROMPTS = {"prompt_seconds", "prompt_samples"}
POINT = {"sequences", "status", "samples", *PROMPTS, "sampler", "peak_memory_bytes", "weight_bytes"}
GPU = torch.cuda.is_available()


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

    original = timing.timed

    def timed(start, *about):
        def clocked(sequences):
            engine = start(sequences)
            return engine._replace(draw=lambda *asked: (draw(*asked), engine.draw(*asked))[1])

        return original(clocked, *about)

    monkeypatch.setattr(timing, "seconds", seconds)
    monkeypatch.setattr(timing, "timed", timed)
    return draw


def measure(out, sequences, engine="native", weights="nvfp4", **changes):
    """The result of a job on the tiny shape."""
    return measured(out, Decoding(engine=engine, weights=weights, **SETTINGS | changes), sequences)


def read(out):
    return json.loads(out.read_text())


@pytest.mark.parametrize(("weights", "sampler"), [("bf16", "bfloat16"), ("nf4", "nf4"), ("mxfp4", "mxfp4")])
def test_a_job_states_its_work_and_its_point(tmp_path, weights, sampler):
    result = measure(tmp_path / "out.json", [2], weights=weights)
    assert set(result) == NAMES
    assert result["bench"] == "decode"
    assert result["work"].items() >= ({"engine": "native", "weights": weights} | SETTINGS).items()
    assert (result["ceilings"] is None, result["gpu"] is None) == (not GPU, not GPU)
    assert result["provenance"]["commit"] == "test"
    assert len(result["sync_seconds"]) == 20
    [point] = result["points"]
    assert set(point) == POINT
    assert (point["sequences"], point["status"]) == (2, "ok")
    assert (point["samples"], point["prompt_seconds"]) == ([2 / 0.25] * 3, 2.0)
    assert point["peak_memory_bytes"] > point["weight_bytes"] > 0
    assert sampler in point["sampler"]


def test_packed_delta_nets_are_points_of_their_own(tmp_path, monkeypatch):
    """A file without the key has dense ones, as those that were committed before there was the key."""
    monkeypatch.setitem(PUBLISHED, "hybrid", FAMILIES["qwen3_5"].config(vocab_size=256).to_dict())
    monkeypatch.setattr(speeds, "SIZES", (*SIZES, "hybrid"))
    files = [tmp_path / "dense.json", tmp_path / "packed.json"]
    dense, packed = (
        measure(file, [2], size="hybrid", pack_delta_nets=packed)
        for file, packed in zip(files, (False, True), strict=True)
    )
    numbers = 64 * (96 + 64) + 64 * 64
    saved = dense["points"][0]["weight_bytes"] - packed["points"][0]["weight_bytes"]
    assert saved == pytest.approx(numbers * (2 - 4.5 / 8), rel=0.01)
    del dense["work"]["pack_delta_nets"]
    files[0].write_text(json.dumps(dense))
    points = speeds.load(files, "decode")
    assert points["weights"].tolist() == ["nvfp4", "nvfp4-delta-nets"]
    assert (points["tokens_per_second"].tolist(), points["percent_of_floor"].isna().all()) == ([8.0, 8.0], True)


def test_ranks_and_lengths_share_one_base_and_a_killed_job_continues(tmp_path, monkeypatch):
    """Each file is as if its points had been measured alone: rank 0 has no adapter, and no longer one of rank 4."""
    made = []
    monkeypatch.setattr(native, "random_policy", lambda *asked: made.append(asked) or random_policy(*asked))
    asked = [(4, 4), (0, 4), (8, 4), (8, 6)]
    works = [Decoding(engine="native", weights="nvfp4", **SETTINGS | {"rank": r, "prompt": p}) for r, p in asked]
    parts = [part_of(tmp_path / f"{work.rank}-{work.prompt}.json", work, [1, 2]) for work in works]
    native.measure_points(PointJob(parts=parts[:2], out=tmp_path))
    assert [rank for _, rank, _ in made] == [0]
    first = {file.name: file.read_text() for file in tmp_path.glob("*.json")}
    native.measure_points(PointJob(parts=parts, out=tmp_path))
    native.measure_points(PointJob(parts=parts, out=tmp_path))
    assert len(made) == 2  # no more than once for each call, and not where nothing is missing
    assert {name: (tmp_path / name).read_text() for name in first} == first
    for part in parts:
        result, rank = read(tmp_path / part.file), part.work.rank
        assert (result["work"]["rank"], result["work"]["prompt"]) == (rank, part.work.prompt)
        assert bool(result["sync_seconds"]) == (rank > 0)
        assert [point["sequences"] for point in result["points"]] == [1, 2]
        alone = weight_bytes(random_policy(Base("tiny", "nvfp4"), rank, choose_device()))
        assert {point["weight_bytes"] for point in result["points"]} == {alone}


def test_runs_in_one_engine_are_a_file_whose_sequences_are_of_each(tmp_path, monkeypatch):
    """Three runs draw together, each two sequences by an adapter of its own on the base's weights."""
    drawn, generate = [], EngineSampler.generate_all

    def seen(self, requests):
        ups = [next(weight for name, weight in one.trainable() if "lora_B" in name) for one in self.policies]
        drawn.append((ups, requests))
        return generate(self, requests)

    monkeypatch.setattr(EngineSampler, "generate_all", seen)
    result = measure(tmp_path / "three.json", [2], runs=3)
    [point] = result["points"]
    assert (result["work"]["runs"], point["sequences"], point["samples"]) == (3, 2, [3 * 2 / 0.25] * 3)
    for ups, requests in drawn:
        assert not any(torch.equal(*pair) for pair in combinations(ups, 2))
        assert [len(request.prompts) for request in requests] == [2, 2, 2]
        assert len({str(prompt) for request in requests for prompt in request.prompts}) == 6
    base, alone = (weight_bytes(random_policy(Base("tiny", "nvfp4"), rank, choose_device())) for rank in (0, 4))
    assert point["weight_bytes"] == pytest.approx(base + 3 * (alone - base), rel=0.01)


def work_of(**other):
    values = {"engine": "native", "size": "7B", "weights": "nvfp4", "rank": 16, "prompt": 128, "tokens": 256}
    return Decoding(**values | other)


def engine(_):
    return Engine(lambda prompts, count, seed: len(prompts) * count, "s", lambda: 1)


def measure_with(start, out, sequences=(1,)):
    timing.measure_decoding(part_of(out, work_of(), sequences), out, nullcontext((start, {})))


def test_parts_of_other_work_points_code_or_machines_are_measured_again(tmp_path):
    out = tmp_path / "out.json"

    def left(points=(1,), **changes) -> bool:
        job = PointJob(parts=[part_of(out, work_of(**changes), points)], out=tmp_path)
        return bool([*timing.unmeasured(job)])

    assert left()
    measure_with(engine, out, [1, 2])
    assert not left()
    assert not left([2, 1])
    assert left([1, 8])
    for name, value in {"engine": "vllm", "rank": 0, "kernels": "portable", "pack_delta_nets": True, "runs": 2}.items():
        assert left(**{name: value}), name
    for changes in ({"machine": read(out)["provenance"]["machine"] | {"label": "8x another GPU"}}, {"files": "0" * 12}):
        result = read(out)
        stored = json.dumps(result | {"provenance": result["provenance"] | changes})
        (tmp_path / "other.json").write_text(stored)
        assert bool(
            [*timing.unmeasured(PointJob(parts=[part_of(tmp_path / "other.json", work_of(), (1,))], out=tmp_path))]
        )
    out.write_text("{}")
    with pytest.raises(ResultError, match=rf"{out} is not a DecodeResult"):
        left()


def test_a_killed_job_goes_on_with_the_points_that_its_file_lacks(tmp_path):
    out, started = tmp_path / "out.json", []

    def killed_at_two(sequences):
        started.append(sequences)
        if started == [1, 2]:
            raise KeyboardInterrupt
        return engine(sequences)

    with pytest.raises(KeyboardInterrupt):
        measure_with(killed_at_two, out, [1, 2, 3])
    [first] = read(out)["points"]
    measure_with(killed_at_two, out, [1, 2, 3])
    assert started == [1, 2, 2, 3]
    assert [point["sequences"] for point in read(out)["points"]] == [1, 2, 3]
    assert read(out)["points"][0] == first


def test_a_point_out_of_memory_is_a_row_and_the_next_is_measured(tmp_path, monkeypatch):
    """The native engine raises a sentence of its own from the error; what the point held is given back."""
    out, held = tmp_path / "out.json", []

    def scarce(policy, settings, sequences, others):
        if sequences == 1:
            return EngineSampler(policy, settings, sequences, others)
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        try:
            raise torch.cuda.OutOfMemoryError("tried to allocate 1 GiB")
        except torch.cuda.OutOfMemoryError as error:
            if sequences == 3:
                raise
            raise RuntimeError("lower max_tokens") from error

    monkeypatch.setattr(native, "EngineSampler", scarce)
    last, *failed = measure(out, [3, 2, 1])["points"]
    assert failed == [{"sequences": count, "status": "out of memory"} for count in (2, 3)]
    assert (last["sequences"], last["status"], len(last["samples"])) == (1, "ok", 3)
    assert [reference() for reference in held] == [None, None]


@pytest.mark.parametrize(("pages", "status"), [(6, "ok"), (5, "out of memory"), (0, None)])
def test_sequences_that_would_wait_for_each_other_are_a_row_and_another_error_is_none(tmp_path, pages, status):
    """Three sequences of 17 tokens take two pages of 16 each."""
    out = tmp_path / "out.json"

    def start(sequences):
        timing.check_room(pages + 1 // (10 * pages), 16, sequences, 17)
        return engine(sequences)

    with nullcontext() if status else pytest.raises(ZeroDivisionError):
        measure_with(start, out, [3])
    assert not status or [point["status"] for point in read(out)["points"]] == [status]


def test_the_warm_up_of_a_long_run_is_short_and_has_room_for_all_its_tokens(clock, tmp_path, monkeypatch):
    """The engine captures its graphs by the tokens that there is room for, so that no timed run captures any."""
    asked, generate = [], EngineSampler.generate

    def seen(self, prompts, params):
        asked.append((params.max_tokens, params.lengths))
        return generate(self, prompts, params)

    monkeypatch.setattr(EngineSampler, "generate", seen)
    monkeypatch.setattr(timing, "WARM_UP", 3)
    measure(tmp_path / "out.json", [2])
    whole = SETTINGS["tokens"] + 1
    assert asked == [(whole, ((4,), (4,))), *[(1, None), (whole, None)] * 3]


def test_vllm_without_room_for_its_cache_is_a_row(tmp_path, monkeypatch):
    def engine(*_, **__):
        raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=None))
    [point] = measure(tmp_path / "out.json", [1], "vllm")["points"]
    assert point["status"] == "out of memory"


# --- timing


def timed(draw, sequences, prompt, tokens, size="tiny"):
    """The point of an engine that draws so. It isn't that of the fixture, whose clock a `draw` moves itself."""
    work = Decoding(engine="native", size=size, weights="bf16", rank=0, prompt=prompt, tokens=tokens)
    return time_point(lambda _: Engine(draw, "any", lambda: 1), work, sequences)


@pytest.mark.parametrize("tokens", [100, 32000, 151936])
def test_prompts_do_not_count_and_their_ids_are_in_the_vocabulary(clock, tokens, monkeypatch):
    monkeypatch.setattr("qerl.bench.timing.vocabulary", lambda size: tokens)
    seen = []

    def draw(prompts, count, seed):
        seen.extend(prompts)
        return clock(prompts, count, seed)

    point = timed(draw, 6, 50, 5)
    assert (point.samples, point.prompt_samples) == ([24.0] * 3, [2.0] * 3)
    assert {len(prompt) for prompt in seen} == {50}
    ids = [one for prompt in seen for one in prompt]
    assert min(1000, tokens // 2) <= min(ids)
    assert tokens // 3 <= max(ids) < min(100000, tokens)


def test_a_busy_phase_of_the_machine_does_not_move_the_median(clock):
    runs = iter(range(7))

    def draw(prompts, count, seed):
        if next(runs) < 3:  # the warm-up, and the first round: prompts, all
            clock(prompts, 1, seed)
        return clock(prompts, count, seed)

    # 6 * 5 tokens; those of the first round took 2 s longer, its prompts too.
    point = timed(draw, 6, 10, 5)
    assert (point.samples, point.prompt_samples) == ([30 / 3.25, 24.0, 24.0], [4.0, 2.0, 2.0])
    assert point.prompt_seconds == 2.0


@pytest.mark.parametrize(
    ("seconds", "runs"), [(0.01, 9), (0.6, 9), (0.7, 8), (1.2, 5), (1.7, 3), (9.9, 3), (10.0, 1), (60.0, 1)]
)
def test_short_runs_are_repeated_more_often_and_long_ones_not_at_all(seconds, runs, clock):
    """By the clock, 33 tokens take 10 s, the first one with the prompts."""
    assert [count for count in range(12) if enough_runs([seconds] * count)] == [*range(runs, 12)]
    assert [timed(clock, 6, 10, tokens).samples for tokens in (31, 32)] == [[24.0] * 3, [24.0]]


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda clock: lambda *asked: clock(*asked) - 1, "35 tokens were drawn instead of 36"),
        (lambda clock: lambda prompts, count, seed: clock(prompts, 1, seed) * count, "decode more of them"),
    ],
)
def test_work_that_was_not_done_is_no_speed(clock, draw, words):
    with pytest.raises(RuntimeError, match=words):
        timed(draw(clock), 6, 10, 5)


class Held:
    """The memory that a point holds."""


@pytest.fixture
def world():
    return {"order": [], "alive": weakref.WeakSet(), "most": 0}


def point(name, world, *, make_fails=False, fails_in=None):
    def make():
        if make_fails:
            raise MemoryError
        held = Held()
        held.itself = held
        world["alive"].add(held)

        def once(round_):
            world["order"].append((name, round_))
            world["most"] = max(world["most"], len(world["alive"]))
            if round_ == fails_in:
                raise MemoryError
            return {"round": round_, "held": id(held)}

        return once

    return Point({"name": name}, make)


@pytest.mark.parametrize(
    ("interleave", "rounds", "most"), [(True, "a0 b0 a1 b1 a2 b2", 2), (False, "a0 a1 a2 b0 b1 b2", 1)]
)
def test_points_are_timed_in_turn_or_alone_in_memory(world, interleave, rounds, most):
    gc.disable()  # the cycle of a point must go because it is collected, not by chance
    try:
        done = run_points([point("a", world), point("b", world)], repeats=2, interleave=interleave)
    finally:
        gc.enable()
    assert " ".join(f"{name}{round_}" for name, round_ in world["order"]) == rounds
    assert world["most"] == most
    assert [[sample["round"] for sample in one.samples] for one in done] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("interleave", [True, False])
def test_a_point_of_several_out_of_memory_is_a_row(world, interleave):
    points = [point("a", world, make_fails=True), point("b", world, fails_in=1), point("c", world)]
    done = run_points(points, repeats=2, interleave=interleave)
    assert [p.status for p in done] == ["out of memory", "out of memory", "ok"]
    assert [len(p.samples) for p in done] == [0, 0, 2]
    assert ("b", 2) not in world["order"]
