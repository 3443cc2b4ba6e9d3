"""Loading and unloading adapters while the server runs, and what clients may not reach that way."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

from graftlm import AsyncLLM
from graftlm.errors import ConfigurationError
from graftlm.server import create_app
from tests.server.conftest import Files
from tests.server.live_server import LiveServer, error_of, serving
from tests.server.test_models import listed
from tests.tiny import edit_json


def load(live: LiveServer, name: str, path: str | Path, **more: Any) -> httpx.Response:
    return live.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def unload(live: LiveServer, name: str) -> httpx.Response:
    return live.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_a_load_says_what_was_bound_and_not_where(server: LiveServer, files: Files) -> None:
    reply = load(server, "new", "red", load_inplace=False)
    assert reply.status_code == 200, reply.text
    assert reply.json()["id"] == "new"
    assert reply.json()["parent"] == "tiny/llama"
    assert reply.json()["ranks"] == [8]
    assert reply.json()["bound"] == reply.json()["total"] > 0
    assert str(files.roots) not in reply.text
    assert unload(server, "new").json() == {"id": "new", "object": "adapter", "unloaded": True}


def test_r054_a_reloaded_name_answers_with_its_new_weights(server: LiveServer) -> None:
    texts = {model: server.text(model=model, prompt="hello") for model in ("red", "blue")}
    for turn in range(4):
        source, path = (("red", "red"), ("blue", "nested/blue"))[turn % 2]
        assert load(server, "swap", path).status_code == 200
        assert server.text(model="swap", prompt="hello") == texts[source]
        assert unload(server, "swap").status_code == 200
    assert server.complete(model="swap", prompt="hello").status_code == 404


def test_r056_of_many_loads_of_one_name_one_succeeds(server: LiveServer) -> None:
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda _: load(server, "once", "red").status_code, range(30)))
        assert sorted(set(replies)) == [200, 409]
        assert replies.count(200) == 1
        mixed = pool.map(lambda turn: load(server, "once", "red") if turn % 2 else unload(server, "once"), range(16))
        assert {reply.status_code for reply in mixed} <= {200, 404, 409}
    is_loaded = "once" in listed(server)
    assert server.complete(model="once", prompt="x").status_code == (200 if is_loaded else 404)
    assert unload(server, "once").status_code == (200 if is_loaded else 404)


def test_names_that_are_taken_or_none_are_refused(server: LiveServer) -> None:
    before = listed(server)
    assert error_of(load(server, "red", "red"), 409)["code"] == "adapter_name_taken"
    assert error_of(load(server, "tiny/llama", "red"), 400)["code"] in ("adapter_name_taken", "adapter_name_invalid")
    for name in ("../red", "a b", "a\x00", "x" * 200, ".."):
        assert error_of(load(server, name, "red"))["code"] == "adapter_name_invalid"
    for name in ("", "x" * 300):
        assert error_of(load(server, name, "red"))["param"] == "lora_name"
    assert listed(server) == before


def test_unloading_what_is_not_an_adapter_is_404(server: LiveServer) -> None:
    for name in ("nope", "tiny/llama"):
        error = error_of(unload(server, name), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "lora_name")


@pytest.mark.parametrize(
    "damage",
    ["no config", "no weights", "not safetensors", "missing half", "nan", "wrong rank", "wrong size", "unknown method"],
)
def test_r051_a_broken_adapter_is_refused_and_leaves_nothing(server: LiveServer, files: Files, damage: str) -> None:
    folder = files.roots / "broken"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(files.red, folder)
    weights = folder / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    first = next(iter(tensors))
    match damage:
        case "no config":
            (folder / "adapter_config.json").unlink()
        case "no weights":
            weights.unlink()
        case "not safetensors":
            weights.write_bytes(b"PK\x03\x04 zip of a pickle")
        case "missing half":
            del tensors[first]
            safetensors.torch.save_file(tensors, weights)
        case "nan":
            tensors[first][0, 0] = float("nan")
            safetensors.torch.save_file(tensors, weights)
        case "wrong rank":
            edit_json(folder / "adapter_config.json", r=3)
        case "wrong size":
            tensors[first] = torch.zeros(8, 32)
            safetensors.torch.save_file(tensors, weights)
        case "unknown method":
            edit_json(folder / "adapter_config.json", peft_type="MADE_UP")
    before = listed(server)
    error = error_of(load(server, "broken", "broken"))
    assert error["code"].startswith("adapter_")
    assert str(files.roots) not in error["message"]
    assert listed(server) == before
    assert server.complete(model="broken", prompt="x").status_code == 404


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._marker,)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_r095_nothing_is_unpickled(server: LiveServer, files: Files, tmp_path: Path, name: str) -> None:
    folder = files.roots / "pickled"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copy(files.red / "adapter_config.json", folder)
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    error_of(load(server, "pickled", "pickled"))
    assert not (tmp_path / "marker").exists()


def test_r003_r096_paths_below_a_root_are_taken_and_no_others(server: LiveServer, files: Files) -> None:
    inside = ["./red/", "nested/../red", "nested/blue", f"{files.roots}/nested//blue"]
    for path in inside:
        assert load(server, "inside", path).status_code == 200, path
        assert unload(server, "inside").status_code == 200
    outside = [
        str(files.secret),
        "../secret",
        "escape",
        f"{files.roots}/escape",
        f"{files.roots}/../secret",
        "/etc",
        "/proc/self",
        f"{files.roots}x",
    ]
    for path in outside:
        error = error_of(load(server, "outside", path), 403)
        assert error["code"] == "permission_denied"
        assert "secret" not in error["message"]
    for path in ("%2e%2e/secret", "..%2fsecret", "missing", "~/x", "x" * 300, "red/\x00", "x" * 5000, ""):
        error_of(load(server, "outside", path))
    assert "outside" not in listed(server)


def test_r096_an_adapter_whose_files_are_links_to_outside_is_outside(server: LiveServer, files: Files) -> None:
    folder = files.roots / "linked"
    folder.mkdir()
    for file in files.secret.iterdir():
        (folder / file.name).symlink_to(file)
    error_of(load(server, "linked", "linked"), 403)


def test_r097_urls_are_refused_and_nothing_is_fetched(server: LiveServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for path in (
            f"http://127.0.0.1:{port}/a",
            f"https://127.0.0.1:{port}/a",
            "file:///etc/passwd",
            "s3://bucket/a",
        ):
            assert error_of(load(server, "remote", path))["param"] == "lora_path"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_path": "red"}, "lora_name"),
        ({"lora_name": 1, "lora_path": "red"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "red", "load_inplace": "yes"}, "load_inplace"),
        ({"lora_name": "a", "lora_path": "red", "base_model_name": "x"}, "base_model_name"),
    ],
    ids=str,
)
def test_fields_of_a_load_are_strict(server: LiveServer, body: dict[str, Any], param: str) -> None:
    assert error_of(server.http.post("/v1/load_lora_adapter", json=body))["param"] == param


def test_r096_loading_is_off_unless_allowed(short_server: LiveServer, files: Files) -> None:
    assert "--enable-adapter-loading" in error_of(load(short_server, "new", files.red), 403)["message"]
    error_of(unload(short_server, "red"), 403)
    assert short_server.complete(model="red", prompt="x").status_code == 200


def test_permission_and_folders_come_together(server: LiveServer, files: Files) -> None:
    llm: Any = None
    for roots, enabled in (([], True), ([files.roots], False), ([files.roots / "nothing"], True)):
        with pytest.raises(ConfigurationError):
            create_app(llm, adapter_roots=roots, enable_adapter_loading=enabled)


def test_r050_loads_and_unloads_do_not_touch_running_streams(server: LiveServer) -> None:
    def run(model: str) -> str:
        return server.text(model=model, prompt="once upon a time", max_tokens=80, ignore_eos=True)

    models = ["tiny/llama", "red", "blue"] * 2
    quiet = {model: run(model) for model in set(models)}
    with ThreadPoolExecutor(len(models)) as pool:
        running = [pool.submit(run, model) for model in models]
        was_running = []
        for _ in range(8):
            assert load(server, "churn", "nested/blue").status_code == 200
            was_running.append(not all(future.done() for future in running))
            assert unload(server, "churn").status_code == 200
        # Otherwise the streams were over before anything was loaded.
        assert was_running[0]
    assert [future.result() for future in running] == [quiet[model] for model in models]


def test_r060_load_inplace_replaces_a_name_and_a_bad_path_leaves_it(server: LiveServer) -> None:
    texts = {model: server.text(model=model, prompt="hello") for model in ("red", "blue")}
    assert texts["red"] != texts["blue"]
    assert load(server, "swap", "red", load_inplace=True).status_code == 200
    assert server.text(model="swap", prompt="hello") == texts["red"]
    assert error_of(load(server, "swap", "nothing", load_inplace=True))["code"] == "adapter_files_not_found"
    assert server.text(model="swap", prompt="hello") == texts["red"]
    assert load(server, "swap", "nested/blue", load_inplace=True).status_code == 200
    assert server.text(model="swap", prompt="hello") == texts["blue"]
    error_of(load(server, "tiny/llama", "red", load_inplace=True))
    assert unload(server, "swap").status_code == 200


def test_r052_a_forced_unload_ends_running_requests(server: LiveServer) -> None:
    assert load(server, "doomed", "red").status_code == 200
    with server.http.stream(
        "POST",
        "/v1/completions",
        json={"model": "doomed", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True},
    ) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        body = {"lora_name": "doomed", "force": True}
        assert server.http.post("/v1/unload_lora_adapter", json=body).status_code == 200
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "error" in events[-1]
    assert server.complete(model="doomed", prompt="x").status_code == 404
    error_of(server.http.post("/v1/unload_lora_adapter", json=body), 404)


def test_an_adapter_folder_is_served_by_name_within_its_memory(files: Files, tmp_path: Path) -> None:
    many = tmp_path / "many"
    for index in range(4):
        shutil.copytree(files.red, many / f"red-{index}")
        edit_json(many / f"red-{index}" / "adapter_config.json", lora_alpha=8 * (index + 1))
    shutil.copytree(files.red, many / "broken")
    (many / "broken" / "adapter_config.json").unlink()
    file_bytes = (files.red / "adapter_model.safetensors").stat().st_size
    llm = AsyncLLM(files.base, name="tiny", adapter_dir=many, adapter_memory_bytes=file_bytes, kv_cache_bytes=2 << 20)
    names = [f"red-{index}" for index in range(4)]
    with serving(llm) as live:
        cards = {card["id"]: card for card in live.http.get("/v1/models").json()["data"]}
        assert set(cards) == {"tiny", "broken", *names}
        assert "residency" not in cards["tiny"]
        assert {cards[name]["residency"] for name in names} == {"absent"}
        alone = [live.text(model=name, prompt="hello", max_tokens=20) for name in names]
        assert len(set(alone)) == 4
        with ThreadPoolExecutor(8) as pool:
            texts = pool.map(lambda name: live.text(model=name, prompt="hello", max_tokens=20), names * 3)
            assert list(texts) == alone * 3
        states = [live.http.get(f"/v1/models/{name}").json()["residency"] for name in names]
        assert sorted(states) == ["absent", "absent", "absent", "resident"]
        error = error_of(live.complete(model="broken", prompt="x"))
        assert error["code"] == "adapter_files_not_found"
        assert str(many) not in error["message"]
        error_of(live.complete(model="broken", prompt="x", stream=True))
        error_of(
            live.http.post(
                "/v1/chat/completions", json={"model": "broken", "messages": [{"role": "user", "content": "x"}]}
            )
        )
        shutil.copy(files.red / "adapter_config.json", many / "broken")
        assert live.complete(model="broken", prompt="x").status_code == 200
        error_of(live.complete(model="nope", prompt="x"), 404)
        edit_json(many / "broken" / "adapter_config.json", lora_alpha=3)
        assert live.text(model="red-0", prompt="hello", max_tokens=20) == alone[0]
        assert error_of(live.complete(model="broken", prompt="x"), 409)["code"] == "adapter_changed"
        assert live.complete(model="broken", prompt="x").status_code == 200


def test_a_priority_is_a_whole_number(server: LiveServer) -> None:
    assert server.complete(model="red", prompt="x", priority=-3).status_code == 200
    assert error_of(server.complete(model="red", prompt="x", priority=1.5))["param"] == "priority"
