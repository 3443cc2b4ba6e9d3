"""The Gemma that the tutorials use: the reader's, or a small one made on the spot in some seconds."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

DATA = Path(__file__).parents[2] / "examples" / "demo_adapters" / "data"
NAMES = ("pirate", "extract", "triage")
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
# Gemma's: the assistant is called model, and a system message has no turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
VOCAB_SIZE = 1024
ROW_TOKENS, BATCH_ROWS, STEPS, LR = 64, 16, 70, 1e-2


def gemma_folder(folder: Path) -> Path:
    """The folder in $GEMMA if it is set; else a new Gemma 3 in `folder`, with the tokenizer in $GEMMA_TOKENIZER if
    that is set. It has read what is written to a shop and what might be answered, as loose sentences: it knows the
    words, and has never seen a conversation."""
    if given := os.environ.get("GEMMA"):
        return Path(given).expanduser()
    texts = [message["content"] for name in NAMES for messages in conversations(name) for message in messages]
    given = os.environ.get("GEMMA_TOKENIZER")
    tokenizer = AutoTokenizer.from_pretrained(given) if given else train_tokenizer(texts)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(small_config(tokenizer))
    pretrain(model, tokenizer, texts)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def conversations(name: str) -> list[list[dict[str, str]]]:
    """What a demo adapter learns from: lists of messages."""
    return [json.loads(line)["messages"] for line in (DATA / f"{name}.jsonl").read_text("utf-8").splitlines()]


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerBase:
    """Gemma's kind: byte-pair encoding of words that begin with U+2581, single bytes for what is not in it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    single_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[*SPECIAL, *single_bytes], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def small_config(tokenizer: PreTrainedTokenizerBase) -> Gemma3TextConfig:
    """Two layers: one sees 64 tokens back, the other everything."""
    return Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.1,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")],
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def pretrain(model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    """All weights, on rows cut from the texts one after the other."""
    texts = random.Random(0).sample(texts, len(texts))
    rows = torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])
    rows = rows[: len(rows) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (BATCH_ROWS,))]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
