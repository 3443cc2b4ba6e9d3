"""How much one API key may ask for. Knows names and numbers; nothing of HTTP."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Resource = Literal["requests", "tokens"]


@dataclass(frozen=True, kw_only=True)
class RateLimits:
    """None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class LimitReached(Exception):
    """what: which limit, in words. limit: what is allowed. seconds: when it may be worth while to try again."""

    def __init__(self, what: str, *, limit: int, seconds: float) -> None:
        super().__init__(what)
        self.what = what
        self.limit = limit
        self.retry_after_seconds = max(math.ceil(seconds), 1)


class Bucket:
    """A budget that refills evenly, `per_minute` in a minute, and never holds more than that. It may be overdrawn: what
    is owed is paid back before anything else is had.

    Args:
        clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._as_of = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._as_of) * self.per_minute / 60, self.per_minute)
        self._as_of = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        return max(level - self.level, 0) * 60 / self.per_minute


class Account:
    """What one key has used. A request takes a place while it runs and one from the budget of requests. It is admitted
    while the budget of tokens is not used up, and then takes what it computes, as it computes it: one request may
    overdraw the budget, and those after it wait the longer."""

    def __init__(self, limits: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_running = 0
        self.change(limits)

    def change(self, limits: RateLimits) -> None:
        """Other limits from now on. What runs goes on running."""
        self.limits = limits
        per_minute = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
        self.buckets = {name: Bucket(number, self._clock) for name, number in per_minute.items() if number is not None}

    def begin(self) -> None:
        """Raises LimitReached: not now; nothing is taken then."""
        most = self.limits.concurrent_requests
        if most is not None and self._num_running >= most:
            raise LimitReached("too many requests of this API key are running", limit=most, seconds=1)
        for name, needed in (("requests", 1.0), ("tokens", 1.0)):
            bucket = self.buckets.get(name)
            if bucket is not None and bucket.level < needed:
                what = f"the {name} of this API key are used up"
                raise LimitReached(what, limit=bucket.per_minute, seconds=bucket.seconds_until(needed))
        if "requests" in self.buckets:
            self.buckets["requests"].take(1)
        self._num_running += 1

    def use_tokens(self, count: int) -> None:
        if "tokens" in self.buckets:
            self.buckets["tokens"].take(count)

    def end(self) -> None:
        """A request that has begun is over."""
        self._num_running -= 1


class Accounts:
    """Of each key by its name, from its first request on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_name: dict[str, Account] = {}

    def of(self, name: str, limits: RateLimits) -> Account:
        account = self._by_name.get(name)
        if account is None:
            account = self._by_name[name] = Account(limits, self._clock)
        elif account.limits != limits:
            account.change(limits)
        return account
