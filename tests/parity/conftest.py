"""Engines shared by the parity tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.oracle import World, make_world


@pytest.fixture(scope="session")
def untied(llama: Path) -> World:
    return make_world(llama)


@pytest.fixture(scope="session")
def tied(tied_llama: Path) -> World:
    return make_world(tied_llama)


@pytest.fixture(scope="session", params=["untied", "tied"])
def world(request: pytest.FixtureRequest) -> World:
    """Both kinds of head, one after the other."""
    chosen: World = request.getfixturevalue(request.param)
    return chosen
