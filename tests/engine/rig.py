"""What the engine's tests share: prompts, an oracle, models whose answers are known, and a look at what is executed."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from graftlm import LLM, AsyncLLM, RequestOutput, SamplingParams
from graftlm.engine.scheduler import ScheduledSequence
from tests.tiny import write_tokenizer

VOCAB = 259
END = 257
# Ids of printable bytes in `write_tokenizer`'s vocabulary: the alphabet of bytes, sorted by character.
BYTE_OF_TEXT = {chr(code): index for index, code in enumerate(range(33, 127))}
# Keys and values of one token of `make_llama`'s default in float32: 2 layers, K and V, 2 heads of 16.
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
BLOCK_BYTES = 16 * KV_BYTES_PER_TOKEN


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(1000 * length + seed)
    return {"prompt_token_ids": [rng.randrange(256) for _ in range(length)]}


def ids_of(text: str) -> list[int]:
    """Token ids of printable ASCII without spaces."""
    return [BYTE_OF_TEXT[char] for char in text]


def greedy(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **more)


def token_ids(output: RequestOutput) -> tuple[int, ...]:
    """The ids of an only answer."""
    (answer,) = output.outputs
    return answer.token_ids


def one(llm: LLM, request: Any, params: SamplingParams, adapter: str | None = None) -> RequestOutput:
    (output,) = llm.generate([request], params, adapter=adapter)
    return output


def oracle(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def full_forward(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits of every position, [T, V]."""
    logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


def greedy_loop(
    model: Any, request: dict[str, list[int]], steps: int, adjust: Callable[[Tensor, list[int]], Tensor]
) -> tuple[int, ...]:
    """Greedy decoding by full forward passes. adjust: (last logits, outputs so far) -> logits."""
    outputs: list[int] = []
    for _ in range(steps):
        logits = full_forward(model, [*request["prompt_token_ids"], *outputs])[-1]
        outputs.append(int(adjust(logits.clone(), outputs).argmax()))
    return tuple(outputs)


def make_chain(folder: Path, table: Tensor) -> Path:
    """A Llama whose logits depend on the last token alone: after token i they are table[i]. table: [V, V]."""
    hidden = 320
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=20,
        num_key_value_heads=1,
        max_position_embeddings=512,
        rms_norm_eps=1e-12,
        bos_token_id=256,
        eos_token_id=END,
        pad_token_id=258,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # One-hot embeddings pass through unchanged and come out of the last norm times sqrt(hidden).
        model.model.embed_tokens.weight[:, :VOCAB] = torch.eye(VOCAB)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[:, :VOCAB] = table.t() / math.sqrt(hidden)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def chain_of(ids: Sequence[int], *, gap: float = 30.0) -> Tensor:
    """A table that makes each of the (different) ids be followed by the next one, the last by itself."""
    table = torch.zeros(VOCAB, VOCAB)
    for current, following in zip(ids, [*ids[1:], ids[-1]], strict=True):
        table[current, following] = gap
    return table


@contextmanager
def watched(llm: LLM | AsyncLLM) -> Iterator[list[ScheduledSequence]]:
    """Every sequence the engine executes meanwhile."""
    executor: Any = core(llm)._executor
    seen: list[ScheduledSequence] = []
    submit = executor.submit

    def watching(sequences: Sequence[ScheduledSequence], *replays: Any) -> Any:
        seen.extend(sequences)
        return submit(sequences, *replays)

    executor.submit = watching
    try:
        yield seen
    finally:
        executor.submit = submit


def num_preemptions(seen: Sequence[ScheduledSequence]) -> int:
    """How often a request began anew."""
    starts = [sequence.request_id for sequence in seen if sequence.start == 0]
    return len(starts) - len(set(starts))


@contextmanager
def held(llm: AsyncLLM) -> Iterator[None]:
    """Until the end of the block no step begins, so that what is sent meanwhile meets an engine that stands still."""
    gate, engine_core = threading.Event(), core(llm)
    step = engine_core.step

    def step_later() -> Any:
        gate.wait()
        return step()

    engine_core.step = step_later
    try:
        yield
    finally:
        engine_core.step = step
        gate.set()


@contextmanager
def stepwise(llm: AsyncLLM) -> Iterator[Callable[[], None]]:
    """Until the end of the block a step begins only for each call of what is yielded."""
    permits, engine_core = threading.Semaphore(0), core(llm)
    step = engine_core.step

    def step_if_permitted() -> Any:
        permits.acquire()
        return step()

    engine_core.step = step_if_permitted
    try:
        yield permits.release
    finally:
        engine_core.step = step
        permits.release()


@contextmanager
def masks_held(llm: LLM | AsyncLLM) -> Iterator[None]:
    """Until the end of the block no mask is computed, as if all threads for them had one that takes long."""
    released = threading.Event()
    threads = core(llm)._masks._threads
    for _ in range(threads._max_workers):
        threads.submit(released.wait)
    try:
        yield
    finally:
        released.set()


def core(llm: LLM | AsyncLLM) -> Any:
    """The one place where tests reach behind the front ends: to inject faults and to watch steps."""
    return llm._engine.core  # type: ignore[union-attr]
