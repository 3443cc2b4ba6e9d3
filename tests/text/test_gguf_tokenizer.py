"""Tokenizers out of GGUF files, against the `tokenizers` objects they were written from."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from graftlm.checkpoint.gguf_file import GGUFFile
from graftlm.errors import CheckpointError
from graftlm.text import load_tokenizer

Type = gguf.TokenType
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>")
TEXTS = [
    "Hello world, hello there",
    "  two spaces first, and   three inside; one at the end ",
    "a  12 b   3\n\n4 x12 1234567 3.14 1,000,000",
    "don't I'll WE'VE it's",
    "line\nline\r\n\r\n\n\ttab\t\t  \n end\n",
    "日本語のテキスト，中文字符。 한국어 مرحبا नमस्ते",  # noqa: RUF001
    "emoji 👩\u200d👩\u200d👧 🇩🇪 ☃ ²³¹½",
    "e\u0301 é ﬁ ﷺ \u00a0\u200b\u3000x",
    "<s>special</s> <|im_start|>user\nhi<unk> <|im_end|>",
    "\u2581raw \x00\x01\x7f \ufeff",
    "camelCase HTTPServer Ünïcödé ßẞ",
    'def f(x):\n    return x  # ok\n\n\n    pass\n$+<=>^`|~ [{"a": "b"}] … 。，!?.,',  # noqa: RUF001
    " ",
    "",
]


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def words(*before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


# As in the tokenizer.json of GPT-2, Pythia, StarCoder, Falcon and BLOOM; the others' patterns are transformers'.
BYTE_LEVEL: dict[str, tuple[pre_tokenizers.PreTokenizer, bool]] = {
    "gpt-2": (words(), False),
    "mpt": (words(), True),
    "olmo": (words(), True),
    "starcoder": (words(pre_tokenizers.Digits(individual_digits=True)), False),
    "smollm": (words(pre_tokenizers.Digits(individual_digits=True)), False),
    "falcon": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Punctuation("contiguous"),
                words(),
                pre_tokenizers.Digits(individual_digits=False),
                pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
            ]
        ),
        False,
    ),
    "bloom": (split(" ?[^(\\s|[.,!?…。，、।۔،])]+"), False),  # noqa: RUF001
    **{
        name: (split(GGUF_PRE_TOKENIZER_SPLITS[name]), name == "qwen2")
        for name in ("llama-bpe", "dbrx", "tekken", "gpt-4o", "qwen2")
    },
}


def train(tokenizer: Tokenizer, **arguments: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=list(SPECIAL), **arguments)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def byte_level_tokenizer(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, composed = BYTE_LEVEL[name]
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    if name in ("llama-bpe", "tekken"):
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def sentencepiece_tokenizer(*, adds_space: bool) -> Tokenizer:
    """As transformers' converter makes one: a merge for every way to make a token."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = spelling(adds_space=adds_space)
    letters = sorted({letter for text in TEXTS[:5] for letter in text.replace(" ", "\u2581")})
    train(trained, initial_alphabet=letters, limit_alphabet=len(letters))
    pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    pieces[len(SPECIAL) : len(SPECIAL)] = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = generate_merges(vocab, {piece: -float(index) for piece, index in vocab.items()})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = spelling(adds_space=adds_space)
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def spelling(*, adds_space: bool) -> normalizers.Normalizer:
    prefix = [normalizers.Prepend("\u2581")] if adds_space else []
    return normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])


def write(
    tokenizer: Tokenizer, path: Path, *, model: str, arch: str, edit: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """The way llama.cpp's converter does. SentencePiece's merges are left for the reader to find."""
    content = json.loads(tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types([token_type(token, added) for token in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if model == "gpt2":
        writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    else:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def token_type(token: str, added: dict[str, bool]) -> Type:
    if token in added:
        return Type.CONTROL if added[token] else Type.USER_DEFINED
    return Type.BYTE if len(token) == 6 and token.startswith("<0x") else Type.NORMAL


def assert_same(path: Path, original: Tokenizer) -> None:
    read = load_tokenizer(GGUFFile(path).metadata)
    for text in TEXTS:
        for add_special_tokens in (True, False):
            expected = original.encode(text, add_special_tokens=add_special_tokens).ids
            assert read.encode(text, add_special_tokens=add_special_tokens) == expected, text
        assert read.decode(expected) == original.decode(expected), text
    assert len(read) == original.get_vocab_size()


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_byte_level_vocabulary_is_read_with_the_splits_it_names(name: str, tmp_path: Path) -> None:
    original = byte_level_tokenizer(name)
    path = write(original, tmp_path / "m.gguf", model="gpt2", arch="llama", edit=lambda w: w.add_tokenizer_pre(name))
    assert_same(path, original)


def test_splits_tell_kinds_apart() -> None:
    tokens = {name: byte_level_tokenizer(name).encode(TEXTS[2]).tokens for name in ("gpt-2", "starcoder", "dbrx")}
    assert len({tuple(found) for found in tokens.values()}) == len(tokens)


def test_a_whole_word_is_one_token_where_merges_do_not_lead_to_it(tmp_path: Path) -> None:
    original = byte_level_tokenizer("llama-bpe")
    vocab, merges = original.get_vocab(), json.loads(original.to_str())["model"]["merges"]
    vocab = {token: index for token, index in vocab.items() if token not in SPECIAL} | {
        token: index for index, token in enumerate(SPECIAL)
    }
    vocab["zqz"] = len(vocab)
    original.model = models.BPE(vocab=vocab, merges=[tuple(merge) for merge in merges], ignore_merges=True)
    path = write(
        original, tmp_path / "m.gguf", model="gpt2", arch="llama", edit=lambda w: w.add_tokenizer_pre("llama-bpe")
    )
    assert load_tokenizer(GGUFFile(path).metadata).encode("zqz", add_special_tokens=False) == [vocab["zqz"]]
    assert_same(path, original)


@pytest.mark.parametrize("arch", ["gemma", "gemma3"])
def test_gemmas_pieces_are_read(arch: str, tmp_path: Path) -> None:
    original = sentencepiece_tokenizer(adds_space=False)
    path = write(original, tmp_path / "m.gguf", model="llama", arch=arch, edit=lambda w: w.add_add_space_prefix(False))
    assert_same(path, original)


def test_llamas_pieces_are_read_with_a_space_before_every_text(tmp_path: Path) -> None:
    original = sentencepiece_tokenizer(adds_space=True)
    path = write(original, tmp_path / "m.gguf", model="llama", arch="llama")
    assert_same(path, original)


@pytest.mark.parametrize(("adds_bos", "adds_eos"), [(True, True), (False, True), (False, False)])
def test_the_file_says_what_stands_before_and_after_a_text(adds_bos: bool, adds_eos: bool, tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(adds_bos)
        writer.add_add_eos_token(adds_eos)

    path = write(sentencepiece_tokenizer(adds_space=True), tmp_path / "m.gguf", model="llama", arch="llama", edit=edit)
    ids = load_tokenizer(GGUFFile(path).metadata).encode("x")
    assert (ids[0] == 1, ids[-1] == 2) == (adds_bos, adds_eos)


def test_runs_of_spaces_that_users_defined_stay_whole(tmp_path: Path) -> None:
    original = byte_level_tokenizer("mpt")
    original.add_tokens([AddedToken(" " * size, normalized=False, special=False) for size in (4, 3, 2)])
    path = write(original, tmp_path / "m.gguf", model="gpt2", arch="gptneox", edit=lambda w: w.add_tokenizer_pre("mpt"))
    assert_same(path, original)
    ids = load_tokenizer(GGUFFile(path).metadata).encode("x" + " " * 4 + "y")
    assert original.token_to_id(" " * 4) in ids


def test_a_chat_template_in_the_file_renders(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}[{{ message.content }}]{{ eos_token }}{% endfor %}"
    path = write(
        sentencepiece_tokenizer(adds_space=True),
        tmp_path / "m.gguf",
        model="llama",
        arch="llama",
        edit=lambda w: w.add_chat_template(template),
    )
    assert load_tokenizer(GGUFFile(path).metadata).render_chat([{"role": "user", "content": "hi"}]) == "<s>[hi]</s>"


def test_a_file_that_names_no_split_gets_its_architectures_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = byte_level_tokenizer("starcoder")
    path = write(original, tmp_path / "m.gguf", model="gpt2", arch="starcoder")
    with caplog.at_level(logging.WARNING):
        assert_same(path, original)
    assert "taken to be starcoder" in caplog.text


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no_tokens": ({"tokens": None}, "has no tokenizer"),
    "unknown_kind": ({"model": "t5"}, "tokenizer.ggml.model 't5'"),
    "unknown_split": ({"pre": "superbpe"}, "tokenizer.ggml.pre 'superbpe'"),
    "no_merges": ({"merges": None}, "has no merges"),
    "a_merge_of_one": ({"merges": ["ab"]}, "holds what is no pair"),
    "too_few_types": ({"token_type": [1]}, "does not fit its tokens"),
    "an_unknown_type": ({"token_type": [9, 1, 1]}, "has an unknown type"),
    "a_bos_that_is_no_token": ({"bos_token_id": 3}, "is no token's id"),
    "tokens_that_are_no_text": ({"tokens": [1, 2]}, "is not made of str"),
    "a_flag_that_is_none": ({"add_bos_token": "yes"}, "is no bool"),
    "merges_of_unknown_tokens": ({"merges": ["x y"]}, "cannot be read"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_a_vocabulary_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], "merges": ["a b"]}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in {**values, **changes}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(metadata)
