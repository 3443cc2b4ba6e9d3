"""Reading tokenizers, and encoding exactly what was sent."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from graftlm.errors import CheckpointError, InvalidRequest
from graftlm.text import Tokenizer, load_tokenizer
from tests.tiny import edit_json


def add_bos(folder: Path) -> None:
    """Let the tokenizer put <s> before every text, as Llama's do."""
    fast = AutoTokenizer.from_pretrained(folder)
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    fast.save_pretrained(folder)


def test_text_round_trips(byte_level: Tokenizer) -> None:
    text = "Hello . It 's  naïve 漢字 👩‍👧 \n\t"
    assert byte_level.decode(byte_level.encode(text)) == text


def test_decoding_does_not_tidy_up_spaces_before_punctuation(byte_level_folder: Path) -> None:
    edit_json(
        byte_level_folder / "tokenizer_config.json",
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    tokenizer = load_tokenizer(byte_level_folder)
    assert tokenizer.decode(tokenizer.encode("it 's x = a ? b : c !")) == "it 's x = a ? b : c !"


@pytest.mark.parametrize("num_characters", [1, 8, 9, 1000])
def test_r085_truncation_and_padding_saved_while_training_do_not_touch_prompts(
    byte_level_folder: Path, num_characters: int
) -> None:
    edit_json(
        byte_level_folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 16},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 258,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        },
    )
    tokenizer = load_tokenizer(byte_level_folder)
    assert len(tokenizer.encode("x" * num_characters)) == num_characters


def test_r025_a_prompt_gets_the_tokenizers_own_bos_and_a_chat_only_the_templates(byte_level_folder: Path) -> None:
    add_bos(byte_level_folder)
    tokenizer = load_tokenizer(byte_level_folder)
    assert tokenizer.encode("a")[0] == 256
    assert tokenizer.encode("a").count(256) == 1
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert ids.count(256) == 1
    assert ids[0] == 256
    reference = AutoTokenizer.from_pretrained(byte_level_folder)
    assert ids == reference.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_r025_a_template_without_bos_gets_none(byte_level_folder: Path) -> None:
    add_bos(byte_level_folder)
    (byte_level_folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(byte_level_folder)
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == tokenizer.encode(
        "hi", add_special_tokens=False
    )


def test_special_tokens_show_in_the_text_of_one_token_and_nowhere_else(byte_level: Tokenizer) -> None:
    assert byte_level.decode([256, *byte_level.encode("a"), 257]) == "a"
    assert byte_level.token_text(257) == "</s>"
    assert byte_level.eos_token_id == 257
    assert len(byte_level) == 259


def test_long_texts_are_read_and_written_as_short_ones_are(byte_level_folder: Path) -> None:
    add_bos(byte_level_folder)
    tokenizer, expected = load_tokenizer(byte_level_folder), AutoTokenizer.from_pretrained(byte_level_folder)
    text = "Hello . It 's  naïve 漢字 👩‍👧 \n\t" * 200
    for special in (True, False):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert ids == expected.encode(text, add_special_tokens=special)
        for skipped in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skipped) == expected.decode(
                ids, skip_special_tokens=skipped
            )


@pytest.mark.parametrize("before", ["a", "a" * 5000], ids=len)
def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer, before: str) -> None:
    with pytest.raises(InvalidRequest, match="not valid Unicode") as refused:
        byte_level.encode(f"{before}\ud83d")
    assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="not valid Unicode") as refused:
        byte_level.encode_chat([{"role": "user", "content": "a\ud83d"}])
    assert refused.value.param == "messages"


def truncate_json(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:500])


def lose_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    del content["model"]
    path.write_text(json.dumps(content))


def unknown_class(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", tokenizer_class="NoSuchTokenizer", backend=...)


def no_files(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def broken_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")


def config_is_a_list(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")


@pytest.mark.parametrize(
    "damage", [truncate_json, lose_model, unknown_class, no_files, broken_config, config_is_a_list]
)
def test_r023_a_broken_tokenizer_folder_gives_one_clear_error(byte_level_folder: Path, damage: Any) -> None:
    damage(byte_level_folder)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(byte_level_folder)


def test_r023_code_in_a_tokenizer_folder_is_not_imported(byte_level_folder: Path) -> None:
    marker = byte_level_folder / "marker"
    (byte_level_folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\n")
    edit_json(
        byte_level_folder / "tokenizer_config.json",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    )
    try:
        tokenizer = load_tokenizer(byte_level_folder)
    except CheckpointError:
        pass
    else:
        assert tokenizer.encode("ab") == [64, 65]
    assert not marker.exists()
    assert not [name for name in sys.modules if name.endswith("evil")]
