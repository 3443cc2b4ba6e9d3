"""/v1/completions with well-formed requests."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import peft
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.server.conftest import Files
from tests.server.live_server import LiveServer

PROMPT = "the quick brown fox"
MODELS = ["tiny/llama", "red", "blue"]


def stream_choices(live: LiveServer, **body: Any) -> dict[int, dict[str, Any]]:
    """The choices of a streamed completion put together by index, each with its list of finish reasons."""
    joined: dict[int, dict[str, Any]] = {}
    stream = live.openai.completions.create(stream=True, **{"temperature": 0, "max_tokens": 8, **body})
    for chunk in stream:
        for choice in chunk.choices:
            entry = joined.setdefault(choice.index, {"text": "", "finish": [], "offsets": [], "logprobs": []})
            entry["text"] += choice.text
            if choice.finish_reason is not None:
                entry["finish"].append(choice.finish_reason)
            if choice.logprobs is not None:
                entry["offsets"] += choice.logprobs.text_offset
                entry["logprobs"] += choice.logprobs.token_logprobs
    return joined


def test_greedy_text_is_that_of_transformers_and_peft(server: LiveServer, files: Files) -> None:
    tokenizer = AutoTokenizer.from_pretrained(files.base)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    for name, adapter in ("tiny/llama", None), ("red", files.red), ("blue", files.blue):
        model = LlamaForCausalLM.from_pretrained(files.base, dtype=torch.float32)
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter)
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert server.text(model=name, prompt=PROMPT, max_tokens=24) == expected


def test_r017_adapters_differ_and_streaming_keeps_the_adapter(server: LiveServer) -> None:
    texts = {model: server.text(model=model, prompt=PROMPT, max_tokens=32) for model in MODELS}
    assert len(set(texts.values())) == len(MODELS)
    for model in MODELS:
        assert stream_choices(server, model=model, prompt=PROMPT, max_tokens=32)[0]["text"] == texts[model]


def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(server: LiveServer, files: Files) -> None:
    ids = AutoTokenizer.from_pretrained(files.base)(PROMPT)["input_ids"]
    expected = server.text(model="red", prompt=PROMPT)
    assert server.text(model="red", prompt=ids) == expected
    for prompt in ([PROMPT, "x"], [ids, ids[:3]]):
        choices = server.complete(model="red", prompt=prompt).json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert choices[0]["text"] == expected


def test_choices_of_many_prompts_are_numbered_prompt_by_prompt(server: LiveServer) -> None:
    prompts = ["one", "two", "three"]
    reply = server.complete(model="blue", prompt=prompts, n=2, temperature=1, seed=5).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    streamed = stream_choices(server, model="blue", prompt=prompts, n=2, temperature=1, seed=5)
    assert {index: entry["text"] for index, entry in streamed.items()} == {
        choice["index"]: choice["text"] for choice in reply["choices"]
    }
    assert counted(reply["usage"]) == (11, 48, 59)


def test_r065_a_seed_repeats_itself_among_neighbours(server: LiveServer) -> None:
    def sampled(seed: int) -> str:
        texts = [
            choice["text"]
            for choice in server.complete(model="red", prompt=[PROMPT] * 3, temperature=1, seed=seed).json()["choices"]
        ]
        assert len(set(texts)) == 1
        return texts[0]

    assert sampled(7) == sampled(7) != sampled(8)


def test_r070_without_a_seed_answers_differ(server: LiveServer) -> None:
    choices = server.complete(model="red", prompt=PROMPT, temperature=1, n=10).json()["choices"]
    assert len({choice["text"] for choice in choices}) >= 5


def test_r090_r091_concurrent_requests_answer_as_alone(server: LiveServer) -> None:
    asked = [(model, prompt) for prompt in ("a", "hello there", PROMPT * 9) for model in MODELS] * 2
    alone = {pair: server.text(model=pair[0], prompt=pair[1], max_tokens=16) for pair in set(asked)}
    with ThreadPoolExecutor(len(asked)) as pool:
        texts = list(pool.map(lambda pair: server.text(model=pair[0], prompt=pair[1], max_tokens=16), asked))
    assert texts == [alone[pair] for pair in asked]


@pytest.mark.parametrize("temperature", [1e-45, 1e-8])
def test_r068_a_tiny_temperature_is_greedy(server: LiveServer, temperature: float) -> None:
    greedy = server.text(model="red", prompt=PROMPT)
    assert server.text(model="red", prompt=PROMPT, temperature=temperature) == greedy


def test_r066_each_sampling_field_has_its_effect(server: LiveServer) -> None:
    sampled = {"model": "red", "prompt": PROMPT, "seed": 3, "temperature": 1.5, "max_tokens": 24}
    greedy = {"model": "red", "prompt": PROMPT, "max_tokens": 24}
    plain, plain_greedy = server.text(**sampled), server.text(**greedy)
    for change in (
        {"temperature": 0.3},
        {"top_p": 0.1},
        {"top_k": 1},
        {"min_p": 0.9},
        {"seed": 4},
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {"65": 100}},
    ):
        assert server.text(**{**sampled, **change}) != plain, change
    forced = server.complete(**greedy, logit_bias={"5": 100}, stop_token_ids=[5]).json()["choices"][0]
    assert (forced["text"], forced["finish_reason"], forced["stop_reason"]) == ("", "stop", 5)
    held = {**greedy, "logit_bias": {"257": 100}}
    assert server.text(**held) == ""
    assert server.complete(**held, min_tokens=3).json()["usage"]["completion_tokens"] > 3
    assert server.complete(**held, ignore_eos=True).json()["usage"]["completion_tokens"] == 24
    assert server.text(**greedy, top_k=-1) == plain_greedy


def test_r080_a_bias_of_100_forces_its_token(server: LiveServer) -> None:
    assert server.text(model="tiny/llama", prompt=PROMPT, logit_bias={"5": 100}, max_tokens=4) == "&&&&"


def test_r063_no_part_of_a_stop_string_is_sent(server: LiveServer) -> None:
    body = {"model": "tiny/llama", "prompt": PROMPT, "logit_bias": {"5": 100}, "max_tokens": 6}
    assert stream_choices(server, **body, stop=["&&&"])[0] | {"offsets": [], "logprobs": []} == {
        "text": "",
        "finish": ["stop"],
        "offsets": [],
        "logprobs": [],
    }
    near_miss = stream_choices(server, **body, stop=["&&&&&&&"])[0]
    assert (near_miss["text"], near_miss["finish"]) == ("&" * 6, ["length"])


@pytest.mark.parametrize("model", ["tiny/llama", "red"])
def test_r064_streamed_text_joins_to_the_whole(server: LiveServer, model: str) -> None:
    for seed in range(4):
        body = {"model": model, "prompt": "日本語 👩‍👩‍👧", "temperature": 1.2, "seed": seed, "max_tokens": 40}
        assert stream_choices(server, **body)[0]["text"] == server.text(**body)


def counted(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def test_usage_tells_how_much_of_the_prompt_was_cached(server: LiveServer) -> None:
    body = {"model": "red", "prompt": list(range(40, 90)), "max_tokens": 1}
    first, second = (server.complete(**body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 48}


def test_r071_usage_is_streamed_only_when_asked_for(server: LiveServer) -> None:
    body: dict[str, Any] = {"model": "red", "prompt": [PROMPT, "x"], "n": 2, "max_tokens": 5, "temperature": 0}
    usage = server.complete(**body).json()["usage"]
    for options in (None, {"include_usage": False}):
        chunks = raw_chunks(server, **body, stream_options=options)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    *chunks, last = raw_chunks(server, **body, stream_options={"include_usage": True})
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], counted(last["usage"])) == ([], counted(usage))


def raw_chunks(live: LiveServer, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    reply = live.http.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_r082_every_choice_ends_once_under_its_own_index(server: LiveServer) -> None:
    body = {"model": "blue", "prompt": PROMPT, "n": 3, "temperature": 1, "seed": 11, "max_tokens": 12}
    whole = server.complete(**body).json()["choices"]
    streamed = stream_choices(server, **body)
    assert [len(streamed[index]["finish"]) for index in range(3)] == [1, 1, 1]
    assert [streamed[index]["text"] for index in range(3)] == [choice["text"] for choice in whole]
    assert len({choice["text"] for choice in whole}) > 1


@pytest.mark.parametrize(("echo", "logprobs"), list(itertools.product([True, False], [None, 0, 3])))
def test_r075_no_tokens_may_be_asked_for(server: LiveServer, echo: bool, logprobs: int | None) -> None:
    body = {"model": "red", "prompt": PROMPT, "max_tokens": 0, "echo": echo, "logprobs": logprobs}
    reply = server.complete(**body).json()
    [choice] = reply["choices"]
    assert choice["text"] == (PROMPT if echo else "")
    assert choice["finish_reason"] == "length"
    assert counted(reply["usage"]) == (len(PROMPT), 0, len(PROMPT))
    streamed = stream_choices(server, **body)[0]
    assert (streamed["text"], streamed["finish"]) == (choice["text"], ["length"])
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert len(choice["logprobs"]["tokens"]) == (len(PROMPT) if echo else 0)
        assert streamed["logprobs"] == choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("name", ["tiny/llama", "red"])
def test_r076_echoed_logprobs_cover_the_prompt_and_are_the_models(server: LiveServer, files: Files, name: str) -> None:
    body = {"model": name, "prompt": "0123456789", "max_tokens": 3, "echo": True, "logprobs": 2}
    for _ in range(2):  # the second time may come from a prefix cache
        choice = server.complete(**body).json()["choices"][0]
        logprobs, text = choice["logprobs"], choice["text"]
        assert {key: len(entries) for key, entries in logprobs.items()} == dict.fromkeys(logprobs, 13)
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["text_offset"][:10] == list(range(10))
        assert all(0 <= offset <= len(text) for offset in logprobs["text_offset"])
        streamed = stream_choices(server, **body)[0]
        assert (streamed["text"], streamed["logprobs"]) == (text, logprobs["token_logprobs"])

    tokenizer = AutoTokenizer.from_pretrained(files.base)
    model = LlamaForCausalLM.from_pretrained(files.base, dtype=torch.float32)
    if name == "red":
        model = peft.PeftModel.from_pretrained(model, files.red)
    ids = tokenizer("0123456789", return_tensors="pt")["input_ids"]
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=out).logits[0], dim=-1)
    expected = table[:-1].gather(1, out[0, 1:, None])[:, 0].tolist()
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)
    best = table[:-1].topk(2).values.tolist()
    assert [sorted(top.values(), reverse=True)[0] for top in logprobs["top_logprobs"][1:]] == pytest.approx(
        [pair[0] for pair in best], abs=1e-4
    )


def test_echo_of_ids_is_their_text_and_starts_every_choice(server: LiveServer, files: Files) -> None:
    prompt = "né 日本"
    ids = AutoTokenizer.from_pretrained(files.base)(prompt)["input_ids"]
    body = {"model": "red", "prompt": ids, "echo": True, "n": 2, "temperature": 1, "seed": 1}
    texts = [choice["text"] for choice in server.complete(**body).json()["choices"]]
    assert all(text.startswith(prompt) and text != prompt for text in texts)
    streamed = stream_choices(server, **body)
    assert [streamed[index]["text"] for index in range(2)] == texts


def test_the_reply_names_the_model_that_was_asked(server: LiveServer) -> None:
    completion = server.openai.completions.create(model="red", prompt=PROMPT, max_tokens=2)
    assert completion.model == "red"
    assert completion.object == "text_completion"
    assert completion.id.startswith("cmpl-")
    default = server.openai.completions.create(model="red", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert default.usage is not None
    assert default.usage.completion_tokens == 16
