"""Which pointers of a launch may be null."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupaged.errors import ArgumentValueError
from cupaged.source import Parameter


class NullPointers:
    """The rule of one kernel.

    Args:
        parameters: of the kernel, in order.
        nullable: see `KernelEntry.nullable`; None for a kernel of the user's, whose pointers may all be null.

    Attributes:
        needed: picks from a launch's argument values the pointers that must not be null, or not always. Where
            none of them is 0 there is nothing to check.
    """

    def __init__(
        self, parameters: Sequence[Parameter], nullable: Mapping[str, tuple[str, ...]] | None
    ) -> None:
        self._places = {parameter.name: place for place, parameter in enumerate(parameters)}
        pointers = [] if nullable is None else [p.name for p in parameters if p.kind == "ptr"]
        # Name -> arguments of which one must be 0 for the pointer to be null.
        self._reasons = {name: (nullable or {}).get(name) for name in pointers}
        places = [self._places[name] for name, reasons in self._reasons.items() if reasons != ()]
        self.needed: Callable[[Sequence[Any]], tuple[Any, ...]] = lambda values: tuple(
            values[place] for place in places
        )
        if len(places) > 1:  # of one place, an itemgetter makes no tuple
            self.needed = operator.itemgetter(*places)

    def check(self, values: Sequence[Any]) -> None:
        """Raise ArgumentValueError for a null pointer that the kernel is going to use.

        Args:
            values: of a launch that has work to do.
        """
        for name, reasons in self._reasons.items():
            if values[self._places[name]] != 0 or reasons == ():
                continue
            if reasons is None or all(values[self._places[other]] for other in reasons):
                where = "" if reasons is None else f" unless {' or '.join(reasons)} is 0"
                raise ArgumentValueError(f"{name}: got a null pointer (address 0), not allowed{where}")
