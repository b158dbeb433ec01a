"""Which numbers a setting may be: one table for each kind of settings, checked when they are made."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError


@dataclass(frozen=True)
class Range:
    """The finite numbers that a setting may be.

    Attributes:
        least: The smallest.
        most: The largest; None: any.
        whole: Whole numbers only.
        without_ends: ``least`` and ``most`` themselves are not among them.
        name: What the person who set it knows it by; empty: the attribute's own name.
    """

    least: float
    most: float | None = None
    whole: bool = False
    without_ends: bool = False
    name: str = ""

    def holds(self, value: Any) -> bool:
        """Return whether ``value`` is one of them; True and False are not numbers."""
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        try:
            if not math.isfinite(value):
                return False
        except OverflowError:
            # An integer that no float can hold.
            return False
        number: Any = value
        most = math.inf if self.most is None else self.most
        return self.least < number < most if self.without_ends else self.least <= number <= most

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        if self.most is not None:
            return f"{kind} between {self.least} and {self.most}" + (", without these" * self.without_ends)
        return f"{kind} above {self.least}" if self.without_ends else f"{kind}, {self.least} or more"


def check_numbers(settings: Any, ranges: Mapping[str, Range]) -> None:
    """Refuse settings of which a number is outside its range, or is none.

    Args:
        settings: An object with the attributes ``ranges`` names.
        ranges: By attribute.

    Raises:
        RequestError: Naming the first such attribute, its value and what it may be.
    """
    for attribute, allowed in ranges.items():
        check_number(allowed.name or attribute, getattr(settings, attribute), allowed)


def check_number(name: str, value: Any, allowed: Range) -> None:
    """Refuse a number outside its range, or what is none.

    Raises:
        RequestError: Naming it, its value and what it may be.
    """
    if not allowed.holds(value):
        raise RequestError(
            f"{name}={value!r} was asked", limit=f"It must be {allowed}", way_out=f"Change {name}"
        )
