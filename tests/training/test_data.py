"""From rows to tokens: what is learnt, what is cut, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from graftlm.errors import TrainingDataError
from graftlm.text import Tokenizer, load_tokenizer
from graftlm.training.batch_order import BatchOrder
from graftlm.training.document import Document, encode_row
from graftlm.training.documents import Documents, load_documents
from tests.tiny import write_tokenizer
from tests.training.peft_loop import write_rows

EOS, VOCABULARY = 257, 259
QWEN_LIKE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao\n"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def learnt_text(document: Document, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.token_text(document.token_ids[place]) for place in document.targets)


def load(path: Path, tokenizer: Tokenizer, **options: Any) -> Documents:
    settings = {"vocab_size": VOCABULARY, "max_length": 512, "long_documents": "truncate", **options}
    return load_documents(path, tokenizer, **settings)


def test_a_chat_teaches_the_assistants_turns_and_how_they_end(tokenizer: Tokenizer) -> None:
    """R112, R115."""
    document = encode_row({"messages": CHAT}, tokenizer)
    assert learnt_text(document, tokenizer) == "hello</s>ciao\n</s>"
    assert document.token_ids == tuple(tokenizer.encode_chat(CHAT, add_generation_prompt=False))


def test_a_parquet_file_has_the_documents_of_its_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": CHAT}, {"messages": CHAT[2:]}]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    assert load(path, tokenizer) == load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer)
    datasets.Dataset.from_list([{"text": "ab", "n": 1}, {"text": None, "n": 2}]).to_parquet(path)
    with pytest.raises(TrainingDataError, match=r"rows\.parquet:2: needs messages"):
        load(path, tokenizer)
    with pytest.raises(TrainingDataError, match="cannot be read"):
        load(tmp_path / "absent.parquet", tokenizer)


def test_a_data_set_in_the_hubs_layout_has_its_splits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Read from a folder, which `datasets` takes for a repository of the hub's."""
    folder = tmp_path / "org" / "name"
    (folder / "data").mkdir(parents=True)
    rows: dict[str, list[dict[str, Any]]] = {"train": [{"text": "ab"}, {"text": "cd"}], "validation": [{"text": "ef"}]}
    for split, split_rows in rows.items():
        datasets.Dataset.from_list(split_rows).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    for suffix, split in (("", "train"), (":train", "train"), (":validation", "validation")):
        expected = load(write_rows(tmp_path / "rows.jsonl", rows[split]), tokenizer)
        assert load(Path(f"hub:{folder}{suffix}"), tokenizer) == expected
    with pytest.raises(TrainingDataError, match=r"cannot be read; got: .*test"):
        load(Path(f"hub:{folder}:test"), tokenizer)


def test_what_follows_the_closing_token_is_not_learnt(tokenizer: Tokenizer) -> None:
    document = encode_row({"messages": CHAT}, tokenizer.with_chat_template(QWEN_LIKE))
    assert learnt_text(document, tokenizer) == "hello</s>ciao\n</s>"


def test_a_completion_is_learnt_with_its_end(tokenizer: Tokenizer) -> None:
    """R112."""
    document = encode_row({"prompt": "2+2=", "completion": " 4é"}, tokenizer)
    assert learnt_text(document, tokenizer).endswith("</s>")
    assert tokenizer.decode(document.token_ids) == "2+2= 4é"
    assert len(document.targets) == len(tokenizer.encode(" 4é")) + 1


def test_all_of_a_text_is_learnt_but_its_first_token(tokenizer: Tokenizer) -> None:
    document = encode_row({"text": "abc"}, tokenizer)
    assert (document.targets, document.token_ids[-1]) == ((1, 2, 3), EOS)


def test_wrong_rows_are_listed_with_file_line_and_reason(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "rows.jsonl",
        [
            {"text": "fine"},
            {"messages": [{"role": "user", "content": "hi"}]},
            {"prompt": "alone"},
            {"text": ""},
            {"text": 5},
            {"question": "?"},
            {"text": "a", "messages": CHAT},
            {"messages": [{"role": "assistant"}]},
        ],
    )
    path.write_text(path.read_text() + "\n[1]\n{broken\n")
    with pytest.raises(TrainingDataError) as caught:
        load(path, tokenizer)
    message = str(caught.value)
    for line, reason in (
        (2, "no turn of the assistant's"),
        (3, "completion is missing"),
        (4, "text is not a text"),
        (5, "text is not a text"),
        (6, "its keys are question"),
        (7, "its keys are text, messages"),
        (8, "messages[0] needs a role and a content"),
        (10, "a list, not an object"),
        (11, "not JSON"),
    ):
        [told] = [part for part in message.split("\n") if part.startswith(f"  {path}:{line}: ")]
        assert reason in told
    assert message.startswith("9 rows cannot be learnt from")


def test_a_chat_whose_turns_change_once_others_follow_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    forgetful = tokenizer.with_chat_template(
        "{% for message in messages %}{% if loop.last %}!{% endif %}{{ message['content'] }}</s>{% endfor %}"
    )
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CHAT}])
    with pytest.raises(TrainingDataError, match=r"renders messages\[1\] otherwise"):
        load(path, forgetful)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows_is_refused(tokenizer: Tokenizer, tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(TrainingDataError, match="no rows"):
        load(path, tokenizer)


def test_a_file_that_is_not_there_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TrainingDataError, match="cannot be read"):
        load(tmp_path / "absent.jsonl", tokenizer)


def test_long_documents_are_cut_split_or_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 24}, {"text": "short"}])
    cut = load(path, tokenizer, max_length=10)
    assert [len(document.token_ids) for document in cut.documents] == [10, 6]
    assert cut.num_long == 1
    split = load(path, tokenizer, max_length=10, long_documents="split")
    assert [len(document.token_ids) for document in split.documents] == [10, 10, 5, 6]
    with pytest.raises(TrainingDataError, match=r":1: it has 25 tokens, more than 10"):
        load(path, tokenizer, max_length=10, long_documents="refuse")
    masked = write_rows(tmp_path / "masked.jsonl", [{"prompt": "x" * 12, "completion": "y"}])
    with pytest.raises(TrainingDataError, match="hold nothing to learn"):
        load(masked, tokenizer, max_length=10)


def test_a_token_the_model_has_no_row_for_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "abc"}])
    with pytest.raises(TrainingDataError, match="gives token 257, but the model has rows for 200"):
        load(path, tokenizer, vocab_size=200)


def test_every_epoch_has_all_documents_in_an_order_of_its_own() -> None:
    order = BatchOrder(10, 4, shuffle=True, seed=1)
    epochs = [[order.batch(epoch * 3 + index) for index in range(3)] for epoch in range(2)]
    assert [len(batch) for batch in epochs[0]] == [4, 4, 2]
    first, second = ([index for batch in epoch for index in batch] for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != list(range(10))
    again = BatchOrder(10, 4, shuffle=True, seed=1)
    assert again.batch(4) == epochs[1][1]
    assert BatchOrder(10, 4, shuffle=True, seed=2).batch(0) != epochs[0][0]
