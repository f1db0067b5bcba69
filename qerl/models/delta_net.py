"""Gated delta nets, which mix tokens by a short convolution and a recurrent state in place of attention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, rms_norm, softplus
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from qerl.host.console import log
from qerl.kernels.packed_sequences import Packing

# flash-linear-attention, which transformers takes where it is installed, raises in the gated rule's backward pass where
# its gradients would be wrong: on Hopper with some versions of Triton (its issue 640), unless it has tilelang.

_INSTALLED = find_spec("fla") is not None
#: The first version of Triton whose code for Hopper has wrong gradients, and the first after it that has right ones.
_WRONG = (Version("3.4.0"), Version("3.7.1"))


@cache
def library_trains_on(device: torch.device) -> bool:
    """Whether the library computes gradients on a GPU. If it doesn't, the log says so once."""
    triton = version("triton")
    hopper, wrong = torch.cuda.get_device_capability(device) == (9, 0), _WRONG[0] <= Version(triton) < _WRONG[1]
    if not hopper or not wrong or find_spec("tilelang") is not None:
        return True
    log.warning(
        "flash-linear-attention has no correct gradients on this GPU with Triton %s, so updates compute delta nets in "
        "PyTorch: install Triton 3.7.1 or newer, or tilelang, to use its kernels",
        triton,
    )
    return False


# The gated delta rule by chunks of tokens, in PyTorch with one product for each chunk in each direction.
#
# A state S [K, V] has the value of each key. A token decays it to D = e^g S, by its log-decay g. With key k, value v
# and rate b the token then changes it to D + b k (v - D^T k)^T, which its query reads. Within a chunk these changes
# solve a triangular system, whose solution is `u` and `w`: a chunk that starts with S writes the values u - w S. The
# state after it is (d - k^T w) S + k^T u, with the chunk's decay d and keys that decay until its end. Matrices and sums
# of all chunks are computed together. The loop over chunks has a single product for each, forward and backward.
#
# In the shapes B are sequences, T tokens, and N chunks of C tokens. G are heads of keys with K features, and H heads of
# values with V features. R = H / G heads of values share a head of keys.

#: Tokens of a chunk.
CHUNK = 64
#: What is added to a key's squared length, as in transformers and flash-linear-attention.
_EPS = 1e-6


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The outputs [B, T, H, V] in the dtype of queries, and the last states [B, H, K, V] if they are asked for.

    `query` and `key` are [B, T, G, K], `value` [B, T, H, V], log-decays `g` (at most 0) and rates `beta` [B, T, H], and
    `initial_state` [B, H, K, V]. All is computed in float32, or in float64 if queries are. The last states have that
    dtype, too. Arguments are named as in transformers' `torch_chunk_gated_delta_rule`, which needs as many key heads as
    value heads.
    """
    dtype, (sequences, tokens, groups, features) = torch.promote_types(query.dtype, torch.float32), key.shape
    heads, width = value.shape[2:]
    both = _chunks(torch.stack((query, key), 3).flatten(2, 3)).to(dtype, memory_format=torch.contiguous_format)
    both = _unit(both) if use_qk_l2norm_in_kernel else both
    values, decays, rates = (_chunks(x).unflatten(2, (groups, -1)) for x in (value, g.to(dtype), beta.to(dtype)))
    parts = _prepared(both.contiguous().unflatten(2, (groups, 2)), values, decays, rates)
    if initial_state is None:
        initial_state = torch.zeros(sequences, heads, features, width, dtype=dtype, device=key.device)
    scale = features**-0.5
    out, last = _Scan.apply(scale, *(part.flatten(0, 3) for part in parts), initial_state.to(dtype).flatten(0, 1))
    out = out.unflatten(0, (-1, sequences, heads)).permute(1, 0, 3, 2, 4)
    out = out.to(query.dtype, memory_format=torch.contiguous_format).flatten(1, 2)[:, :tokens]
    return out, last.unflatten(0, (sequences, heads)) if output_final_state else None


def _chunks(x: Tensor) -> Tensor:
    """The tokens of x [B, T, heads, ...] as [N, B, heads, C, ...]; zeros fill the last chunk and change no state."""
    missing = -x.shape[1] % CHUNK
    padded = pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
    return padded.unflatten(1, (-1, CHUNK)).movedim(1, 0).movedim(2, 3)


def _unit(x: Tensor) -> Tensor:
    """x divided by the length of its last dimension; PyTorch has one kernel for this norm on a GPU."""
    features = x.shape[-1]
    return rms_norm(x, (features,), eps=_EPS / features) * features**-0.5


def _prepared(both: Tensor, values: Tensor, decays: Tensor, rates: Tensor) -> tuple[Tensor, ...]:
    """What chunks need of their own tokens: decayed queries and keys, products of these, u and w, and decays.

    both [N, B, G, 2, C, K] are queries and keys; values are [N, B, G, R, C, V]. Log-decays and rates are
    [N, B, G, R, C].
    """
    query, key = (x.unsqueeze(3) for x in both.unbind(3))
    products = (both.flatten(3, 4) @ key.squeeze(3).mT).unflatten(3, (2, CHUNK)).unsqueeze(3)
    between = _between(decays)
    attention, overlap = (products * between.unsqueeze(4)).unbind(4)
    read, write = decays.cumsum(-1).exp(), between[..., -1, :]
    right = torch.cat((values * rates.unsqueeze(-1), key * (read * rates).unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(overlap * rates.unsqueeze(-1), right, upper=False, unitriangular=True)
    return query * read.unsqueeze(-1), key * write.unsqueeze(-1), attention, solved, read[..., -1]


def _between(decays: Tensor) -> Tensor:
    """The decay [..., C, C] from each column's token to each row's, 0 if it is earlier, of log-decays [..., C]."""
    # Each sums its log-decays anew. A difference of sums from a chunk's start would lose small decays beside large
    # ones. No exponent is positive.
    later = torch.full((CHUNK, CHUNK), -torch.inf, dtype=decays.dtype, device=decays.device).triu_(1)
    return decays.unsqueeze(-1).expand(*decays.shape, CHUNK).tril(-1).cumsum(-2).add_(later).exp_()


class _Scan(torch.autograd.Function):
    """The outputs [N · B · H, C, V] of all chunks and the last states [B · H, K, V].

    Its inputs start with a factor of the outputs, decayed queries and keys [N · B · H, C, K] and attention
    [N · B · H, C, C]. Then come u and w as one tensor [N · B · H, C, V + K], decays of chunks [N · B · H], and initial
    states. Chunks are the slowest index, so each has a contiguous part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        query: Tensor,
        key: Tensor,
        attention: Tensor,
        solved: Tensor,
        decay: Tensor,
        initial: Tensor,
    ) -> tuple[Tensor, Tensor]:
        u, w = solved.split((initial.shape[-1], key.shape[-1]), -1)
        states = initial.new_empty(len(key) // len(initial) + 1, *initial.shape)
        states[0] = initial
        torch.bmm(key.mT, u, out=states[1:].flatten(0, 1))
        lost = _lost(key, w, decay).unflatten(0, states[1:].shape[:2])
        for before, after, factor in zip(states[:-1].unbind(), states[1:].unbind(), lost.unbind(), strict=True):
            after.baddbmm_(factor, before, alpha=-1)
        ctx.scale = scale
        ctx.save_for_backward(query, key, attention, solved, decay, states)
        starts = states[:-1].flatten(0, 1)
        written = torch.baddbmm(u, w, starts, alpha=-1)
        return torch.bmm(attention, written).baddbmm_(query, starts, beta=scale, alpha=scale), states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
        query, key, attention, solved, decay, states = ctx.saved_tensors
        u, w = solved.split((states.shape[-1], key.shape[-1]), -1)
        grad = grad * ctx.scale
        grad_written = torch.bmm(attention.mT, grad)
        grads = torch.empty_like(states)
        grads[-1] = grad_last
        torch.bmm(query.mT, grad, out=grads[:-1].flatten(0, 1)).baddbmm_(w.mT, grad_written, alpha=-1)
        lost = _lost(key, w, decay).unflatten(0, states[1:].shape[:2])
        slices = (x.unbind()[::-1] for x in (grads[:-1], grads[1:], lost.mT))
        for before, after, factor in zip(*slices, strict=True):
            before.baddbmm_(factor, after, alpha=-1)
        starts, ends = states[:-1].flatten(0, 1), grads[1:].flatten(0, 1)
        grad_written.baddbmm_(key, ends)
        written = torch.baddbmm(u, w, starts, alpha=-1)
        return (
            None,
            torch.bmm(grad, starts.mT),
            torch.bmm(written, ends.mT),
            torch.bmm(grad, written.mT),
            torch.cat((grad_written, torch.bmm(grad_written, starts.mT).neg_()), -1),
            (starts * ends).sum((1, 2)),
            grads[0],
        )


def _lost(key: Tensor, w: Tensor, decay: Tensor) -> Tensor:
    """k^T w - d [N · B · H, K, K]: minus the matrix by which a chunk multiplies the state before it."""
    lost = torch.bmm(key.mT, w)
    lost.diagonal(dim1=1, dim2=2).sub_(decay.unsqueeze(-1))
    return lost


# Gated delta nets, which mix tokens by a short convolution and a recurrent state in place of attention.
#
# In a packed row each piece has its own state: a prompt's starts from zero, and a completion's from the last state of
# its prompt. transformers' functions compute the convolution and steps of one token, and this module more tokens. On a
# GPU, kernels of causal-conv1d and flash-linear-attention take their places where these are installed.


class Functions(NamedTuple):
    """The convolution of a delta net, its rule for chunks of tokens, and its rule for one token."""

    convolve: Callable[..., Any]
    chunks: Callable[..., Any]
    step: Callable[..., Any]


#: Functions in PyTorch, whatever is installed.
PLAIN = Functions(unwrap(causal_conv1d_fn), gated_delta_rule, unwrap(torch_recurrent_gated_delta_rule))
#: transformers' functions, which a library replaces where it is installed.
INSTALLED = Functions(causal_conv1d_fn, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule)


def functions_for(x: Tensor) -> Functions:
    """The functions that take x: kernels of the libraries take 16-bit tensors on a GPU alone."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return PLAIN
    usable = _INSTALLED and (not torch.is_grad_enabled() or library_trains_on(x.device))
    return INSTALLED if usable else INSTALLED._replace(chunks=PLAIN.chunks)


#: The linear layers of a delta net that are wide enough to be packed. The others give b and a, a number for each head.
PACKABLE = ("in_proj_qkv", "in_proj_z", "out_proj")


class PackedDeltaNet(nn.Module):
    """A mixin for transformers' gated delta nets that computes packed rows too.

    The recurrence is float32, unless a library's kernels compute it (`functions_for`).
    In the shapes P are pieces or sequences, T tokens, C channels of the convolution, H heads and D features of a value.
    """

    # Attributes of the base class, whose types transformers doesn't tell.
    A_log: Any
    dt_bias: Any
    conv1d: Any
    conv_kernel_size: Any
    activation: Any
    norm: Any
    layer_idx: Any
    key_dim: Any
    value_dim: Any
    head_k_dim: Any
    head_v_dim: Any

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **settings: Any,
    ) -> Tensor:
        """Map hidden_states [P, T, hidden] to the same shape; `attention_mask` [P, T] is 0 on padding.

        Zero inputs leave a state at zero, so padding before a prompt doesn't count.
        """
        if attention_mask is not None:
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        mixed, z, b, a = (self.get_submodule(f"in_proj_{part}")(hidden_states) for part in ("qkv", "z", "b", "a"))
        decay = -self.A_log.float().exp() * softplus(a.float() + self.dt_bias)
        packing = settings.get("packing")
        if isinstance(packing, Packing):
            out = self._over_row(mixed[0], decay[0], b[0].sigmoid(), packing)
        else:
            out = self._after_cache(mixed, decay, b.sigmoid(), cache_params)
        normed = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        return self.get_submodule("out_proj")(normed.reshape(*hidden_states.shape[:-1], -1))

    def _after_cache(self, mixed: Tensor, decay: Tensor, beta: Tensor, cache: Any) -> Tensor:
        """The outputs [P, T, H, D] of tokens that follow those in a cache, which gets the new states."""
        if cache is None:
            return self._mix(mixed, decay, beta, None)[0]
        follows = cache.has_previous_state(self.layer_idx, state_idx=0)
        state = cache.layers[self.layer_idx].recurrent_states[0] if follows else None
        row = cache.update_conv_state(mixed.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        out, state = self._mix(row.transpose(1, 2), decay, beta, state)
        cache.update_recurrent_state(state, self.layer_idx)
        return out

    def _over_row(self, mixed: Tensor, decay: Tensor, beta: Tensor, packing: Packing) -> Tensor:
        """The outputs [L, H, D] of a row, whose pieces are computed in padded batches.

        Padding has no decay and no beta, so it doesn't change a state.
        """
        rows = [row.split(packing.lengths) for row in (mixed, decay, beta)]
        outs: dict[int, Tensor] = {}
        states: dict[int, Tensor] = {}
        for places in _similar(packing):
            mixed, decay, beta = (pad_sequence([row[place] for place in places], batch_first=True) for row in rows)
            prompts = [prompt for place in places if (prompt := packing.prompts[place]) is not None]
            if prompts:
                mixed = torch.cat([torch.stack([self._end(rows[0][prompt]) for prompt in prompts]), mixed], 1)
            state = torch.stack([states[prompt] for prompt in prompts]) if prompts else None
            out, last = self._mix(mixed, decay, beta, state)
            outs |= dict(zip(places, out, strict=True))
            states |= dict(zip(places, last, strict=True))
        return torch.cat([outs[place][:length] for place, length in enumerate(packing.lengths)])

    def _end(self, piece: Tensor) -> Tensor:
        """The last tokens of a piece [T, C] that the convolution of its successor reads, after zeros if it is short."""
        width = self.conv_kernel_size - 1
        return pad(piece[-width:], (0, 0, width - min(width, len(piece)), 0))

    def _mix(self, mixed: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs [P, T, H, D] and the last states of T tokens; `decay` and `beta` are [P, T, H].

        mixed [P, T, C] may have earlier tokens too, which the convolution reads. Without them it reads zeros.
        """
        tokens, functions = decay.shape[1], functions_for(mixed)
        with nullcontext() if mixed.is_meta else torch.autocast(mixed.device.type, enabled=False):
            weight = self.conv1d.weight.squeeze(1)
            row = functions.convolve(mixed.transpose(1, 2), weight, self.conv1d.bias, activation=self.activation)
            parts = row[..., -tokens:].transpose(1, 2).split([self.key_dim, self.key_dim, self.value_dim], -1)
            sizes = (self.head_k_dim, self.head_k_dim, self.head_v_dim)
            query, key, value = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))
            rule = functions.chunks if state is None or tokens > 1 else functions.step
            if rule is not gated_delta_rule:  # it alone takes fewer heads of keys than of values
                query, key = (heads.repeat_interleave(value.shape[2] // heads.shape[2], 2) for heads in (query, key))
            out, last = rule(
                query,
                key,
                value,
                g=decay,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        return out, last


def _similar(packing: Packing) -> list[list[int]]:
    """The pieces in batches, prompts first; the longest of a batch has less than twice the tokens of the shortest."""
    kinds = [(prompt is not None, n.bit_length()) for n, prompt in zip(packing.lengths, packing.prompts, strict=True)]
    return [[place for place, one in enumerate(kinds) if one == kind] for kind in sorted(set(kinds))]


_PACKED: dict[type, type[PackedDeltaNet]] = {
    kind: type(f"Packed{kind.__name__}", (PackedDeltaNet, kind), {})
    for kind in (Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet)
}


def use_packed_delta_nets(model: nn.Module) -> None:
    """Change every gated delta net of a known class to its subclass for packed rows; weights and names stay."""
    for module in model.modules():
        if type(module) in _PACKED:
            module.__class__ = _PACKED[type(module)]
