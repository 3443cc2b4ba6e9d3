"""How byte-level vocabularies in GGUF files cut text before it is merged: `tokenizer.ggml.pre`.

A GGUF file only names the kind. What belongs to it is what the tokenizer.json of the models it was named after has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{{0}}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{{0}}"
AFTER_CASED_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_WORDS = CASED_WORDS.replace("{0}", "") + r"|\p{N}" + AFTER_CASED_WORDS
GPT4O_WORDS = CASED_WORDS.replace("{0}", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + AFTER_CASED_WORDS
BLOOM_WORDS = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to cut text.

    Args:
        pre_tokenizer: cuts, and spells bytes as characters.
        composed: characters are composed first (Unicode's NFC).
        ignore_merges: a piece that is a token stays whole, even if no merges lead to it.
        adds_bos: whether texts begin with a BOS unless the file says otherwise.
    """

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    composed: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composed else None


def _words(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _digits_apart() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _falcon() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )


GPT2 = Split(pre_tokenizer=_words(GPT2_WORDS))
GPT_NEOX = Split(pre_tokenizer=_words(GPT2_WORDS), composed=True)
DIGITS_APART = Split(pre_tokenizer=_digits_apart)
LLAMA3 = Split(pre_tokenizer=_words(LLAMA3_WORDS), ignore_merges=True, adds_bos=True)
TEKKEN = Split(pre_tokenizer=_words(TEKKEN_WORDS), ignore_merges=True, adds_bos=True)
# Source of names, and of which begin with a BOS: llama.cpp, src/llama-vocab.cpp, load; convert_hf_to_gguf_update.py.
SPLITS: Mapping[str, Split] = {
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "jais": GPT2,
    "mpt": GPT_NEOX,
    "olmo": GPT_NEOX,
    "starcoder": DIGITS_APART,
    "refact": DIGITS_APART,
    "smollm": DIGITS_APART,
    "codeshell": DIGITS_APART,
    "command-r": DIGITS_APART,
    "exaone": DIGITS_APART,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "dbrx": Split(pre_tokenizer=_words(LLAMA3_WORDS)),
    "smaug-bpe": Split(pre_tokenizer=_words(LLAMA3_WORDS)),
    "tekken": TEKKEN,
    "gpt-4o": Split(pre_tokenizer=_words(GPT4O_WORDS), ignore_merges=True),
    "llama4": Split(pre_tokenizer=_words(GPT4O_WORDS)),
    "qwen2": Split(pre_tokenizer=_words(QWEN2_WORDS), composed=True),
    "deepseek-r1-qwen": Split(pre_tokenizer=_words(QWEN2_WORDS)),
    "falcon": Split(pre_tokenizer=_falcon),
    "bloom": Split(pre_tokenizer=_words(BLOOM_WORDS)),
}
