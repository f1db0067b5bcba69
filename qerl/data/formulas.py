"""Arithmetic formulas of whole numbers, read strictly: their exact value and a form that equal solutions share.

A formula has whole numbers, `+ - * /`, parentheses and spaces, and nothing else: no sign before a number, no decimals,
no equality. Completions are untrusted text, so a parser reads them, and no text is ever evaluated as code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

#: A number, or a sign with its two operands.
Formula = int | tuple[str, "Formula", "Formula"]

#: The most characters of a formula, which bounds the recursion's depth and the value's size.
_LONGEST = 100
_TOKENS = re.compile(r" *(?:(0|[1-9][0-9]{0,5})(?![0-9])|([-+*/()]))")
_SUM, _PRODUCT = ("+", "-"), ("*", "/")


def parse_formula(text: str) -> Formula | None:
    """The formula that the whole text represents, or None."""
    tokens = _tokens(text)
    if tokens is None:
        return None
    try:
        formula, rest = _chain(tokens, 0, _SUM)
    except (IndexError, ValueError):
        return None
    return formula if rest == len(tokens) else None


def value(formula: Formula) -> Fraction | None:
    """The exact value; None if the formula divides by zero."""
    if isinstance(formula, int):
        return Fraction(formula)
    sign, left, right = formula[0], value(formula[1]), value(formula[2])
    if left is None or right is None or (sign == "/" and right == 0):
        return None
    return {"+": left.__add__, "-": left.__sub__, "*": left.__mul__, "/": left.__truediv__}[sign](right)


def leaves(formula: Formula) -> Iterator[int]:
    """The numbers of the formula from left to right, with repetitions."""
    if isinstance(formula, int):
        yield formula
    else:
        yield from leaves(formula[1])
        yield from leaves(formula[2])


def canonical(formula: Formula) -> str:
    """A text that two formulas share if order, grouping and signs within sums and products alone tell them apart.

    So `2*(8-3)`, `(8-3)*2` and `8*2-3*2` are two formulas, because the last one uses a number twice.
    """
    sign, key = _signed(formula)
    return key if sign > 0 else f"-{key}"


def _tokens(text: str) -> list[str] | None:
    text = text.rstrip(" ")
    tokens, place = [], 0
    while place < len(text) <= _LONGEST:
        match = _TOKENS.match(text, place)
        if match is None:
            return None
        tokens.append(match.group(1) or match.group(2))
        place = match.end()
    return tokens or None


def _chain(tokens: list[str], place: int, signs: tuple[str, str]) -> tuple[Formula, int]:
    """The sum (or product) that begins at `place`, grouped from the left, and the place after it."""
    formula, place = _operand(tokens, place, signs)
    while place < len(tokens) and tokens[place] in signs:
        right, after = _operand(tokens, place + 1, signs)
        formula, place = (tokens[place], formula, right), after
    return formula, place


def _operand(tokens: list[str], place: int, signs: tuple[str, str]) -> tuple[Formula, int]:
    if signs == _SUM:
        return _chain(tokens, place, _PRODUCT)
    if tokens[place] != "(":
        return int(tokens[place]), place + 1
    formula, place = _chain(tokens, place + 1, _SUM)
    if tokens[place] != ")":
        raise ValueError("a parenthesis isn't closed")
    return formula, place + 1


def _signed(formula: Formula) -> tuple[int, str]:
    """The sign and the form of the formula without it: b - a is -(a - b)."""
    if isinstance(formula, int):
        return 1, str(formula)
    if formula[0] in _SUM:
        terms = sorted(_terms(formula, 1), key=lambda term: (term[1], -term[0]))
        first = terms[0][0]
        return first, "(" + "".join(("+" if sign == first else "-") + key for sign, key in terms) + ")"
    factors = list(_factors(formula, 1))
    negative = sum(sign < 0 for _, sign, _ in factors) % 2
    ordered = sorted((key, -power) for power, _, key in factors)
    return -1 if negative else 1, "(" + "".join(("/" if power > 0 else "*") + key for key, power in ordered) + ")"


def _terms(formula: Formula, sign: int) -> Iterator[tuple[int, str]]:
    """The terms of a sum of sums, each with its sign."""
    if isinstance(formula, tuple) and formula[0] in _SUM:
        yield from _terms(formula[1], sign)
        yield from _terms(formula[2], sign if formula[0] == "+" else -sign)
    else:
        inner, key = _signed(formula)
        yield sign * inner, key


def _factors(formula: Formula, power: int) -> Iterator[tuple[int, int, str]]:
    """The factors of a product of products, each with its power, 1 or -1, and its sign."""
    if isinstance(formula, tuple) and formula[0] in _PRODUCT:
        yield from _factors(formula[1], power)
        yield from _factors(formula[2], power if formula[0] == "*" else -power)
    else:
        yield power, *_signed(formula)
