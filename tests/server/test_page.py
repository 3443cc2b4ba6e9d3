"""The page at /, as far as HTTP shows it: its files, what they may reach, and who may see what it asks for. What it
does in a browser is in tests/browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest

from graftlm import AsyncLLM
from graftlm.server.api_keys import digest_of
from graftlm.server.key_file import KeyFile
from graftlm.server.playground.page import ASSETS
from graftlm.server.status import MAX_REQUESTS
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_disconnect import LONG, open_request, wait_until

MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}


class References(HTMLParser):
    """Every address in a page, and whatever in it is code or style of its own."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses |= {given[name] or "" for name in ("src", "href") if name in given}
        self.inline += [name for name in given if name.startswith("on") or name == "style"]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


@pytest.fixture(scope="module")
def guarded(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """With keys that may use red, manage adapters, or read metrics."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    rights = {
        "user": 'models = ["red"]',
        "admin": 'models = ["*"]\nadmin = true',
        "watcher": "models = []\nmetrics = true",
    }
    path.write_text(
        "".join(f'[keys.{name}]\nsha256 = "{digest_of(name)}"\n{fields}\n' for name, fields in rights.items())
    )
    adapters = {"red": files.red, "blue": files.blue}
    llm = AsyncLLM(files.base, name="tiny", adapters=adapters, max_num_seqs=1, kv_cache_bytes=8 << 20)
    with serving(llm, adapter_roots=[files.roots], keys=KeyFile(path)) as live:
        yield live


def status_of(live: LiveServer, key: str = "none") -> dict[str, Any]:
    reply = live.http.get("/status", headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    assert reply.headers["cache-control"] == "no-store"
    body: dict[str, Any] = reply.json()
    return body


def test_every_file_of_the_page_is_served_with_its_type_and_nothing_else_is(server: LiveServer) -> None:
    for asset in ASSETS:
        suffix = "html" if asset.path == "/" else asset.path.rpartition(".")[2]
        for send in (server.http.get, server.http.head):
            reply = send(asset.path)
            assert reply.status_code == 200
            assert reply.headers["content-type"].partition(";")[0] == MEDIA_TYPES[suffix]
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert server.http.get(asset.path).content == asset.content
    for path in (
        "/playground/",
        "/playground/index.html",
        "/playground/page.py",
        "/playground/../app.py",
        "/index.html",
    ):
        error_of(server.http.get(path), 404)
    error_of(server.http.post("/", json={}), 405)


def test_what_the_page_names_is_its_own(server: LiveServer) -> None:
    references = References(server.http.get("/").text)
    assert references.inline == []
    local = {address for address in references.addresses if not address.startswith("#")}
    assert local >= {"playground/page.js", "playground/style.css"}
    modules = [asset for asset in ASSETS if asset.path.endswith(".js")]
    imported = {name for asset in modules for name in re.findall(r'from "\./([\w.]+)"', asset.content.decode())}
    served = {asset.path for asset in ASSETS}
    assert {f"/{address}" for address in local} | {f"/playground/{name}" for name in imported} == served - {"/"}
    for asset in ASSETS:
        text = asset.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|@import|url\(|innerHTML|insertAdjacentHTML|eval\(", text), asset.path


def test_the_policy_forbids_whatever_is_inline_or_from_elsewhere(server: LiveServer) -> None:
    policy = server.http.get("/").headers["content-security-policy"]
    directives = dict(directive.split(" ", 1) for directive in policy.split("; "))
    assert directives["default-src"] == "'none'"
    for name in ("script-src", "style-src", "img-src", "connect-src"):
        assert directives[name] == "'self'"
    for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert directives[name] == "'none'"
    assert directives["require-trusted-types-for"] == "'script'"


def test_an_unchanged_file_is_not_sent_again(server: LiveServer) -> None:
    first = server.http.get("/playground/page.js")
    assert first.headers["cache-control"] == "no-cache"
    again = server.http.get("/playground/page.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert server.http.get("/playground/page.js", headers={"if-none-match": '"another"'}).status_code == 200


def test_the_page_needs_no_key_and_what_it_asks_for_does(guarded: LiveServer) -> None:
    for asset in ASSETS:
        assert guarded.http.get(asset.path).status_code == 200
    for path in ("/status", "/v1/models", "/playground/nothing.js"):
        error_of(guarded.http.get(path), 401)


def test_status_counts_what_runs_and_what_waits(guarded: LiveServer) -> None:
    idle = status_of(guarded, "watcher")["engine"]
    assert (idle["num_running"], idle["num_waiting"], idle["requests"], idle["workers"]) == (0, 0, [], [])
    assert idle["kv_cache_usage"] == 0
    assert 0 < idle["adapter_bytes"] <= idle["max_adapter_bytes"]
    key = {"authorization": "Bearer user"}
    with guarded.http.stream(
        "POST", "/v1/completions", json={**LONG, "model": "red", "stream": True}, headers=key
    ) as reply:
        # Dropped, the iterator would close the reply.
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        busy = status_of(guarded, "watcher")["engine"]
        assert busy["num_running"] == 1
        assert busy["kv_cache_usage"] > 0
        [request] = busy["requests"]
        assert (request["model"], request["state"], request["prompt_tokens"]) == ("red", "running", 5)
        assert request["output_tokens"] > 0
        assert request["seconds"] > 0
    wait_until(lambda: status_of(guarded, "watcher")["engine"]["requests"] == [])


def test_status_shows_the_oldest_requests_and_counts_them_all(files: Files) -> None:
    llm = AsyncLLM(files.base, name="tiny", max_num_seqs=1, max_queued_requests=100, kv_cache_bytes=8 << 20)
    with serving(llm) as live:
        body = {**LONG, "model": "tiny", "prompt": ["x"] * (MAX_REQUESTS + 5)}
        with open_request(live, "/v1/completions", body):
            wait_until(lambda: status_of(live)["engine"]["num_waiting"] == MAX_REQUESTS + 4)
            requests = status_of(live)["engine"]["requests"]
            assert [request["state"] for request in requests] == ["running", *["waiting"] * (MAX_REQUESTS - 1)]
            assert {request["model"] for request in requests} == {"tiny"}
        wait_until(lambda: status_of(live)["engine"]["requests"] == [])


def test_status_tells_each_caller_what_they_may_know_and_do(guarded: LiveServer, short_server: LiveServer) -> None:
    user, admin, watcher = (status_of(guarded, key) for key in ("user", "admin", "watcher"))
    assert user["engine"] is None
    assert admin["engine"] is None
    assert watcher["engine"] is not None
    assert admin["loading_refused"] is None
    assert "admin = true" in user["loading_refused"]
    assert "admin = true" in watcher["loading_refused"]
    # Without keys everybody may, if only loading were on.
    assert "--enable-adapter-loading" in status_of(short_server)["loading_refused"]
    assert status_of(short_server)["engine"] is not None
