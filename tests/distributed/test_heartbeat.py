"""A worker is silent for as many looks as nothing was heard of it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from graftlm.distributed.heartbeat import Pulse


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)


def test_silence_is_counted_from_the_last_beat(store: TCPStore) -> None:
    pulse = Pulse(store, "worker-1", 0.5)
    store.add("worker-2", 1)
    assert [pulse.look(), pulse.look()] == [0.5, 1.0]
    store.add("worker-1", 1)
    assert [pulse.look(), pulse.look()] == [0.0, 0.5]
    store.add("worker-1", 5)
    assert pulse.look() == 0.0


def test_an_answer_is_a_sign_of_life_where_beats_do_not_get_through(store: TCPStore) -> None:
    pulse = Pulse(store, "worker-1", 0.5)
    pulse.look()
    pulse.heard()
    assert pulse.look() == 0.5
