"""Chromium, and a server with two adapters for it to open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from graftlm import AsyncLLM
from tests.browser.playground import Playground
from tests.server.live_server import LiveServer, serving
from tests.server.scripted import make_scripted
from tests.tiny import make_adapter, make_llama

LAPTOP: dict[str, Any] = {"viewport": {"width": 1280, "height": 800}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
# On a machine that does other things too.
PATIENCE_MILLISECONDS = 30_000
# Of tokens that are single bytes.
SCRIPTS = {
    "markup": "<img src=/x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script> & <b>bold</b>",
    "characters": "naïve 🙂 \n done",
    "long": "on and on " * 700,
}

Open = Callable[..., Playground]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, or else the one that `playwright install` brought."""
    # Chromium's sandbox does not start for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a server's page in a context of its own. Whatever the browser complains of fails the test, but replies that
    are no success."""
    complaints: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    def open_(live: LiveServer, *, prepare: Callable[[Page], object] = lambda page: None, **options: Any) -> Playground:
        context = browser.new_context(**{**LAPTOP, **options})
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        expect.set_options(timeout=PATIENCE_MILLISECONDS)
        page.on("console", complain)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        prepare(page)
        page.goto(f"{live.url}/")
        return Playground(page, complaints)

    yield open_
    for context in browser.contexts:
        context.close()
    assert complaints == []


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("browser") / "base", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def roots(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roots")
    make_adapter(base, folder / "red", seed=1)
    make_adapter(base, folder / "blue", seed=2, r=4)
    return folder


@pytest.fixture(scope="session")
def live(base: Path, roots: Path) -> Iterator[LiveServer]:
    """Clients may load adapters."""
    adapters = {"red": roots / "red", "blue": roots / "blue"}
    llm = AsyncLLM(base, name="tiny", adapters=adapters, kv_cache_bytes=4 << 20)
    with serving(llm, adapter_roots=[roots]) as running:
        yield running


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """For each script the prompt that it answers; "folder" is the model's."""
    folder = tmp_path_factory.mktemp("scripted")
    return {**make_scripted(folder, SCRIPTS), "folder": str(folder)}


@pytest.fixture(scope="session")
def scripted(prompts: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model, and an adapter that changes nothing, which answer plain text by `SCRIPTS`. Nothing can be loaded."""
    folder = Path(prompts["folder"])
    twin = make_adapter(
        folder, tmp_path_factory.mktemp("adapters") / "twin", target_modules=["c_attn"], fan_in_fan_out=True
    )
    llm = AsyncLLM(folder, name="scripted", adapters={"twin": twin}, kv_cache_bytes=64 << 20)
    with serving(llm) as running:
        yield running
