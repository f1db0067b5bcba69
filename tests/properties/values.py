"""Values that a parser of YAML or JSON may return, and the properties that every refusal has."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

from hypothesis import strategies as st

from qerl.checkpoints.files import CheckpointError
from qerl.data.records import DataError
from qerl.settings.base import ConfigError
from qerl.settings.models import FormatError

#: What pydantic says, which no user has to know of.
PHRASES = ("Input should", "Field required", "instance of", "Unable to", "valid dictionary", "Value error")
#: The errors whose message is one sentence for the user.
SENTENCES = (ConfigError, DataError, CheckpointError, FormatError)

texts = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\0", "\n", "../../x", "x" * 300, "nan", "1e999", "٣", "\ud800", "null", "~", "${HOME}", "{run}"]
)
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 2**31, 2**63, 10**400, float("nan"), float("inf"), -0.0, 1e-320])
)
scalars = st.none() | st.booleans() | numbers | texts | st.dates() | st.binary(max_size=8)
keys = texts | st.integers() | st.none() | st.booleans()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=10
)


@contextmanager
def refused_in_one_sentence(*naming: str, one_of: Iterable[str] = ()):
    """What the block does succeeds, or is refused in one line with every text of `naming` and a text of `one_of`."""
    try:
        yield
    except SENTENCES as error:
        sentence = str(error)
        assert sentence.strip()
        assert len(sentence.splitlines()) == 1, sentence
        assert len(sentence) < 4000
        assert not any(phrase in sentence for phrase in PHRASES), sentence
        for name in naming:
            assert name in sentence
        one_of = [" ".join(name.split())[:20] for name in one_of]
        assert not one_of or any(name in sentence for name in one_of), (sentence, one_of)
