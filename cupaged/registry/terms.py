"""Integers that a launch will bring, as text: what is calculated with them is an expression.

A grid is declared once, by a function of integers. Called with numbers it is a launch's grid; called with
`Term`s it says how a loader in another language finds the same grid.
"""

from __future__ import annotations

from typing import cast

_STRENGTHS = {"+": 1, "-": 1, "*": 2, "//": 2}
_WHOLE = 3  # a name, or a call


class Term:
    """An expression of ``+ - * //``, ``min`` and ``max`` over names and integers; nothing in it is negative.

    Args:
        text: the expression.
        strength: how strongly its outermost operator binds.
    """

    def __init__(self, text: str, strength: int = _WHOLE) -> None:
        self._text = text
        self._strength = strength

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> Term:
        return self._with("+", other)

    def __sub__(self, other: object) -> Term:
        return self._with("-", other)

    def __mul__(self, other: object) -> Term:
        return self._with("*", other)

    def __floordiv__(self, other: object) -> Term:
        return self._with("//", other)

    def __rmul__(self, other: object) -> Term:
        return self._with("*", other)

    def _with(self, operator: str, other: object) -> Term:
        if other == (0 if operator in "+-" else 1):
            return self
        strength = _STRENGTHS[operator]
        return Term(f"{_operand(self, strength)} {operator} {_operand(other, strength + 1)}", strength)


def _operand(value: object, least: int) -> str:
    """An operand, in parentheses where it binds less strongly than it must."""
    return f"({value})" if isinstance(value, Term) and value._strength < least else str(value)


def named(name: str) -> int:
    """The integer of that name, for a function of integers: a `Term`, though none of its callers can tell."""
    return cast(int, Term(name))


def smaller(a: int, b: int) -> int:
    """``min(a, b)``, of terms too."""
    return _chosen("min", a, b) if _has_term(a, b) else min(a, b)


def larger(a: int, b: int) -> int:
    """``max(a, b)``, of terms too."""
    return _chosen("max", a, b) if _has_term(a, b) else max(a, b)


def div_ceil(a: int, b: int) -> int:
    """Smallest integer not below a / b, for a >= 0 and b > 0; of terms too."""
    return (a + (b - 1)) // b


def _has_term(*values: object) -> bool:
    return any(isinstance(value, Term) for value in values)


def _chosen(function: str, a: int, b: int) -> int:
    return named(f"{function}({a}, {b})")
