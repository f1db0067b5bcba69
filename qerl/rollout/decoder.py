"""A policy's blocks for prefill and decode steps, and the memory of a sampler on which they run, in CUDA graphs.

Shapes: B sequences or tokens of a pass, H hidden features, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from qerl.checkpoints.files import context_length
from qerl.kernels import operations
from qerl.kernels.cuda.w4a16 import limits, padded_rows
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import (
    IDLE,
    PAGE,
    Activation,
    DecodeState,
    DeltaHeads,
    DeltaState,
    DeltaStates,
    GraphBySize,
    Heads,
    KVCache,
    Norm,
    PromptRow,
    Rope,
    SamplingState,
    captured,
    dry_run,
    in_dry_run,
    pack,
    state_bytes,
)
from qerl.models.blocks import NoisyRMSNorm
from qerl.models.delta_net import PackedDeltaNet
from qerl.models.experts import (
    AdaptedExperts,
    ExpertLora,
    Experts,
    Float32Router,
    GroupedAdapters,
    GroupedLinear,
    TorchGroupedLinear,
)
from qerl.models.linear import (
    POLICY_ADAPTER,
    Cohort,
    FusedLinear,
    NarrowLinear,
    PackedLinear,
    W4Linear,
    embedding_weight,
    fuse,
    packed_format,
    unwrap,
)
from qerl.models.policy import Policy
from qerl.models.structure import epsilon_of, offset_of, structure_of
from qerl.rollout.sampler import activation_of, refused_by_engine
from qerl.settings.base import ConfigError
from qerl.settings.run import Kernels

# Copies of small tensors between host and device that don't wait for the device's queued work.


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`values` (a list or array) as a tensor on the device, copied from pinned memory so that the host doesn't wait."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@dataclass(frozen=True)
class Download:
    """A copy of a tensor to the host, with its values at this point of the device's stream."""

    _host: Tensor
    _event: torch.cuda.Event | None

    @classmethod
    def of(cls, tensor: Tensor) -> Download:
        """Start to copy `tensor`."""
        if tensor.device.type != "cuda":
            return cls(tensor.clone(), None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    @property
    def arrived(self) -> bool:
        """Whether the copy is complete."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


# Norms and products of a policy's modules; in a cohort each run has its own norms and adapters of them.


def norm_of(norm: Any) -> Norm:
    """A norm with its noise; PEFT's trained copy if there is one."""
    norm = _trained(norm)
    offset = norm.offset if isinstance(norm, NoisyRMSNorm) else offset_of(norm)
    return Norm(norm.weight, getattr(norm, "noise", None), epsilon_of(norm), offset or 0.0)


def _trained(norm: Any) -> Any:
    return norm.modules_to_save[POLICY_ADAPTER] if isinstance(norm, ModulesToSaveWrapper) else norm


@dataclass(frozen=True)
class Parts:
    """What makes the engine's parts of a policy's modules, or of the first policy's of a cohort."""

    dtype: torch.dtype
    kernels: Kernels
    cohort: Cohort | None

    def fuse(self, layers: Sequence[nn.Module], gated: bool = False) -> FusedLinear:
        """Layers with the same input as one product."""
        return fuse(layers, self.dtype, gated, self.kernels, self.cohort)

    def norm(self, norm: Any) -> Norm:
        """A norm before projections. The runs' weights and noise become views of tensors with a row for each run."""
        if self.cohort is None or not isinstance(_trained(norm), NoisyRMSNorm):
            return norm_of(norm)
        norms = [_trained(one) for one in self.cohort.of(norm)]
        weights = torch.stack([one.weight.detach() for one in norms])
        noise = torch.stack([one.noise for one in norms])
        for one, weight, z in zip(norms, weights, noise, strict=True):
            one.noise = z
            if one.weight.requires_grad:  # frozen ones may be one tensor of all runs
                one.weight.data = weight
        return replace(norm_of(norm), weight=weights, noise=noise, runs=self.cohort.runs)


# The MLP of a block in the engine: gate, up and down as two products, or a mixture of experts as grouped products.
#
# A shared expert of a mixture is an MLP of the former kind.

#: A product, or adapters that are apart from theirs.
Product = FusedLinear | GroupedLinear | GroupedAdapters


class DenseMlp:
    """down(activation(gate x) * up x), which shares the weights of transformers' module `mlp`."""

    def __init__(self, mlp: Any, activation: Activation, parts: Parts) -> None:
        self._gate_up = parts.fuse(projections(mlp, "gate_up_proj", "gate_proj", "up_proj"), gated=True)
        self._down = parts.fuse([mlp.down_proj])
        self._activation = activation
        #: Its products, with adapters that are apart.
        self.linears: Sequence[Product] = (self._gate_up, self._down)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """Write the outputs of x [B, H] to out [B, H], or with `residual` add them. Both are contiguous."""
        inner = x.new_empty(len(x), self._gate_up.out_features // 2)
        self._gate_up(x, inner, activation=self._activation)
        self._down(inner, out, residual)


class MixtureMlp:
    """The weighted sum of the experts that a router in float32 chooses for each token.

    Nothing waits for the choice: a launch has room for any, so that CUDA graphs can have it.
    """

    def __init__(self, router: Float32Router, module: Experts | AdaptedExperts, parts: Parts) -> None:
        assert router.normalised is not None  # the engine serves no family whose router has no softmax
        if parts.cohort and isinstance(module, AdaptedExperts):
            raise ConfigError("runs with adapters of experts can't train side by side; train them one after another")
        dtype = parts.dtype
        self._router, self._normalised = router, router.normalised
        lora = module.lora if isinstance(module, AdaptedExperts) else ExpertLora()
        experts: Experts = module.base_layer if isinstance(module, AdaptedExperts) else module
        self._products, self._count = experts.products(dtype), len(experts)
        products = self._products.gate_up, self._products.down
        self._adapters = [
            GroupedAdapters(loras, product.dense, dtype) if loras else None
            for loras, product in zip((lora.gate_up, lora.down), products, strict=True)
        ]
        self.linears: Sequence[Product] = (*products, *filter(None, self._adapters))
        device = router.weight.device
        if device.type == "cuda" and any(isinstance(linear, TorchGroupedLinear) for linear in products):
            raise ConfigError(
                "the native engine has no grouped product for these experts: they must be NVFP4, MXFP4 or dense, in "
                "one format, and dense ones need widths that are multiples of 64"
            )
        self._operations = operations(device)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `DenseMlp`."""
        router, products = self._router, self._products
        ops = self._operations
        scores = ops.scores(x, router.weight, getattr(router, "bias", None))
        numbers, weights = ops.route(scores, router.top_k, self._normalised)
        groups = ops.group(numbers, self._count)
        clamped, width = products.clamped, products.gate_up.out_features
        inner = x.new_empty(groups.count, width if clamped else width // 2)
        gate_up_lora, down_lora = self._adapters
        products.gate_up(x, groups, inner, clamped is None, gate_up_lora(x, groups) if gate_up_lora else None)
        if clamped:
            inner = ops.clamped_glu(inner, *clamped)
        y = x.new_empty(groups.count, out.shape[1])
        products.down(inner, groups, y, lora=down_lora(inner, groups) if down_lora else None)
        ops.combine(y, weights, out, residual)


class SharedMixtureMlp:
    """A mixture beside a shared expert, which all tokens have, times the sigmoid of its gate."""

    def __init__(self, mixture: MixtureMlp, shared: DenseMlp, gate: nn.Linear) -> None:
        self._mixture, self._shared, self._gate = mixture, shared, gate
        self.linears: Sequence[Product] = (*mixture.linears, *shared.linears)

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `DenseMlp`."""
        shared = torch.empty_like(out)
        self._shared(x, shared)
        self._mixture(x, out, residual)
        out.addcmul_(shared, self._gate(x).sigmoid())


Mlp = DenseMlp | MixtureMlp | SharedMixtureMlp


def mlp_of(mlp: Any, activation: Activation, parts: Parts) -> Mlp:
    """The MLP of a model's module, which shares its weights. Mixtures have silu, or gpt-oss's clamped gate."""
    modules = list(mlp.children())
    router = next((module for module in modules if isinstance(module, Float32Router)), None)
    experts = next((module for module in modules if isinstance(module, (Experts, AdaptedExperts))), None)
    if router is None or experts is None:
        return DenseMlp(mlp, activation, parts)
    mixture = MixtureMlp(router, experts, parts)
    if not hasattr(mlp, "shared_expert"):
        return mixture
    return SharedMixtureMlp(mixture, DenseMlp(mlp.shared_expert, activation, parts), mlp.shared_expert_gate)


def projections(module: Any, fused: str, *parts: str) -> list[Any]:
    """The layer that a checkpoint has fused, as in Phi-3, or its parts."""
    return [getattr(module, name) for name in ((fused,) if hasattr(module, fused) else parts)]


# What mixes the tokens of a sequence in a block: attention, which reads pages of a cache, or a gated delta net.

#: Cosines and sines of each kind of attention.
Ropes = Mapping[str | None, Rope]


@dataclass(frozen=True)
class Mixing:
    """How the tokens of a decode step, or of prompts, read earlier tokens of their sequences."""

    #: Attention [n, Hq * D] of q, k and v [n, `heads.width`], which a block's cache gets.
    attend: Callable[[Tensor, KVCache, Heads, Rope], Tensor]
    #: Outputs [n, H * V] of a delta net's inputs and of its gates z, b and a; its state gets the new values.
    recur: Callable[[Tensor, Tensor, Tensor, Tensor, DeltaHeads, DeltaState], Tensor]


class Attention:
    """Attention of a block, by transformers' module of it. `out` is the projection of its results.

    `kind` is the kind of the attention, where rotary positions differ by it.
    """

    def __init__(self, module: Any, config: Any, kind: str | None, window: int | None, parts: Parts) -> None:
        self.kind = kind
        self.qkv = parts.fuse(projections(module, "qkv_proj", "q_proj", "k_proj", "v_proj"))
        self.out = parts.fuse([module.o_proj])
        self.linears = [self.qkv, self.out]
        heads = Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            module.head_dim,
            module.scaling,
            window=window,
            sinks=getattr(module, "sinks", None),
        )
        if hasattr(module, "q_norm"):
            q, k = norm_of(module.q_norm), norm_of(module.k_norm)
            heads = replace(heads, q_norm=q.weight, k_norm=k.weight, eps=q.eps, norm_offset=q.offset)
        self.heads = replace(heads, gated=self.qkv.out_features > heads.width)

    def __call__(self, x: Tensor, mixing: Mixing, cache: Any, ropes: Ropes) -> Tensor:
        """What `out` reads [n, Hq * D], from normalised hidden states x [n, hidden] and the block's cache."""
        qkv = x.new_empty(len(x), self.qkv.out_features)
        self.qkv(x, qkv)
        return mixing.attend(qkv, cache, self.heads, ropes[self.kind])


def attend_together(
    attend: Callable[..., Tensor],
    state: DecodeState,
    rows: Tensor,
    qkv: Tensor,
    cache: KVCache,
    heads: Heads,
    rope: Rope,
) -> Tensor:
    """Attention [n, Hq * D] of tokens that have a slot each; tokens of one sequence may follow each other.

    `attend` is that of decode steps, which has the other arguments.
    """
    # All tokens are stored before one of them is read, since those that see themselves alone read no other. The second
    # launch stores the same again. Its programs have whole sequences: those of splits read a page before the kernel
    # before them has ended.
    attend(qkv, cache, state, rows, rope, replace(heads, window=1), 1)
    return attend(qkv, cache, state, rows, rope, heads, 1)


class DeltaNet:
    """The gated delta net of a block, by transformers' module of it. `out` is the projection of its results."""

    def __init__(self, net: Any, parts: Parts) -> None:
        self.heads = DeltaHeads(
            key=net.num_k_heads,
            value=net.num_v_heads,
            key_dim=net.head_k_dim,
            value_dim=net.head_v_dim,
            convolution=net.conv1d.weight.squeeze(1),
            log_rate=net.A_log,
            rate_bias=net.dt_bias,
            norm=net.norm.weight,
            eps=net.norm.variance_epsilon,
        )
        wide, narrow = [net.in_proj_qkv, net.in_proj_z], [net.in_proj_b, net.in_proj_a]
        widths = [self.heads.channels, self.heads.parts[2]], [self.heads.value] * 2
        #: The products that give the convolution's inputs, z, b and a, and the widths of each one's parts.
        self._projections: list[tuple[FusedLinear, list[int]]]
        if any(isinstance(unwrap(layer).base, PackedLinear) for layer in wide + narrow):
            # Layers in several formats have no common kernel, and b and a are too narrow to be packed.
            joint = parts.fuse(wide), NarrowLinear(narrow, parts.dtype, parts.cohort)
            self._projections = list(zip(joint, widths, strict=True))
        else:
            self._projections = [(parts.fuse(wide + narrow), widths[0] + widths[1])]
        self.out = parts.fuse([net.out_proj])
        self.linears = [*(linear for linear, _ in self._projections), self.out]

    def __call__(self, x: Tensor, mixing: Mixing, net: DeltaState, ropes: Ropes) -> Tensor:
        """What `out` reads [n, H * V], from normalised hidden states x [n, hidden] and the net's states."""
        del ropes
        parts: list[Tensor] = []
        # The narrow product is first: while it runs, the packed one after it copies its first weights.
        for linear, widths in reversed(self._projections):
            joint = x.new_empty(len(x), linear.out_features)
            linear(x, joint)
            parts = [*joint.split(widths, 1), *parts]
        mixed, z, b, a = parts
        return mixing.recur(mixed, z, b, a, self.heads, net)


# A policy's blocks for prefill and decode steps: fused products on its own weights, with a paged KV cache.


class _Block:
    """A block of transformers' module `layer`, with fused products on the same weights."""

    def __init__(self, layer: Any, number: int, config: Any, parts: Parts) -> None:
        self.mixer: Attention | DeltaNet
        kind = window = None
        if isinstance(net := getattr(layer, "linear_attn", None), PackedDeltaNet):
            self.mixer = DeltaNet(net, parts)
        else:
            kind = config.layer_types[number] if "full_attention" in config.rope_parameters else None
            window = structure_of(config).windows[number]
            self.mixer = Attention(layer.self_attn, config, kind, window, parts)
        activation: Any = activation_of(config)
        self.mlp = mlp_of(layer.mlp, activation, parts)
        self.input_norm = parts.norm(layer.input_layernorm)
        #: The norms of what attention and MLP add to the hidden states, as Gemma has them.
        self.after_attention: Norm | None = None
        self.after_mlp: Norm | None = None
        # With these, the one after attention has the name of others' norm before the MLP.
        before_mlp = layer.post_attention_layernorm
        if hasattr(layer, "pre_feedforward_layernorm"):
            before_mlp = layer.pre_feedforward_layernorm
            self.after_attention = parts.norm(layer.post_attention_layernorm)
            self.after_mlp = parts.norm(layer.post_feedforward_layernorm)
        self.mlp_norm = parts.norm(before_mlp)
        #: What its kernels depend on.
        self.kind = type(self.mixer), kind, window, type(self.mlp)


class Decoder:
    """The policy's blocks, head and token sampling. Norms and noise are read in place, adapters at each `sync`.

    Several policies belong to a cohort's runs on one base: a row of a pass takes the adapter and norms of its run.
    """

    def __init__(self, policies: Sequence[Policy], kernels: Kernels = "auto") -> None:
        policy = policies[0]
        config = policy.lm.config
        cohort = Cohort([policy.lm for policy in policies]) if len(policies) > 1 else None
        #: The number of runs, and the run of each row of the present pass if there are several.
        self.runs, self._row_runs = len(policies), cohort.runs if cohort else None
        if refusal := refused_by_engine(config, packed_format(policy.lm)):
            raise ConfigError(f"{refusal}; the eager sampler serves it")
        self.dtype = policy.lm.dtype
        self.device = policy.device
        self.operations = operations(policy.device)
        self._model: Any = policy.lm.model
        embedding: Any = policy.lm.get_input_embeddings()
        self._embedding = embedding_weight(embedding)
        #: Number of features of a hidden state.
        self.width = int(self._embedding.shape[1])
        scale: Tensor | None = getattr(embedding, "embed_scale", None)
        self._embedding_scale = None if scale is None else scale.to(self.dtype)
        parts, layers = Parts(self.dtype, kernels, cohort), enumerate(self._model.layers)
        self._blocks = [_Block(layer, number, config, parts) for number, layer in layers]
        #: A block of each kind: others launch the same kernels.
        self._kinds = list({block.kind: block for block in self._blocks}.values())
        self._norm = norm_of(self._model.norm)
        self._attentions = [block.mixer for block in self._blocks if isinstance(block.mixer, Attention)]
        self._nets = [block.mixer for block in self._blocks if isinstance(block.mixer, DeltaNet)]
        self._vocabulary = config.vocab_size
        self._head = fuse([policy.lm.get_output_embeddings()], self.dtype)
        #: The tokens of the longest sequence, where rotary positions change for all tokens of a text that passes a
        #: length; else None.
        changes = config.rope_parameters.get("rope_type") == "longrope"
        self.longest = context_length(config.to_dict()) if changes else None
        self._ropes = self._rope_tables(1)
        self._adapted = policy.peft is not None
        self._parameters = [parameter for policy in policies for parameter in policy.lm.parameters()]
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._sync: Callable[[], None] | None = None
        self._copies: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Number of blocks with attention. Each has a part of the KV cache."""
        return len(self._attentions)

    @property
    def linears(self) -> list[Product]:
        """All matrix products of a step, with adapters that are apart."""
        return [linear for b in self._blocks for linear in (*b.mixer.linears, *b.mlp.linears)] + [self._head]

    @property
    def heads(self) -> Heads:
        """Attention heads of a block; they are the same in all blocks."""
        return self._attentions[0].heads

    @property
    def state_bytes(self) -> int:
        """Bytes of the delta nets' states of a sequence, 0 without delta nets."""
        return sum(state_bytes(net.heads, self.dtype) for net in self._nets)

    def new_memory(self, slots: int, pages: int, dtype: torch.dtype) -> tuple[KVCache, DeltaStates | None]:
        """A KV cache of zeros with so many pages, in the model's dtype or FP8, and the states of delta nets if any."""
        cache = KVCache.empty(len(self), pages, self.heads, dtype, self.device)
        if not self._nets:
            return cache, None
        return cache, DeltaStates.empty(self._nets[0].heads, len(self._nets), slots, self.dtype, self.device)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the policy's present adapters and biases. Raises RuntimeError if the policy's tensors were moved."""
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            raise RuntimeError("the policy's weights were moved or cast after its sampler was made; make a new sampler")
        # Without adapters there may be nothing to capture.
        if self.device.type == "cuda" and self._adapted:
            self._sync = self._sync or captured(self._sync_all)
            self._sync()
        else:  # not kept: a decoder that held its own method would keep the weights until Python looks for cycles
            self._sync_all()

    def _sync_all(self) -> None:
        pairs = [pair for linear in self.linears if isinstance(linear, W4Linear) for pair in linear.copies()]
        in_one = pairs and all(source.is_contiguous() and source.dtype == torch.float32 for _, source in pairs)
        if in_one and self._copies is None:
            from qerl.kernels.triton.linear import Copies

            self._copies = Copies(*zip(*pairs, strict=True))
        if in_one and self._copies is not None:
            self._copies()
        for linear in self.linears:
            if in_one and isinstance(linear, W4Linear):
                linear.contain()
            else:
                linear.sync()

    def reach(self, tokens: int) -> None:
        """Extend the rotary tables to sequences of `tokens`, at most `longest`. If they grow, graphs that were captured
        before are invalid.
        """
        if tokens > len(self._ropes[self._attentions[0].kind][0]):
            self._ropes = self._rope_tables(tokens)

    def _rope_tables(self, tokens: int) -> dict[str | None, tuple[Tensor, Tensor]]:
        """Cosines and sines [tokens, R / 2] of the R elements of a head that rotate, for each kind of attention.

        They are those of the model's rotary module, rounded to the model's dtype as there.
        """
        # With more positions than `longest`, the module would change the angles of all.
        positions = torch.arange(min(tokens, self.longest or tokens), device=self.device)[None]
        tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        if hasattr(self._model.rotary_emb, "mrope_section"):
            positions = positions.expand(3, 1, -1)  # in time, height and width, which are the same in a text
        for kind in dict.fromkeys(attention.kind for attention in self._attentions):
            rotary, options = self._model.rotary_emb, {} if kind is None else {"layer_type": kind}
            cos, sin = rotary(self._embedding[:1, None], positions, **options)
            half = len(getattr(rotary, "inv_freq" if kind is None else f"{kind}_inv_freq"))  # most models have both
            tables[kind] = cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
        return tables

    def step(self, rows: Tensor, pool: Pool, splits: int, truncated: bool, replayed: bool) -> None:
        """Feed the last token of the slots `rows` [B] int32 and draw the next one; idle slots don't change."""
        ops, state = self.operations, pool.state
        mixing = Mixing(
            lambda qkv, block, heads, rope: ops.attend(qkv, block, state, rows, rope, heads, splits),
            lambda mixed, z, b, a, heads, net: ops.delta_step(mixed, z, b, a, heads, net, state, rows),
        )
        runs = state.run[rows] if self._row_runs else None
        x = self._through_blocks(self._embedded(state.token[rows]), runs, pool.cache, pool.states, mixing)
        ops.draw(self.logits(x), rows, state, pool.sampling, truncated, replayed)

    def extend(self, ids: Tensor, state: DecodeState, cache: KVCache) -> None:
        """Write keys and values of tokens `ids` [n] to the cache; tokens of one sequence may follow each other.

        `state` has a slot for each of them, with the token's position and its sequence's pages and run.
        """
        rows = torch.arange(len(ids), dtype=torch.int32, device=self.device)

        def recur(*args: Any) -> Tensor:
            raise NotImplementedError("a delta net takes the tokens of a sequence one after another")

        mixing = Mixing(partial(attend_together, self.operations.attend, state, rows), recur)
        # Nothing reads the last block's results.
        self._through_blocks(self._embedded(ids), state.run if self._row_runs else None, cache, None, mixing, rows[:1])

    def last_hidden(self, row: PromptRow, cache: KVCache, states: DeltaStates | None = None) -> Tensor:
        """Hidden states [prompts, H] after the last norm, at each prompt's last token.

        `cache` then holds the keys and values of all tokens, and `states` those after the prompts.
        """
        ops = self.operations
        mixing = Mixing(
            lambda qkv, block, heads, rope: ops.attend_prompts(qkv, block, row, rope, heads),
            lambda mixed, z, b, a, heads, net: ops.delta_prompts(mixed, z, b, a, heads, net, row),
        )
        return self._through_blocks(self._embedded(row.ids), row.runs, cache, states, mixing, row.last)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [B, V] of hidden states [B, H] after the last norm."""
        logits = hidden.new_empty(len(hidden), self._vocabulary)
        self._head(hidden, logits)
        return logits

    def _embedded(self, ids: Tensor) -> Tensor:
        x = self._embedding[ids]
        return x if self._embedding_scale is None else x * self._embedding_scale

    def _through_blocks(
        self,
        x: Tensor,
        runs: Tensor | None,
        cache: KVCache,
        states: DeltaStates | None,
        mixing: Mixing,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, for some `rows` of x [B, H] or for all. Overwrites x.

        `runs` [B] names the run of each row of a cohort.
        """
        if self._row_runs and runs is not None:
            self._row_runs.rows = runs
        pages, nets = cache.blocks(), iter(()) if states is None else states.nets()
        blocks = self._kinds if in_dry_run() else self._blocks
        following = [*(block.input_norm for block in blocks[1:]), self._norm]
        normed = self.operations.rms_norm(x, blocks[0].input_norm)
        for block, next_norm in zip(blocks, following, strict=True):
            memory: Any = next(nets if isinstance(block.mixer, DeltaNet) else pages)
            mixed = block.mixer(normed, mixing, memory, self._ropes)
            if rows is not None and block is blocks[-1]:
                # After the last attention nothing reads the other rows.
                x, mixed = x[rows], mixed[rows]
                if self._row_runs and runs is not None:
                    self._row_runs.rows = runs[rows]
            normed = self._add(x, block.mixer.out, mixed, block.after_attention, block.mlp_norm)
            normed = self._add(x, block.mlp, normed, block.after_mlp, next_norm)
        return normed

    def _add(self, to: Tensor, linear: FusedLinear | Mlp, x: Tensor, norm: Norm | None, next_norm: Norm) -> Tensor:
        """Add a product or an MLP, with `norm` its normalised output, to the hidden states `to` [B, H] in place.

        Returns the norm `next_norm` of the sum.
        """
        if norm is None:
            linear(x, to, residual=True)
            return self.operations.rms_norm(to, next_norm)
        out = torch.empty_like(to)
        linear(x, out)
        return self.operations.add_normed(to, out, norm, next_norm)


# The memory of a sampler on the device, and the decode steps and prefill on it, as CUDA graphs on a GPU.

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
#: Tokens of a prefill's graph, padding included. More tokens keep the GPU busy while the host launches the next
#: products; up to as many, launching kernels takes longer than computing.
PROMPT_BUCKETS = (32, 64, 128, 256, 384, 512, 768, 1024)
#: Prompts of a graph: attention starts thread blocks for as many, whether they have tokens or not.
MOST_PROMPTS = 32


def bucket_of(rows: int) -> int:
    """The least batch size of a graph that has room for `rows`; few sizes keep graphs few.

    Beyond `_SMALL`, only sizes at which the decode product needs more row blocks have a graph. Products take most of
    such a step, and sizes between take as long (docs/lab/rollouts.md).
    """
    return next((size for size in _SMALL if size >= rows), padded_rows(rows))


def prompt_bucket(tokens: int, prompts: int) -> int | None:
    """The size of the smallest graph with room for `tokens` of `prompts`; None if there is none."""
    return next((size for size in PROMPT_BUCKETS if size >= tokens), None) if prompts <= MOST_PROMPTS else None


class Pages:
    """Reference counts of a KV cache's `count` pages, kept on the host. Page 0 is for writes that nobody reads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = [0] * count
        self._free = list(range(count - 1, 0, -1))

    @property
    def available(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self, number: int) -> list[int]:
        """`number` free pages, each with one holder. Raises RuntimeError if fewer are free: callers check that."""
        if number > self.available:
            raise RuntimeError(f"{number} pages of the KV cache are requested, but only {self.available} are free")
        pages = [self._free.pop() for _ in range(number)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add a holder to the pages."""
        for page in pages:
            self._check_held(page)
            self._holders[page] += 1
        return list(pages)

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a holder from the pages. Pages without a holder are free again."""
        for page in pages:
            self._check_held(page)
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _check_held(self, page: int) -> None:
        if not self._holders[page]:
            raise RuntimeError(f"page {page} of the KV cache has no holder")


def pages_of(tokens: int) -> int:
    """Number of pages that hold `tokens`."""
    return -(-tokens // PAGE)


def lay_out(texts: Sequence[Sequence[int]], rows: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """The tokens [3, n] of all texts, int64: ids, the row of each one's text, and the places before the text's end."""
    lengths = [len(text) for text in texts]
    ids = np.fromiter(chain.from_iterable(texts), np.int64, sum(lengths))
    before = np.array(ends) - np.cumsum(lengths)
    return np.stack([ids, np.repeat(rows, lengths), np.arange(len(ids)) + np.repeat(before, lengths)])


@dataclass(frozen=True)
class _PromptGraph:
    """Replaying it computes `hidden` [MOST_PROMPTS, H], at each prompt's last token, from the prompts in `row`.

    `slots` [MOST_PROMPTS] are the rows of states that it writes.
    """

    row: Tensor
    slots: Tensor | None
    hidden: Tensor
    replay: Callable[[], None]


class Pool:
    """A sampler's memory on the device: slots for sequences, KV cache, and states where there are delta nets.

    Each slot has room for `tokens` drawn tokens and `pages_each` pages. Graphs on this memory are captured at their
    first use. `all_slots`: every step has the batch size of all slots, so that no product depends on how many are
    active.
    """

    def __init__(
        self,
        decoder: Decoder,
        slots: int,
        tokens: int,
        pages_each: int,
        pages: int,
        dtype: torch.dtype,
        all_slots: bool,
    ) -> None:
        device = decoder.device
        self.decoder = decoder
        self.state = DecodeState.empty(slots, tokens, pages_each, device)
        self.cache, self.states = decoder.new_memory(slots, pages, dtype)
        self.sampling = SamplingState.empty(device, decoder.runs)
        self.pages = Pages(self.cache.pages)
        self._all_slots = all_slots
        self._rows = torch.full((bucket_of(slots),), slots, dtype=torch.int32, device=device)
        # Graphs never run at the same time, so they share one memory pool.
        memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        #: By (bucket, splits, truncated, replayed), and by buckets of tokens.
        self.steps: GraphBySize[Callable[[], None]] = GraphBySize(memory)
        self.prompts: GraphBySize[_PromptGraph] = GraphBySize(memory)
        self.chunks: GraphBySize[tuple[Tensor, Callable[[], None]]] = GraphBySize(memory)
        self._compiled: set[tuple[int, bool, bool]] = set()
        # In float32 attention runs prompt by prompt, which needs lengths that a graph doesn't have.
        self._captures_prompts = memory is not None and decoder.dtype.itemsize == 2
        #: Whether replies may be computed by `extend`, and not by decode steps alone. Delta nets advance their states
        #: token by token. With `all_slots` a completion has the bits that it has alone, and products of a pass over
        #: replies would round them by the number of replies.
        self.extends = self.states is None and not all_slots

    @property
    def nbytes(self) -> int:
        """Bytes of the KV cache and of the delta nets' states."""
        return self.cache.nbytes + (self.states.nbytes if self.states else 0)

    @torch.no_grad()
    def compile(self, splits: int, truncated: bool, replayed: bool) -> None:
        """Compile what prompts and decode steps launch, all at the same time, unless that was done.

        A kernel that this misses is compiled by its first launch.
        """
        key = splits, truncated, replayed
        if self.steps.memory is None or key in self._compiled:
            return
        self._compiled.add(key)
        device, slots = self.decoder.device, None
        with dry_run(device):
            self._rows.fill_(self.state.count)
            for rows in (1, *limits(len(self._rows))):  # tensors of one row can be aligned otherwise
                self.decoder.step(self._rows[:rows], self, splits, truncated, replayed)
            if self._captures_prompts:
                tokens = PROMPT_BUCKETS[-1]
                packed = pack([[0]], [[0]], PAGE, tokens, MOST_PROMPTS)
                if self.states is not None:
                    slots = torch.full((MOST_PROMPTS,), self.states.idle, dtype=torch.int32, device=device)
                row = PromptRow.of(upload(packed, torch.int32, device), tokens, MOST_PROMPTS, None, slots)
                self.decoder.last_hidden(row, self.cache, self.states)

    @torch.no_grad()
    def decode(self, chosen: Sequence[int], count: int, splits: int, truncated: bool, replayed: bool) -> None:
        """Launch `count` decode steps of the slots `chosen`, without waiting for the device."""
        if not count:
            return
        idle = self.state.count
        bucket = bucket_of(idle if self._all_slots else len(chosen))
        rows = self._rows[:bucket]

        step: Callable[[], None] = partial(self.decoder.step, rows, self, splits, truncated, replayed)

        def recorded() -> Callable[[], None]:
            rows.fill_(idle)  # capturing runs the step, so it must touch only the idle slot
            return captured(step, self.steps.memory)

        if self.steps.memory is not None:
            step = self.steps.at((bucket, splits, truncated, replayed), recorded)
        # What the bucket has room for beyond the chosen slots is the idle one, which no step changes.
        rows.copy_(upload([*chosen, *[idle] * (bucket - len(chosen))], torch.int32, rows.device))
        for _ in range(count):
            step()

    @torch.no_grad()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        pages: Sequence[Sequence[int]],
        slots: Sequence[int],
        runs: Sequence[int],
    ) -> Tensor:
        """Logits [prompts, V] after each prompt, by the policies of the prompts' `runs`.

        Writes keys and values to the prompts' `pages` of the cache, states of delta nets to their `slots`, and does not
        wait for the device.
        """
        # Prompts are packed into one row for the blocks.
        lengths, decoder = [len(prompt) for prompt in prompts], self.decoder
        bucket = prompt_bucket(sum(lengths), len(prompts)) if self._captures_prompts else None
        tokens, count = (sum(lengths), len(prompts)) if bucket is None else (bucket, MOST_PROMPTS)
        # A graph's row has a fixed number of prompts and blocks; without one, attention launches what there is.
        packed = pack(prompts, pages, PAGE, tokens, None if bucket is None else MOST_PROMPTS, runs)
        row = upload(packed, torch.int32, decoder.device)
        written = None
        if self.states is not None:
            padded = [*slots, *[self.states.idle] * (count - len(slots))]
            written = upload(padded, torch.int32, decoder.device)
        if bucket is None:
            # Read only where attention runs prompt by prompt, since copying it to a GPU waits for the queued work.
            packing = None if self._captures_prompts else Packing.of(lengths, [None] * len(lengths), decoder.device)
            placed = PromptRow.of(row, tokens, count, packing, written)
            return decoder.logits(decoder.last_hidden(placed, self.cache, self.states))
        graph = self.prompts.at(bucket, lambda: self._captured_prompts(tokens, row.clone(), written))
        graph.row.copy_(row)
        if graph.slots is not None and written is not None:
            graph.slots.copy_(written)
        graph.replay()
        return decoder.logits(graph.hidden[: len(prompts)])

    @torch.no_grad()
    def extend(self, texts: Sequence[Sequence[int]], slots: Sequence[int], ends: Sequence[int]) -> None:
        """Write keys and values of `texts` to the pages of their `slots`, up to the positions before `ends`.

        Each token is a row, as a sequence is in a decode step. So replies have whatever attention steps have.
        """
        tokens = lay_out(texts, slots, ends)
        count = tokens.shape[1]
        bucket = None if self.chunks.memory is None else prompt_bucket(count, 1)
        padding = (bucket or count + count % 2) - count  # attention can take two rows together
        idle = np.repeat([[0], [self.state.count], [IDLE]], padding, axis=1)
        columns = upload(np.hstack([tokens, idle]), torch.int64, self.decoder.device)
        if bucket is None:
            self._extend(columns)
            return
        # What is captured runs first, and may run again: it writes the same.
        captured_columns, replay = self.chunks.at(
            bucket, lambda: (columns, captured(partial(self._extend, columns), self.chunks.memory))
        )
        captured_columns.copy_(columns)
        replay()

    def _extend(self, columns: Tensor) -> None:
        """Write keys and values of tokens by their ids, slots and positions, `columns` [3, n]."""
        ids, slots, positions = columns
        state, pages, run = self.state, self.state.pages[slots], self.state.run[slots]
        self.decoder.extend(ids, replace(state, position=positions.int(), pages=pages, run=run), self.cache)

    def _captured_prompts(self, bucket: int, row: Tensor, slots: Tensor | None) -> _PromptGraph:
        decoder, prompts = self.decoder, PromptRow.of(row, bucket, MOST_PROMPTS, None, slots)
        hidden = torch.empty(MOST_PROMPTS, decoder.width, dtype=decoder.dtype, device=decoder.device)

        def compute() -> None:
            hidden.copy_(decoder.last_hidden(prompts, self.cache, self.states))

        return _PromptGraph(row, slots, hidden, captured(compute, self.prompts.memory))
