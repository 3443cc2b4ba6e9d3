"""What reaches further than it should: web pages, hostile adapters, and the server's own paths in replies."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from graftlm import AsyncLLM
from graftlm.server.key_file import KeyFile
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_adapters import load, unload
from tests.tiny import edit_json

CHAT = [{"role": "user", "content": "x"}]
PAGE = "https://chat.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture(scope="module")
def open_to_page(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A page of one origin may use it, with a key that nobody has."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text("")
    llm = AsyncLLM(files.base, name="tiny", kv_cache_bytes=2 << 20)
    with serving(llm, cors_origins=[PAGE], keys=KeyFile(keys)) as live:
        yield live


def test_scripts_of_web_pages_are_not_served_unless_told(server: LiveServer) -> None:
    refused = server.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert refused.status_code == 405
    for reply in (refused, server.http.get("/v1/models", headers={"origin": PAGE})):
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_scripts_of_allowed_pages_are_and_they_see_errors_too(open_to_page: LiveServer) -> None:
    reply = open_to_page.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in reply.headers
    reply = open_to_page.http.get("/v1/models", headers={"origin": PAGE})
    error_of(reply, 401)
    assert reply.headers["access-control-allow-origin"] == PAGE
    exposed = reply.headers["access-control-expose-headers"]
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed.split(", "))
    other = {**PREFLIGHT, "origin": "https://chat.example.org.evil.example"}
    assert open_to_page.http.options("/v1/chat/completions", headers=other).status_code == 400


def test_pages_of_other_sites_change_nothing_though_browsers_do_not_ask_for_them(
    server: LiveServer, open_to_page: LiveServer
) -> None:
    form: dict[str, Any] = {"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}
    for site in ("cross-site", "same-site"):
        foreign = {"origin": "https://evil.example", "sec-fetch-site": site}
        for live in (server, open_to_page):
            assert error_of(live.http.post("/v1/files", headers=foreign, **form), 403)["code"] == "permission_denied"
            assert live.http.get("/health", headers=foreign).status_code == 200
        allowed = {**foreign, "origin": PAGE}
        assert open_to_page.http.post("/v1/files", headers=allowed, **form).status_code == 401
    own = {"origin": server.url, "sec-fetch-site": "same-origin"}
    body = {"model": "red", "prompt": "x", "max_tokens": 1}
    assert server.http.post("/v1/completions", headers=own, json=body).status_code == 200


@pytest.mark.parametrize(
    "attack",
    [
        "{{ strftime_now.__globals__['__builtins__']['open'](MARKER, 'w') }}",
        "{{ cycler.__init__.__globals__.os.system('touch ' + MARKER) }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
    ],
)
@pytest.mark.parametrize("file_name", ["chat_template.jinja", "tokenizer_config.json"])
def test_r099_a_template_in_an_adapter_folder_runs_no_code(
    server: LiveServer, files: Files, tmp_path: Path, attack: str, file_name: str
) -> None:
    marker = tmp_path / "marker"
    template = attack.replace("MARKER", f"'{marker}'")
    folder = files.roots / "templated"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(files.red, folder)
    if file_name.endswith(".jinja"):
        (folder / file_name).write_text(template)
    else:
        (folder / file_name).write_text("{}")
        edit_json(folder / file_name, chat_template=template)
    loaded = load(server, "templated", "templated")
    if loaded.status_code == 200:
        reply = server.chat(model="templated", messages=CHAT)
        # An unsafe attribute may render as nothing, which is no prompt.
        error_of(reply, 400)
        assert unload(server, "templated").status_code == 200
    else:
        error_of(loaded, 400)
    assert not marker.exists()
    assert server.chat(model="red", messages=CHAT).status_code == 200


def damaged(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replaced_by_folder(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no weights": removed("adapter_model.safetensors"),
    "no config": removed("adapter_config.json"),
    "weights are a folder": replaced_by_folder,
    "weights are none": damaged("adapter_model.safetensors", b"nothing"),
    "other weights": damaged("adapter_config.json", b"{}"),
    "config is none": damaged("adapter_config.json", b"{"),
    "tokenizer is none": damaged("tokenizer.json", b"{"),
    "tokenizer config is none": damaged("tokenizer_config.json", b"\xff{"),
    "template is no text": damaged("chat_template.jinja", b"\xff\xfe"),
    "end tokens are none": damaged("generation_config.json", b'{"eos_token_id": "x"}'),
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_reply_about_a_damaged_adapter_says_where_the_server_keeps_it(
    files: Files, tmp_path: Path, damage: str
) -> None:
    # So long that no message holds all of it: part of a path is a path too.
    deep = tmp_path / "a-place-that-is-nobodys-business" / ("deep" * 20) / ("er" * 40)
    roots, lazy = deep / "roots", deep / "lazy"
    for folder in (roots / "red", lazy / "early", lazy / "late"):
        shutil.copytree(files.red, folder)
    size = (files.red / "adapter_model.safetensors").stat().st_size
    llm = AsyncLLM(files.base, name="tiny", adapter_dir=lazy, adapter_memory_bytes=size, kv_cache_bytes=1 << 20)
    replies: list[httpx.Response] = []
    with serving(llm, adapter_roots=[roots]) as live:
        assert live.complete(model="early", prompt="x").status_code == 200
        assert load(live, "kept", "red").status_code == 200
        # Its weights push out those of the other: they are read again for its next request.
        assert live.complete(model="kept", prompt="x").status_code == 200
        for folder in (roots / "red", lazy / "early", lazy / "late"):
            DAMAGE[damage](folder)
        for model in ("early", "late", "kept", "early"):
            replies += [live.complete(model=model, prompt="x", stream=stream) for stream in (False, True)]
            replies.append(live.chat(model=model, messages=CHAT))
        for path in ("red", f"{roots}/red/", "red/adapter_model.safetensors"):
            replies.append(load(live, "again", path))
    refused = [reply for reply in replies if reply.status_code != 200]
    assert refused
    for reply in refused:
        error_of(reply, reply.status_code)
        sent = reply.request.content.decode()
        assert "nobodys-business" in sent or "nobodys-business" not in reply.text, reply.text
        assert "Traceback" not in reply.text
