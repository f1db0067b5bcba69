"""Numbers as people write them: with a name, a currency or a unit, in plain text or in LaTeX.

Only known text may surround a number, so that no word can change or retract its value. `18 dollars` is 18. `18
thousand`, `18%`, `18k` and `18 is wrong` don't count as numbers here. Units are a closed list (`UNITS`), which a data
set extends (`DatasetSettings.units`).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Context, Decimal, Inexact
from math import gcd

#: The most characters of an amount.
_LONGEST = 200

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
    if len(text) > _LONGEST:
        return None
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    amount = _AMOUNT.fullmatch(text.strip())
    if amount is None or not is_unit(amount["unit"], units):
        return None
    number = amount["over"] if amount["under"] is None else _quotient(amount["over"], amount["under"])
    return number and amount["sign"].replace("+", "") + number


def is_unit(text: str, units: Collection[str] = ()) -> bool:
    """Whether `text` is empty, a currency or a unit of the list or of `units`, such as `m^2`, `km/h` or `per day`."""
    first, *per = _PER.split(text, maxsplit=1)
    return _is_simple(first, units) and all(other != "" and _is_simple(other, units) for other in per)


def _is_simple(text: str, units: Collection[str]) -> bool:
    if text in units or re.fullmatch(f"{_CURRENCY}?", text):
        return True
    bare = _POWER.sub("", text, count=1).removeprefix("square ").removeprefix("cubic ").strip()
    return bare in UNITS or (len(bare) >= _SHORTEST_WORD and bare.lower() in UNITS)


def _quotient(over: str, under: str) -> str | None:
    if not over.isdigit() or int(under) < 2 or gcd(int(over), int(under)) > 1:
        return None
    try:
        return f"{Context(prec=50, traps=[Inexact]).divide(Decimal(over), Decimal(under)):f}"
    except Inexact:
        return None
