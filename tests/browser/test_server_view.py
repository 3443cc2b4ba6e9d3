"""The rest of the page: adapters that come and go, and what the server is doing."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Page, Request, Route, expect

from graftlm import AsyncLLM
from tests.browser.conftest import Open
from tests.server.live_server import LiveServer, serving


def test_adapters_are_loaded_and_unloaded(live: LiveServer, open_page: Open) -> None:
    page = open_page(live)
    page.open_details("Load an adapter")
    note = page.page.locator("#loading-note")
    name = page.page.get_by_label("Name", exact=True)
    path = page.page.get_by_label("Folder or hub id")
    load = page.page.get_by_role("button", name="Load", exact=True)
    path.fill("nowhere")
    name.fill("guest")
    load.click()
    expect(note).to_contain_text("The server refused this (400)")
    expect(note).to_contain_text("nowhere")
    path.fill("red")
    load.click()
    expect(note).to_contain_text("Loaded guest: LoRA")
    expect(page.model("guest")).to_be_visible()
    row = page.page.get_by_role("listitem").filter(has=page.model("guest"))
    expect(row).to_contain_text("in memory")
    expect(row).to_contain_text("rank 8")
    row.get_by_role("button", name="Unload guest").click()
    dialog = page.page.get_by_role("dialog", name="Unload guest?")
    dialog.get_by_role("button", name="Cancel").click()
    expect(page.model("guest")).to_be_visible()
    row.get_by_role("button", name="Unload guest").click()
    dialog.get_by_role("button", name="Unload", exact=True).click()
    expect(note).to_contain_text("Unloaded guest.")
    expect(page.model("guest")).to_have_count(0)
    # What had the focus is gone.
    expect(page.page.get_by_role("heading", name="Models")).to_be_focused()
    assert live.http.get("/v1/models/guest").status_code == 404


def test_where_nothing_can_be_loaded_the_page_says_why(scripted: LiveServer, open_page: Open) -> None:
    page = open_page(scripted)
    page.open_details("Load an adapter")
    expect(page.page.get_by_text("loading adapters over HTTP is off")).to_be_visible()
    expect(page.page.get_by_role("button", name="Load", exact=True)).to_be_hidden()
    expect(page.model("twin")).to_be_visible()
    expect(page.page.get_by_role("button", name="Unload twin")).to_have_count(0)


def test_running_requests_and_the_cache_they_take_are_seen(
    scripted: LiveServer, prompts: dict[str, str], open_page: Open
) -> None:
    page = open_page(scripted)
    page.choose(["twin"])
    page.send_as_plain_text()
    page.set("Most tokens", "7000")
    table = page.page.get_by_role("region", name="Requests").get_by_role("table")
    expect(page.page.get_by_text("None are running or waiting.")).to_be_visible()
    page.ask(prompts["long"])
    expect(table.get_by_role("row", name="twin running")).to_be_visible()
    cache = page.page.get_by_role("meter", name="KV cache in use")
    expect(cache).not_to_have_attribute("aria-valuetext", "0.0 %")
    expect(page.page.get_by_role("meter", name="Adapter memory")).to_have_attribute(
        "aria-valuetext", re.compile("KiB of")
    )
    page.stop_button.click()
    expect(page.page.get_by_text("None are running or waiting.")).to_be_visible()
    expect(cache).to_have_attribute("aria-valuetext", "0.0 %")


def test_workers_are_listed_where_there_are_some(live: LiveServer, open_page: Open) -> None:
    def with_workers(route: Route) -> None:
        reply = route.fetch()
        status = reply.json()
        status["engine"]["workers"] = [
            {"id": "worker-0", "layers": [0, 12], "adapters": ["red"], "state": "running"},
            {"id": "worker-1", "layers": None, "adapters": [], "state": "spare"},
        ]
        route.fulfill(response=reply, json=status)

    page = open_page(live, prepare=lambda page: page.route("**/status", with_workers)).page
    expect(page.get_by_role("row", name="worker-0 running 0 to 11 red")).to_be_visible()
    expect(page.get_by_role("row", name="worker-1 spare none none")).to_be_visible()
    page.unroute("**/status")
    expect(page.get_by_role("row", name="worker-0")).to_be_hidden()


def test_nothing_is_asked_for_while_the_tab_is_hidden(live: LiveServer, open_page: Open) -> None:
    asked: list[str] = []

    def count(request: Request) -> None:
        if request.url.endswith("/status"):
            asked.append(request.url)

    def prepare(page: Page) -> None:
        page.clock.install()
        page.on("request", count)

    page = open_page(live, prepare=prepare)
    expect(page.model("red")).to_be_visible()
    with page.page.expect_response("**/v1/models"):
        page.page.clock.run_for(1600)
    show = "state => { Object.defineProperty(document, 'visibilityState', {value: state, configurable: true});"
    show += "document.dispatchEvent(new Event('visibilitychange')); }"
    page.page.evaluate(show, "hidden")
    before = len(asked)
    page.page.clock.run_for(60_000)
    assert len(asked) == before
    with page.page.expect_response("**/v1/models"):
        page.page.evaluate(show, "visible")
    assert len(asked) == before + 1


def test_a_server_that_goes_away_is_told_and_found_again(base: Path, open_page: Open) -> None:
    with serving(AsyncLLM(base, name="tiny", kv_cache_bytes=1 << 20)) as leaving:
        page = open_page(leaving)
        expect(page.model("tiny")).to_be_checked()
        page.page.context.set_offline(True)
        expect(page.page.get_by_text("Connection lost")).to_be_visible()
        page.page.context.set_offline(False)
        expect(page.page.get_by_text("Connection lost")).to_be_hidden()
    expect(page.page.get_by_text("Connection lost")).to_be_visible()
