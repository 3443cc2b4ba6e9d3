"""/v1/models and /health."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import CONTEXT, Files
from tests.server.live_server import LiveServer, error_of


def listed(live: LiveServer) -> set[str]:
    return {card["id"] for card in live.http.get("/v1/models").json()["data"]}


def test_r073_the_list_holds_the_names_that_answer(server: LiveServer) -> None:
    assert {"tiny/llama", "red", "blue"} <= listed(server)
    for name in listed(server):
        assert server.text(model=name, prompt="x", ignore_eos=True)


def test_r073_a_loaded_adapter_is_listed_until_it_is_unloaded(server: LiveServer, files: Files) -> None:
    before = listed(server)
    for name in ("a", "a.b", "A-1_x"):
        load = {"lora_name": name, "lora_path": "nested/blue"}
        assert server.http.post("/v1/load_lora_adapter", json=load).status_code == 200
        assert listed(server) == {*before, name}
        assert server.http.get(f"/v1/models/{name}").json()["id"] == name
        assert server.text(model=name, prompt="hello") == server.text(model="blue", prompt="hello")
        assert server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        assert listed(server) == before
        error_of(server.http.get(f"/v1/models/{name}"), 404)


def test_a_card_names_the_parent_and_no_path(server: LiveServer, files: Files) -> None:
    reply = server.http.get("/v1/models")
    cards: dict[str, dict[str, Any]] = {card["id"]: card for card in reply.json()["data"]}
    assert cards["tiny/llama"]["parent"] is None
    assert cards["red"]["parent"] == cards["red"]["root"] == "tiny/llama"
    assert cards["red"]["max_model_len"] == CONTEXT
    assert str(files.roots) not in reply.text
    assert str(files.base) not in reply.text


def test_r073_one_model_can_be_asked_for_by_a_name_with_a_slash(server: LiveServer) -> None:
    assert server.openai.models.retrieve("tiny/llama").id == "tiny/llama"
    assert server.openai.models.retrieve("red").object == "model"
    assert {model.id for model in server.openai.models.list()} == listed(server)
    for name in ("nope", "llama", "tiny", "tiny/", "../red"):
        assert error_of(server.http.get(f"/v1/models/{name}"), 404)["code"] in ("model_not_found", "route_not_found")


def test_health_says_ok(server: LiveServer) -> None:
    reply = server.http.get("/health")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
