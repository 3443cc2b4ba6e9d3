"""/v1/chat/completions with well-formed requests, and what a template refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from graftlm import AsyncLLM
from tests.server.conftest import CONTEXT, Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_completions import raw_chunks
from tests.tiny import make_llama

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
STRICT_TEMPLATE = (
    "{% if not messages or messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<s>{{ message.content }}{% endfor %}"
)


def test_r017_streamed_chat_is_the_whole_chat_for_every_model(server: LiveServer) -> None:
    texts = set()
    for model in ("tiny/llama", "red", "blue"):
        whole = server.openai.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=24)
        message = whole.choices[0].message
        assert message.role == "assistant"
        stream = server.openai.chat.completions.create(
            model=model, messages=MESSAGES, temperature=0, max_tokens=24, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == message.content
        texts.add(message.content)
    assert len(texts) == 3


def test_a_chat_is_the_completion_of_its_template(server: LiveServer, files: Files) -> None:
    tokenizer = AutoTokenizer.from_pretrained(files.base)
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    reply = server.chat(model="red", messages=MESSAGES).json()
    assert reply["choices"][0]["message"]["content"] == server.text(model="red", prompt=ids)
    assert reply["usage"]["prompt_tokens"] == len(ids)


def test_content_may_come_in_text_parts(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole, split = (
        server.chat(model="red", messages=[{"role": "user", "content": content}]).json()["choices"][0]["message"]
        for content in ("hello", parts)
    )
    assert whole == split


def test_an_assistants_own_reply_can_be_sent_back(server: LiveServer) -> None:
    reply = server.openai.chat.completions.create(model="red", messages=MESSAGES, max_tokens=4)
    message = reply.choices[0].message.model_dump()
    messages = [*MESSAGES, message, {"role": "user", "content": "go on", "name": "ann"}]
    assert server.chat(model="red", messages=messages).status_code == 200


def test_r087_without_a_limit_the_context_is_the_limit(short_server: LiveServer) -> None:
    body = {"model": "red", "messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    reply = short_server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["total_tokens"] == 128
    assert reply.json()["choices"][0]["finish_reason"] == "length"


def test_r087_both_limits_must_agree(server: LiveServer) -> None:
    body: dict[str, Any] = {"model": "red", "messages": MESSAGES, "ignore_eos": True}
    reply = server.chat(**body, max_tokens=3, max_completion_tokens=3)
    assert reply.json()["usage"]["completion_tokens"] == 3
    only = server.http.post("/v1/chat/completions", json={**body, "max_completion_tokens": 2})
    assert only.json()["usage"]["completion_tokens"] == 2
    assert error_of(server.chat(**body, max_tokens=3, max_completion_tokens=4))["param"] == "max_completion_tokens"


def test_logprobs_rate_each_token(server: LiveServer) -> None:
    body = {"model": "red", "messages": MESSAGES, "logprobs": True}
    choice = server.chat(**body, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 8
    for entry in content:
        assert entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"], abs=1e-5)
        assert len(entry["top_logprobs"]) == 2
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode() == entry["token"]
    streamed = raw_chunks(server, "/v1/chat/completions", **body, top_logprobs=2, temperature=0, max_tokens=8)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [entry for part in parts if part for entry in part["content"]] == content
    assert all(not entry["top_logprobs"] for entry in server.chat(**body).json()["choices"][0]["logprobs"]["content"])
    assert server.chat(model="red", messages=MESSAGES).json()["choices"][0]["logprobs"] is None


def test_r071_r082_several_choices_stream_with_one_end_each_and_usage_last(server: LiveServer) -> None:
    body = {"model": "blue", "messages": MESSAGES, "n": 3, "temperature": 1, "seed": 2, "max_tokens": 10}
    whole = server.chat(**body).json()
    *chunks, last = raw_chunks(server, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for expected in whole["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == expected["message"]["content"]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [expected["finish_reason"]]
    assert all("usage" not in chunk for chunk in raw_chunks(server, "/v1/chat/completions", **body))


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A base whose template refuses what Gemma's refuses."""
    folder = tmp_path_factory.mktemp("strict")
    base = make_llama(folder / "base")
    set_template(base, STRICT_TEMPLATE)
    llm = AsyncLLM(base, name="strict", kv_cache_bytes=1 << 20)
    with serving(llm) as live:
        yield live


def set_template(folder: Path, template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (MESSAGES, "System role not supported"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], "Conversation roles must alternate"),
    ],
)
def test_r074_a_template_that_refuses_is_a_400_with_its_words(
    strict_server: LiveServer, messages: list[Any], reason: str, stream: bool
) -> None:
    error = error_of(strict_server.chat(model="strict", messages=messages, stream=stream))
    assert error["param"] == "messages"
    assert reason in error["message"]
    assert strict_server.chat(model="strict", messages=[{"role": "user", "content": "a"}]).status_code == 200


def test_r079_empty_content_renders_and_no_content_is_refused(server: LiveServer) -> None:
    assert server.chat(model="red", messages=[{"role": "user", "content": ""}]).status_code == 200
    for messages in ([], [{"role": "user", "content": []}], [{"role": "user", "content": None}], [{"role": "user"}]):
        assert error_of(server.chat(model="red", messages=messages))["param"] == "messages"


def test_r086_five_thousand_messages_are_too_many(server: LiveServer) -> None:
    messages = [{"role": "user" if turn % 2 else "assistant", "content": "hi"} for turn in range(5000)]
    error = error_of(server.chat(model="red", messages=messages))
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
