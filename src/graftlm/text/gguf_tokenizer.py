"""Tokenizers out of GGUF files: the file has the vocabulary, and names the rules that go with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from graftlm.errors import CheckpointError
from graftlm.text.gguf_splits import SPLITS, Split
from graftlm.text.gguf_vocabulary import GGUFVocabulary, TokenType, read_gguf_vocabulary

logger = logging.getLogger(__name__)

# What SentencePiece writes for a space.
SPACE = "\u2581"


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """
    Args:
        metadata: of a GGUF file, by llama.cpp's keys.

    Raises:
        CheckpointError: there is no vocabulary, its parts do not fit each other, or its rules are unknown; the message
            names them.
    """
    vocabulary = read_gguf_vocabulary(metadata)
    build = BUILDERS.get(vocabulary.model)
    if build is None:
        raise CheckpointError(
            "the GGUF file's tokenizer is of an unknown kind",
            got=f"tokenizer.ggml.model {vocabulary.model!r}",
            allowed=", ".join(sorted(BUILDERS)),
        )
    try:
        tokenizer = build(vocabulary)
    except CheckpointError:
        raise
    except Exception as cause:  # the Rust library raises plain Exception
        raise CheckpointError("the GGUF file's tokenizer cannot be read", got=str(cause)[:200]) from cause
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    # Of those that are respelled, text reaches the tokens through merges.
    own = [token for token in vocabulary.of_type(TokenType.USER_DEFINED) if tokenizer.token_to_id(token) is not None]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])
    names = {f"{role}_token": vocabulary.tokens[token_id] for role, token_id in vocabulary.special.items()}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=vocabulary.chat_template, **names)


def _byte_level(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Merges over bytes, each of which is spelled as a character (GPT-2)."""
    if vocabulary.merges is None:
        raise CheckpointError("the GGUF file has no merges", got=f"tokenizer.ggml.model {vocabulary.model!r}")
    split = _split(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=_ids(vocabulary.tokens), merges=list(vocabulary.merges), ignore_merges=split.ignore_merges)
    )
    normalizer = split.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = split.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, vocabulary, adds_bos=split.adds_bos)
    return tokenizer


def _split(vocabulary: GGUFVocabulary) -> Split:
    """
    Raises:
        CheckpointError: the file names one that is unknown.
    """
    if vocabulary.split is None:
        name = vocabulary.architecture if vocabulary.architecture in SPLITS else "gpt-2"
        logger.warning("the GGUF file does not say how text is split (tokenizer.ggml.pre): taken to be %s", name)
        return SPLITS[name]
    if vocabulary.split not in SPLITS:
        raise CheckpointError(
            "the GGUF file splits text in a way that is unknown",
            got=f"tokenizer.ggml.pre {vocabulary.split!r}",
            allowed=", ".join(sorted(SPLITS)),
            do="serve the model from its Hugging Face folder",
        )
    return SPLITS[vocabulary.split]


def _sentencepiece(vocabulary: GGUFVocabulary) -> Tokenizer:
    """Pieces with spaces inside, and bytes for what is in none."""
    tokens = [_respelled(token) for token in vocabulary.tokens]
    merges = vocabulary.merges or _merges(vocabulary, tokens)
    unknown = vocabulary.special.get("unk")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_ids(tokens),
            merges=list(merges),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = vocabulary.adds_space is not False
    spell = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if adds_space else spell
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if adds_space else []),
        ]
    )
    _add_ends(tokenizer, vocabulary, adds_bos=True)
    return tokenizer


def _respelled(token: str) -> str:
    """llama.cpp's converter spells a token of spaces alone as spaces (Gemma has some)."""
    return SPACE * len(token) if token and not token.strip(" ") else token


def _merges(vocabulary: GGUFVocabulary, tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Every way to make a token of two, the best token first.

    Source: transformers' SentencePiece converter (`generate_merges`), equal ranks included.
    """
    ids = _ids(tokens)
    ranked = []
    for token, score in _scored(vocabulary, tokens).items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in ids and right in ids:
                ranked.append((score, len(left), len(right), left, right))
    ranked.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _scored(vocabulary: GGUFVocabulary, tokens: Sequence[str]) -> dict[str, float]:
    """Gemma's scores do not rank its merges; the order of its tokens does. A run of spaces that was respelled is taken
    as long as it can be."""
    if vocabulary.architecture.startswith("gemma") or not vocabulary.scores:
        scored = {token: -float(index) for index, token in enumerate(tokens)}
    else:
        scored = dict(zip(tokens, vocabulary.scores, strict=True))
    runs = {token for token, stored in zip(tokens, vocabulary.tokens, strict=True) if token != stored}
    return scored | {token: float(len(token)) for token in runs}


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_ends(tokenizer: Tokenizer, vocabulary: GGUFVocabulary, *, adds_bos: bool) -> None:
    """What stands before and after every text. adds_bos: where the file does not say."""
    wanted = {"bos": adds_bos if vocabulary.adds_bos is None else vocabulary.adds_bos, "eos": vocabulary.adds_eos}
    ends = {
        role: (vocabulary.tokens[vocabulary.special[role]], vocabulary.special[role])
        for role, is_wanted in wanted.items()
        if is_wanted and role in vocabulary.special
    }
    if ends:
        before, after = ([ends[role][0]] if role in ends else [] for role in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=list(ends.values())
        )


BUILDERS: Mapping[str, Callable[[GGUFVocabulary], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
