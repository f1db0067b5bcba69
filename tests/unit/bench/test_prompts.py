"""The measurement of prompts on a tiny shape, its file and its table."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from qerl.bench import native
from qerl.host.gpus import Seconds
from qerl.report.speed_tables import write_shapes
from qerl.report_jobs import ShapesJob
from qerl.results.schema import read
from qerl.results.speeds import SCHEMAS
from qerl.settings.workloads import Prompting
from tests.jobs import measured

POINTS = [(1, 8), (2, 4)]


def measure(out: Path, **changes) -> dict:
    """The result of a job on the tiny shape."""
    return measured(out, Prompting(size="tiny", weights="nvfp4", repeats=2, **{"rank": 4} | changes), POINTS)


@pytest.fixture
def calls(monkeypatch):
    """The calls of the sampler; each takes a millisecond per prompt token."""
    calls = []

    class Sampler(native.EngineSampler):
        def generate(self, ids, params):
            calls.append((ids, params))
            return super().generate(ids, params)

    @contextmanager
    def seconds():
        taken = Seconds()
        yield taken
        taken.value = 1e-3 * sum(map(len, calls[-1][0]))

    monkeypatch.setattr(native, "EngineSampler", Sampler)
    monkeypatch.setattr(native, "seconds", seconds)
    return calls


def test_each_call_draws_one_token_after_prompts_of_its_own(tmp_path, calls):
    result = measure(tmp_path / "out.json")
    read(SCHEMAS["prompts"], tmp_path / "out.json")
    (warm_up, _), *timed = calls
    assert [len(prompt) for prompt in warm_up] == [8, 8]
    assert [[len(prompt) for prompt in ids] for ids, _ in timed] == [[8]] * 3 + [[4, 4]] * 3
    assert len({str(ids) for ids, _ in timed}) == 6
    assert {params.max_tokens for _, params in timed} == {1}
    values = [[point[key] for key in ("prompts", "tokens", "status", "samples", "first")] for point in result["points"]]
    assert values == [[1, 8, "ok", [8e-3] * 2, 8e-3], [2, 4, "ok", [8e-3] * 2, 8e-3]]
    assert result["sampler"].startswith("native engine")


def test_calls_without_memory_are_rows(tmp_path, calls, monkeypatch):
    measured = native.measure_prefill

    def scarce(sampler, count, *rest):
        if count == 2:
            raise torch.cuda.OutOfMemoryError("tried to allocate 1 GiB")
        return measured(sampler, count, *rest)

    monkeypatch.setattr(native, "measure_prefill", scarce)
    points = measure(tmp_path / "out.json")["points"]
    assert [(point["status"], len(point["samples"])) for point in points] == [("ok", 2), ("out of memory", 0)]


def test_the_table_has_medians_in_milliseconds_by_policy(tmp_path, calls, monkeypatch):
    measure(tmp_path / "r4.json")
    monkeypatch.setattr(native, "random_policy", lambda *_: _out_of_memory())
    measure(tmp_path / "r0.json", rank=0)
    write_shapes(ShapesJob(files=[tmp_path / "r4.json", tmp_path / "r0.json"], out=tmp_path / "tables"))
    lines = (tmp_path / "tables/prompts-tiny.csv").read_text().splitlines()
    assert lines == ["prompts,tokens,NVFP4 r0,NVFP4 r4", "1,8,out of memory,8.0", "2,4,out of memory,8.0"]


def _out_of_memory():
    raise torch.cuda.OutOfMemoryError
