"""By keyboard alone, by what axe-core finds, on a laptop and a phone, light and dark."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import LAPTOP, PHONE, Open
from tests.browser.playground import Playground
from tests.server.live_server import LiveServer

PROMPT = "hello"


def serious(page: Page) -> list[str]:
    """What axe-core finds that keeps somebody from using the page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {[node['target'] for node in rule['nodes']]}"
        for rule in found
        if rule["impact"] in ("serious", "critical")
    ]


def answered(page: Playground) -> None:
    page.choose(["tiny", "red", "blue"])
    page.set("Most tokens", "40")
    page.set("Temperature", "1.5")
    page.page.route("**/v1/chat/completions", lambda route: fail_for_blue(route))
    page.ask(PROMPT)
    page.expect_state("red", "Complete")
    page.expect_state("blue", "Failed")


def fail_for_blue(route: Any) -> None:
    if '"blue"' in route.request.post_data:
        route.abort("connectionreset")
    else:
        route.continue_()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_axe_finds_nothing_serious(
    live: LiveServer, open_page: Open, device: dict[str, Any], scheme: Literal["light", "dark"]
) -> None:
    # The policy would keep axe-core out, as it keeps out everything that is not the page's own.
    page = open_page(live, color_scheme=scheme, bypass_csp=True, **device)
    answered(page)
    page.open_details("Load an adapter")
    page.tokens_of("red").locator(".token").first.focus()
    expect(page.tooltip).to_be_visible()
    assert serious(page.page) == []
    page.page.get_by_role("button", name="API key").click()
    assert serious(page.page) == []
    # It fits the width.
    assert page.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_everything_is_done_by_keyboard(live: LiveServer, open_page: Open) -> None:
    page = open_page(live)
    expect(page.model("blue")).to_be_checked()
    keyboard = page.page.keyboard
    keyboard.press("Tab")
    expect(page.page.get_by_role("link", name="Skip to the prompt")).to_be_focused()
    keyboard.press("Enter")
    expect(page.prompt).to_be_focused()
    keyboard.type(PROMPT)
    keyboard.press("Control+Enter")
    page.expect_state("red", "Complete")
    page.expect_state("tiny", "Complete")
    page.expect_state("blue", "Complete")

    tokens = page.tokens_of("tiny").locator(".token")
    for _ in range(10):
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.classList.contains('token')"):
            break
    expect(tokens.nth(0)).to_be_focused()
    expect(page.tooltip).to_be_visible()
    expect(tokens.nth(0)).to_have_attribute("aria-describedby", "inspector")
    keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    keyboard.press("End")
    expect(tokens.last).to_be_focused()
    keyboard.press("ArrowRight")
    expect(tokens.last).to_be_focused()
    keyboard.press("Home")
    expect(tokens.nth(0)).to_be_focused()
    keyboard.press("Escape")
    expect(page.tooltip).to_be_hidden()
    # An answer is one stop, and the next one is the next answer.
    keyboard.press("Tab")
    expect(page.tokens_of("red").locator(".token").first).to_be_focused()

    page.page.get_by_role("button", name="API key").focus()
    keyboard.press("Enter")
    expect(page.page.get_by_label("Key", exact=True)).to_be_focused()
    keyboard.press("Escape")
    expect(page.page.get_by_role("button", name="API key")).to_be_focused()
