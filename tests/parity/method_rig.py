"""What the tests of PEFT's other methods share: three bases, adapters of all cases, PEFT's answers and the engine's.

Knows no method: which adapters there are is each test file's table of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from graftlm import LLM, SamplingParams
from tests import tiny

PROMPT = [5, 9, 200, 40, 17, 18, 33, 60, 7]
NUM_TOKENS = 12

Method = type[peft.PeftConfig]
# Base, config class, config.
Case = tuple[str, Method, dict[str, Any]]
# name -> what is not tiny.make_llama's default.
BASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What PEFT computes with an adapter: logits of the prompt, and the tokens it continues with."""

    logits: Tensor
    token_ids: tuple[int, ...]


def make_bases(folder: Path) -> dict[str, Path]:
    """Write a Llama for each of `BASES`."""
    made = {name: tiny.make_llama(folder / name, **config) for name, config in BASES.items()}
    make_biases_loud(made["biased"])
    return made


def make_biases_loud(base: Path) -> None:
    """Draw a saved model's biases, which start as zeros, from torch's global generator."""
    weights = base / "model.safetensors"
    loud = {
        name: torch.randn_like(tensor) if name.endswith("bias") else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(loud, weights, metadata={"format": "pt"})


def make_adapters(
    cases: Mapping[str, Case],
    bases: Mapping[str, Path],
    folder: Path,
    before_saving: Mapping[str, Callable[[Any], None]] | None = None,
) -> dict[str, Path]:
    """Have PEFT write an adapter for each case. before_saving: by case, what to do to the model that is saved."""
    edits = before_saving or {}
    return {
        name: make_adapter(
            bases[base], folder / name, method(task_type="CAUSAL_LM", **config), before_saving=edits.get(name)
        )
        for name, (base, method, config) in cases.items()
    }


def make_adapter(
    base: Path,
    folder: Path,
    config: peft.PeftConfig,
    *,
    vocab_size: int | None = None,
    before_saving: Callable[[Any], None] | None = None,
) -> Path:
    """Have PEFT write an adapter whose every trained parameter is random and loud."""
    torch.manual_seed(len(folder.name))
    adapted = peft.get_peft_model(open_base(base, vocab_size), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    if before_saving is not None:
        before_saving(adapted)
    adapted.save_pretrained(folder)
    return folder


def open_base(base: Path, vocab_size: int | None = None) -> Any:
    """As transformers reads it. vocab_size: what to resize its vocabulary to, if anything."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if vocab_size is not None:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


@torch.no_grad()
def run_peft(
    base: Path, folder: Path | None, *, vocab_size: int | None = None, prompt: Sequence[int] = PROMPT
) -> Expected:
    """PEFT's answer with the adapter in `folder`, or the base's own. Logits are [len(prompt), V]."""
    model = open_base(base, vocab_size)
    if folder is not None:
        model = peft.PeftModel.from_pretrained(model, folder).eval()
    token_ids = list(prompt)
    logits = rows = model(input_ids=torch.tensor([token_ids])).logits[0]
    for _ in range(NUM_TOKENS):
        token_ids.append(int(rows[-1].argmax()))
        rows = model(input_ids=torch.tensor([token_ids])).logits[0]
    # A learned prompt has rows of its own, in front.
    return Expected(logits=logits[-len(prompt) :], token_ids=tuple(token_ids[len(prompt) :]))


def expect_adapters(
    cases: Mapping[str, Case], bases: Mapping[str, Path], folders: Mapping[str, Path]
) -> dict[str, Expected]:
    """PEFT's answer for each case, alone over a fresh base."""
    return {name: run_peft(bases[base], folders[name]) for name, (base, _, _) in cases.items()}


def expect_bases(bases: Mapping[str, Path]) -> dict[str, Expected]:
    """The answer of each base without an adapter."""
    return {name: run_peft(path, None) for name, path in bases.items()}


def load_llms(cases: Mapping[str, Case], bases: Mapping[str, Path], folders: Mapping[str, Path]) -> dict[str, LLM]:
    """An engine for each base, with all of its cases' adapters loaded."""
    llms = {name: LLM(path) for name, path in bases.items()}
    for name, (base, _, _) in cases.items():
        llms[base].load_adapter(name, folders[name])
    return llms


def generate(llm: LLM, adapters: list[str | None]) -> list[tuple[int, ...]]:
    """Greedy continuations of the prompt with each of the adapters, computed in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": PROMPT}] * len(adapters)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, adapter=adapters)]


def assert_adapter_is_peft(name: str, llm: LLM, expected: Expected, unadapted: Expected) -> None:
    """The adapter moves the base's logits by more than 1e-2, and alone gives the logits and tokens PEFT gives."""
    reference = expected.logits
    moved = (reference - unadapted.logits).abs().max()
    assert moved > 1e-2, f"{name} is too quiet to prove anything: {moved}"
    logits = llm.logits(PROMPT, adapter=name)
    assert logits.shape == reference.shape, f"{name}: {logits.shape}, not {reference.shape}"
    difference, allowed = (logits - reference).abs().max(), 1e-4 * (1 + reference.abs().max())
    assert difference <= allowed, f"{name}: logits differ by {difference:.3g}, allowed {allowed:.3g}"
    answers = generate(llm, [name])
    assert answers == [expected.token_ids], f"{name}: {answers}, not {[expected.token_ids]}"


def assert_batch_is_peft(names: Sequence[str], llm: LLM, expected: Mapping[str, Expected], unadapted: Expected) -> None:
    """In one batch of the base and, twice, every adapter, each row is PEFT's; the base's logits are its own."""
    mixed = [None, *names, None, *reversed(names), None]
    wanted = [unadapted.token_ids if name is None else expected[name].token_ids for name in mixed]
    answers = generate(llm, mixed)
    wrong = [row for row in zip(mixed, answers, wanted, strict=True) if row[1] != row[2]]
    assert answers == wanted, f"adapter, tokens, PEFT's tokens: {wrong}"
    torch.testing.assert_close(llm.logits(PROMPT), unadapted.logits, rtol=1e-4, atol=1e-4)
