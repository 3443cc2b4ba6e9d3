"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.conftest import CONTEXT, Files
from tests.server.live_server import LiveServer, error_of

TEXT = "né <s>日本</s>"
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]


def tokenize(live: LiveServer, **body: Any) -> dict[str, Any]:
    reply = live.http.post("/tokenize", json=body)
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    return content


@pytest.mark.parametrize("model", [None, "red"])
def test_a_texts_tokens_are_the_tokenizers_and_lead_back_to_it(
    server: LiveServer, files: Files, model: str | None
) -> None:
    reference = AutoTokenizer.from_pretrained(files.base)
    reply = tokenize(server, model=model, prompt=TEXT, return_token_strs=True)
    ids = reference(TEXT)["input_ids"]
    assert reply == {
        "count": len(ids),
        "max_model_len": CONTEXT,
        "tokens": ids,
        "token_strs": reference.convert_ids_to_tokens(ids),
    }
    assert tokenize(server, prompt=TEXT)["token_strs"] is None
    back = server.http.post("/detokenize", json={"model": model, "tokens": ids})
    assert back.json() == {"prompt": TEXT}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "options",
    [{}, {"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True}],
    ids=str,
)
def test_a_conversations_tokens_are_its_templates(server: LiveServer, files: Files, options: dict[str, Any]) -> None:
    reference = AutoTokenizer.from_pretrained(files.base)
    wanted = {"add_generation_prompt": True, **options}
    expected = reference.apply_chat_template(MESSAGES, return_dict=False, **wanted)
    assert tokenize(server, messages=MESSAGES, **options)["tokens"] == expected
    chat = {"model": "red", "messages": MESSAGES, "return_token_ids": True, **options}
    assert server.chat(**chat).json()["prompt_token_ids"] == expected


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"prompt": "a" * 128 * (CONTEXT + 1)}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_be_tokenised_is_400_naming_the_field(
    server: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(server.http.post(path, json=body))["param"] == param


@pytest.mark.parametrize(("path", "field"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_r072_another_models_tokenizer_is_not_the_bases(server: LiveServer, path: str, field: dict[str, Any]) -> None:
    error = error_of(server.http.post(path, json={"model": "nope", **field}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
