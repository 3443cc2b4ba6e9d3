"""Servers with API keys: who may use which models, how much, and what the others never learn."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from graftlm import AsyncLLM
from graftlm.cli import app as graft
from graftlm.errors import ConfigurationError
from graftlm.server.api_keys import digest_of, find_key, parse_keys
from graftlm.server.key_file import KeyFile
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_disconnect import LONG, wait_until

CHAT = [{"role": "user", "content": "x"}]
FIELDS = {
    "alice": 'models = ["red*"]',
    "bob": 'models = ["blue", "tiny"]\ncache_group = "shared"',
    "admin": 'models = ["*"]\nadmin = true',
    "team": 'models = ["team-*"]\nadmin = true\ncache_group = "shared"',
    "scraper": "models = []\nmetrics = true",
    "slow": 'models = ["tiny"]\nrequests_per_minute = 3\ntokens_per_minute = 100000',
    "narrow": 'models = ["tiny"]\nconcurrent_requests = 2',
    "spender": 'models = ["tiny"]\ntokens_per_minute = 30',
}
SECRETS = {name: f"graft-secret-of-{name}" for name in FIELDS}


def entry(name: str, fields: str | None = None) -> str:
    return f'[keys.{name}]\nsha256 = "{digest_of(SECRETS[name])}"\n{FIELDS[name] if fields is None else fields}\n'


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[name]}"}


@pytest.fixture(scope="module")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text("\n".join(map(entry, SECRETS)))
    return path


@pytest.fixture(scope="module")
def llm(files: Files) -> AsyncLLM:
    adapters = {"red": files.red, "red-2": files.red, "blue": files.blue}
    return AsyncLLM(files.base, name="tiny", adapters=adapters, kv_cache_bytes=8 << 20)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def live(llm: AsyncLLM, files: Files, key_path: Path, lines: list[str]) -> Iterator[LiveServer]:
    with serving(llm, adapter_roots=[files.roots], keys=KeyFile(key_path), write_access=lines.append) as running:
        yield running


def client(live: LiveServer, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=SECRETS[name], max_retries=0, timeout=60)


def complete(live: LiveServer, name: str, **body: Any) -> httpx.Response:
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True, **body}
    return live.http.post("/v1/completions", json=fields, headers=bearer(name))


def named_routes(live: LiveServer, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every route whose body names a model, by the server's own description, with a body that it takes; without those
    of admins alone."""
    description = live.app.openapi()
    for path, operations in description["paths"].items():
        for operation in operations.values() if "fine_tuning" not in path else ():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            schema = description["components"]["schemas"].get(content.get("schema", {}).get("$ref", "").split("/")[-1])
            if schema and "model" in schema["properties"]:
                fields: dict[str, Any] = {"prompt": "x", "messages": CHAT, "input": "x", "tokens": [1]}
                names = [name for name in fields if name in schema.get("required", ())]
                names = names or [name for name in fields if name in schema["properties"]]
                yield path, {"model": model, names[0]: fields[names[0]]}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer graft-nobody"},
        {"authorization": f"Basic {SECRETS['alice']}"},
        {"authorization": SECRETS["alice"]},
        {"authorization": f"Bearer {SECRETS['alice']}x"},
        {"authorization": f"Bearer {digest_of(SECRETS['alice'])}"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": SECRETS["alice"]},
    ],
    ids=str,
)
def test_without_a_key_that_is_known_nothing_but_the_probes_answers(live: LiveServer, headers: dict[str, Any]) -> None:
    asked = [
        live.http.post("/v1/completions", json={"model": "red", "prompt": "x" * 100_000}, headers=headers),
        live.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "red"}, headers=headers),
        *(live.http.get(path, headers=headers) for path in ("/v1/models", "/v1/models/red", "/metrics", "/nowhere")),
        *(live.http.get(path, headers=headers) for path in ("/docs", "/openapi.json")),
    ]
    for reply in asked:
        error = error_of(reply, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert reply.headers["www-authenticate"] == "Bearer"
        assert "red" not in reply.text
        assert reply.headers["x-request-id"]
    for path in ("/health", "/ready"):
        assert live.http.get(path, headers=headers).status_code == 200


def test_the_client_raises_its_own_errors(live: LiveServer) -> None:
    stranger = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError):
        client(live, "alice").chat.completions.create(model="blue", messages=CHAT)  # type: ignore[arg-type]
    with pytest.raises(openai.PermissionDeniedError):
        client(live, "alice").post("/load_lora_adapter", body={"lora_name": "a", "lora_path": "red"}, cast_to=object)


def test_a_key_sees_its_own_models_and_uses_them(live: LiveServer) -> None:
    seen = {name: {card.id for card in client(live, name).models.list()} for name in ("alice", "bob", "admin", "team")}
    assert seen == {
        "alice": {"red", "red-2"},
        "bob": {"tiny", "blue"},
        "admin": {"tiny", "red", "red-2", "blue"},
        "team": set(),
    }
    assert complete(live, "alice", model="red").status_code == 200
    assert complete(live, "alice", model="red:0.5+red-2:0.5").status_code == 200
    assert complete(live, "bob", model="tiny").status_code == 200
    assert client(live, "bob").models.retrieve("blue").id == "blue"


def test_models_of_others_look_the_same_as_models_that_do_not_exist(live: LiveServer) -> None:
    routes = [path for path, _ in named_routes(live, "x")]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"} <= set(routes)
    for model, hidden in [("blue", True), ("tiny", True), ("nobody", False), ("red:0.5+blue:0.5", True)]:
        for path, body in named_routes(live, model):
            for stream in (False, True):
                streamed = {"stream": True} if stream and "complet" in path else {}
                reply = live.http.post(path, json={**body, **streamed}, headers=bearer("alice"))
                error = error_of(reply, 404)
                shown = "blue" if "+" in model else model
                assert error["message"] == f"no model answers to this name; got: {shown!r}; allowed: red, red-2"
                assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert hidden == (live.http.get(f"/v1/models/{model}", headers=bearer("admin")).status_code == 200)
        error_of(live.http.get(f"/v1/models/{model}", headers=bearer("alice")), 404)
    assert "allowed: none" in error_of(complete(live, "scraper", model="red"), 404)["message"]


def test_r096_adapters_are_managed_with_an_admin_key_within_its_names(live: LiveServer) -> None:
    def load(name: str, adapter: str, path: str = "red") -> httpx.Response:
        body = {"lora_name": adapter, "lora_path": path}
        return live.http.post("/v1/load_lora_adapter", json=body, headers=bearer(name))

    def unload(name: str, adapter: str) -> httpx.Response:
        return live.http.post("/v1/unload_lora_adapter", json={"lora_name": adapter}, headers=bearer(name))

    for path in ("red", "../secret", "missing"):
        assert error_of(load("alice", "red-3", path), 403)["code"] == "permission_denied"
    error_of(unload("alice", "red"), 403)
    # Whether somebody else's name is taken is not told.
    replies = [load("team", name).text for name in ("red", "free")]
    assert replies[0] == replies[1]
    error_of(load("team", "red"), 403)
    assert error_of(unload("team", "red"), 404)["message"].endswith("allowed: none")
    assert load("team", "team-a").status_code == 200
    assert complete(live, "team", model="team-a").status_code == 200
    assert complete(live, "alice", model="team-a").status_code == 404
    assert unload("admin", "team-a").status_code == 200


def test_workers_are_drained_with_the_key_of_an_admin_of_all_models(live: LiveServer) -> None:
    def drain(name: str) -> httpx.Response:
        return live.http.post("/v1/drain_worker", json={"worker": "worker-1"}, headers=bearer(name))

    for name in ("alice", "team"):
        assert error_of(drain(name), 403)["code"] == "permission_denied"
    assert error_of(drain("admin"), 404)["code"] == "not_found"


def test_metrics_name_every_model_and_need_a_key_that_may_read_them(live: LiveServer) -> None:
    complete(live, "bob", model="blue")
    assert 'model_name="blue"' in live.http.get("/metrics", headers=bearer("scraper")).text
    for name in ("alice", "admin"):
        error_of(live.http.get("/metrics", headers=bearer(name)), 403)


def test_requests_beyond_the_limit_are_429_and_headers_say_what_is_left(live: LiveServer) -> None:
    left = []
    while (reply := complete(live, "slow")).status_code == 200:
        assert reply.headers["x-ratelimit-limit-requests"] == "3"
        left.append(int(reply.headers["x-ratelimit-remaining-requests"]))
        assert re.fullmatch(r"\d+(\.\d+)?s|1m0s", reply.headers["x-ratelimit-reset-requests"])
        assert 99_000 < int(reply.headers["x-ratelimit-remaining-tokens"]) < 100_000
    # A slow machine gets one more every twenty seconds.
    assert len(left) >= 3
    assert (left[0], left[-1]) == (2, 0)
    while (streamed := complete(live, "slow", stream=True)).status_code == 200:
        pass
    for refused in (reply, streamed):
        error = error_of(refused, 429)
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "requests" in error["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
    with pytest.raises(openai.RateLimitError):
        deque(iter(lambda: client(live, "slow").completions.create(model="tiny", prompt="x"), None), maxlen=0)
    # Looking costs nothing, and others have limits of their own.
    assert client(live, "slow").models.list().data
    assert complete(live, "bob").status_code == 200
    assert "x-ratelimit-limit-requests" not in complete(live, "bob").headers


def test_requests_at_a_time_are_limited_and_every_end_gives_the_place_back(live: LiveServer, llm: AsyncLLM) -> None:
    body = {**LONG, "model": "tiny", "stream": True}

    def status_of_one() -> int:
        return complete(live, "narrow").status_code

    with live.http.stream("POST", "/v1/completions", json=body, headers=bearer("narrow")) as first:
        lines = first.iter_lines()
        next(lines)
        with live.http.stream("POST", "/v1/completions", json=body, headers=bearer("narrow")) as second:
            more_lines = second.iter_lines()
            next(more_lines)
            reply = complete(live, "narrow")
            assert "are running; allowed: 2" in error_of(reply, 429)["message"]
            assert reply.headers["retry-after"] == "1"
            more_lines.close()
        wait_until(lambda: status_of_one() == 200)
        assert complete(live, "narrow", temperature=-1).status_code == 400
        assert complete(live, "narrow", model="nobody").status_code == 404
        assert status_of_one() == 200
        lines.close()
    wait_until(lambda: llm.num_unfinished_requests == 0)


def test_tokens_beyond_the_limit_are_429_until_they_are_paid_back(live: LiveServer) -> None:
    reply = complete(live, "spender", max_tokens=19)
    assert reply.headers["x-ratelimit-limit-tokens"] == "30"
    # Half a token more for every second since then.
    assert 10 <= int(reply.headers["x-ratelimit-remaining-tokens"]) < 30
    assert complete(live, "spender", max_tokens=1000, stream=True).status_code == 200
    reply = complete(live, "spender")
    assert "the tokens of this API key are used up; allowed: 30" in error_of(reply, 429)["message"]
    assert reply.headers["x-ratelimit-remaining-tokens"] == "0"
    # 991 tokens are owed, at 30 in a minute.
    assert 1000 < int(reply.headers["retry-after"]) <= 1984


def test_tenants_share_no_cached_prompts_unless_their_keys_are_of_one_group(live: LiveServer) -> None:
    prompt = "a long beginning that everybody sends and nobody else may notice"

    def num_cached(name: str, model: str) -> int:
        usage = complete(live, name, model=model, prompt=prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert num_cached("admin", "blue") == 0
    assert num_cached("bob", "blue") == 0
    assert num_cached("admin", "blue") > 0
    assert num_cached("bob", "blue") > 0
    live.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "team-b", "lora_path": "nested/blue"}, headers=bearer("team")
    )
    assert num_cached("team", "team-b") > 0


def test_the_access_log_says_who_and_how_much_and_never_a_key(live: LiveServer, lines: list[str]) -> None:
    headers = {**bearer("bob"), "x-request-id": "who"}
    live.http.post("/v1/completions", json={"model": "tiny", "prompt": "xyz", "max_tokens": 2}, headers=headers)
    live.http.get("/v1/models", headers={"authorization": "Bearer nobody", "x-request-id": "stranger"})
    wait_until(lambda: any('"stranger"' in line for line in lines))
    entries = {entry["request_id"]: entry for entry in map(json.loads, lines)}
    assert (entries["who"]["tenant"], entries["who"]["prompt_tokens"]) == ("bob", 3)
    assert 1 <= entries["who"]["output_tokens"] <= 2
    assert (entries["stranger"]["tenant"], entries["stranger"]["error"]) == (None, "invalid_api_key")
    assert not any(secret in line for secret in SECRETS.values() for line in lines)


def test_keys_are_read_again_when_their_file_changes_and_a_bad_file_changes_nothing(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("alice"))
    llm = AsyncLLM(files.base, name="tiny", adapters={"red": files.red}, kv_cache_bytes=2 << 20)
    with serving(llm, keys=KeyFile(path)) as live:

        def status(name: str) -> int:
            return live.http.get("/v1/models", headers=bearer(name)).status_code

        assert (status("alice"), status("bob")) == (200, 401)
        path.write_text(entry("alice") + entry("bob"))
        assert (status("alice"), status("bob")) == (200, 200)
        path.write_text("[keys.alice]\nsha256 = 'short'")
        assert (status("alice"), status("bob")) == (200, 200)
        assert len([record for record in caplog.records if "stay as they were" in record.message]) == 1
        os.replace(tmp_path / "keys.toml", tmp_path / "gone")
        assert (status("alice"), status("bob")) == (200, 200)
        path.write_text("")
        assert (status("alice"), status("bob")) == (401, 401)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[keys", "TOML"),
        ("[key.alice]", "'key'"),
        ("keys = 3", "keys"),
        ("[keys.alice]", "sha256"),
        ("[keys.alice]\nsha256 = 'AB'", "sha256"),
        (entry("alice", ""), "models"),
        (entry("alice", "models = '*'"), "models"),
        (entry("alice", "models = ['*']\nadmn = true"), "write admin"),
        (entry("alice", "models = ['*']\nadmin = 1"), "admin"),
        (entry("alice", "models = ['*']\ntokens_per_minute = 0"), "tokens_per_minute"),
        (entry("alice", "models = ['*']\ncache_group = ''"), "cache_group"),
        (entry("alice") + entry("alice").replace("keys.alice", "keys.eve"), "two API keys"),
        (entry("alice").replace("keys.alice", "keys.'a b'"), "'a b'"),
    ],
    ids=lambda value: value if len(value) < 20 else "",
)
def test_a_file_of_keys_is_read_strictly(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        KeyFile(path)


def test_a_file_of_keys_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        KeyFile(tmp_path / "nothing.toml")


def test_keys_that_the_command_makes_are_known_to_the_server(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    options = ["--model", "legal-*", "--model", "base", "--tokens-per-minute", "500", "--admin"]
    made = CliRunner().invoke(graft, ["keys", "create", "alice", *options, "--file", str(path)])
    assert made.exit_code == 0, made.output
    other = CliRunner().invoke(graft, ["keys", "create", "bob.2"])
    path.write_text(path.read_text() + other.stdout)
    key = made.stdout.strip()
    assert key not in path.read_text()
    keys = parse_keys(path.read_text())
    found = find_key(keys, key)
    assert found is not None
    assert (found.name, found.caller.models, found.caller.is_admin) == ("alice", ("legal-*", "base"), True)
    assert (found.limits.tokens_per_minute, found.limits.requests_per_minute) == (500, None)
    shown = other.stderr.split()[-1]
    assert shown not in other.stdout
    assert [entry.name for entry in keys if entry is find_key(keys, shown)] == ["bob.2"]
    again = CliRunner().invoke(graft, ["keys", "create", "alice", "--file", str(path)])
    assert (again.exit_code, "alice" in again.stderr) == (2, True)
    assert CliRunner().invoke(graft, ["keys", "create", "a b"]).exit_code == 2
