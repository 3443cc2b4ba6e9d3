"""The Gemma that the tutorials use: the reader's, or a small one made on the spot in some seconds."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

# Where `make` puts Gemma's own.
TOKENIZER = Path(sys.prefix) / "share" / "gemma-tokenizer"
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
    """The folder in $GEMMA if it is set; else a new Gemma 3 in `folder`, with Gemma's own tokenizer where it is
    installed, or one made here. It has read what is written to a shop and what might be answered, as loose sentences:
    it knows the words, and has never seen a conversation."""
    if given := os.environ.get("GEMMA"):
        return Path(given).expanduser()
    texts = [message["content"] for name in NAMES for messages in conversations(name) for message in messages]
    own = has_own_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER) if own else train_tokenizer(texts)
    print(f"a small Gemma with {'its own tokenizer' if own else 'a tokenizer made here'}: {len(tokenizer)} tokens")
    logging.disable_progress_bar()
    torch.manual_seed(0)
    make_gemma(tokenizer, texts).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def has_own_tokenizer() -> bool:
    """Whether Gemma's own tokenizer is there."""
    return TOKENIZER.is_dir()


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


def make_gemma(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Gemma3ForCausalLM:
    """A Gemma that has read the texts.

    Tokens that nobody writes here have one row of the table together while it reads, which counts as often as there are
    such tokens: the loss is that over all of them, at the price of the few that are used.
    """
    texts = random.Random(0).sample(texts, len(texts))
    token_ids = torch.tensor([token for text in texts for token in tokenizer(text)["input_ids"]])
    chats = [tokenizer.apply_chat_template(chat, return_dict=False) for name in NAMES for chat in conversations(name)]
    used = torch.tensor(
        sorted({*tokenizer.all_special_ids, *token_ids.tolist(), *(id for chat in chats for id in chat)})
    )
    row_of = torch.full((len(tokenizer),), len(used))
    row_of[used] = torch.arange(len(used))
    reader = Gemma3ForCausalLM(small_config(tokenizer, num_rows=len(used) + 1))
    pretrain(reader, row_of[token_ids], num_unused=len(tokenizer) - len(used))
    model = Gemma3ForCausalLM(small_config(tokenizer, num_rows=len(tokenizer)))
    table = reader.get_input_embeddings().weight[row_of]
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), table)
    model.load_state_dict({**reader.state_dict(), **ends})
    return model


def small_config(tokenizer: PreTrainedTokenizerBase, *, num_rows: int) -> Gemma3TextConfig:
    """Two layers: one sees 64 tokens back, the other everything. Narrow, since Gemma's vocabulary is wide."""
    return Gemma3TextConfig(
        vocab_size=num_rows,
        hidden_size=64,
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
        eos_token_id=tokenizer.convert_tokens_to_ids(["<eos>", "<end_of_turn>"]),
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def pretrain(model: Gemma3ForCausalLM, token_ids: torch.Tensor, *, num_unused: int) -> None:
    """All weights, on rows cut from the tokens one after the other. num_unused: what the last logit stands for."""
    rows = token_ids[: len(token_ids) // ROW_TOKENS * ROW_TOKENS].view(-1, ROW_TOKENS)
    counts = torch.zeros(model.config.vocab_size)
    counts[-1] = torch.tensor(float(num_unused)).log()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (BATCH_ROWS,))]
        logits = model(input_ids=batch).logits + counts
        cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
