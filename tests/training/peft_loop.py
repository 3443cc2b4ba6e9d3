"""The reference: PEFT and a plain torch loop, one document at a time, unpadded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

Ids = tuple[list[int], list[bool]]

TEXTS = (
    "the cat sat on the mat",
    "a much longer line than all the others, so that nothing is padded to one length by luck",
    "ok",
    "SELECT name FROM users WHERE age > 30;",
    "yes sir",
    "Ahoy, matey! The wind is fair.",
    "1, 2, 3, 4, 5, 6, 7",
    "what is the capital of France? Paris.",
)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def completion_rows(texts: Sequence[str] = TEXTS) -> list[dict[str, str]]:
    """Halves of each text: the first is the prompt."""
    return [{"prompt": text[: len(text) // 2], "completion": text[len(text) // 2 :]} for text in texts]


def encode_completion(base: Path, row: Mapping[str, str]) -> Ids:
    """Token ids, and which of them count, by transformers' tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    prompt, completion = tokenizer(row["prompt"])["input_ids"], tokenizer(row["completion"])["input_ids"]
    ids = [*prompt, *completion, tokenizer.eos_token_id]
    return ids, [False] * len(prompt) + [True] * (len(completion) + 1)


def make_embedding_loud(adapter: Path) -> None:
    """PEFT starts an embedding's A at zero, where B has no gradient."""
    path = adapter / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(path)
    for name, tensor in tensors.items():
        if "lora_embedding_A" in name:
            tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def load(base: Path, adapter: Path, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> peft.PeftModel:
    """The base in a dtype, the adapter in float32, or in float64 too."""
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return model.double() if dtype == torch.float64 else model


def summed_loss(model: torch.nn.Module, ids: Sequence[int], counts: Sequence[bool]) -> Tensor:
    logits = model(torch.tensor([list(ids)])).logits[0]
    targets = torch.tensor([token if count else -100 for token, count in zip(ids, counts, strict=True)])
    return functional.cross_entropy(logits[:-1], targets[1:], reduction="sum", ignore_index=-100)


def padded_loss(model: torch.nn.Module, documents: Sequence[Ids]) -> float:
    """Mean over the tokens that count, of one batch in which all documents have the longest one's length."""
    longest = max(len(ids) for ids, _ in documents)
    ids = torch.tensor([document + [0] * (longest - len(document)) for document, _ in documents])
    mask = torch.tensor([[1] * len(document) + [0] * (longest - len(document)) for document, _ in documents])
    labels = torch.full_like(ids, -100)
    for row, (document, counts) in enumerate(documents):
        labels[row, : len(document)] = torch.where(torch.tensor(counts), torch.tensor(document), -100)
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    return loss.item()


def train(
    base: Path,
    adapter: Path,
    batches: Sequence[Sequence[Ids]],
    *,
    lr: float,
    weight_decay: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """The loss of each update: a mean over the tokens of its batch."""
    model = load(base, adapter, dtype)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
    losses = []
    for batch in batches:
        count = sum(sum(counts[1:]) for _, counts in batch)
        loss = torch.stack([summed_loss(model, ids, counts) for ids, counts in batch]).sum() / count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
