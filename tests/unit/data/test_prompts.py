"""Where thinking ends, for tokenizers and chat templates of each kind."""

import pytest
from tokenizers import AddedToken, decoders

from qerl.data.grading import is_correct, well_formed
from qerl.data.prompts import Thinking
from qerl.models.loading import load_tokenizer
from tests.tiny import TEMPLATE, tiny_tokenizer, write_template

HARMONY = [f"<|{name}|>" for name in ("start", "channel", "message", "end", "return", "constrain")]
HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}<|start|>assistant"
)


@pytest.fixture
def make(tmp_path):
    """Makes a tokenizer of characters with added tokens, special or not, and a chat template."""

    def make(tokens, template=TEMPLATE, special=True):
        tokenizer = tiny_tokenizer(tmp_path)
        tokenizer.backend_tokenizer.decoder = decoders.Fuse()
        tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens])
        tokenizer.save_pretrained(tmp_path)
        write_template(tmp_path, template)
        return load_tokenizer(tmp_path)

    return make


def read(tokenizer, written, named=None, question="9+9?"):
    """What graders read of a completion, which a stop token ends."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(written + "<eos>", add_special_tokens=False)["input_ids"]
    return Thinking(tokenizer, named).text(ids, prompt)


def grade(text, record_format="gsm8k", form="native"):
    return is_correct(text, "18", record_format, form), well_formed(text, record_format, form)


PAIRS = [
    *(("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<reasoning>", "</reasoning>")),
    *(("<seed:think>", "</seed:think>"), ("<|begin_of_thought|>", "<|end_of_thought|>")),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("begin", "end"), PAIRS)
def test_delimiters_of_the_tokenizer_delimit_thinking(make, begin, end, special):
    tokenizer = make([begin, end], special=special)
    assert grade(read(tokenizer, f"{begin}9+8 #### 17{end}#### 18")) == (True, True)
    assert grade(read(tokenizer, f"{begin}#### 18{end}#### 17")) == (False, True)
    assert grade(read(tokenizer, f"{begin}Perhaps #### 18")) == (False, False)
    assert grade(read(tokenizer, "#### 18")) == (True, True)


@pytest.mark.parametrize(("begin", "end"), PAIRS)
@pytest.mark.parametrize("rest", ["", "\n", "\nOkay, "])
def test_a_template_that_begins_the_thinking(make, begin, end, rest):
    tokenizer = make([begin, end], template=f"{TEMPLATE}{begin}{rest}")
    assert Thinking(tokenizer).begins_in_prompt
    assert grade(read(tokenizer, f"so{end}<answer>18</answer>"), form="tags") == (True, True)
    assert grade(read(tokenizer, f"{begin}so{end}<answer>18</answer>"), form="tags") == (True, True)
    assert grade(read(tokenizer, "<answer>18</answer>"), form="tags") == (False, False)
    assert grade(read(tokenizer, "Perhaps \\boxed{18}"), "math") == (False, False)
    assert grade(read(tokenizer, f"so{end}\\boxed{{18}}"), "math") == (True, True)


THINKS = "{% if '/think' in messages[-1]['content'] %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("tokens", "after", "named", "question", "written", "right"),
    [
        (["<think>", "</think>"], "<think>\n\n</think>\n\n", None, "9+9?", "#### 18", True),
        (["<think>", "</think>"], "", None, "Think after <think>. 9+9?", "#### 18", True),
        # A template that begins the thinking after some messages alone.
        ([], THINKS, None, "9+9?", "#### 18", True),
        ([], THINKS, None, "/think 9+9?", "#### 18", False),
        # Delimiters of the settings.
        ([], "", None, "9+9?", "<plan>#### 17</plan>#### 18", False),
        ([], "", ["<plan>", "</plan>"], "9+9?", "<plan>#### 17</plan>#### 18", True),
    ],
)
def test_what_ends_within_the_thinking_states_no_answer(make, tokens, after, named, question, written, right):
    tokenizer = make(tokens, template=TEMPLATE + after)
    assert grade(read(tokenizer, written, named, question)) == (right, right)
    assert not Thinking(tokenizer).begins_in_prompt


def test_tags_of_answers_that_are_special_tokens_are_read(make):
    tokenizer = make(["<think>", "</think>", "<answer>", "</answer>"])
    text = read(tokenizer, "<think>9+9</think><answer>18</answer>")
    assert text == "<think>9+9</think><answer>18</answer>"
    assert grade(text, form="tags") == (True, True)


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (f"{ANALYSIS}Not #### 17.<|end|>{FINAL}#### 18<|return|>", "<think>Not #### 17.</think>#### 18"),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "<think>ab</think>c"),
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary to=f <|constrain|>json<|message|>b", "<think>ab"),
        (f"{ANALYSIS}#### 18<|end|><|start|>assistant<|channel|>fin", "<think>#### 18"),
        ("<|channel|>final<|message|>#### 18<|return|>", "#### 18"),
        ("#### 18", "#### 18"),
    ],
)
def test_channels_of_harmony(make, written, text):
    assert read(make(HARMONY, HARMONY_TEMPLATE), written) == text


def test_a_template_that_begins_the_analysis(make):
    tokenizer = make(HARMONY, HARMONY_TEMPLATE + ANALYSIS)
    assert read(tokenizer, f"a<|end|>{FINAL}#### 18") == "<think>a</think>#### 18"
    assert grade(read(tokenizer, "#### 18")) == (False, False)


def test_what_ends_the_thinking_is_one_line(make):
    lines = [
        Thinking(make(["[THINK]", "[/THINK]"])).summary,
        Thinking(make(HARMONY, HARMONY_TEMPLATE)).summary,
        Thinking(make([], template=f"{TEMPLATE}<think>")).summary,
    ]
    for line, end in zip(lines, ("[/THINK]", "<|channel|>final", "begins it in the prompt"), strict=True):
        assert end in line
        assert "\n" not in line
