"""What is calculated with terms reads as what is calculated with numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from cupaged.registry import div_ceil
from cupaged.registry.terms import larger, named, smaller

CALCULATIONS: dict[str, Callable[[int, int, int], int]] = {
    "a + b * c": lambda a, b, c: a + b * c,
    "(a + b) * c": lambda a, b, c: (a + b) * c,
    "a * b // c": lambda a, b, c: a * b // c,
    "a * (b // c)": lambda a, b, c: a * (b // c),
    "a // (b * c)": lambda a, b, c: a // (b * c),
    "a // b // c": lambda a, b, c: a // b // c,
    "a + b - 1 - c * 0": lambda a, b, c: a + b - 1 - c * 0,
    "a + 20 - (b + c)": lambda a, b, c: a + 20 - (b + c),
    "(a + 7) // 8": lambda a, b, c: div_ceil(a, 8),
    "(a + (b - 1)) // b": lambda a, b, c: div_ceil(a, b),
    "min(3, a * b) * c": lambda a, b, c: smaller(3, a * b) * c,
    "max(1, min(a + b, c))": lambda a, b, c: larger(1, smaller(a + b, c)),
    "a * 3": lambda a, b, c: 3 * a,
    "a": lambda a, b, c: 1 * a * 1 // 1 + 0 - 0,
}


@pytest.mark.parametrize("text", CALCULATIONS)
def test_text_and_value_are_those_of_the_calculation(text: str) -> None:
    calculation = CALCULATIONS[text]
    assert str(calculation(named("a"), named("b"), named("c"))) == text
    for a, b, c in itertools.product((1, 2, 5, 9), repeat=3):
        values = {"a": a, "b": b, "c": c}
        assert eval(text, {"min": min, "max": max}, values) == calculation(a, b, c)


def test_numbers_stay_numbers() -> None:
    assert (smaller(2, 3), larger(2, 3), div_ceil(9, 4)) == (2, 3, 3)


def test_a_term_has_no_order() -> None:
    """A grid that compares sizes would be right for launches and wrong for everyone else."""
    with pytest.raises(TypeError, match="not supported"):
        min(named("a"), 3)
