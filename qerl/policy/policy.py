"""A policy: a frozen base (dense or packed) with its trained tensors and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.checkpoints.folder import ADAPTER_CONFIG, check_adapter, weights_format_of
from qerl.layers.adapters import POLICY_ADAPTER
from qerl.layers.dropout import key_dropout
from qerl.layers.lora import register_lora
from qerl.layers.mlp import fuse_mlps
from qerl.layers.noisy_norm import ROLES, make_noisy
from qerl.layers.packed_attention import fuse_attentions
from qerl.policy.card import Base, write_card
from qerl.policy.loading import load_model, load_tokenizer
from qerl.settings.training import AdapterSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

#: PEFT's name of the value's adapter, and the folder that it is saved in.
VALUE_ADAPTER = "value"
#: Names the head of the value function among what is trained, and its file.
VALUE_HEAD = "value_head"


@contextmanager
def same_requires_grad(model: nn.Module) -> Iterator[None]:
    """After the block, every parameter that was there before it requires a gradient exactly if it did before.

    PEFT makes the adapter that it switches to trainable and freezes all others.
    """
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in before:
            parameter.requires_grad_(flag)


@dataclass
class Policy:
    """`lm` is the Hugging Face causal LM, adapters injected in place; `peft` wraps it when there are adapters.

    It is in evaluation mode; only an update puts it into training mode (LoRA dropout).
    """

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    peft: PeftModel | None = None
    #: From the hidden state to the value of a state, with the adapter "value" (`qerl.rl.value`); PPO only.
    value_head: nn.Linear | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm.device

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a completion: those of the generation config, or the tokenizer's end of text."""
        declared = self.lm.generation_config.eos_token_id if self.lm.generation_config else None
        stops = declared if declared is not None else self.tokenizer.eos_token_id
        return list(stops) if isinstance(stops, (list, tuple)) else [stops]

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Named parameters that the optimizer updates."""
        yield from ((name, p) for name, p in (self.peft or self.lm).named_parameters() if p.requires_grad)
        if self.value_head is not None:
            yield from self.value_head.named_parameters(VALUE_HEAD)

    def autocast(self) -> AbstractContextManager:
        """A context with products in the base's 16-bit dtype, while trained tensors stay float32."""
        dtype = self.lm.dtype
        return torch.autocast(self.device.type, dtype=dtype) if dtype != torch.float32 else nullcontext()

    @contextmanager
    def reference(self) -> Iterator[None]:
        """A context that disables the trained tensors, so that the base serves as reference without a second model."""
        if self.peft is None:
            raise ValueError("a policy trained in full has no reference in it; use method=lora with loss.kl")
        with same_requires_grad(self.peft), self.peft.disable_adapter():
            yield

    def save(self, folder: Path, base: Base | None = None) -> None:
        """Write the trained tensors: an adapter in PEFT's layout, or the whole model in the hub's layout.

        An adapter names `base` as its base, by default the folder of the checkpoint; a card says how to load it.
        The matrices of a whole model are rounded to bfloat16; norms and biases stay float32, as an adapter's do.
        A value function goes into the folder `value` there: its adapter in the same layout, and its head.
        """
        if self.peft is not None:
            self._save_adapters(self.peft, folder, base)
            if self.value_head is not None:
                head = {name: tensor.contiguous() for name, tensor in self.value_head.state_dict().items()}
                save_file(head, folder / VALUE_ADAPTER / f"{VALUE_HEAD}.safetensors")
        else:
            for parameter in self.lm.parameters():
                parameter.data = parameter.data.bfloat16() if parameter.ndim > 1 else parameter.data
            self.lm.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def _save_adapters(self, peft: PeftModel, folder: Path, base: Base | None) -> None:
        checkpoint = Path(str(self.lm.name_or_path)).resolve()
        base = base or Base(str(checkpoint))
        for config in peft.peft_config.values():
            config.base_model_name_or_path, config.revision = base.name, base.revision
        # Embeddings are never trained: no look at the hub whether they are.
        peft.save_pretrained(str(folder), save_embedding_layers=False)
        norms = bool(getattr(peft.peft_config[POLICY_ADAPTER], "modules_to_save", None))
        write_card(folder, base, weights_format_of(checkpoint), norms)


def choose_device() -> torch.device:
    """This process's GPU if there is one; by number, since safetensors takes a mere "cuda" for the first."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def use_own_modules(lm: PreTrainedModel) -> None:
    """Put norms that carry noise, fused MLPs and attentions into a loaded model's blocks; names of weights stay."""
    make_noisy(lm)
    fuse_mlps(lm)
    fuse_attentions(lm)


def _base(checkpoint: Path, dtype: str, device: torch.device | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # A norm of 16 bits would round what is added to it: a copy that PEFT loads trained norms into has its dtype.
    lm = load_model(checkpoint, DTYPES[dtype], device or choose_device(), float32=ROLES)
    use_own_modules(lm)
    tokenizer = load_tokenizer(checkpoint)
    return lm.requires_grad_(False), tokenizer


def lora_config(adapter: AdapterSettings) -> LoraConfig:
    """PEFT's configuration of the adapter, with the norms of each block where they are trained."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=list(adapter.targets),
        modules_to_save=list(ROLES) if adapter.train_norms else None,
    )
    register_lora(config)
    return config


def with_adapter(
    checkpoint: Path, adapter: AdapterSettings, dtype: str, seed: int, device: torch.device | None = None
) -> Policy:
    """A policy with a fresh LoRA adapter (B = 0) on a frozen base; adapter and norms are float32."""
    lm, tokenizer = _base(checkpoint, dtype, device)
    torch.manual_seed(seed)
    peft = get_peft_model(lm, lora_config(adapter))
    key_dropout(peft, POLICY_ADAPTER)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return Policy(lm.eval(), tokenizer, peft)


def trained_in_full(checkpoint: Path, device: torch.device | None = None) -> Policy:
    """A policy with every weight trainable, in float32."""
    lm, tokenizer = _base(checkpoint, "float32", device)
    return Policy(lm.requires_grad_(True), tokenizer)


def load_policy(checkpoint: Path, trained: Path | None, dtype: str, device: torch.device | None = None) -> Policy:
    """A policy to sample from: the base as it is, or with the outcome of a run (adapter or full weights)."""
    if trained is None or not (trained / ADAPTER_CONFIG).is_file():
        return Policy(*_base(trained or checkpoint, dtype, device))
    check_adapter(trained)
    lm, tokenizer = _base(checkpoint, dtype, device)
    config = LoraConfig.from_pretrained(str(trained))
    register_lora(config)
    peft = PeftModel.from_pretrained(lm, str(trained), config=config)
    return Policy(lm.eval(), tokenizer, peft)


def weight_bytes(policy: Policy) -> int:
    """Bytes of all weights in memory, adapters and packed buffers included."""
    head = policy.value_head.parameters() if policy.value_head is not None else ()
    tensors = {id(t): t for t in (*policy.lm.parameters(), *policy.lm.buffers(), *head)}
    return sum(t.numel() * t.element_size() for t in tensors.values())
