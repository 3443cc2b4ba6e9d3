"""Fields that are vLLM's and not OpenAI's, on both generation routes."""

from __future__ import annotations

from typing import Any

import pytest

from graftlm import AsyncLLM
from tests.engine.rig import stepwise
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_completions import PROMPT, raw_chunks
from tests.server.test_refusals import MESSAGES, ROUTES, body_for

FORCED = {"logit_bias": {"5": 100}, "max_tokens": 3}


def choice_of(live: LiveServer, route: str, **fields: Any) -> dict[str, Any]:
    reply = live.http.post(route, json=body_for(route, temperature=0, **fields))
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def test_r076_prompt_logprobs_rate_the_token_and_the_best(server: LiveServer) -> None:
    body = {"model": "red", "prompt": PROMPT, "echo": True, "max_tokens": 1, "logprobs": 3, "prompt_logprobs": 2}
    choice = server.complete(**body).json()["choices"][0]
    first, *rated = choice["prompt_logprobs"]
    echoed = choice["logprobs"]
    assert first is None
    assert len(rated) == len(PROMPT) - 1
    for position, entry in enumerate(rated, 1):
        ranks = [rating["rank"] for rating in entry.values()]
        own = next(iter(entry.values()))
        assert own["decoded_token"] == PROMPT[position]
        assert own["logprob"] == echoed["token_logprobs"][position]
        assert sorted({*ranks, 1, 2}) == sorted(ranks)
        assert len(entry) == (2 if ranks[0] <= 2 else 3)
        [best] = [rating["logprob"] for rating in entry.values() if rating["rank"] == 1]
        assert best == max(echoed["top_logprobs"][position].values())


def test_prompt_logprobs_do_not_need_echo_and_leave_the_answer_as_it_is(server: LiveServer) -> None:
    body: dict[str, Any] = {"model": "red", "prompt": [PROMPT, "xy"], "logprobs": 1, "max_tokens": 2}
    plain = server.complete(**body).json()["choices"]
    rated = server.complete(**body, prompt_logprobs=0).json()["choices"]
    assert [len(choice.pop("prompt_logprobs")) for choice in rated] == [len(PROMPT), 2]
    assert [choice["text"] for choice in rated] == [choice["text"] for choice in plain]
    assert [len(choice["logprobs"]["tokens"]) for choice in rated] == [2, 2]
    chat = server.chat(model="red", messages=MESSAGES, prompt_logprobs=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("route", ROUTES)
def test_prompt_logprobs_are_refused_in_a_stream_and_out_of_range(server: LiveServer, route: str) -> None:
    for fields in ({"prompt_logprobs": 1, "stream": True}, {"prompt_logprobs": 21}, {"prompt_logprobs": -1}):
        assert error_of(server.http.post(route, json=body_for(route, **fields)))["param"] == "prompt_logprobs"


@pytest.mark.parametrize("route", ROUTES)
def test_token_ids_are_returned_when_asked_for_and_streamed(server: LiveServer, route: str) -> None:
    body = body_for(route, temperature=0, return_token_ids=True, **FORCED)
    whole = server.http.post(route, json=body).json()
    assert whole["choices"][0]["token_ids"] == [5, 5, 5]
    prompt_ids = (whole if "chat" in route else whole["choices"][0])["prompt_token_ids"]
    assert len(prompt_ids) == whole["usage"]["prompt_tokens"]
    chunks = raw_chunks(server, route, **body)
    assert [id for chunk in chunks for id in chunk["choices"][0].get("token_ids", [])] == [5, 5, 5]
    holders = [chunk if "chat" in route else chunk["choices"][0] for chunk in chunks]
    assert [holder["prompt_token_ids"] for holder in holders if "prompt_token_ids" in holder] == [prompt_ids]


@pytest.mark.parametrize("route", ROUTES)
def test_what_ends_an_answer_and_special_tokens_are_text_when_asked_for(server: LiveServer, route: str) -> None:
    kept = {"stop": "&&", "include_stop_str_in_output": True}
    assert text_of(choice_of(server, route, **FORCED, **kept)) == "&&"
    special = {"logit_bias": {"258": 100}, "max_tokens": 2}
    assert text_of(choice_of(server, route, **special)) == ""
    assert text_of(choice_of(server, route, **special, skip_special_tokens=False)) == "<pad><pad>"
    chunks = raw_chunks(server, route, **body_for(route, skip_special_tokens=False, **special))
    pieces = [chunk["choices"][0] for chunk in chunks]
    assert "".join(piece.get("text") or piece.get("delta", {}).get("content", "") for piece in pieces) == "<pad><pad>"


def test_a_prompt_can_be_taken_without_the_tokenizers_own_tokens(server: LiveServer) -> None:
    body = {"model": "red", "prompt": PROMPT, "echo": True}
    assert server.text(**body, add_special_tokens=False) == server.text(**body)


def test_a_chat_can_go_on_with_its_last_message(server: LiveServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I thi"}]
    rest = server.chat(model="red", messages=messages, continue_final_message=True).json()
    rendered = "<s>user\nhello</s><s>assistant\nI thi"
    ids = server.http.post("/tokenize", json={"prompt": rendered}).json()["tokens"]
    assert rest["usage"]["prompt_tokens"] == len(ids)
    assert rest["choices"][0]["message"]["content"] == server.text(model="red", prompt=ids)
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error_of(server.chat(model="red", messages=messages, **both))["param"] == "continue_final_message"


def test_a_chunk_is_with_the_client_before_the_next_step_begins(files: Files) -> None:
    llm = AsyncLLM(files.base, name="tiny", kv_cache_bytes=1 << 20)
    body = {"model": "tiny", "prompt": "x", "stream": True, **FORCED}
    with serving(llm) as live, stepwise(llm) as permit_step:
        permit_step()
        with live.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            for _ in range(3):
                # The engine stands still before its next step.
                assert '"text":"&"' in next(lines)
                assert next(lines) == ""
                permit_step()
            assert next(lines) == "data: [DONE]"
