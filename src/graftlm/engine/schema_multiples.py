"""What the `multipleOf` keywords of a JSON schema come to. Knows JSON, and nothing of grammars."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any


def least_common_multiple(schema: str) -> int:
    """Of all numbers that a schema's `multipleOf` name, in units of their last decimal place; 1 if there are none.

    Raises:
        ValueError, RecursionError: the text is not JSON, or nested too deeply.
    """
    numbers = _multiples(json.loads(schema, parse_float=Decimal))
    places = max((-int(number.as_tuple().exponent) for number in numbers), default=0)
    return math.lcm(*(int(number.scaleb(max(places, 0))) for number in numbers))


def _multiples(schema: Any) -> list[Decimal]:
    """Numbers only: a property may have that name."""
    found: list[Decimal] = []
    unseen = [schema]
    while unseen:
        match unseen.pop():
            case dict() as members:
                number = members.get("multipleOf")
                if isinstance(number, int | Decimal) and not isinstance(number, bool):
                    found.append(Decimal(number))
                unseen += members.values()
            case list() as entries:
                unseen += entries
    return found
