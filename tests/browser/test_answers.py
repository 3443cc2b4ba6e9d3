"""Asking: answers side by side, their tokens, and the ways they end."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from playwright.sync_api import Error, Page, Route, expect

from graftlm import AsyncLLM
from graftlm.server.api_keys import digest_of
from graftlm.server.key_file import KeyFile
from tests.browser.conftest import SCRIPTS, Open
from tests.server.live_server import LiveServer, serving
from tests.server.test_disconnect import wait_until

PROMPT = "hello"
MODELS = ["tiny", "red", "blue"]


def said(live: LiveServer, model: str, *, system: str | None = None) -> str:
    """What the openai client gets for the page's question."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": PROMPT})
    reply = live.openai.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    return reply.choices[0].message.content or ""


def test_models_answer_side_by_side_what_the_openai_client_gets(live: LiveServer, open_page: Open) -> None:
    page = open_page(live)
    page.choose(MODELS)
    page.set("Most tokens", "24")
    page.ask(PROMPT)
    for model in MODELS:
        page.expect_state(model, "Complete")
        assert page.text(model) == said(live, model)
        first, speed, tokens = page.figures(model)
        assert re.fullmatch(r"\d+\.\d\d s", first)
        assert float(speed) > 0
        assert 1 <= int(tokens) <= 24
    assert len({page.text(model) for model in MODELS}) == 3
    boxes = [page.answer(model).bounding_box() for model in MODELS]
    assert len({box["y"] for box in boxes if box}) == 1
    page.set("System message", "Be brief.")
    page.ask(PROMPT)
    page.expect_state("red", "Complete")
    assert page.text("red") == said(live, "red", system="Be brief.") != said(live, "red")


def test_no_more_than_four_can_be_chosen_and_one_must(live: LiveServer, open_page: Open) -> None:
    for name in ("third", "fourth"):
        body = {"lora_name": name, "lora_path": "red"}
        assert live.http.post("/v1/load_lora_adapter", json=body).status_code == 200
    page = open_page(live)
    expect(page.model("fourth")).to_be_disabled()
    page.model("third").uncheck()
    page.model("fourth").check()
    expect(page.model("third")).to_be_disabled()
    page.choose(["red"])
    page.model("red").uncheck()
    page.ask(PROMPT)
    expect(page.page.get_by_text("Choose at least one model.")).to_be_visible()
    for name in ("third", "fourth"):
        assert live.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200


def test_a_setting_that_is_wrong_is_shown_though_it_was_folded_away(live: LiveServer, open_page: Open) -> None:
    page = open_page(live)
    page.choose(["red"])
    page.set("Most tokens", "0")
    field = page.page.get_by_label("Most tokens")
    page.page.get_by_text("Settings", exact=True).click()
    expect(field).to_be_hidden()
    page.ask(PROMPT)
    expect(field).to_be_focused()
    expect(page.answer("red")).to_have_count(0)
    page.send_as_plain_text()
    # It would be ignored.
    expect(page.page.get_by_label("System message")).to_be_disabled()


def test_a_token_shows_how_likely_it_was_and_what_else_was(live: LiveServer, open_page: Open) -> None:
    page = open_page(live)
    page.choose(["red"])
    page.set("Most tokens", "24")
    page.ask(PROMPT)
    page.expect_state("red", "Complete")
    reply = live.openai.chat.completions.create(
        model="red",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    # Bytes of a random model; some are characters alone.
    rated = next(rated for rated in logprobs.content if rated.token.isalnum())
    token = page.tokens_of("red").locator(".token").filter(has_text=re.compile(f"^{rated.token}$")).first
    expect(page.tooltip).to_be_hidden()
    token.hover()
    expect(page.tooltip).to_contain_text(f"log-probability {rated.logprob:.3f}")
    expect(page.tooltip.get_by_role("row")).to_have_count(5)
    for row, other in zip(page.tooltip.get_by_role("row").all(), rated.top_logprobs, strict=True):
        expect(row).to_contain_text(f"{math.exp(other.logprob) * 100:.1f} %")
    page.prompt.hover()
    expect(page.tooltip).to_be_hidden()


def test_what_a_model_says_is_text_and_never_markup(
    scripted: LiveServer, prompts: dict[str, str], open_page: Open
) -> None:
    page = open_page(scripted)
    page.choose(["scripted"])
    page.send_as_plain_text()
    page.ask(prompts["markup"])
    page.expect_state("scripted", "Complete, ended by itself")
    assert page.text("scripted") == SCRIPTS["markup"]
    assert page.tokens_of("scripted").locator("img, script, b").count() == 0
    page.tokens_of("scripted").locator(".token").first.hover()
    expect(page.tooltip).to_contain_text("<")
    assert page.page.title() == "Graft playground"


def test_the_browser_refuses_markup_out_of_text_and_code_within_the_page(live: LiveServer, open_page: Open) -> None:
    page = open_page(live)
    tries = {
        "markup": "document.body.innerHTML = '<b>x</b>'",
        "code": "document.head.append(Object.assign(document.createElement('script'), {text: '1'}))",
    }
    for name, code in tries.items():
        with pytest.raises(Error, match=r"TypeError: .*requires 'Trusted"):
            page.page.evaluate(f"() => {{ {code}; }}")
        assert [complaint for complaint in page.complaints if "Trusted" in complaint], name
        page.complaints.clear()
    with page.page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.page.evaluate("() => { document.createElement('img').src = 'https://example.org/x.png'; }")
    page.complaints.clear()


def test_a_character_of_several_tokens_is_one_piece(
    scripted: LiveServer, prompts: dict[str, str], open_page: Open
) -> None:
    page = open_page(scripted)
    page.choose(["scripted"])
    page.send_as_plain_text()
    page.ask(prompts["characters"])
    page.expect_state("scripted", "Complete")
    assert page.text("scripted") == SCRIPTS["characters"]
    assert page.tokens_of("scripted").locator(".token").all_text_contents() == list(SCRIPTS["characters"])
    page.tokens_of("scripted").get_by_text("🙂").hover()
    expect(page.tooltip).to_contain_text("4 tokens make this character.")


def test_stop_and_escape_end_the_answers_and_the_server_frees_them(
    scripted: LiveServer, prompts: dict[str, str], open_page: Open
) -> None:
    page = open_page(scripted)
    page.choose(["scripted", "twin"])
    page.send_as_plain_text()
    page.set("Most tokens", "7000")
    for stop in (page.stop_button.click, lambda: page.page.keyboard.press("Escape")):
        page.ask(prompts["long"])
        for model in ("scripted", "twin"):
            page.expect_state(model, "Answering")
        assert len(scripted.http.get("/status").json()["engine"]["requests"]) == 2
        stop()
        for model in ("scripted", "twin"):
            page.expect_state(model, "Stopped")
            assert SCRIPTS["long"].startswith(page.text(model))
        wait_until(lambda: scripted.http.get("/status").json()["engine"]["requests"] == [])
        expect(page.stop_button).to_be_disabled()


def test_an_answer_that_breaks_off_says_so_and_the_others_go_on(
    scripted: LiveServer, prompts: dict[str, str], open_page: Open
) -> None:
    page = open_page(scripted)
    page.choose(["scripted", "twin"])
    page.send_as_plain_text()
    page.set("Most tokens", "7000")

    def cut(route: Route) -> None:
        if json.loads(route.request.post_data or "")["model"] == "scripted":
            route.continue_()
            return
        reply = route.fetch(post_data={**json.loads(route.request.post_data or ""), "max_tokens": 3})
        route.fulfill(response=reply, body=reply.text().partition("data: [DONE]")[0])

    page.page.route("**/v1/completions", cut)
    page.ask(prompts["long"])
    alert = page.answer("twin").get_by_role("alert")
    expect(alert).to_contain_text("Connection lost")
    assert page.text("twin") == SCRIPTS["long"][:3]
    page.expect_state("scripted", "Answering")
    page.page.unroute("**/v1/completions")
    alert.get_by_role("button", name="Try again").click()
    page.expect_state("twin", "Answering")
    expect(alert).to_be_hidden()
    page.stop_button.click()
    page.expect_state("twin", "Stopped")


def test_each_failure_is_told_in_its_own_column(live: LiveServer, open_page: Open) -> None:
    def with_ghost(route: Route) -> None:
        reply = route.fetch()
        cards = reply.json()
        cards["data"].append({**cards["data"][-1], "id": "ghost"})
        route.fulfill(response=reply, json=cards)

    def through_a_bad_proxy(route: Route) -> None:
        match json.loads(route.request.post_data or "")["model"]:
            case "blue":
                route.abort("connectionrefused")
            case "tiny":
                route.fulfill(status=502, content_type="text/html", body="<h1>Bad Gateway</h1>")
            case _:
                route.continue_()

    def prepare(page: Page) -> None:
        page.route("**/v1/models", with_ghost)
        page.route("**/v1/chat/completions", through_a_bad_proxy)

    page = open_page(live, prepare=prepare)
    page.choose(["tiny", "red", "blue", "ghost"])
    page.set("Most tokens", "24")
    page.ask(PROMPT)
    told = {
        "blue": ["Connection lost", "cannot be reached"],
        "ghost": ["There is no such model (404)", "ghost"],
        "tiny": ["The server failed (502)", "Bad Gateway"],
    }
    for model, texts in told.items():
        page.expect_state(model, "Failed")
        for text in texts:
            expect(page.answer(model).get_by_role("alert")).to_contain_text(text)
    page.expect_state("red", "Complete")
    assert page.text("red") == said(live, "red")


def test_what_the_server_refuses_is_told_in_its_words(live: LiveServer, open_page: Open) -> None:
    page = open_page(live)
    page.choose(["red"])
    page.set("Most tokens", "100000")
    page.ask(PROMPT)
    expect(page.answer("red").get_by_role("alert")).to_contain_text("The server refused this (400)")
    expect(page.answer("red").get_by_role("alert")).to_contain_text("100000")


def test_a_key_is_asked_for_kept_in_the_session_and_its_limits_told(
    base: Path, roots: Path, tmp_path: Path, open_page: Open
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[keys.one]\nsha256 = "{digest_of("secret-one")}"\nmodels = ["tiny", "red"]\nrequests_per_minute = 1\n'
    )
    llm = AsyncLLM(base, name="tiny", adapters={"red": roots / "red", "blue": roots / "blue"}, kv_cache_bytes=4 << 20)
    with serving(llm, keys=KeyFile(keys)) as guarded:
        page = open_page(guarded)
        expect(page.page.get_by_text("An API key is needed (401)")).to_be_visible()
        for key in ("wrong", "secret-one"):
            page.page.get_by_role("button", name="API key").click()
            page.page.get_by_label("Key", exact=True).fill(key)
            page.page.get_by_label("Key", exact=True).press("Enter")
            expect(page.page.get_by_role("button", name="API key: set")).to_be_visible()
        expect(page.model("red")).to_be_checked()
        expect(page.model("blue")).to_have_count(0)
        expect(page.page.get_by_text("shown to API keys with metrics = true")).to_be_visible()
        page.open_details("Load an adapter")
        expect(page.page.get_by_text("this API key may not manage adapters")).to_be_visible()
        page.set("Most tokens", "4")
        page.ask(PROMPT)
        alert = page.page.get_by_role("alert").and_(page.page.locator(":not([hidden])"))
        expect(alert).to_contain_text("Too many requests (429)")
        expect(alert).to_contain_text(re.compile(r"Try again in \d+ s"))
        expect(page.page.get_by_text("Complete")).to_have_count(1)
        stored = page.page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
        assert stored == [["secret-one"], [], ""]
        page.page.reload()
        expect(page.model("red")).to_be_checked()
        page.page.get_by_role("button", name="API key: set").click()
        page.page.get_by_role("button", name="Forget it").click()
        expect(page.model("red")).to_have_count(0)
        assert page.page.evaluate("sessionStorage.length") == 0
