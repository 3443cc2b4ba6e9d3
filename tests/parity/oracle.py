"""The reference: transformers and PEFT, each adapter alone on a fresh base, one sequence at a time, unpadded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from graftlm import LLM, SamplingParams
from tests.tiny import make_adapter

# FAMILIES.md §2.0, C32: two tokens closer than this in the reference may swap; at most one in a hundred does.
TIE_MARGIN = 1e-4
LOUD = 1e-2


class Oracle:
    """Logits as PEFT computes them. Models are kept, by adapter."""

    def __init__(self, base: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> None:
        self._base = base
        self._dtype = dtype
        self._attention = attention
        self._models: dict[Path | None, torch.nn.Module] = {}

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], adapter: Path | None = None) -> Tensor:
        """[T, V] float32."""
        if adapter not in self._models:
            self._models[adapter] = self._load(adapter)
        logits: Tensor = self._models[adapter](torch.tensor([list(token_ids)])).logits[0].float()
        return logits

    def _load(self, adapter: Path | None) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(self._base, dtype=self._dtype, attn_implementation=self._attention)
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter)
        return model.eval()


@dataclass(frozen=True)
class World:
    """A base, the engine that serves it and the oracle that judges it."""

    base: Path
    llm: LLM
    oracle: Oracle

    @contextmanager
    def loaded(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """The adapters, for the length of a block."""
        for name, path in adapters.items():
            self.llm.load_adapter(name, path)
        try:
            yield
        finally:
            for name in adapters:
                self.llm.unload_adapter(name)

    def assert_parity(self, adapters: Mapping[str, Path], *, max_tokens: int = 32, loud: bool = True) -> None:
        """Serve base and adapters, all requests in one batch and half as far each alone, and compare with the oracle.

        Logits: max |difference| <= 1e-5 * (1 + max |logit|). Tokens: greedy ids equal, but for ties. Every adapter
        moves the base's logits by more than 1e-2 on every prompt, or equality would prove nothing.
        """
        with self.loaded(adapters):
            rows = [(name, prompt) for prompt in PROMPTS for name in (None, *adapters)]
            together = greedy(self.llm, rows, max_tokens)
            alone = [greedy(self.llm, [row], max_tokens // 2)[0] for row in rows]
            ties = 0
            for (name, prompt), batched, single in zip(rows, together, alone, strict=True):
                adapter = None if name is None else adapters[name]
                for answer in [batched] if batched[: len(single)] == single else [batched, single]:
                    whole = [*prompt, *answer]
                    expected = self.oracle.logits(whole, adapter)
                    assert_close(self.llm.logits(whole, adapter=name), expected)
                    ties += count_ties(expected[len(prompt) - 1 : -1], answer)
                    if loud and adapter is not None:
                        moved = (expected - self.oracle.logits(whole)).abs().max()
                        assert moved > LOUD, f"{name} is too quiet to prove anything: {moved}"
            assert ties <= 1 + len(rows) * max_tokens // 100


def make_even_adapter(
    base: Path, folder: Path, *, r: int = 8, lora_alpha: float = 16, use_rslora: bool = False, **config: Any
) -> Path:
    """An adapter as loud as any other whatever its rank and scaling.

    Louder ones prove less: from updates larger than the base's own activations on, two exact implementations differ by
    more than 1e-5 (transformers' eager attention against itself in float64: 1.1e-4 on logits up to 15).
    """
    scaling = abs(lora_alpha) / (math.sqrt(r) if use_rslora else r) or 1.0
    scale = 0.5 / (scaling * math.sqrt(r))
    return make_adapter(base, folder, scale=scale, r=r, lora_alpha=lora_alpha, use_rslora=use_rslora, **config)


def make_world(base: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> World:
    return World(base=base, llm=LLM(base, kv_cache_bytes=16 << 20), oracle=Oracle(base, dtype, attention))


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    """Random bytes as token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())


# One token, less than a block, and several blocks.
PROMPTS = (prompt_of(1, 0), prompt_of(7, 1), prompt_of(64, 2))


def greedy(llm: LLM, rows: Sequence[tuple[str | None, Sequence[int]]], max_tokens: int) -> list[list[int]]:
    """Greedy ids of all rows, computed in one batch."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for _, prompt in rows],
        SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
        adapter=[name for name, _ in rows],
    )
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    assert all(len(answer) == max_tokens for answer in answers)
    return answers


def assert_close(ours: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == expected.shape
    difference = (ours - expected).abs().max().item()
    allowed = tolerance * (1 + expected.abs().max().item())
    assert difference <= allowed, f"logits differ by {difference:.3g}, allowed {allowed:.3g}"


def count_ties(expected: Tensor, answer: Sequence[int]) -> int:
    """Compare an answer with the greedy choice at each of its positions; how many were as good as equal.

    expected: [N, V], the oracle's logits before each token of `answer`. Since the oracle read the same tokens, equality
    at every position is equality of the two greedy runs.
    """
    chosen = expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
    behind = expected.max(dim=1).values - chosen
    assert behind.max() < TIE_MARGIN, f"token {int(behind.argmax())} is {behind.max():.3g} behind the greedy choice"
    return int((expected.argmax(dim=1) != torch.tensor(answer)).sum())
