"""Answer extraction and grading, as pure functions of the completion's text."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from functools import lru_cache
from math import gcd
from string import ascii_lowercase
from typing import Literal, get_args

from qerl.data import expressions
from qerl.settings.data import AnswerForm, CountdownUse, RecordFormat

# Numbers as people write them: with a name, a currency or a unit, in plain text or in LaTeX.
#
# Only known text may surround a number, so that no word can change or retract its value. `18 dollars` is 18. `18
# thousand`, `18%`, `18k` and `18 is wrong` don't count as numbers here. Units are a closed list (`UNITS`), which a data
# set extends (`DatasetSettings.units`).

#: The most characters of an amount.
_LONGEST_AMOUNT = 200

_UNITS = """
dollar dollars buck bucks cent cents euro euros pound pounds yen rupee rupees USD EUR GBP
second seconds sec secs s minute minutes min mins hour hours hr hrs h day days week weeks month months year years
years_old
meter meters metre metres m centimeter centimeters centimetre centimetres cm millimeter millimeters mm kilometer
kilometers kilometre kilometres km inch inches foot feet ft yard yards yd mile miles mi
gram grams g kilogram kilograms kg milligram milligrams mg ounce ounces oz lb lbs ton tons tonne tonnes
liter liters litre litres l L milliliter milliliters mL ml cup cups gallon gallons pint pints quart quarts
tablespoon tablespoons teaspoon teaspoons
degree degrees ° °C °F radian radians rad mph kph calorie calories watt watts volt volts newton newtons joule joules
unit units time times way ways point points step steps item items piece pieces part parts
person people child children kid kids adult adults student students teacher teachers boy boys girl girls man men
woman women friend friends member members player players worker workers guest guests passenger passengers
animal animals dog dogs cat cats bird birds fish chicken chickens cow cows horse horses sheep
book books page pages pencil pencils pen pens card cards stamp stamps ticket tickets toy toys ball balls marble marbles
coin coins bag bags box boxes bottle bottles car cars room rooms house houses shirt shirts seat seats table tables
apple apples orange oranges banana bananas egg eggs cookie cookies cake cakes candy candies pizza pizzas slice slices
flower flowers tree trees game games question questions problem problems lap laps trip trips song songs
"""
UNITS = frozenset(unit.replace("_", " ") for unit in _UNITS.split())
#: Units with fewer letters are symbols, whose case matters.
_SHORTEST_WORD = 4

_DIGITS = r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_CURRENCY = r"[$€£¥]"
_LETTER = r"[A-Za-z](?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?"
_NAME = rf"{_LETTER}(?:\s*\+\s*{_LETTER})*"
_AMOUNT = re.compile(
    rf"(?:{_NAME}\s*=\s*)?(?:{_CURRENCY}\s*)?(?P<sign>[-+]?)\s*(?:{_CURRENCY}\s*)?"
    rf"(?P<over>{_DIGITS})(?:\s*/\s*(?P<under>[0-9]+))?\s*(?P<unit>(?:[^\s0-9.,;:].*?)?)\s*\.?",
    re.DOTALL,
)
_POWER = re.compile(r"[²³]|\^[23]|\^\{[23]\}")
#: `per cent` is a factor, not a ratio of units.
_PER = re.compile(r"\s*/\s*|(?:^|\s+)per\s+(?!cent\b)")
#: LaTeX that is typeset like plain text, and the replacements.
_LATEX = [
    (re.compile(r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{(\s*[^\W\d_°%$][^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[dt]?frac\{(-?[0-9]+)\}\{([0-9]+)\}"), r"\1/\2"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\[,;: ]|(?<=[0-9])~|\\q?quad(?![A-Za-z])"), " "),
    (re.compile(r"\\([%$])"), r"\1"),
    (re.compile(r"\^(?:\\circ|\{\\circ\})|\\degrees?(?![A-Za-z])"), "°"),
    (re.compile("\u2212"), "-"),
]


def read_amount(text: str, units: Collection[str] = ()) -> str | None:
    """The number that `text` states, in digits. None if the text is anything else or says more.

    A fraction in lowest terms counts as the equal decimal. `36/2` and `1/3` don't count.
    """
    if len(text) > _LONGEST_AMOUNT:
        return None
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    amount = _AMOUNT.fullmatch(text.strip())
    if amount is None or not is_unit(amount["unit"], units):
        return None
    sign, over, under = amount["sign"].replace("+", ""), amount["over"], amount["under"]
    if under is None:
        return f"{sign}{over}"
    if not over.isdigit() or int(under) < 2 or gcd(int(over), int(under)) > 1:
        return None
    try:
        return f"{sign}{Context(prec=50, traps=[Inexact]).divide(Decimal(over), Decimal(under)):f}"
    except Inexact:
        return None


def is_unit(text: str, units: Collection[str] = ()) -> bool:
    """Whether `text` is empty, a currency or a unit of the list or of `units`, such as `m^2`, `km/h` or `per day`."""
    first, *per = _PER.split(text, maxsplit=1)
    return _is_simple(first, units) and all(other != "" and _is_simple(other, units) for other in per)


def _is_simple(text: str, units: Collection[str]) -> bool:
    if text in units or re.fullmatch(f"{_CURRENCY}?", text):
        return True
    bare = _POWER.sub("", text, count=1).removeprefix("square ").removeprefix("cubic ").strip()
    return bare in UNITS or (len(bare) >= _SHORTEST_WORD and bare.lower() in UNITS)


# Words, dates and relations in an answer of math that math-verify misreads, so that a grader must check them.
#
# math-verify drops `\text{...}` and takes the last side of a chain: `5 \text{ is wrong}`, `5 \text{ thousand}` and
# `7=5` equal 5 for it. Words are products of variables for it, and dates are differences: `cat` equals `act`, and
# `2025-01-05` equals 2019.

_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|math(?:rm|it|bf))\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_COMMAND = re.compile(r"\\(?:(?:begin|end)\s*\{[^{}]*\}(?:\{[lcr| ]*\})?|[A-Za-z]+|.)", re.DOTALL)
_TOKEN = re.compile(r"[^\W\d_]+|[0-9]+")
_LETTERS = re.compile(r"[^\W\d_]+")
#: From the first `\\text` on, math-verify drops all up to a brace at the end: `5 \\text{ m}, 6 \\text{ m}` is 5.
_AFTER_UNIT = re.compile(r"\s*(?:\^\{?[23]\}?)?[\s.$]*\Z")
#: Runs of letters with nothing but space between them.
_SENTENCE = re.compile(r"[^\W\d_]+(?:[\s']+[^\W\d_]+)*")
#: Outside of `\text`, shorter runs of letters are products of variables.
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
    plain = " ".join(_TEXT.sub(r"\1", answer).split())
    words = [word for word in _words(answer, units) if len(word) > 1]  # single letters may be variables
    return bool(words) and not _SINGLE.fullmatch(plain) and plain.strip(". ").lower() not in _PHRASES


def _words(answer: str, units: Collection[str]) -> set[str]:
    """The words inside `\\text` or readable as text, in lower case, without units, `and` and `or`."""
    words: list[str] = []
    rest = _TEXT.sub("+", answer)
    for sentence in _SENTENCE.findall(_COMMAND.sub("+", rest)):
        runs = _LETTERS.findall(sentence)
        for run in runs:
            # Long runs are words, and all but single letters where several stand in a row.
            is_long = len(run) >= _SHORTEST_WORD and not run.isupper()
            if (is_long or (len(runs) > 1 and len(run) > 1)) and not is_unit(run, units):
                words.append(run)
    for text in _TEXT.finditer(answer):
        if not (is_unit(text[1].strip(" ."), units) and _AFTER_UNIT.match(answer, text.end())):
            words += _TOKEN.findall(text[1])
    if "\\text" in rest:
        words.append("\\text")
    return {word.casefold() for word in words} - _JOINING


# Arithmetic formulas of whole numbers, read strictly: their exact value and a form that equal solutions share.
#
# A formula has whole numbers, `+ - * /`, parentheses and spaces, and nothing else: no sign before a number, no
# decimals, no equality. Completions are untrusted text: Python's parser reads their syntax, and nothing is evaluated.

#: A number, or a sign with its two operands.
Formula = int | tuple[str, "Formula", "Formula"]

#: The most characters of a formula, which bounds the recursion's depth and the value's size.
_LONGEST_FORMULA = 100
#: What Python would read as another expression, such as a number with a leading zero, has other characters or is none.
_NO_FORMULA = re.compile(r"[^-+*/() 0-9]|[0-9]{7}|(?<![0-9])0[0-9]")
_SIGN_OF: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_SUM, _PRODUCT = ("+", "-"), ("*", "/")


def parse_formula(text: str) -> Formula | None:
    """The formula that the whole text represents, or None."""
    text = text.rstrip(" ")
    if len(text) > _LONGEST_FORMULA or _NO_FORMULA.search(text):
        return None
    try:
        return _formula(ast.parse(text.lstrip(" "), mode="eval").body)
    except SyntaxError:
        return None


def _formula(node: ast.expr) -> Formula:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGN_OF:
        return _SIGN_OF[type(node.op)], _formula(node.left), _formula(node.right)
    raise SyntaxError("a formula has whole numbers and + - * / alone")


def value(formula: Formula) -> Fraction | None:
    """The exact value; None if the formula divides by zero."""
    if isinstance(formula, int):
        return Fraction(formula)
    sign, left, right = formula[0], value(formula[1]), value(formula[2])
    if left is None or right is None or (sign == "/" and right == 0):
        return None
    return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[sign](right)


def leaves(formula: Formula) -> list[int]:
    """The numbers of the formula from left to right, with repetitions."""
    return [formula] if isinstance(formula, int) else leaves(formula[1]) + leaves(formula[2])


def canonical(formula: Formula) -> str:
    """A text that two formulas share if order, grouping and signs within sums and products alone tell them apart.

    So `2*(8-3)`, `(8-3)*2` and `8*2-3*2` are two formulas, because the last one uses a number twice.
    """
    sign, key = _signed(formula)
    return key if sign > 0 else f"-{key}"


def _signed(formula: Formula) -> tuple[int, str]:
    """The sign and the form of the formula without it: b - a is -(a - b)."""
    if isinstance(formula, int):
        return 1, str(formula)
    signs = _SUM if formula[0] in _SUM else _PRODUCT
    parts = [(direction, *_signed(part)) for direction, part in _parts(formula, signs, 1)]
    if signs == _SUM:
        terms = sorted(
            ((direction * sign, key) for direction, sign, key in parts), key=lambda term: (term[1], -term[0])
        )
        first = terms[0][0]
        return first, "(" + "".join(("+" if sign == first else "-") + key for sign, key in terms) + ")"
    negative = sum(sign < 0 for _, sign, _ in parts) % 2
    ordered = sorted((key, -power) for power, _, key in parts)
    return -1 if negative else 1, "(" + "".join(("/" if power > 0 else "*") + key for key, power in ordered) + ")"


def _parts(formula: Formula, signs: tuple[str, str], direction: int) -> Iterator[tuple[int, Formula]]:
    """The terms of a sum of sums, or the factors of a product of products, each with 1 or, if it is inverted, -1."""
    if isinstance(formula, tuple) and formula[0] in signs:
        yield from _parts(formula[1], signs, direction)
        yield from _parts(formula[2], signs, direction if formula[0] == signs[0] else -direction)
    else:
        yield direction, formula


# Countdown: problems to reach a target from given numbers with + - * /, graded by a formula's value and numbers.

_GOAL = re.compile(r"([0-9]+) = (all|some) of ([0-9]+(?: [0-9]+)*)")


@dataclass(frozen=True)
class Goal:
    """The goal of a formula. As text, such as `20 = all of 3 4 8`, it is the answer of a problem."""

    target: int
    numbers: tuple[int, ...]
    use: CountdownUse = "all"

    @staticmethod
    def read(text: str) -> Goal:
        """The goal from its text. Raises ValueError for another text."""
        match = _GOAL.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no goal of a countdown problem, such as '20 = all of 3 4 8'")
        [use] = [word for word in get_args(CountdownUse) if word == match.group(2)]
        return Goal(int(match.group(1)), tuple(map(int, match.group(3).split())), use)

    def __str__(self) -> str:
        return f"{self.target} = {self.use} of {' '.join(map(str, self.numbers))}"

    @property
    def question(self) -> str:
        """The goal as a question."""
        return f"Use {self.use} of {', '.join(map(str, self.numbers))} to make {self.target}."

    def is_reached_by(self, formula: Formula) -> bool:
        """Whether the formula has the target as its value and uses the numbers as the goal says."""
        used, numbers = Counter(leaves(formula)), Counter(self.numbers)
        allowed = used == numbers if self.use == "all" else used <= numbers
        return allowed and value(formula) == self.target


def solution_key(formula: str) -> str:
    """The canonical form of a formula, by which distinct solutions are counted."""
    parsed = parse_formula(formula)
    if parsed is None:
        raise ValueError(f"{formula!r} is no formula")
    return canonical(parsed)


# Answer extraction and grading, as pure functions of the completion's text.
#
# The place of the answer in a completion depends on the form that the data set asks for:
#
# reasoning_gym has its answer in tags in either form, and the task of the library scores it.
#
# native: gsm8k as `#### n` (the first one counts, read as lm-eval's strict match reads it), math, prompt and aime as
# `\boxed{}` (the last one counts). countdown has a formula after the first `#### `, to the end of the line, without
# delimiters.
#
# tags: `<think>...</think><answer>...</answer>`, the answer inside the answer tags. The last `<answer>` counts, up to
# the first `</answer>` after it. A tag that is never closed states nothing, even if a closed one stands before it.
# Inside, gsm8k and aime expect a number, math and prompt an expression, countdown a formula. `\boxed{}`,
# `$...$`, `\(...\)`, `\[...\]` and `**...**` around a number or an expression are removed. If a longer text ends with
# one box, the box counts.
#
# In both forms, thinking never counts. Only the text after the last `</think>` and before any later `<think>` does. A
# `</think>` without a `<think>` is fine, since some chat templates open the thinking in the prompt. Tags are lower case
# and exact; `<Answer>` and `<answer >` are text.
#
# An expression of math is equal if math-verify says so and it says no more than the expected answer.
# Words and dates are equal as text, in any case and with any spaces. After `####`, all commas
# are ignored, as in lm-eval. Elsewhere only commas between thousands are, and in math `1,2` is two numbers.

Verdict = Literal["right", "wrong", "timeout"]

#: The record formats whose answers are expressions; in the others they are numbers or formulas.
EXPRESSIONS = ("math", "prompt")

_ANSWER_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
#: The pattern of lm-eval's strict match.
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_FORMULA = re.compile(r"#### ([^\n]*)")
_GOLD_HASHES = re.compile(r"####\s?(.*)")
#: Percentages of gsm8k are plain numbers, and its grader ignores what follows a number.
_GOLD_UNITS = ("%",)
_NUMBER = re.compile(rf"([-+\u2212]?)({_ANSWER_DIGITS})\.?")
_THOUSANDS = re.compile(r"[-+\u2212]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
_DELIMITED = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$]+)\$|\*\*([^*]+)\*\*|\\\(((?:(?!\\[()]).)+)\\\)|\\\[((?:(?!\\[\[\]]).)+)\\\]", re.DOTALL
)
#: The most nested delimiters around an answer.
_MOST_DELIMITERS = 4
_BOXED = "\\boxed{"
#: A box without braces, as a few solutions of MATH have it; lm-eval too reads it up to the dollar sign.
_UNBRACED = re.compile(r"\\boxed\s+([^\s{}$\\]+)\$")
_BEFORE_BOX = re.compile(r"(?:[\s$*]|\\[(\[])*")
_AFTER_BOX = re.compile(r"(?:[\s.$*]|\\[)\]])*")
#: The tags of thinking and of the answer, in their order.
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAGGED = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
#: The most characters of an expression.
_LONGEST_EXPRESSION = 512
_AIME_ANSWER = re.compile(r"[0-9]{1,3}")


def after_thinking(text: str) -> str:
    """The part of a completion after the thinking, which may state an answer."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def gold(solution: str, record_format: RecordFormat, units: Collection[str] = ()) -> str | None:
    """Return the answer that the worked solution of a record states, as written; None if it states none.

    An answer of gsm8k is the line after the last `####`, which must be one number, with or without a unit. It is none
    if a completion of the same text would count as another number.
    """
    if record_format != "gsm8k":
        return extract(_UNBRACED.sub(r"\\boxed{\1}$", solution), record_format)
    lines = _GOLD_HASHES.findall(after_thinking(solution))
    number = read_amount(_bare(lines[-1]) or "", (*units, *_GOLD_UNITS)) if lines else None
    graded = extract(solution, record_format)
    agree = number is not None and (graded is None or _number(graded, record_format) == _number(number, record_format))
    return number if agree else None


def extract(
    text: str, record_format: RecordFormat, form: AnswerForm = "native", units: Collection[str] = ()
) -> str | None:
    """Return the final answer that `text` states, None if it states none.

    `units` may follow a number besides `UNITS`. A number with units is returned without them, any
    other answer as written, without delimiters.
    """
    return _find(text, record_format, form, units)[0]


def boxed(text: str) -> str | None:
    """The content of the last box after the thinking, empty if the box is open; None if there is no box."""
    spoken = after_thinking(text)
    box = _last_boxed(spoken)
    return box[0] if box else "" if _BOXED in spoken else None


def statement(answer: str, record_format: RecordFormat, form: AnswerForm = "native") -> str:
    """Return the text in which a completion is expected to state `answer`, as `extract` reads it."""
    if record_format == "reasoning_gym":
        answer = json.loads(answer)["answer"] or "..."
    if form == "tags":
        return f"<think>...</think><answer>{answer}</answer>"
    if record_format == "reasoning_gym":
        return f"<answer>{answer}</answer>"
    return f"#### {answer}" if record_format in ("gsm8k", "countdown") else f"{_BOXED}{answer}}}"


def is_correct(
    text: str,
    problem_answer: str,
    record_format: RecordFormat,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> bool:
    """Whether the final answer of `text` equals `problem_answer`, as a number or expression, or reaches its goal."""
    return verdict(text, problem_answer, record_format, form, units) == "right"


def credit(
    text: str,
    problem_answer: str,
    record_format: RecordFormat,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> float:
    """For reasoning_gym the points that its task gives the answer of `text`, from 0 to 1; else 1 if it is correct."""
    if record_format != "reasoning_gym":
        return float(is_correct(text, problem_answer, record_format, form, units))
    answer = extract(text, record_format, form, units)
    return 0.0 if answer is None else _points(answer, problem_answer) or 0.0


@lru_cache(maxsize=4096)
def _points(answer: str, entry: str) -> float | None:
    return expressions.score(answer, entry)


def verdict(
    text: str,
    problem_answer: str,
    record_format: RecordFormat,
    form: AnswerForm = "native",
    units: Collection[str] = (),
) -> Verdict:
    """The verdict on `text`, as `is_correct`; `timeout` if the comparison of expressions exceeded its limits."""
    answer = extract(text, record_format, form, units)
    if answer is None or not problem_answer:  # of a problem without an answer nothing is right
        return "wrong"
    if record_format == "countdown":
        formula = parse_formula(answer)
        return "right" if formula is not None and Goal.read(problem_answer).is_reached_by(formula) else "wrong"
    if record_format == "reasoning_gym":
        points = _points(answer, problem_answer)
        return "timeout" if points is None else "right" if points == 1 else "wrong"
    number, expected = (_number(stated, record_format) for stated in (answer, problem_answer))
    if number is not None and expected is not None:
        return "right" if number == expected else "wrong"
    return _same_expression(problem_answer, answer, tuple(units)) if record_format in EXPRESSIONS else "wrong"


def well_formed(
    text: str, record_format: RecordFormat, form: AnswerForm = "native", units: Collection[str] = ()
) -> bool:
    """Whether `text` states exactly one final answer, which `extract` finds, and nothing after it.

    With tags, the text has each of the four tags once, in their order, with only white space outside. Inside the
    answer's tags stands only the answer. Prose such as `I do not know` isn't an answer.
    """
    answer, is_alone = _find(text, record_format, form, units)
    if answer is None or (record_format in EXPRESSIONS and is_prose(answer[:_LONGEST_EXPRESSION], units)):
        return False
    return is_alone


def _find(text: str, record_format: RecordFormat, form: AnswerForm, units: Collection[str]) -> tuple[str | None, bool]:
    """The answer that a completion states, None if it states none, and whether it stands there as it should."""
    spoken = after_thinking(text)
    if record_format == "reasoning_gym" and form == "native":
        before, _, after = spoken.rpartition("</answer>")
        return _content(spoken).strip() or None, before.count("<answer>") == 1 and not after.strip()
    if form == "tags":
        content = _content(spoken)
        before, box, _ = content.partition(_BOXED)
        is_alone = all(text.count(tag) == 1 for tag in TAGS) and _TAGGED.fullmatch(text) is not None
        if record_format == "reasoning_gym":
            return content.strip() or None, is_alone
        is_alone = is_alone and (not box or _BEFORE_BOX.fullmatch(before) is not None)
        if record_format == "countdown":
            formula = content.strip()
            return (formula if parse_formula(formula) is not None else None), is_alone
        answer = _bare(content) or None
        if answer is not None and record_format not in EXPRESSIONS:
            amount = read_amount(answer, units)
            answer = None if amount is None else _in_format(amount, record_format, units)
        return answer, is_alone
    if record_format in (*EXPRESSIONS, "aime"):
        found = _last_boxed(spoken)
        if found is None:
            return None, False
        is_alone = spoken.count(_BOXED) == 1 and _AFTER_BOX.fullmatch(spoken, found[1]) is not None
        return _in_format(found[0].strip(), record_format, units), is_alone
    match = (_HASHES if record_format == "gsm8k" else _FORMULA).search(spoken)
    if match is None:
        return None, False
    stated = match.group(1).rstrip(".,") if record_format == "gsm8k" else match.group(1)
    is_answer = (_number(stated, "gsm8k") if record_format == "gsm8k" else parse_formula(stated)) is not None
    is_alone = spoken.count("####") == 1 and not spoken[match.start(1) + len(stated) :].strip()
    return (stated.strip() if is_answer else None), is_alone


def _content(spoken: str) -> str:
    """The content of the last answer tag, empty if the tag isn't closed."""
    _, opened, rest = spoken.rpartition("<answer>")
    content, closed, _ = rest.partition("</answer>")
    return content if opened and closed else ""


def _bare(content: str) -> str | None:
    """The content of answer tags without box and delimiters; None if a box is open, not the only one or not the end."""
    if _BOXED in content:
        boxed = _last_boxed(content)
        if boxed is None or content.count(_BOXED) > 1 or not _AFTER_BOX.fullmatch(content, boxed[1]):
            return None
        content = boxed[0]
    for _ in range(_MOST_DELIMITERS):
        delimited = _DELIMITED.fullmatch(content.strip())
        content = delimited.group(delimited.lastindex or 0) if delimited else content
    return content.strip()


def _in_format(answer: str, record_format: RecordFormat, units: Collection[str]) -> str | None:
    if record_format == "aime":
        amount = read_amount(answer, units)
        return amount if amount and _AIME_ANSWER.fullmatch(amount) else None
    return answer or None


def _last_boxed(text: str) -> tuple[str, int] | None:
    """Content of the last `\\boxed{}` and the index after its closing brace; None if there is none or it is open."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for brace in re.finditer(r"\\?[{}]", text[start:]):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : start + brace.start()], start + brace.end()
    return None


def _number(text: str, record_format: RecordFormat) -> Decimal | None:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or (record_format in EXPRESSIONS and "," in text and not _THOUSANDS.match(text)):
        return None
    value = Decimal(match.group(2).replace(",", ""))
    return value if match.group(1) in ("", "+") else value.copy_negate()


@lru_cache(maxsize=4096)
def _same_expression(expected: str, answer: str, units: tuple[str, ...]) -> Verdict:
    if expected.strip() == answer:
        return "right"
    if len(answer) > _LONGEST_EXPRESSION:
        return "wrong"
    if is_text(expected):
        return "right" if same_text(answer, expected) else "wrong"
    if is_date(answer) or tells_more(answer, expected, units):
        return "wrong"
    equal = expressions.equal(*(text.replace("\u2212", "-") for text in (expected, answer)))
    return "timeout" if equal is None else "right" if equal else "wrong"
