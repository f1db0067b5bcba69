"""The packed update on a GPU in bfloat16 against float32 sequences, one by one, through Hugging Face's forward pass."""

from copy import deepcopy

import pytest
import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl.host.gpus import allocatable_bytes
from qerl.kernels.packed_sequences import Packing, attend_packed
from qerl.models import blocks
from qerl.models.blocks import attend, rotate
from qerl.models.policy import trained_in_full, use_own_modules
from qerl.models.random import random_policy
from qerl.rl.packing import Sample, logprobs_and_entropy, micro_batch, split
from qerl.rl.passes import USABLE, Recomputation, kept_bytes
from qerl.rl.pretrain import _Example, _row, _row_loss
from qerl.rollout.engine import EngineSampler
from qerl.settings.models import Base
from qerl.settings.run import NativeSettings
from tests.gpu.backends import adapted, kernels_of, with_portable
from tests.tiny import random_checkpoint, tiny_llama, tiny_qwen2, tiny_qwen3
from tests.unit.rl.test_packing import samples as samples_of

DEVICE = torch.device("cuda")
TEMPERATURE = 0.9
FAMILIES = {"qwen2": tiny_qwen2, "qwen3": tiny_qwen3, "llama": tiny_llama}


def checkpoint_of(name, folder):
    """A checkpoint of a weight format or of a family, and samples of its vocabulary."""
    if name in FAMILIES:
        shape = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}
        groups = ((37, (300, 1, 129, 2)), (1, (65, 64)), (200, (7, 31)), (64, (128,)))
        return FAMILIES[name](folder / "m", **shape), samples_of(groups)
    random_checkpoint(folder / "m", "small", name)
    return folder / "m", samples()


def samples():
    """Groups of odd sizes; completions of one and two tokens, whose pieces have no and one query."""
    return samples_of(((37, (300, 1, 129, 2)), (1, (65, 64)), (200, (7, 500, 31)), (64, (128,))), 1000)


def packed(policy, drawn, weights, max_tokens):
    """Log-probabilities and entropy of each completion; gradients of the weighted log-probabilities accumulate."""
    found = {}
    for index in split(drawn, max_tokens):
        batch = micro_batch(drawn, index, DEVICE)
        logprobs, entropy = logprobs_and_entropy(policy, batch, TEMPERATURE)
        rows = [(logprobs[n, : len(weights[i])], entropy[n, : len(weights[i])]) for n, i in enumerate(index)]
        sum((row * weights[i]).sum() for i, (row, _) in zip(index, rows, strict=True)).backward()
        found |= {i: (row.detach(), entropy) for i, (row, entropy) in zip(index, rows, strict=True)}
    return [found[i] for i in range(len(drawn))]


def one_by_one(policy, drawn, weights):
    """The same in float32, for one sequence at a time, with all its logits at once."""
    found = []
    for sample, weight in zip(drawn, weights, strict=True):
        ids = torch.tensor([sample.prompt + sample.completion.token_ids], device=DEVICE)
        logits = policy.lm(ids).logits[0, len(sample.prompt) - 1 : -1]
        full = torch.log_softmax(logits / TEMPERATURE, -1)
        row = full.gather(-1, ids[0, len(sample.prompt) :, None])[:, 0]
        (row * weight).sum().backward()
        found.append((row.detach(), -(full.exp() * full).sum(-1).detach()))
    return found


def of_all(policy):
    return {name: parameter.grad.double().flatten() for name, parameter in policy.trainable()}


@pytest.mark.parametrize(
    ("name", "dtype", "max_tokens"),
    [
        *((name, "bfloat16", tokens) for name in ("bf16", "nvfp4") for tokens in (100_000, 700, 300)),
        *((name, "float32", 700) for name in ("bf16", "nvfp4", *FAMILIES)),
        *((name, "bfloat16", 700) for name in FAMILIES),
    ],
)
def test_log_probabilities_and_gradients_follow_float32_one_by_one(tmp_path, monkeypatch, name, dtype, max_tokens):
    """With the kernels of all parts of a block, which transformers' own pass in float32 does without.

    bfloat16 keeps 8 bits: each product errs by 2^-9 of its size. Logits of this shape have a deviation near 0.5, and
    errors of four blocks add up in squares, so that 0.03 is wide; a wrong mask or position moves whole
    log-probabilities. The gradients' errors are independent of the gradients: the cosine stays near 1.
    """
    calls = []
    monkeypatch.setattr(blocks, "rotate", lambda query, *others: calls.append(len(query)) or rotate(query, *others))
    folder, drawn = checkpoint_of(name, tmp_path)
    exactly = dtype == "float32"
    generator, alike = torch.Generator().manual_seed(2), exactly and name not in FAMILIES
    lengths = [len(s.completion.token_ids) for s in drawn]
    weights = [torch.ones(n) if alike else torch.randn(n, generator=generator) for n in lengths]
    weights = [weight.to(DEVICE) for weight in weights]
    ours, exact = adapted(folder, dtype), adapted(folder, "float32")
    found = packed(ours, drawn, weights, max_tokens)
    assert calls
    del calls[:]
    expected = one_by_one(exact, drawn, weights)
    assert not calls
    deltas = torch.cat([a - b for (a, _), (b, _) in zip(found, expected, strict=True)])
    assert deltas.abs().max() < (1e-4 if exactly else 0.03)
    mine, theirs = of_all(ours), of_all(exact)
    if name not in FAMILIES:
        assert (torch.expm1(deltas) - deltas).mean() < 1e-4
        for (_, a), (_, b) in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0.01)
        for key, gradient in theirs.items():
            assert torch.cosine_similarity(mine[key], gradient, dim=0) > 0.98, key
    a, b = (torch.cat(list(gradients.values())) for gradients in (mine, theirs))
    assert torch.cosine_similarity(a, b, dim=0) > 0.999
    assert abs(a.norm() / b.norm() - 1) < 0.02
    assert not exactly or (a - b).norm() < 1e-4 * b.norm()


@pytest.mark.parametrize("window", [None, 200])
def test_gradients_of_attention_over_many_blocks_of_keys_repeat_to_the_bit_and_follow_float64(window):
    """Three blocks of keys or more, whose atomic sums would come in any order."""
    lengths, prompts, device = [200] + [700] * 8, [None] + [0] * 8, torch.device("cuda")
    packing, tokens = Packing.of(lengths, prompts, device), sum(lengths)
    numbers = torch.Generator(device).manual_seed(5)
    rows = [torch.randn(tokens, heads, 128, generator=numbers, device=device) for heads in (12, 2, 2, 12)]

    def gradients(dtype):
        query, key, value = (row.to(dtype).requires_grad_() for row in rows[:3])
        out = attend_packed(query, key, value, packing, 128**-0.5, window)
        return torch.autograd.grad(out, (query, key, value), rows[3].to(dtype))

    first, exact = gradients(torch.bfloat16), gradients(torch.float64)
    for _ in range(10):
        assert all(map(torch.equal, gradients(torch.bfloat16), first))
    for found, wanted in zip(first, exact, strict=True):
        assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


def test_a_row_of_pre_training_has_the_gradients_of_float32():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512, **heads}
    plain = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).to(DEVICE)
    own = deepcopy(plain)
    use_own_modules(own)
    examples = [_Example(torch.randint(512, (n,)).tolist(), n // 3) for n in (5, 300, 64, 129)]
    ours = _row_loss(own, _row(examples), torch.bfloat16)
    ours.backward()
    theirs, count = torch.zeros((), device=DEVICE), 0
    for one in examples:
        logits = plain(torch.tensor([one.ids], device=DEVICE)).logits[0, one.prompt - 1 : -1]
        theirs = theirs + cross_entropy(logits, torch.tensor(one.ids[one.prompt :], device=DEVICE), reduction="sum")
        count += len(logits)
    (theirs / count).backward()
    assert ours.item() == pytest.approx(theirs.item() / count, rel=1e-3)
    for (name, mine), parameter in zip(own.named_parameters(), plain.parameters(), strict=True):
        error = (mine.grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-3)
        assert error < 0.03, (name, error)


def test_full_fine_tuning_in_bfloat16_has_the_gradients_of_float32(tmp_path):
    """Gradients arrive at the float32 masters of all weights; the tolerances are those of the test above."""
    random_checkpoint(tmp_path / "m", "small", "bf16")
    ours, exact = (trained_in_full(tmp_path / "m", dtype, DEVICE) for dtype in ("bfloat16", "float32"))
    drawn = samples()
    weights = [torch.ones(len(s.completion.token_ids), device=DEVICE) for s in drawn]
    packed(ours, drawn, weights, 700), one_by_one(exact, drawn, weights)
    a, b = (torch.cat(list(of_all(policy).values())) for policy in (ours, exact))
    assert torch.cosine_similarity(a, b, dim=0) > 0.99
    assert abs(a.norm() / b.norm() - 1) < 0.03


@pytest.mark.parametrize("name", with_portable("nvfp4", "mxfp4"))
def test_an_update_reads_the_same_weights_after_the_engine_has_moved_them(name):
    """Bit for bit; the engine's kernels read another order than the checkpoint's."""
    drawn, read = samples(), []
    with kernels_of(name) as weights_format:
        policy = random_policy(Base("small", weights_format), 16, DEVICE)
        for moved in (False, True):
            if moved:
                EngineSampler(policy, NativeSettings(), 1)
            batch = micro_batch(drawn, split(drawn, 700)[0], DEVICE)
            with torch.no_grad():
                read.append(logprobs_and_entropy(policy, batch, TEMPERATURE))
    assert torch.equal(read[0][0], read[1][0])
    assert torch.equal(read[0][1], read[1][1])


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(28, 4, 128), (12, 2, 128), (4, 4, 64), (14, 2, 64)])
def test_flash_attention_sees_the_prompt_and_the_own_piece_only(heads, kv_heads, width):
    """Outputs and gradients of each piece against SDPA in float64 with the mask written out."""
    packing = Packing.of([37, 5, 1, 200, 1, 3, 64, 129], [None, 0, 0, 0, None, 4, None, 6], DEVICE)
    total = sum(packing.lengths)
    generator = torch.Generator(DEVICE).manual_seed(0)
    draw = lambda count: torch.randn(1, count, total, width, generator=generator, device=DEVICE).bfloat16()  # noqa: E731
    query, key, value, grad = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads).transpose(1, 2)
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    out, _ = attend(torch.nn.Module(), *inputs, None, packing, scaling=width**-0.5, dropout=0.0)
    piece = torch.repeat_interleave(torch.arange(8, device=DEVICE), torch.tensor(packing.lengths, device=DEVICE))
    prompt = torch.tensor([n if p is None else p for n, p in enumerate(packing.prompts)], device=DEVICE)[piece]
    earlier = torch.ones(total, total, dtype=torch.bool, device=DEVICE).tril()
    seen = earlier & ((piece[:, None] == piece) | (prompt[:, None] == piece))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    exact = scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02)
    found, expected = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(exact, wide, grad.double())
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_memory_that_a_graph_reserved_is_not_allocatable():
    torch.cuda.empty_cache()
    before, graph = allocatable_bytes(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = torch.zeros(2**30, device=DEVICE, dtype=torch.uint8).sum()
    assert before - allocatable_bytes() >= 2**30
    graph.replay()
    assert result.item() == 0


@pytest.fixture
def capped():
    """A cap of 8 GB on further memory, so that to fill it takes nothing from other processes on the GPU."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        min((torch.cuda.memory_reserved() + 8e9) / torch.cuda.mem_get_info()[1], 1.0)
    )
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_recomputation_is_chosen_so_that_a_batch_fits(tmp_path, capped):
    """In memory that is nearly full: without it the batch doesn't fit, with it the gradients are the same."""
    random_checkpoint(tmp_path / "m", "small", "nvfp4")
    drawn = [Sample(s.prompt, s.completion, 0.0, 1.0) for s in samples()] * 40
    batch = micro_batch(drawn, list(range(len(drawn))), DEVICE)
    tokens, gradients, counts = batch.ids.numel(), [], []
    for full in (False, True):
        policy = adapted(tmp_path / "m", "bfloat16")
        policy.lm.train()
        recomputation = Recomputation(policy)
        needed = 3.5 * tokens * kept_bytes(policy)  # of four blocks' and two blocks' worth
        torch.cuda.empty_cache()
        spare = int(allocatable_bytes() - needed / USABLE)
        _filling = torch.empty(spare if full else 0, dtype=torch.uint8, device=DEVICE)
        counts.append(recomputation.choose(tokens))
        logprobs_and_entropy(policy, batch, 1.0)[0].sum().backward()
        gradients.append(torch.cat(list(of_all(policy).values())))
        del policy, recomputation, _filling
    assert counts[0] == 0
    assert 0 < counts[1] <= 4
    # Flash attention adds up the gradients of queries in any order.
    assert (gradients[1] - gradients[0]).norm() < 0.01 * gradients[0].norm()
