"""Words, dates and relations in an answer of math that math-verify misreads, so that a grader must check them.

math-verify drops `\\text{...}` and takes the last side of a chain: `5 \\text{ is wrong}`, `5 \\text{ thousand}` and
`7=5` equal 5 for it. Words are products of variables for it, and dates are differences: `cat` equals `act`, and
`2025-01-05` equals 2019.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from string import ascii_lowercase

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

#: Signs of sentences, which leave words text. Those of the second group are also mathematics.
_PUNCTUATION = ".,;:'\"!?()"
_LINKS = "-/&"
_SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])|[${}]")
_DASHES = re.compile("[\u2010-\u2015\u2212]")
_NAMES = "sin cos tan cot sec csc log ln exp lim max min gcd lcm det deg arg arcsin arccos arctan infinity"
#: Names that aren't words beside other letters (`log x`). math-verify reads infinity.
_FUNCTIONS = frozenset(_NAMES.split())
_SHORT = "ad ah am an as at be by do go ha he hi if in is it me my no of oh ok on or ox pm so to up us we cab fed"
#: Words of two letters or of neighbours in the alphabet, whose like are products of variables.
_SHORT_WORDS = frozenset(_SHORT.split())
_ROMAN = re.compile(r"[IVX]{2,}")
_LONGEST_PRODUCT = 4
_VOWELS = set("aeiouy")
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\.?"
)
#: Three numbers, two with a leading zero, a year and a month, two years, a day of a month, or a time with AM or PM.
_DATE = re.compile(
    r"(?<![0-9.,])[0-9]{1,4}(?P<sign>[-/.:])[0-9]{1,4}(?P=sign)[0-9]{1,4}(?![0-9])"
    r"|(?<![0-9.,])0[0-9]+[-/:][0-9]+(?![0-9.])|(?<![0-9.,])[0-9]+[-/:]0[0-9]+(?![0-9.])"
    r"|^[12][0-9]{3}-(?:1[0-2]|[12][0-9]{3})$"
    rf"|[0-9](?:st|nd|rd|th)?\s*(?:of\s+)?{_MONTH}(?![a-z])|(?<![a-z]){_MONTH}\s*[0-9]"
    r"|[0-9]\s*[ap]\.?m\.?(?![a-z])"
)
#: A word and a number, such as `Day 5`.
_NUMBERED = re.compile(r"([^\W\d_]{3,})\s+[0-9]+")


def is_text(expected: str) -> bool:
    """Whether an expected answer is words or a date without mathematics, which are compared as text."""
    plain = _plain(expected)
    if is_date(expected):
        return True
    if numbered := _NUMBERED.fullmatch(plain.strip()):
        return _is_word(numbered[1]) and numbered[1].lower() not in _FUNCTIONS
    if not all(sign in _PUNCTUATION + _LINKS or sign.isspace() or _is_letter(sign) for sign in plain):
        return False
    runs = [run for run in _LETTERS.findall(plain) if run.lower() not in _JOINING]
    if any(sign in plain for sign in _LINKS):  # x-y and km/h, but co-prime
        return any(len(run) >= _SHORTEST_WORD and not run.isupper() and _is_word(run) for run in runs)
    if any(run.lower() in _FUNCTIONS for run in runs) and (len(runs) > 1 or runs[0].lower() == "infinity"):
        return False
    quoted = {run for text in _TEXT.finditer(expected) for run in _LETTERS.findall(text[1])} - _JOINING
    return any((run in quoted and len(run) > 1) or _is_word(run) for run in runs)


def is_date(answer: str) -> bool:
    """Whether an answer is a date, a time of the day or numbers in such a form."""
    plain = _plain(answer).casefold().strip()
    return bool(_DATE.search(plain)) and all(sign.isalnum() or sign.isspace() or sign in "-/.,:'" for sign in plain)


def same_text(answer: str, expected: str) -> bool:
    """Whether two texts are equal but for case, spaces, LaTeX's commands for text, and a point at the end."""
    one, other = ("".join(_plain(text).casefold().split()).strip('."') for text in (answer, expected))
    return one == other


def _plain(answer: str) -> str:
    """An answer without the LaTeX of text and space, and with one form of each character."""
    while (bare := _TEXT.sub(r" \1 ", answer)) != answer:
        answer = bare
    return _DASHES.sub("-", unicodedata.normalize("NFKC", _SPACE.sub(" ", answer))).replace("\u2019", "'")


def _is_letter(sign: str) -> bool:
    return sign.isalpha() or unicodedata.category(sign).startswith("M")


def _is_word(run: str) -> bool:
    """Whether letters are a word or a name rather than a product of variables, such as `xy`, `abc`, `BCD` or `mgh`."""
    letters = run.lower()
    if letters in _SHORT_WORDS or _ROMAN.fullmatch(run):
        return True
    if not run.isascii():
        return len(run) > 1 and not all("GREEK" in unicodedata.name(letter, "") for letter in run)
    neighbours = "".join(sorted(letters)) in ascii_lowercase
    return len(run) > 2 and not neighbours and (len(run) > _LONGEST_PRODUCT or not _VOWELS.isdisjoint(letters))


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
