"""Rows of a batch are independent, and every tensor of an adapter counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftlm import LLM
from tests.parity.oracle import LOUD, World, assert_close, greedy, make_even_adapter, prompt_of
from tests.tiny import ALL_PROJECTIONS

NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def paths(untied: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return {
        name: make_even_adapter(untied.base, folder / name, seed=seed, r=4**seed, target_modules=ALL_PROJECTIONS)
        for seed, name in enumerate(NAMES, 1)
    }


@pytest.fixture
def llm(untied: World, paths: dict[str, Path]) -> Iterator[LLM]:
    with untied.loaded(paths):
        yield untied.llm


def test_r090_two_adapters_keep_their_answers_in_every_order_for_fifty_rounds(llm: LLM) -> None:
    prompt = prompt_of(12, 1)
    red = greedy(llm, [("red", prompt)], 8)[0]
    green = greedy(llm, [("green", prompt)], 8)[0]
    assert red != green
    for round_ in range(50):
        names, expected = (["red", "green"], [red, green]) if round_ % 2 else (["green", "red"], [green, red])
        if round_ % 3:
            assert greedy(llm, [(name, prompt) for name in names], 8) == expected
        else:
            assert [greedy(llm, [(name, prompt)], 8)[0] for name in names] == expected


def test_r040_r091_thirty_two_requests_get_the_same_tokens_singly_and_at_once(llm: LLM) -> None:
    names = itertools.cycle([None, *NAMES])
    lengths = [1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 200] * 3
    rows = [(next(names), prompt_of(length, seed)) for seed, length in enumerate(lengths[:32])]
    singly = [greedy(llm, [row], 16)[0] for row in rows]
    for order in (rows, rows[::-1], rows[1::2] + rows[::2]):
        assert dict(zip(order, greedy(llm, order, 16), strict=True)) == dict(zip(rows, singly, strict=True))


@pytest.mark.parametrize(("num_base", "num_adapted"), [(1, 1), (1, 7), (7, 1), (4, 0), (0, 4)])
def test_r092_base_rows_keep_their_tokens_beside_adapter_rows(num_base: int, num_adapted: int, llm: LLM) -> None:
    rows: list[tuple[str | None, tuple[int, ...]]] = [(None, prompt_of(10 + i, i)) for i in range(num_base)]
    rows += [(NAMES[i % 3], prompt_of(20 + i, i)) for i in range(num_adapted)]
    assert greedy(llm, rows, 16) == [greedy(llm, [row], 16)[0] for row in rows]


def test_r012_every_pair_of_tensors_has_an_effect_and_it_is_pefts(
    untied: World, paths: dict[str, Path], tmp_path: Path
) -> None:
    prompt = prompt_of(48, 3)
    tensors = load_file(paths["red"] / "adapter_model.safetensors")
    halves = [name for name in tensors if "lora_B" in name]
    assert len(halves) == 14
    config = (paths["red"] / "adapter_config.json").read_bytes()
    with untied.loaded({"whole": paths["red"]}):
        whole = untied.llm.logits(prompt, adapter="whole")
    for index, half in enumerate(halves):
        folder = tmp_path / str(index)
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(config)
        save_file({**tensors, half: torch.zeros_like(tensors[half])}, folder / "adapter_model.safetensors")
        with untied.loaded({"ablated": folder}):
            ablated = untied.llm.logits(prompt, adapter="ablated")
        assert (ablated - whole).abs().max() > 1e-3, half
        assert_close(ablated, untied.oracle.logits(prompt, folder))


def test_r058_base_logits_are_the_same_bits_before_during_and_after_an_adapters_life(
    world: World, tmp_path: Path
) -> None:
    prompts = [prompt_of(length, length) for length in (1, 5, 16, 40, 150)]
    adapters = {
        name: make_even_adapter(world.base, tmp_path / name, seed=seed, target_modules=[*ALL_PROJECTIONS, "lm_head"])
        for seed, name in enumerate(NAMES, 1)
    }
    before = [world.llm.logits(prompt) for prompt in prompts]
    with world.loaded(adapters):
        for name in NAMES:
            greedy(world.llm, [(name, prompt) for prompt in prompts], 4)
            moved = world.llm.logits(prompts[-1], adapter=name) - before[-1]
            assert moved.abs().max() > LOUD
            assert all(world.llm.logits(prompt).equal(logits) for prompt, logits in zip(prompts, before, strict=True))
    assert all(world.llm.logits(prompt).equal(logits) for prompt, logits in zip(prompts, before, strict=True))


def test_logits_of_a_long_prompt_do_not_depend_on_chunks(untied: World, paths: dict[str, Path]) -> None:
    whole = prompt_of(300, 4)
    chunked = LLM(
        untied.base, adapters=paths, kv_cache_bytes=1 << 20, max_num_batched_tokens=37, prefill_chunk_tokens=11
    )
    for name in (None, *NAMES):
        path = None if name is None else paths[name]
        assert_close(chunked.logits(whole, adapter=name), untied.oracle.logits(whole, path))
    rows = [(name, prompt_of(90, seed)) for seed, name in enumerate((None, *NAMES))]
    with untied.loaded(paths):
        assert greedy(chunked, rows, 12) == greedy(untied.llm, rows, 12)
