"""A sampler with known answers, and a tokenizer that keeps every text."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from qerl.rollout.sampler import Completion

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer():
    """One token a byte, the two special tokens of the chat template, and a start token that no chat may hold twice."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.chat_template = TEMPLATE
    start = fast.bos_token
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, fast.bos_token_id)]
    )
    assert fast.encode("a")[0] == fast.bos_token_id
    return fast


@dataclass
class Scripted:
    """A sampler that completes a prompt by `answer(*place(number, prompt), repeat)`; it keeps prompts and calls.

    The place of a prompt is by default its number in the call.
    """

    tokenizer: PreTrainedTokenizerFast
    answer: Callable[..., str]
    place: Callable[[int, list[int]], tuple] = lambda number, prompt: (number,)
    prompts: list[str] = field(default_factory=list)
    calls: list = field(default_factory=list)

    def generate(self, prompts, params):
        self.calls.append(params)
        self.prompts += [self.tokenizer.decode(prompt) for prompt in prompts]
        return [
            [self._complete(self.answer(*self.place(number, prompt), repeat), repeat) for repeat in range(params.count)]
            for number, prompt in enumerate(prompts)
        ]

    def _complete(self, text, repeat):
        tokens = self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
        return Completion(tokens, [0.0] * len(tokens), finished=True)
