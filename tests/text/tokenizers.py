"""Tokenizers of other kinds than `tiny.write_tokenizer`'s, made on the spot."""

from __future__ import annotations

from itertools import chain, count, islice, product
from pathlib import Path
from string import ascii_lowercase

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast


def write_metaspace_tokenizer(folder: Path) -> None:
    """As Llama 2's: a BOS is added, spaces are U+2581, a leading one is stripped, other characters become bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for piece in [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz.\n", "\u2581a"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"
    )
    fast.save_pretrained(folder)


GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def write_gemma_tokenizer(folder: Path, vocab_size: int) -> None:
    """As Gemma's, at its full size or any other: a BOS is added, spaces are U+2581 wherever they stand, other
    characters become bytes; the template writes a BOS of its own and refuses a system role."""
    pieces = ("".join(letters) for length in count(2) for letters in product(ascii_lowercase, repeat=length))
    single = [*GEMMA_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\n", *ascii_lowercase]
    long = list(islice(pieces, vocab_size - len(single)))
    vocab = {piece: index for index, piece in enumerate(chain(single, long))}
    # A merge for every piece would cost seconds; text reaches the last ones through these.
    merges = [(piece[:2], piece[2:]) for piece in long if len(piece) == 4 and piece[0] in "bg"]
    merges = [(piece[0], piece[1]) for piece in long if len(piece) == 2] + merges
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in GEMMA_SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>"
    )
    fast.chat_template = GEMMA_TEMPLATE
    fast.save_pretrained(folder)
