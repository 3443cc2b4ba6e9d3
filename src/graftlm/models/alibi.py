"""Slopes of ALiBi's bias."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """One slope per head: for a power of two, a geometric sequence that ends at 2^-8; for other numbers of heads, that
    of the next smaller power, and then every other slope of the next larger one.

    Source: ALiBi, arXiv 2108.12409, and its reference code.
    """
    closest = 2 ** math.floor(math.log2(num_heads))
    slopes = [_slope(power, closest) for power in range(1, closest + 1)]
    between = [_slope(power, 2 * closest) for power in range(1, 2 * closest, 2)]
    return tuple(slopes + between[: num_heads - closest])


def _slope(power: int, num_heads: int) -> float:
    return float(2.0 ** (-8.0 * power / num_heads))
