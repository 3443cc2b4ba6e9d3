"""Every family against transformers and PEFT: one sequence at a time, unpadded, eager, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.family_cases import FAMILY_CASES, FamilyCase
from tests.parity.oracle import World, assert_close, count_ties, greedy, make_even_adapter, make_world, prompt_of
from tests.tiny import make_model

# PEFT corrects the flag by each layer's type, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
# A token, a block and its neighbours, and more blocks than a window or a chunk holds (FAMILIES.md F1).
LENGTHS = (1, 2, 15, 16, 17, 255, 256, 257)
MAX_TOKENS = 64


@pytest.fixture(scope="module", params=FAMILY_CASES, ids=str)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return FAMILY_CASES[request.param]


@pytest.fixture(scope="module")
def world(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = make_world(make_model(tmp_path_factory.mktemp("base"), case.config()), attention=case.attention)
    yield world
    world.llm.shutdown()


def test_prompts_of_all_lengths_in_one_batch_are_answered_as_by_transformers(world: World) -> None:
    prompts = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
    answers = greedy(world.llm, [(None, prompt) for prompt in prompts], MAX_TOKENS)
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        whole = [*prompt, *answer]
        expected = world.oracle.logits(whole)
        assert_close(world.llm.logits(whole), expected)
        ties += count_ties(expected[len(prompt) - 1 : -1], answer)
    assert ties <= 1 + len(LENGTHS) * MAX_TOKENS // 100


def test_adapters_on_every_module_are_served_as_by_peft(world: World, case: FamilyCase, tmp_path: Path) -> None:
    adapters = {
        name: make_even_adapter(world.base, tmp_path / name, **settings) for name, settings in case.adapters().items()
    }
    world.assert_parity(adapters)
