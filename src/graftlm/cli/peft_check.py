"""The same adapter over the same base in Graft and in PEFT, compared in float32, one after the other in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graftlm import LLM, SamplingParams
from graftlm.adapters import Adapter
from graftlm.adapters.files import find_adapter
from graftlm.errors import ConfigurationError

# One token, less than a block of the cache, and several blocks.
PROMPT_LENGTHS = (1, 7, 64)
NUM_TOKENS = 16
TOLERANCE = 1e-4
# Tokens that an adapter has rows of its own for; more would crowd out all others.
MAX_OWN_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class PeftComparison:
    """Logits over some prompts and greedy answers to them.

    difference: the largest between Graft's and PEFT's. largest: the largest of PEFT's, without its sign. moved: how far
    the adapter moves the base's. num_equal: tokens of Graft's answers that are PEFT's choice too, of `num_tokens`.
    """

    difference: float
    largest: float
    moved: float
    num_equal: int
    num_tokens: int

    @property
    def allowed(self) -> float:
        """Of the difference: what exact computations in float32 may differ by."""
        return TOLERANCE * (1 + self.largest)

    @property
    def agrees(self) -> bool:
        return self.difference <= self.allowed and self.num_equal == self.num_tokens


def compare_with_peft(model: str, adapter: str, *, allow_pickle: bool = False) -> PeftComparison:
    """Run an adapter in both.

    Raises:
        ConfigurationError: PEFT is not installed, or cannot load the adapter.
        GraftError: Graft cannot.
    """
    if find_spec("peft") is None:
        raise ConfigurationError("PEFT is not installed", do="pip install 'graftlm[check]'")
    answers, vocab_size = _run_graft(model, adapter, allow_pickle=allow_pickle)
    reference = _load_peft(model, adapter, vocab_size)
    difference = largest = moved = 0.0
    num_equal = 0
    for answer in answers:
        expected = _peft_logits(reference, answer.token_ids)
        difference = max(difference, _distance(answer.logits, expected))
        largest = max(largest, float(expected.abs().max()))
        moved = max(moved, _distance(answer.logits, answer.base_logits))
        chosen = expected[-NUM_TOKENS - 1 : -1].argmax(dim=1)
        num_equal += int((chosen == torch.tensor(answer.token_ids[-NUM_TOKENS:])).sum())
    return PeftComparison(
        difference=difference,
        largest=largest,
        moved=moved,
        num_equal=num_equal,
        num_tokens=NUM_TOKENS * len(answers),
    )


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """token_ids: prompt and greedy answer, [T]. logits, base_logits: [T, V], with and without the adapter."""

    token_ids: list[int]
    logits: Tensor
    base_logits: Tensor


def _run_graft(model: str, adapter: str, *, allow_pickle: bool) -> tuple[list[_Answer], int | None]:
    """Answers to all prompts, and the adapter's vocabulary if it is not the base's."""
    llm = LLM(model, name="base", adapters={"checked": adapter}, dtype="float32", allow_pickle=allow_pickle)
    try:
        loaded = llm.adapters["checked"]
        base_size = llm.logits([0]).shape[1]
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
        answers = []
        for length in PROMPT_LENGTHS:
            prompt = _prompt(length, loaded, base_size)
            output = llm.generate({"prompt_token_ids": prompt}, params, adapter="checked")[0]
            token_ids = [*prompt, *output.outputs[0].token_ids]
            answers.append(
                _Answer(
                    token_ids=token_ids,
                    logits=llm.logits(token_ids, adapter="checked"),
                    base_logits=llm.logits([min(token_id, base_size - 1) for token_id in token_ids]),
                )
            )
        return answers, loaded.vocab_size
    finally:
        llm.shutdown()


def _prompt(length: int, adapter: Adapter, base_size: int) -> list[int]:
    """Random tokens; among them, if there is room, those that mean something to the adapter alone."""
    vocab_size = adapter.vocab_size or base_size
    generator = torch.Generator().manual_seed(length)
    prompt: list[int] = torch.randint(0, min(base_size, vocab_size), (length,), generator=generator).tolist()
    own = [token_id for token_id in adapter.own_token_ids if token_id < vocab_size]
    own = [*own[:MAX_OWN_TOKENS], vocab_size - 1, *adapter.invocation_token_ids]
    middle = length // 2
    if len(own) < middle:
        prompt[middle : middle + len(own)] = own
    return prompt


def _load_peft(model: str, adapter: str, vocab_size: int | None) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    path = Path(model).expanduser()
    arguments = {"gguf_file": path.name} if path.is_file() else {}
    source = path.parent if path.is_file() else model
    config, _ = find_adapter(adapter)
    try:
        base = AutoModelForCausalLM.from_pretrained(
            source, dtype=torch.float32, attn_implementation="eager", **arguments
        )
        if vocab_size is not None:
            base.resize_token_embeddings(vocab_size, mean_resizing=False)
        return peft.PeftModel.from_pretrained(base, config.parent).eval()
    except Exception as cause:
        # Whatever of a hundred things in three libraries it is, it is not a fault of this comparison.
        raise ConfigurationError(
            "transformers and PEFT cannot load this, so there is nothing to compare with", got=str(cause)[:300]
        ) from cause


@torch.inference_mode()
def _peft_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[T, V] float32. A learned prompt has rows of its own, in front."""
    logits: Tensor = model(input_ids=torch.tensor([list(token_ids)])).logits[0]
    return logits[-len(token_ids) :].float()


def _distance(first: Tensor, second: Tensor) -> float:
    """The largest difference over the vocabulary both have."""
    width = min(first.shape[1], second.shape[1])
    return float((first[:, :width] - second[:, :width]).abs().max())
