"""The project's attention in place of transformers': the same numbers and names, and the cases left to transformers."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, apply_rotary_pos_emb

from qerl.kernels.packed_sequences import Packing, all_keys
from qerl.models import blocks
from qerl.models.blocks import PackedAttention, attend, fuse_attentions, token_hidden
from qerl.models.experts import GatedMLP
from qerl.models.policy import load_policy, trained_in_full, with_adapter
from qerl.settings.run import AdapterSettings
from tests.families import FAMILIES
from tests.tiny import tiny_qwen2

CPU = torch.device("cpu")
MODELS = ("qwen2", "qwen3", "llama", "mistral")
IDS = torch.tensor([[5, 9, 2, 77, 31, 8, 60, 4, 13]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 3, 4, 5, 0, 1]])
PACKING = Packing.of([3, 1, 3, 2], [None, 0, 0, None], CPU)


def made(name, **overrides):
    """transformers' model with random norms and biases, and a copy with the project's attention."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(FAMILIES[name].config(**overrides))
    for parameter in plain.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1, 0.2)
    ours = copy.deepcopy(plain)
    fuse_attentions(ours)
    return plain, ours


def alone(lm):
    return lm(IDS).logits


def together(lm):
    return token_hidden(lm, IDS, POSITIONS, PACKING)


def outcome(lm, run):
    """Output, and the gradient of every parameter that has one, by its name."""
    out = run(lm)
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


def fused(lm):
    return [module for module in lm.modules() if isinstance(module, PackedAttention)]


@pytest.fixture
def own_way(monkeypatch):
    """As if a kernel served CPUs: transformers' rotation stands for it; the shapes that it was called with."""
    shapes = []

    def rotate(query, key, cos, sin, norms=()):
        query, key = (norm(x) for norm, x in zip(norms, (query, key), strict=True)) if norms else (query, key)
        shapes.append((query.shape, key.shape, cos.shape, sin.shape))
        return apply_rotary_pos_emb(query, key, cos, sin)

    monkeypatch.setattr(blocks, "rotate", rotate)
    monkeypatch.setattr(blocks, "_kernel_serves", lambda hidden: True)
    return shapes


@pytest.mark.parametrize("run", [alone, together])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_cpu_everything_stays_the_same(name, run):
    plain, ours = made(name)
    assert len(fused(ours)) == 2
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(outcome(ours, run), outcome(plain, run), rtol=0, atol=0)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_projects_attention_equals_transformers(name, checkpointing, own_way):
    plain, ours = made(name)
    if checkpointing:
        ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    (a, grads), (b, expected) = outcome(ours, together), outcome(plain, together)
    assert own_way == [((9, 4, 16), (9, 2, 16), (9, 16), (9, 16))] * (4 if checkpointing else 2)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert list(grads) == list(expected)
    for key, gradient in expected.items():
        assert (grads[key] - gradient).norm() < 1e-5 * gradient.norm(), key


def test_unpacked_rows_never_use_the_projects_attention(own_way):
    plain, ours = made("qwen2")
    assert torch.equal(alone(ours), alone(plain))
    mask = torch.tensor([[0, 0, *[1] * 7]])
    found, expected = (lm.generate(IDS, attention_mask=mask, max_new_tokens=4, do_sample=False) for lm in (ours, plain))
    assert torch.equal(found, expected)
    assert not own_way


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_a_sliding_window_is_transformers(name, own_way):
    window = {"sliding_window": 2}
    if name != "mistral":
        window |= {"use_sliding_window": True, "max_window_layers": 0}
    plain, ours = made(name, **window)
    found, unlimited = together(ours)[0], together(made(name)[1])[0]
    for piece in ([0, 1, 2, 3], [0, 1, 2, 4, 5, 6], [7, 8]):
        expected = plain.model(IDS[:, piece]).last_hidden_state[0]
        torch.testing.assert_close(found[piece], expected, rtol=1e-5, atol=1e-5)
    assert len(own_way) == 4
    assert not torch.isclose(found[[2, 6]], unlimited[[2, 6]], atol=1e-3).all()


@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_refused_where_it_would_count(name, own_way):
    plain, ours = made(name, attention_dropout=0.1)
    torch.testing.assert_close(together(ours.eval()), together(plain.eval()), rtol=1e-5, atol=1e-6)
    assert len(own_way) == 2
    with pytest.raises(ValueError, match="attention_dropout=0"):
        together(ours.train())


def test_a_class_that_is_not_known_is_left_alone():
    class OtherAttention(Qwen2Attention):
        pass

    block = nn.Sequential(OtherAttention(FAMILIES["qwen2"].config(), 0))
    fuse_attentions(block)
    assert type(block[0]) is OtherAttention


def test_every_policy_has_them_and_adapters_find_their_layers(tmp_path, own_way):
    folder = tiny_qwen2(tmp_path / "m")
    policies = [
        trained_in_full(folder, "float32", CPU),
        load_policy(folder, None, "float32", CPU),
        with_adapter(folder, AdapterSettings(rank=2), "float32", 0, CPU),
    ]
    for kind in (PackedAttention, GatedMLP):
        assert [sum(isinstance(one, kind) for one in policy.lm.modules()) for policy in policies] == [2, 2, 2]
    adapted = policies[-1]
    names = [name for name, _ in adapted.trainable() if ".lora_" in name]
    assert len(names) == 2 * 7 * 2  # Blocks, projections, A and B.
    together(adapted.lm).square().mean().backward()
    assert all(p.grad is not None for name, p in adapted.trainable() if name in names)
    assert len(own_way) == 2


def test_all_keys_are_written_behind_each_other_and_gradients_rounded_once():
    generator = torch.Generator().manual_seed(0)
    draw = lambda tokens: torch.randn(tokens, 2, 4, generator=generator).bfloat16()  # noqa: E731
    row, order = draw(9).requires_grad_(), [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7, 8]
    keys = all_keys(row, PACKING.copies)
    assert torch.equal(keys, row[order])
    grad = draw(len(order))
    (found,) = torch.autograd.grad(keys, row, grad)
    exact = torch.zeros(9, 2, 4, dtype=torch.float64).index_add_(0, torch.tensor(order), grad.double())
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-22).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("queries", [1, 37])
def test_heads_that_share_keys_are_not_copied_and_give_the_same_bits(monkeypatch, dtype, queries):
    copied = []
    copy_heads = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *args: copied.append(1) or copy_heads(*args))
    attention = made("qwen2")[1].model.layers[0].self_attn
    groups, heads, dim = attention.num_key_value_groups, 4, attention.head_dim
    assert groups > 1
    torch.manual_seed(0)
    query = torch.randn(9, queries, heads, dim, dtype=dtype).transpose(1, 2)
    key, value = torch.randn(2, 9, heads // groups, 37, dim, dtype=dtype)
    mask = torch.rand(9, 1, queries, 37) < 0.7
    mask[..., -1] = True
    given = (attention, query, key, value, mask)
    with torch.no_grad():
        made_here = attend(*given, scaling=0.3)[0]
        assert not copied
        assert torch.equal(made_here, sdpa_attention_forward(*given, scaling=0.3)[0])
    assert len(copied) == 2
    attend(*given, scaling=0.3)  # with gradients, whose sums must keep their order
    assert len(copied) == 4


def test_a_padded_batch_has_whole_sequences_and_a_place_of_each_token():
    """Two completions of a prompt of three tokens, and a prompt whose completions have no piece."""
    tokens, mask, places = Packing.of([3, 2, 1, 2], [None, 0, 0, None], torch.device("cpu")).padded()
    assert tokens.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 5, 0], [6, 7, 0, 0, 0]]
    assert mask.sum(1).tolist() == [5, 4, 2]
    assert tokens.reshape(-1)[places].tolist() == list(range(8))
    assert mask.reshape(-1)[places].all()
