"""The budgets of one API key, on a clock that the test turns."""

from __future__ import annotations

import pytest

from graftlm.server.rate_limits import Account, Accounts, LimitReached, RateLimits


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refused(account: Account) -> LimitReached:
    with pytest.raises(LimitReached) as reached:
        account.begin()
    return reached.value


def test_requests_refill_evenly_and_never_beyond_a_minutes_worth(clock: Clock) -> None:
    account = Account(RateLimits(requests_per_minute=3), clock)
    for left in (2, 1, 0):
        account.begin()
        assert account.buckets["requests"].level == left
    reached = refused(account)
    assert (reached.limit, reached.retry_after_seconds) == (3, 20)
    clock.seconds += 19.5
    assert refused(account).retry_after_seconds == 1
    clock.seconds += 0.5
    account.begin()
    assert refused(account).retry_after_seconds == 20
    clock.seconds += 3600
    assert account.buckets["requests"].level == 3


def test_tokens_may_be_overdrawn_and_are_paid_back_first(clock: Clock) -> None:
    account = Account(RateLimits(tokens_per_minute=30), clock)
    account.begin()
    account.use_tokens(20)
    account.begin()
    account.use_tokens(101)
    # 91 are owed and one is needed, at one in two seconds.
    assert refused(account).retry_after_seconds == 184
    clock.seconds += 184
    account.begin()


def test_a_place_is_given_back_and_a_refused_request_takes_none(clock: Clock) -> None:
    account = Account(RateLimits(concurrent_requests=2, requests_per_minute=10), clock)
    account.begin()
    account.begin()
    assert refused(account).limit == 2
    account.end()
    account.begin()
    assert account.buckets["requests"].level == 7


def test_an_account_lives_on_under_its_name_and_other_limits_begin_anew(clock: Clock) -> None:
    accounts = Accounts(clock)
    limits = RateLimits(requests_per_minute=1)
    accounts.of("alice", limits).begin()
    assert refused(accounts.of("alice", limits)).limit == 1
    accounts.of("bob", limits).begin()
    accounts.of("alice", RateLimits(requests_per_minute=2)).begin()
