"""Drawing tokens from logits and rating them, against numpy and torch, and on every level against the twin in torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from graftlm.kernels.kernel_set import Kernels
from graftlm.kernels.ops import TokenDraw
from graftlm.kernels.registry import REFERENCE

# Around the sizes of vectors, blocks and pieces.
SIZES = (1, 15, 64, 259, 5000)
DTYPES = (torch.float32, torch.bfloat16)


def rows(count: int, size: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(count, size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def draw(
    seed: int = 1, *, temperature: float = 1.0, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0
) -> TokenDraw:
    return TokenDraw(
        seed=seed, answer=seed % 3, position=seed % 7, temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_those_of_the_twin(kernels: Kernels, dtype: torch.dtype, size: int) -> None:
    """Flat rows and steep ones; in bfloat16 many logits are alike."""
    settings = itertools.product([0.0, 0.7, 3.0], [0, 1, 40, 300], [1.0, 0.3, 0.9, 0.9999], [0.0, 0.02])
    draws = [
        draw(seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for seed, (temperature, top_k, top_p, min_p) in enumerate(settings)
    ]
    logits = torch.cat([rows(len(draws) // 3, size, scale=scale, dtype=dtype) for scale in (0.1, 1.0, 5.0)])
    logits = logits[torch.randperm(len(draws), generator=torch.Generator().manual_seed(2))]
    assert kernels.draw_tokens(logits, draws) == REFERENCE.draw_tokens(logits, draws)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_large_vocabulary_is_cut_where_the_twin_cuts_it(kernels: Kernels, dtype: torch.dtype) -> None:
    """Also where all but one are about as far from the best, and where only a few are left."""
    logits = rows(24, 30_000, dtype=dtype)
    logits[8:16] = logits[8:16] / 1000 + torch.where(torch.arange(30_000) == 17, 9.0, 0.0).to(dtype)
    logits[16:, 100:29_000] = -torch.inf
    hows = [{"top_p": 0.95}, {"top_p": 0.1}, {"min_p": 1e-3}, {"top_p": 0.99, "min_p": 1e-2}]
    draws = [draw(seed, temperature=1.0 + seed % 3, **hows[seed % 4]) for seed in range(24)]  # type: ignore[arg-type]
    assert kernels.draw_tokens(logits, draws) == REFERENCE.draw_tokens(logits, draws)


def test_random_numbers_are_numpys(kernels: Kernels) -> None:
    """Of 4096 equal logits the one at the random number's place is taken, whatever the three parts of its key."""
    flat = torch.zeros(1, 4096)
    for seed, answer, position in itertools.product((0, 5, 2**64 - 1), (0, 127), (0, 1, 40_000)):
        key = np.array([seed, answer], dtype=np.uint64)
        uniform = np.random.Generator(np.random.Philox(key=key, counter=position)).random()
        own = TokenDraw(seed=seed, answer=answer, position=position, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0)
        assert kernels.draw_tokens(flat, [own]) == [int(uniform * 4096)]


def test_a_row_draws_the_same_alone_among_others_and_padded(kernels: Kernels) -> None:
    draws = [draw(1), draw(2, top_k=20), draw(3, top_p=0.99), draw(4, min_p=0.1), draw(5, temperature=0.0)]
    logits = rows(len(draws), 777)
    padded = torch.cat([logits, torch.full((len(draws), 500), -torch.inf)], dim=1)
    together = kernels.draw_tokens(logits, draws)
    assert kernels.draw_tokens(padded, draws) == together
    assert [kernels.draw_tokens(logits[row : row + 1], [own])[0] for row, own in enumerate(draws)] == together


def test_the_first_of_equals_is_the_best(kernels: Kernels) -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, -0.0, 3.0]).repeat(1, 50)
    assert kernels.draw_tokens(logits, [draw(temperature=0.0)]) == [1]
    assert {kernels.draw_tokens(logits, [draw(seed, top_k=2)])[0] for seed in range(40)} == {1, 3}
    assert kernels.token_logprobs(logits, torch.tensor([0]), 4).best_ids.tolist() == [[1, 3, 5, 7]]


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_what_is_not_a_number_or_ruled_out_is_never_drawn(kernels: Kernels, how: dict[str, float]) -> None:
    logits = torch.full((4, 100), -torch.inf)
    logits[0] = torch.nan
    logits[2, 70:72] = 0.0
    logits[3] = rows(1, 100)[0]
    logits[3, 40] = torch.inf
    for seed in range(20):
        tokens = kernels.draw_tokens(logits, [draw(seed, **how)] * 4)  # type: ignore[arg-type]
        assert tokens[:2] == [-1, -1]
        assert tokens[2] in (70, 71)
        assert tokens[3] == 40


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e300])
def test_extreme_temperatures_are_the_largest_logit_or_an_even_draw(kernels: Kernels, temperature: float) -> None:
    logits = rows(1, 300)
    logits[0, 100] = -torch.inf
    for how in ({}, {"top_k": 200}, {"top_p": 0.9}):
        draws = [draw(seed, temperature=temperature, **how) for seed in range(200)]  # type: ignore[arg-type]
        tokens = set(kernels.draw_tokens(logits.expand(200, -1), draws))
        assert tokens == {int(logits.argmax())} if temperature < 1 else len(tokens - {100}) == len(tokens) > 80


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_log_probabilities_are_those_of_torch(kernels: Kernels, dtype: torch.dtype, size: int, scale: float) -> None:
    logits, count = rows(9, size, scale=scale, dtype=dtype), min(size, 20)
    token_ids = torch.arange(9) * 7 % size
    exact = logits.double().log_softmax(-1)
    for implementation in (kernels, REFERENCE):
        rated = implementation.token_logprobs(logits, token_ids, count)
        own = exact.gather(1, token_ids[:, None])
        torch.testing.assert_close(rated.logprobs.double(), own[:, 0], atol=1e-5, rtol=1e-6)
        assert torch.equal(rated.ranks, 1 + (exact > own).sum(dim=1))
        best = exact.sort(descending=True, stable=True)
        assert torch.equal(rated.best_ids, best.indices[:, :count])
        torch.testing.assert_close(rated.best_logprobs.double(), best.values[:, :count], atol=1e-5, rtol=1e-6)
    nothing = kernels.token_logprobs(logits, token_ids, 0)
    assert nothing.best_ids.shape == (9, 0)
    assert torch.equal(nothing.logprobs, kernels.token_logprobs(logits, token_ids, count).logprobs)


def test_a_row_that_is_not_numbers_is_rated_as_such(kernels: Kernels) -> None:
    logits = torch.full((1, 100), torch.nan)
    for implementation in (kernels, REFERENCE):
        rated = implementation.token_logprobs(logits, torch.tensor([3]), 2)
        assert rated.logprobs.isnan().all()
        assert rated.ranks.tolist() == [1]
        assert rated.best_ids.tolist() == [[0, 1]]
        assert rated.best_logprobs.isnan().all()
