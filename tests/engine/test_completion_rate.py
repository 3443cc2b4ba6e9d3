"""When a place will be free: told from when others became free."""

from __future__ import annotations

from graftlm.engine.completion_rate import CompletionRate


def test_answers_that_finish_every_other_second_are_expected_to_go_on_so() -> None:
    rate = CompletionRate(now=0.0)
    for second in range(0, 21, 2):
        rate.record(1, now=float(second))
    assert rate.seconds_until(1, now=20.0) == 2
    assert rate.seconds_until(5, now=20.0) == 10


def test_several_answers_of_one_request_count_each() -> None:
    rate = CompletionRate(now=0.0)
    rate.record(1, now=0.0)
    rate.record(4, now=8.0)
    assert rate.seconds_until(3, now=8.0) == 6


def test_what_finished_long_ago_does_not_count() -> None:
    rate = CompletionRate(now=0.0)
    for _ in range(100):
        rate.record(1, now=1.0)
    rate.record(1, now=100.0)
    rate.record(1, now=110.0)
    assert rate.seconds_until(2, now=110.0) == 20


def test_before_anything_finished_it_takes_as_long_again_as_it_took() -> None:
    rate = CompletionRate(now=100.0)
    assert rate.seconds_until(1, now=107.0) == 7
    assert rate.seconds_until(1, now=5000.0) == 60


def test_nobody_is_told_to_come_back_at_once() -> None:
    rate = CompletionRate(now=0.0)
    for _ in range(100):
        rate.record(1, now=1.0)
    assert rate.seconds_until(1, now=1.0) == 1
