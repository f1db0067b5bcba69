"""Words and relations in an answer of math that math-verify ignores, so that a grader must check them.

math-verify drops `\\text{...}` and takes the last side of a chain: `5 \\text{ is wrong}`, `5 \\text{ thousand}` and
`7=5` equal 5 for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from qerl.data.amounts import is_unit

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|math(?:rm|it|bf))\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_COMMAND = re.compile(r"\\(?:(?:begin|end)\s*\{[^{}]*\}(?:\{[lcr| ]*\})?|[A-Za-z]+|.)", re.DOTALL)
_TOKEN = re.compile(r"[^\W\d_]+|[0-9]+")
_LETTERS = re.compile(r"[^\W\d_]+")
#: From the first `\\text` on, math-verify drops all up to a brace at the end: `5 \\text{ m}, 6 \\text{ m}` is 5.
_AFTER_UNIT = re.compile(r"\s*(?:\^\{?[23]\}?)?[\s.$]*\Z")
#: Runs of letters with nothing but space between them.
_SENTENCE = re.compile(r"[^\W\d_]+(?:[\s']+[^\W\d_]+)*")
#: Outside of `\text`, shorter runs of letters are products of variables.
_SHORTEST_WORD = 4
_JOINING = {"and", "or"}
_SINGLE = re.compile(r"[\s({$*]*[^\W\d_]+[\s)}.$*]*")
#: Answers of several words.
_PHRASES = {
    *("no solution", "no solutions", "no real solution", "no real solutions", "no such number", "none of these"),
    *("none of the above", "all real numbers", "all real", "does not exist", "infinitely many", "not possible"),
    *("infinitely many solutions", "infinite solutions", "empty set", "the empty set", "cannot be determined"),
}
_RELATION = re.compile(r"=|\\(?:approx|neq?|not|equiv|sim|p?mod|bmod|to|rightarrow|implies|Rightarrow)(?![A-Za-z])")
#: The name of a value and its equals sign: letters, and digits in indices and arguments only (`x_1 =`, `f(2) =`).
_NAMED = re.compile(
    r"(?:^|[,;]|\\text\s*\{\s*(?:and|or)\s*\})(?=[^=]*[A-Za-z])"
    r"(?:[A-Za-z\s\\{}\[\]|+*/'-]|_\w|_\{\w+\}|\([^()=]*\))+="
)


def tells_more(answer: str, expected: str, units: Collection[str] = ()) -> bool:
    """Whether `answer` has words or relations that `expected` lacks, besides units and names of the value (`x = 5`)."""
    known = {token.casefold() for token in _TOKEN.findall(expected)}
    if any(word not in known for word in _words(answer, units)):
        return True
    stated = answer if "=" in expected else _NAMED.sub(",", answer)
    return not set(_RELATION.findall(stated)) <= set(_RELATION.findall(expected))


def is_prose(answer: str, units: Collection[str] = ()) -> bool:
    """Whether `answer` is words rather than an expression: more than one word, or a word that isn't a unit."""
    said = " ".join(_TEXT.sub(r"\1", answer).split())
    words = [word for word in _words(answer, units) if len(word) > 1]  # single letters may be variables
    return bool(words) and not _SINGLE.fullmatch(said) and said.strip(". ").lower() not in _PHRASES


def _words(answer: str, units: Collection[str]) -> set[str]:
    """The words inside `\\text` or readable as text, in lower case, without units, `and` and `or`."""
    rest = _TEXT.sub("+", answer)
    sentences = _SENTENCE.findall(_COMMAND.sub("+", rest))
    bare = [word for sentence in sentences for word in _spoken(_LETTERS.findall(sentence)) if not is_unit(word, units)]
    written = [
        token
        for text in _TEXT.finditer(answer)
        if not (is_unit(text[1].strip(" ."), units) and _AFTER_UNIT.match(answer, text.end()))
        for token in _TOKEN.findall(text[1])
    ]
    unread = ["\\text"] if "\\text" in rest else []
    return {word.casefold() for word in bare + written + unread} - _JOINING


def _spoken(letters: list[str]) -> list[str]:
    """The words among runs of letters: long ones, and all but single letters where several stand in a row."""
    several = len(letters) > 1
    return [run for run in letters if (len(run) >= _SHORTEST_WORD and not run.isupper()) or (several and len(run) > 1)]
