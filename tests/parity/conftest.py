"""Engines and references shared by the parity tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftlm import LLM
from tests.parity.method_rig import Expected, expect_adapters, expect_bases, load_llms
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


@pytest.fixture(scope="module")
def llms(request: pytest.FixtureRequest, bases: dict[str, Path], folders: dict[str, Path]) -> dict[str, LLM]:
    """An engine for each of a module's `bases`, with the adapters of its `CASES`, which are in `folders`."""
    return load_llms(request.module.CASES, bases, folders)


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, bases: dict[str, Path], folders: dict[str, Path]) -> dict[str, Expected]:
    """What PEFT answers with each of a module's `CASES`."""
    return expect_adapters(request.module.CASES, bases, folders)


@pytest.fixture(scope="module")
def unadapted(bases: dict[str, Path]) -> dict[str, Expected]:
    """What a module's `bases` answer without an adapter."""
    return expect_bases(bases)
