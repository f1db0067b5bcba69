"""Packed micro-batches against padded sequences through Hugging Face's own forward pass, and their cuts."""

from functools import partial

import numpy as np
import pytest
import torch

from qerl.kernels.packed_sequences import Packing, all_keys
from qerl.models.blocks import NAME
from qerl.models.policy import trained_in_full
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch, packed_tokens, split
from qerl.rollout.sampler import Completion
from tests.parity.family_models import adapted
from tests.tiny import tiny_family, tiny_llama, tiny_qwen2, tiny_qwen3

CPU = torch.device("cpu")
FAMILIES = ("mistral-sliding", "phi3", "gemma3")
MAKERS = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "llama": tiny_llama}
MAKERS |= {name: partial(tiny_family, name=name, sliding_window=4) for name in FAMILIES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    torch.manual_seed(0)
    for name, make in MAKERS.items():
        make(folder / name)
    return folder


def samples(groups=((5, (7, 1, 12, 2)), (1, (3, 1)), (9, (20,))), vocabulary=90):
    """Groups of (tokens of the prompt, tokens of each completion)."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(2, vocabulary, (length,), generator=generator).tolist()  # noqa: E731
    return [
        Sample(prompt, Completion(draw(length), [-1.0] * length, True), 0.0, 0.0)
        for prompt, lengths in [(draw(p), lengths) for p, lengths in groups]
        for length in lengths
    ]


def padded(policy, drawn, temperature):
    """Log-probabilities and entropy [N, T] by right-padded sequences, each with its prompt, and a mask."""
    longest, widest = max(s.length for s in drawn), max(len(s.completion.token_ids) for s in drawn)
    ids, mask = torch.zeros(len(drawn), longest, dtype=torch.long), torch.zeros(len(drawn), longest, dtype=torch.long)
    for row, s in enumerate(drawn):
        ids[row, : s.length] = torch.tensor(s.prompt + s.completion.token_ids)
        mask[row, : s.length] = 1
    logits = policy.lm(input_ids=ids, attention_mask=mask).logits / temperature
    all_logprobs = torch.log_softmax(logits, -1)
    entropies = -(all_logprobs.exp() * all_logprobs).sum(-1)
    logprobs, entropy = torch.zeros(2, len(drawn), widest).unbind()
    for row, s in enumerate(drawn):
        span, count = slice(len(s.prompt) - 1, s.length - 1), len(s.completion.token_ids)
        chosen = all_logprobs[row, span].gather(-1, ids[row, len(s.prompt) : s.length, None])[:, 0]
        logprobs = logprobs.index_put((torch.full((count,), row), torch.arange(count)), chosen)
        entropy[row, :count] = entropies[row, span].detach()
    return logprobs, entropy


def gradients(policy, loss):
    parameters = dict(policy.trainable())
    return dict(zip(parameters, torch.autograd.grad(loss, parameters.values(), allow_unused=True), strict=True))


def assert_same(found, expected, tolerance=1e-5):
    assert (found - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", MAKERS)
def test_logprobs_entropy_and_gradients_are_those_of_padded_sequences(folder, name, method):
    policy = adapted(folder / name) if method == "lora" else trained_in_full(folder / name, "float32", CPU)
    drawn = samples()
    batch = micro_batch(drawn, list(range(len(drawn))), CPU)
    found, expected = logprobs_and_entropy(policy, batch, 0.8), padded(policy, drawn, 0.8)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)
    weights = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(2))
    ours, theirs = (gradients(policy, (out[0] * weights).sum()) for out in (found, expected))
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        assert gradient.any(), parameter
        assert_same(ours[parameter], gradient, 1e-4)
    assert_same(*(torch.cat([gradient.flatten() for gradient in found.values()]) for found in (ours, theirs)))


def test_keys_are_gathered_and_their_gradients_added_in_float32():
    """Seven copies of a prompt's gradient of 1 + 2^-7: bfloat16 that adds one by one loses the small part."""
    packing = Packing.of([2, *[1] * 6], [None, *[0] * 6], CPU)
    row = torch.arange(8.0, dtype=torch.bfloat16)[:, None].requires_grad_()
    keys = all_keys(row[..., None], packing.copies).split(packing.widths)
    assert [k[:, 0, 0].tolist() for k in keys] == [[0, 1], *([0, 1, n] for n in range(2, 8))]
    (gradient,) = torch.autograd.grad(torch.cat(keys), row, torch.full((20, 1, 1), 1 + 2**-7, dtype=torch.bfloat16))
    assert gradient[:2, 0].tolist() == [torch.tensor(7 * (1 + 2**-7)).bfloat16().item()] * 2
    assert gradient[2:, 0].tolist() == [1 + 2**-7] * 6


def test_sampling_with_a_mask_is_that_of_transformers(folder):
    """Left padding and a cache, as the eager sampler has, after a packed pass."""
    policy, drawn = adapted(folder / "qwen2"), samples()
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before = policy.lm(input_ids=ids, attention_mask=mask).logits
    logprobs_and_entropy(policy, micro_batch(drawn, [0, 1], CPU), 1.0)
    assert policy.lm.config._attn_implementation == NAME
    assert torch.equal(policy.lm(input_ids=ids, attention_mask=mask).logits, before)
    policy.lm.config.save_pretrained(folder / "saved")
    assert NAME not in (folder / "saved/config.json").read_text()


def sizes(drawn, batches):
    return [micro_batch(drawn, index, CPU).ids.shape[1] for index in batches]


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_is_in_one_micro_batch_and_none_exceeds_the_limit(seed, processes):
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=numbers))  # noqa: E731
    drawn = samples([(draw(1, 9), tuple(draw(1, 40) for _ in range(draw(1, 9)))) for _ in range(12)])
    batches = split(drawn, 64, processes)
    assert sorted(i for index in batches for i in index) == list(range(len(drawn)))
    assert max(sizes(drawn, batches)) <= 64
    assert sizes(drawn, batches) == sorted(sizes(drawn, batches), reverse=True)
    assert sum(sizes(drawn, batches)) <= sum(packed_tokens(drawn, [i]) for i in range(len(drawn)))


@pytest.mark.parametrize(
    ("groups", "limit", "processes", "expected"),
    [
        ([(4, (3, 3))] * 6, 20, 1, [16, 16, 16]),  # groups of 8 tokens stay together
        ([(4, (7, 7, 7, 7, 7))], 16, 1, [16, 16, 10]),  # a larger group is cut, and each part has the prompt
        ([(4, (2, 50, 2)), (3, (2,))], 16, 1, [53, 10]),  # a completion over the limit is alone
        ([(4, (3, 3))] * 6, 10_000, 1, [48]),
        ([(4, (3, 3))] * 6, 10_000, 2, [24, 24]),  # the even share of each process
        ([(4, (3, 3))] * 6, 10_000, 3, [16, 16, 16]),
        ([(4, (9, 9, 9, 9))], 10_000, 2, [20, 20]),  # half of a group each
    ],
)
def test_a_batch_is_cut_at_groups_or_else_within_them(groups, limit, processes, expected):
    drawn = samples(groups)
    batches = split(drawn, limit, processes)
    assert sizes(drawn, batches) == expected
    assert sorted(i for index in batches for i in index) == list(range(len(drawn)))


@pytest.mark.parametrize("limit", [8192, 16384, 32768])
def test_two_processes_get_equal_work_from_completions_of_mixed_lengths(limit):
    """Full rows, dealt in turn, gave the first process up to 1.34 times the mean, for which the other waited."""
    numbers = np.random.default_rng(0)
    for _ in range(10):
        lengths = np.minimum(numbers.lognormal(np.log(300), 0.8, (16, 8)).astype(int) + 1, 2048)
        drawn = samples([(100, tuple(row)) for row in lengths.tolist()])
        counts = [sum(sizes(drawn, split(drawn, limit, 2)[rank::2])) for rank in range(2)]
        assert max(counts) <= 1.05 * sum(counts) / 2
