"""A policy's blocks for prefill and decode steps: fused products on its own weights, in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from qerl.checkpoints.files import context_length
from qerl.kernels.cuda.w4a16 import compile_ahead, padded_rows
from qerl.kernels.operations import operations
from qerl.kernels.packed_sequences import Packing
from qerl.kernels.state import (
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


def norm_of(norm: Any) -> Norm:
    """A norm with its noise; PEFT's trained copy if there is one."""
    if isinstance(norm, ModulesToSaveWrapper):
        norm = norm.modules_to_save[POLICY_ADAPTER]
    offset = norm.offset if isinstance(norm, NoisyRMSNorm) else offset_of(norm)
    return Norm(norm.weight, getattr(norm, "noise", None), epsilon_of(norm), offset or 0.0)


# The MLP of a block in the engine: gate, up and down as two products, or a mixture of experts as grouped products.
#
# A shared expert of a mixture is an MLP of the former kind.

#: A product, or adapters that are apart from theirs.
Product = FusedLinear | GroupedLinear | GroupedAdapters


class DenseMlp:
    """down(activation(gate x) * up x)."""

    def __init__(self, gate_up: FusedLinear, down: FusedLinear, activation: Activation) -> None:
        #: Its products, with adapters that are apart.
        self.linears: Sequence[Product] = (gate_up, down)
        self._gate_up, self._down = gate_up, down
        self._activation = activation

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """Write the outputs of x [B, H] to out [B, H], or with `residual` add them. Both are contiguous."""
        inner = x.new_empty(len(x), self._gate_up.out_features // 2)
        self._gate_up(x, inner, activation=self._activation)
        self._down(inner, out, residual)


class MixtureMlp:
    """The weighted sum of the experts that a router in float32 chooses for each token.

    Nothing waits for the choice: a launch has room for any, so that CUDA graphs can have it.
    """

    def __init__(
        self, router: Float32Router, experts: Experts, dtype: torch.dtype, lora: ExpertLora | None = None
    ) -> None:
        assert router.normalised is not None  # the engine serves no family whose router has no softmax
        self._router, self._normalised = router, router.normalised
        self._products, self._count = experts.products(dtype), len(experts)
        products, lora = (self._products.gate_up, self._products.down), lora or ExpertLora()
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
        self.linears: Sequence[Product] = (*mixture.linears, *shared.linears)
        self._mixture, self._shared, self._gate = mixture, shared, gate

    def __call__(self, x: Tensor, out: Tensor, residual: bool = False) -> None:
        """See `DenseMlp`."""
        shared = torch.empty_like(out)
        self._shared(x, shared)
        self._mixture(x, out, residual)
        out.addcmul_(shared, self._gate(x).sigmoid())


Mlp = DenseMlp | MixtureMlp | SharedMixtureMlp


def mlp_of(mlp: Any, activation: Activation, dtype: torch.dtype, kernels: Kernels) -> Mlp:
    """The MLP of a model's module, which shares its weights. Mixtures have silu, or gpt-oss's clamped gate."""
    parts = list(mlp.children())
    routers = [part for part in parts if isinstance(part, Float32Router)]
    experts = [part for part in parts if isinstance(part, (Experts, AdaptedExperts))]
    if not (routers and experts):
        return _dense_of(mlp, activation, dtype, kernels)
    if isinstance(experts[0], AdaptedExperts):
        mixture = MixtureMlp(routers[0], experts[0].base_layer, dtype, experts[0].lora)
    else:
        mixture = MixtureMlp(routers[0], experts[0], dtype)
    if not hasattr(mlp, "shared_expert"):
        return mixture
    return SharedMixtureMlp(mixture, _dense_of(mlp.shared_expert, activation, dtype, kernels), mlp.shared_expert_gate)


def _dense_of(mlp: Any, activation: Activation, dtype: torch.dtype, kernels: Kernels) -> DenseMlp:
    gate_up = fuse(projections(mlp, "gate_up_proj", "gate_proj", "up_proj"), dtype, gated=True, kernels=kernels)
    return DenseMlp(gate_up, fuse([mlp.down_proj], dtype, kernels=kernels), activation)


def projections(module: Any, fused: str, *parts: str) -> list[Any]:
    """The layer that a checkpoint has fused, as in Phi-3, or its parts."""
    return [getattr(module, name) for name in ((fused,) if hasattr(module, fused) else parts)]


# What mixes the tokens of a sequence in a block: attention, which reads pages of a cache, or a gated delta net.

#: Cosines and sines of each kind of attention.
Ropes = Mapping[str | None, Rope]


@dataclass(frozen=True)
class Mixing:
    """How the tokens of a pass, those of a step or of prompts, read earlier tokens of their sequences."""

    #: Attention [n, Hq * D] of q, k and v [n, `heads.width`], which a block's cache gets.
    attend: Callable[[Tensor, KVCache, Heads, Rope], Tensor]
    #: Outputs [n, H * V] of a delta net's inputs and of its gates z, b and a; its state gets the new values.
    recur: Callable[[Tensor, Tensor, Tensor, Tensor, DeltaHeads, DeltaState], Tensor]


@dataclass(frozen=True)
class Attention:
    """Attention of a block. `out` is the projection of its results."""

    heads: Heads
    #: The kind of the attention, where rotary positions differ by it.
    kind: str | None
    qkv: FusedLinear
    out: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        """The products."""
        return [self.qkv, self.out]

    def __call__(self, x: Tensor, mixing: Mixing, cache: Any, ropes: Ropes) -> Tensor:
        """What `out` reads [n, Hq * D], from normalised hidden states x [n, hidden] and the block's cache."""
        qkv = x.new_empty(len(x), self.qkv.out_features)
        self.qkv(x, qkv)
        return mixing.attend(qkv, cache, self.heads, ropes[self.kind])


@dataclass(frozen=True)
class DeltaNet:
    """The gated delta net of a block. `out` is the projection of its results."""

    heads: DeltaHeads
    #: The products that give the convolution's inputs, z, b and a, and the widths of each one's parts.
    projections: Sequence[tuple[FusedLinear, Sequence[int]]]
    out: FusedLinear

    @property
    def linears(self) -> list[FusedLinear]:
        """The products."""
        return [*(linear for linear, _ in self.projections), self.out]

    def __call__(self, x: Tensor, mixing: Mixing, net: DeltaState, ropes: Ropes) -> Tensor:
        """What `out` reads [n, H * V], from normalised hidden states x [n, hidden] and the net's states."""
        del ropes
        parts: list[Tensor] = []
        # The narrow product is first: while it runs, the packed one after it copies its first weights.
        for linear, widths in reversed(self.projections):
            joint = x.new_empty(len(x), linear.out_features)
            linear(x, joint)
            parts = [*joint.split(list(widths), 1), *parts]
        mixed, z, b, a = parts
        return mixing.recur(mixed, z, b, a, self.heads, net)


def attention_of(
    attention: Any, config: Any, kind: str | None, window: int | None, dtype: torch.dtype, kernels: Kernels
) -> Attention:
    """The attention of a block, by transformers' module of it."""
    heads = Heads(
        config.num_attention_heads,
        config.num_key_value_heads,
        attention.head_dim,
        attention.scaling,
        window=window,
        sinks=getattr(attention, "sinks", None),
    )
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = norm_of(attention.q_norm), norm_of(attention.k_norm)
        heads = replace(heads, q_norm=q_norm.weight, k_norm=k_norm.weight, eps=q_norm.eps, norm_offset=q_norm.offset)
    qkv = fuse(projections(attention, "qkv_proj", "q_proj", "k_proj", "v_proj"), dtype, kernels=kernels)
    heads = replace(heads, gated=qkv.out_features > heads.width)
    return Attention(heads, kind, qkv, fuse([attention.o_proj], dtype, kernels=kernels))


def delta_net_of(net: Any, dtype: torch.dtype, kernels: Kernels) -> DeltaNet:
    """The delta net of a block, by transformers' module of it."""
    heads = DeltaHeads(
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
    widths = [heads.channels, heads.parts[2]], [heads.value] * 2
    if any(isinstance(unwrap(layer).base, PackedLinear) for layer in wide + narrow):
        # Layers in several formats have no common kernel, and b and a are too narrow to be packed.
        products = [(fuse(wide, dtype, kernels=kernels), widths[0]), (NarrowLinear(narrow, dtype), widths[1])]
    else:
        products = [(fuse(wide + narrow, dtype, kernels=kernels), widths[0] + widths[1])]
    return DeltaNet(heads, products, fuse([net.out_proj], dtype, kernels=kernels))


# A policy's blocks for prefill and decode steps: fused products on its own weights, with a paged KV cache.


@dataclass(frozen=True)
class _Block:
    mixer: Attention | DeltaNet
    input_norm: Norm
    #: The norms of what attention and MLP add to the hidden states, as Gemma has them.
    after_attention: Norm | None
    mlp_norm: Norm
    mlp: Mlp
    after_mlp: Norm | None


class Decoder:
    """The policy's blocks, head and token sampling. Norms and noise are read in place, adapters at each `sync`."""

    def __init__(self, policy: Policy, kernels: Kernels = "auto") -> None:
        config = policy.lm.config
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
        activation: Any = activation_of(config)
        self._blocks = [
            _block(layer, number, config, activation, self.dtype, kernels)
            for number, layer in enumerate(self._model.layers)
        ]
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
        self._parameters = list(policy.lm.parameters())
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._sync: Callable[[], None] | None = None
        self._copies: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Number of blocks with attention, each of which has a part of the KV cache."""
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

    def new_states(self, slots: int) -> DeltaStates | None:
        """The delta nets' states for so many sequences, None without delta nets."""
        if not self._nets:
            return None
        return DeltaStates.empty(self._nets[0].heads, len(self._nets), slots, self.dtype, self.device)

    def new_cache(self, pages: int, dtype: torch.dtype) -> KVCache:
        """A KV cache of zeros with so many pages, in the model's dtype or FP8."""
        return KVCache.empty(len(self), pages, self.heads, dtype, self.device)

    def compile_ahead(self, sequences: int) -> None:
        """Compile the packed products of steps of up to so many sequences, several at a time."""
        compile_ahead([linear.operands for linear in self.linears if isinstance(linear, W4Linear)], sequences)

    @torch.no_grad()
    def sync(self) -> None:
        """Copy the policy's present adapters and biases. Raises RuntimeError if the policy's tensors were moved."""
        if [parameter.data_ptr() for parameter in self._parameters] != self._addresses:
            raise RuntimeError("the policy's weights were moved or cast after its sampler was made; make a new sampler")
        if self._sync is None:
            # Without adapters there may be nothing to capture.
            in_graph = self.device.type == "cuda" and self._adapted
            self._sync = captured(self._sync_all) if in_graph else self._sync_all
        self._sync()

    def _sync_all(self) -> None:
        pairs = [pair for linear in self.linears if isinstance(linear, W4Linear) for pair in linear.copies()]
        in_one = pairs and all(to.is_contiguous() and source.dtype == torch.float32 for to, source in pairs)
        if in_one and self._copies is None:
            from qerl.kernels.triton.linear import Copies

            self._copies = Copies(*zip(*pairs, strict=True))
        if in_one and self._copies is not None:
            self._copies()
        for linear in self.linears:
            if not (in_one and isinstance(linear, W4Linear)):
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

    def step(
        self,
        rows: Tensor,
        state: DecodeState,
        cache: KVCache,
        sampling: SamplingState,
        splits: int,
        truncated: bool,
        replayed: bool,
        states: DeltaStates | None = None,
    ) -> None:
        """Feed the last token of the slots `rows` [B] int32 and draw the next one; idle slots don't change.

        `states` are those of `new_states`.
        """
        ops = self.operations
        mixing = Mixing(
            lambda qkv, block, heads, rope: ops.attend(qkv, block, state, rows, rope, heads, splits),
            lambda mixed, z, b, a, heads, net: ops.delta_step(mixed, z, b, a, heads, net, state, rows),
        )
        x = self._through_blocks(self._embedded(state.token[rows]), cache, states, mixing)
        ops.draw(self.logits(x), rows, state, sampling, truncated, replayed)

    def last_hidden(self, row: PromptRow, cache: KVCache, states: DeltaStates | None = None) -> Tensor:
        """Hidden states [prompts, H] after the last norm, at each prompt's last token.

        `cache` then holds the keys and values of all tokens, and `states` those after the prompts.
        """
        ops = self.operations
        mixing = Mixing(
            lambda qkv, block, heads, rope: ops.attend_prompts(qkv, block, row, rope, heads),
            lambda mixed, z, b, a, heads, net: ops.delta_prompts(mixed, z, b, a, heads, net, row),
        )
        return self._through_blocks(self._embedded(row.ids), cache, states, mixing, row.last)

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
        cache: KVCache,
        states: DeltaStates | None,
        mixing: Mixing,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the last norm, for some `rows` of x [B, H] or for all. Overwrites x."""
        pages, nets = cache.blocks(), iter(()) if states is None else states.nets()
        following = [*(block.input_norm for block in self._blocks[1:]), self._norm]
        normed = self.operations.rms_norm(x, self._blocks[0].input_norm)
        for block, next_norm in zip(self._blocks, following, strict=True):
            memory: Any = next(nets if isinstance(block.mixer, DeltaNet) else pages)
            mixed = block.mixer(normed, mixing, memory, self._ropes)
            if rows is not None and block is self._blocks[-1]:
                # After the last attention nothing reads the other rows.
                x, mixed = x[rows], mixed[rows]
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


def _block(
    layer: Any, number: int, config: Any, activation: Activation, dtype: torch.dtype, kernels: Kernels
) -> _Block:
    if isinstance(net := getattr(layer, "linear_attn", None), PackedDeltaNet):
        mixer: Attention | DeltaNet = delta_net_of(net, dtype, kernels)
    else:
        kind = config.layer_types[number] if "full_attention" in config.rope_parameters else None
        mixer = attention_of(layer.self_attn, config, kind, structure_of(config).windows[number], dtype, kernels)
    # Norms after attention and MLP, too; the one after attention then has the name of others' norm before the MLP.
    around = hasattr(layer, "pre_feedforward_layernorm")
    return _Block(
        mixer=mixer,
        input_norm=norm_of(layer.input_layernorm),
        after_attention=norm_of(layer.post_attention_layernorm) if around else None,
        mlp_norm=norm_of(layer.pre_feedforward_layernorm if around else layer.post_attention_layernorm),
        mlp=mlp_of(layer.mlp, activation, dtype, kernels),
        after_mlp=norm_of(layer.post_feedforward_layernorm) if around else None,
    )


# Decode steps of any batch size, as CUDA graphs on a GPU and eagerly elsewhere.

_SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def bucket_of(rows: int) -> int:
    """The least batch size of a graph that has room for `rows`; few sizes keep graphs few.

    Beyond `_SMALL`, only sizes at which the decode product needs more row blocks have a graph. Products take most of
    such a step, and sizes between take as long (docs/lab/rollouts.md).
    """
    return next((size for size in _SMALL if size >= rows), padded_rows(rows))


class DecodeGraphs:
    """Runs decode steps of slots; each (bucket, splits, truncated, replayed) is captured at its first use.

    `all_slots`: every step has the batch size of all slots, so that no product depends on how many are active.
    `memory`: the memory pool of the graphs, None without graphs. `states` are those of delta nets.
    """

    def __init__(
        self,
        decoder: Decoder,
        state: DecodeState,
        cache: KVCache,
        sampling: SamplingState,
        all_slots: bool,
        memory: Any,
        states: DeltaStates | None = None,
    ) -> None:
        self._decoder, self._states = decoder, states
        self._all_slots = all_slots
        self._state, self._cache, self._sampling = state, cache, sampling
        self._rows = torch.full((bucket_of(state.count),), state.count, dtype=torch.int32, device=decoder.device)
        self._graphs: GraphBySize[Callable[[], None]] = GraphBySize(memory)

    @torch.no_grad()
    def run(self, chosen: Sequence[int], count: int, splits: int, truncated: bool, replayed: bool) -> None:
        """Launch `count` decode steps of the slots `chosen`, without waiting for the device."""
        if not count:
            return
        bucket = bucket_of(self._state.count if self._all_slots else len(chosen))
        size = bucket, splits, truncated, replayed
        step = self._graphs.at(size, partial(self._captured_step, *size))
        padded = [*chosen, *[self._state.count] * (bucket - len(chosen))]
        self._rows[:bucket].copy_(upload(padded, torch.int32, self._rows.device))
        for _ in range(count):
            step()

    def _captured_step(self, bucket: int, splits: int, truncated: bool, replayed: bool) -> Callable[[], None]:
        rows = self._rows[:bucket]
        rows.fill_(self._state.count)  # capturing runs the step, so it must touch only the idle slot
        step, inputs = self._decoder.step, (rows, self._state, self._cache, self._sampling)
        return self._graphs.captured(partial(step, *inputs, splits, truncated, replayed, states=self._states))


# Prefill: prompts are packed into one row for the blocks, and their keys and values written to pages.
#
# Up to 1,024 tokens, launching kernels takes longer than computing, so all launches are captured in CUDA graphs, one
# for each of a few numbers of tokens. More tokens keep the GPU busy while the host launches the next products.

#: Tokens of a graph, padding included.
PROMPT_BUCKETS = (32, 64, 128, 256, 384, 512, 768, 1024)
#: Prompts of a graph: attention starts thread blocks for as many, whether they have tokens or not.
MOST_PROMPTS = 32


def prompt_bucket(tokens: int, prompts: int) -> int | None:
    """The size of the smallest graph with room for `tokens` of `prompts`; None if there is none."""
    return next((size for size in PROMPT_BUCKETS if size >= tokens), None) if prompts <= MOST_PROMPTS else None


@dataclass(frozen=True)
class _PromptGraph:
    """Replaying it computes `hidden` [MOST_PROMPTS, H], at each prompt's last token, from the prompts in `row`.

    `slots` [MOST_PROMPTS] are the rows of states that it writes.
    """

    row: Tensor
    slots: Tensor | None
    hidden: Tensor
    replay: Callable[[], None]


class Prefill:
    """Computes prompts into a cache; graphs are captured at their first use.

    `memory`: the memory pool of the graphs, None without graphs. `states` are those of delta nets.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, memory: Any, states: DeltaStates | None = None) -> None:
        self._decoder, self._cache, self._states = decoder, cache, states
        self._graphs: GraphBySize[_PromptGraph] = GraphBySize(memory)
        # In float32 attention runs prompt by prompt, which needs lengths that a graph doesn't have.
        self._captures = memory is not None and decoder.dtype.itemsize == 2

    @torch.no_grad()
    def logits(self, prompts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], slots: Sequence[int]) -> Tensor:
        """Logits [prompts, V] after each prompt. Writes keys and values to the prompts' `pages` of the cache, states
        of delta nets to their `slots`, and does not wait for the device.
        """
        lengths, device = [len(prompt) for prompt in prompts], self._decoder.device
        tokens = sum(lengths)
        bucket = prompt_bucket(tokens, len(prompts)) if self._captures else None
        if bucket is None:
            row = upload(pack(prompts, pages, PAGE, tokens), torch.int32, device)
            packing = Packing.of(lengths, [None] * len(lengths), torch.device("cpu"))
            placed = PromptRow.of(row, tokens, len(prompts), packing, self._placed(slots, len(slots)))
            hidden = self._decoder.last_hidden(placed, self._cache, self._states)
        else:
            row = upload(pack(prompts, pages, PAGE, bucket, MOST_PROMPTS), torch.int32, device)
            placed_slots = self._placed(slots, MOST_PROMPTS)
            graph = self._graphs.at(bucket, lambda: self._capture(bucket, row.clone(), placed_slots))
            graph.row.copy_(row)
            if graph.slots is not None and placed_slots is not None:
                graph.slots.copy_(placed_slots)
            graph.replay()
            hidden = graph.hidden[: len(prompts)]
        return self._decoder.logits(hidden)

    def _placed(self, slots: Sequence[int], count: int) -> Tensor | None:
        """The slots on the device, with idle ones up to `count`; None without states."""
        if self._states is None:
            return None
        padded = [*slots, *[self._states.idle] * (count - len(slots))]
        return upload(padded, torch.int32, self._decoder.device)

    def _capture(self, bucket: int, row: Tensor, slots: Tensor | None) -> _PromptGraph:
        decoder, prompts = self._decoder, PromptRow.of(row, bucket, MOST_PROMPTS, None, slots)
        hidden = torch.empty(MOST_PROMPTS, decoder.width, dtype=decoder.dtype, device=decoder.device)

        def compute() -> None:
            hidden.copy_(decoder.last_hidden(prompts, self._cache, self._states))

        return _PromptGraph(row, slots, hidden, self._graphs.captured(compute))
