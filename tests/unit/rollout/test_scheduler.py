"""What the engine computes together: pages of the cache, sizes of graphs, prompts in one row, and its launches."""

import numpy as np
import pytest
import torch

from qerl.kernels.cuda.w4a16 import variant_for
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import QUERY_BLOCK, PromptRow, pack
from qerl.models.policy import with_adapter
from qerl.rollout import engine
from qerl.rollout.decoder import MOST_PROMPTS, PROMPT_BUCKETS, Download, Pages, Pool, bucket_of, prompt_bucket
from qerl.rollout.engine import EngineSampler
from qerl.rollout.sampler import SamplingParams
from qerl.settings.run import AdapterSettings, NativeSettings
from tests.tiny import tiny_qwen3


def test_what_nobody_holds_is_neither_shared_nor_given_back():
    pages = Pages(4)
    held = pages.take(1)
    pages.give_back(held)
    with pytest.raises(RuntimeError, match="has no holder"):
        pages.give_back(held)
    with pytest.raises(RuntimeError, match="has no holder"):
        pages.share(held)
    with pytest.raises(RuntimeError, match="4 pages of the KV cache are requested, but only 3 are free"):
        pages.take(4)


# --- batch sizes of decode steps' graphs ---


MOST = 1100
SIZES = sorted({bucket_of(rows) for rows in range(1, MOST)})


def multiplied(rows: int) -> int:
    """The rows that a product of 7B's largest layer multiplies for `rows`, those that x lacks too."""
    variant, _ = variant_for(rows, 2 * 18944, 3584, 132)
    blocks = 0
    while blocks * variant.rows < rows:
        blocks += 1
    return blocks * variant.rows


@pytest.mark.parametrize("rows", [1, 3, 17, 100, 129, 161, 193, 256, 257, 384, 385, 512, 513, 1000])
def test_a_graph_is_the_smallest_with_room(rows):
    assert bucket_of(rows) == min(size for size in SIZES if size >= rows)
    assert bucket_of(bucket_of(rows)) == bucket_of(rows)


def test_no_padding_costs_a_product_more_and_beyond_128_rows_a_larger_graph_would():
    for rows in range(1, MOST):
        assert multiplied(bucket_of(rows)) == multiplied(rows)
    for size in [size for size in SIZES if size > 128]:
        assert multiplied(size + 1) > multiplied(size) == size
    assert len([size for size in SIZES if size <= 512]) == 19  # few graphs serve a rollout


# --- prompts in one row ---


CPU = torch.device("cpu")
PAGE = 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    torch.manual_seed(0)
    return with_adapter(tiny_qwen3(tmp_path_factory.mktemp("m")), AdapterSettings(rank=4), "float32", 0, CPU)


def split(row, tokens, count):
    ends = [tokens, 2 * tokens, 3 * tokens, 4 * tokens, 4 * tokens + count]
    ids, positions, places, runs, last, blocks = np.split(row, ends)
    assert not runs.any()
    return ids, positions, places, last.tolist(), blocks.reshape(-1, 3)


def test_prompts_lie_one_behind_the_other_and_their_tokens_in_their_pages():
    prompts, pages = [[5, 6, 7], list(range(100, 170)), [9]], [[4], [8, 2], [3]]
    ids, positions, places, last, blocks = split(pack(prompts, pages, PAGE, 74), 74, 3)
    assert last == [2, 72, 73]
    assert ids.tolist() == [5, 6, 7, *range(100, 170), 9]
    assert positions.tolist() == [0, 1, 2, *range(70), 0]
    expected = [4 * PAGE + i for i in range(3)] + [8 * PAGE + i for i in range(64)] + [2 * PAGE + i for i in range(6)]
    assert places.tolist() == [*expected, 3 * PAGE]
    assert sorted(blocks.tolist()) == [[0, 0, 3], [3, 3, 73], [73, 73, 74]]


def test_padding_is_a_separate_prompt_that_fills_no_page():
    ids, positions, places, last, blocks = split(pack([[5, 6, 7], [8]], [[4], [2]], PAGE, 32, 5), 32, 5)
    assert last == [2, 3, 0, 0, 0]
    assert not ids[4:].any()
    assert not positions[4:].any()
    assert not places[4:].any()
    assert sorted(blocks.tolist()) == [[0, 0, 0]] * 3 + [[0, 0, 3], [3, 3, 4], [4, 4, 32]]


def test_blocks_of_queries_cover_every_token_once_and_fit_any_prompts():
    numbers = np.random.default_rng(0)
    for _ in range(200):
        tokens = int(numbers.choice(PROMPT_BUCKETS))
        count = int(numbers.integers(1, min(MOST_PROMPTS, tokens) + 1))
        used = int(numbers.integers(count, tokens + 1))
        cuts = np.sort(numbers.choice(np.arange(1, used), size=count - 1, replace=False)).tolist()
        lengths = np.diff([0, *cuts, used]).tolist()
        pages = [[1] * -(-length // PAGE) for length in lengths]
        *_, blocks = split(pack([[1] * n for n in lengths], pages, PAGE, tokens, MOST_PROMPTS), tokens, MOST_PROMPTS)
        assert len(blocks) == tokens // QUERY_BLOCK + MOST_PROMPTS + 1
        covered = [token for start, _, end in blocks.tolist() for token in range(start, min(start + QUERY_BLOCK, end))]
        assert sorted(covered) == list(range(tokens))
        work = [start - first for start, first, end in blocks.tolist() if end]
        assert work == sorted(work, reverse=True)


def test_a_graph_is_the_smallest_that_has_room():
    assert [prompt_bucket(size, 1) for size in PROMPT_BUCKETS] == list(PROMPT_BUCKETS)
    assert (prompt_bucket(1, 1), prompt_bucket(33, 2), prompt_bucket(513, 3)) == (32, 64, 768)
    assert prompt_bucket(PROMPT_BUCKETS[-1] + 1, 1) is None
    assert prompt_bucket(100, MOST_PROMPTS) == 128
    assert prompt_bucket(100, MOST_PROMPTS + 1) is None


@torch.no_grad()
def test_padding_changes_nothing(policy):
    """A graph computes padding, too; on a CPU there are none, but its row is computed as it is."""
    sampler = EngineSampler(policy, NativeSettings(), 4)
    prompts, pages = [[5, 6, 7], list(range(2, 72))], [[1], [2, 3]]
    sampler.generate(prompts, SamplingParams(max_tokens=2))
    pool = sampler._pool
    outcomes = []
    for tokens in (73, 128):
        pool.cache.data.fill_(7)
        lengths = [3, 70] + [tokens - 73] * (tokens > 73)
        row = torch.from_numpy(pack(prompts, pages, PAGE, tokens, 3))
        packing = Packing.of(lengths, [None] * len(lengths), CPU)
        hidden = pool.decoder.last_hidden(PromptRow.of(row, tokens, 3, packing), pool.cache)
        outcomes.append((hidden[:2], pool.cache.data[:, 1:].clone()))
    for plain, padded in zip(*outcomes, strict=True):
        torch.testing.assert_close(plain, padded)


@pytest.mark.parametrize("stops", [(), range(2, 18)])
def test_the_host_waits_for_no_step_before_it_has_launched_the_next_ones(policy, monkeypatch, stops):
    launched, waits, caught_up = [], [], []
    run, catch_up = Pool.decode, engine.Scheduler._catch_up

    class Watched(Download):
        arrived = False  # the device is as slow as can be

        @classmethod
        def of(cls, tensor):
            asked = super().of(tensor)
            object.__setattr__(asked, "before", len(launched))
            return asked

        def wait(self):
            waits.append(len(launched) - self.before)
            return super().wait()

    def counted(self, *args):
        launched.append(args)
        run(self, *args)

    def noted(self):
        caught_up.append(len(waits))
        catch_up(self)

    monkeypatch.setattr(engine, "Download", Watched)
    monkeypatch.setattr(Pool, "decode", counted)
    monkeypatch.setattr(engine.Scheduler, "_catch_up", noted)
    sampler = EngineSampler(policy, NativeSettings(), 6)
    monkeypatch.setattr(policy.lm.generation_config, "eos_token_id", list(stops))
    sampler.generate([[5, 6], [7], [8, 9, 10]], SamplingParams(max_tokens=40, count=4, seed=1))
    [before_the_end] = caught_up
    assert all(later >= 1 for later in waits[:before_the_end])
    assert len(waits) > before_the_end > 0
