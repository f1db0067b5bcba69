"""The gated delta rule by chunks of tokens, in PyTorch with one product for each chunk in each direction.

A state S [K, V] has the value of each key. A token decays it to D = e^g S, by its log-decay g. With key k, value v and
rate b the token then changes it to D + b k (v - D^T k)^T, which its query reads. Within a chunk these changes solve a
triangular system, whose solution is `u` and `w`: a chunk that starts with S writes the values u - w S. The state after
it is (d - k^T w) S + k^T u, with the chunk's decay d and keys that decay until its end. Matrices and sums of all chunks
are computed together. The loop over chunks has a single product for each, forward and backward.

In the shapes B are sequences, T tokens, and N chunks of C tokens. G are heads of keys with K features, and H heads of
values with V features. R = H / G heads of values share a head of keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, rms_norm

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
    dtype, too. The names are those of transformers' `torch_chunk_gated_delta_rule`, which needs as many heads of keys
    as of values.
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
    """The decay [..., C, C] from the token of each column to that of each row, 0 if it is earlier.

    Each sums its log-decays, which are [..., C], anew. A difference of sums from a chunk's start would lose small
    decays beside large ones. No exponent is positive.
    """
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
