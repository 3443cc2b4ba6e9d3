"""`graft serve --config`: what a file says, what the flags say, and a server that is set up by one file alone."""

from __future__ import annotations

import re
import shutil
import ssl
from pathlib import Path

import httpx
import openai
import pytest
import trustme
from typer.testing import CliRunner

from graftlm.cli import app
from tests.cli.conftest import Files
from tests.cli.graft_process import graft_process


def refused(tmp_path: Path, content: str, *arguments: str) -> str:
    """The one line with which `graft serve` ends."""
    path = tmp_path / "graft.toml"
    path.write_text(content)
    result = CliRunner().invoke(app, ["serve", "--config", str(path), *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return str(line)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot = 8000", "got: prot; allowed: port"),
        ("enable_prefix_cache = true", "prefix_cache"),
        ("config = 'x'", "no such option"),
        ("[server]\nport = 1", "got: server"),
        ("port = true", "port cannot be this; got: True"),
        ("demo = 1", "allowed: true or false"),
        ("adapter_root = 'x'", "allowed: a list"),
        ("model = ['x']", "model cannot be this"),
        ("port = ", "cannot be read"),
        ("port = 2024-01-01", "port cannot be this"),
    ],
)
def test_a_key_or_value_that_is_none_is_refused_with_close_names(tmp_path: Path, content: str, words: str) -> None:
    line = refused(tmp_path, content)
    assert line.startswith("graft: ")
    assert "graft.toml" in line
    assert words in line


def test_a_config_file_that_is_not_there_is_an_error() -> None:
    result = CliRunner().invoke(app, ["serve", "--config", "/nowhere/graft.toml"])
    assert (result.exit_code, "/nowhere/graft.toml" in result.stderr) == (2, True)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    content = "model = '/nowhere/model'\nkv_cache_bytes = 1000\nmax_body_bytes = 'many'\n"
    assert "'many'" in refused(tmp_path, content)
    assert "/nowhere/model" in refused(tmp_path, content, "--max-body-bytes", "1MiB", "--port", "0")
    assert "/else" in refused(tmp_path, content, "/else", "--max-body-bytes", "1MiB", "--port", "0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cors-origin", "https://example.org/page"], "origin"),
        (["--cors-origin", "example.org"], "origin"),
        (["--ssl-keyfile", "/nowhere/key.pem"], "--ssl-certfile"),
        (["--ssl-certfile", "/nowhere/cert.pem"], "/nowhere/cert.pem"),
        (["--api-keys", "/nowhere/keys.toml"], "/nowhere/keys.toml"),
        (["--adapter-hub-id", "org/*"], "--enable-adapter-loading"),
        (["--adapter-hub-id", "*", "--enable-adapter-loading"], "owner/name"),
        (["--max-body-bytes", "much"], "'much'"),
    ],
)
def test_what_is_wrong_with_the_server_is_said_before_the_model_is_loaded(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    line = refused(tmp_path, "model = '/nowhere/model'", *arguments)
    assert words in line
    assert "/nowhere/model" not in line


def hub_cache(folder: Path, hub_id: str, adapter: Path) -> None:
    """A cache as huggingface_hub keeps it, with one repository in it."""
    repository = folder / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abc")
    shutil.copytree(adapter, repository / "snapshots" / "0123abc")


def test_one_file_sets_up_tls_keys_cors_and_sources_of_adapters(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    made = CliRunner().invoke(app, ["keys", "create", "ops", "--admin", "--file", str(tmp_path / "keys.toml")])
    key = made.stdout.strip()
    for hub_id, adapter in (("good/red", files.red), ("evil/red", files.red)):
        hub_cache(tmp_path / "hub", hub_id, adapter)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "graft.toml").write_text(f"""
        model = "{files.base}"
        name = "tiny"
        port = 0
        kv_cache_bytes = "4MiB"
        max_num_seqs = 3
        prefix_cache = false
        enable_adapter_loading = true
        adapter_hub_id = ["good/*"]
        api_keys = "{tmp_path}/keys.toml"
        cors_origin = ["https://chat.example.org"]
        ssl_certfile = "{tmp_path}/cert.pem"
        ssl_keyfile = "{tmp_path}/key.pem"
        [adapter]
        blue = "{files.blue}"
    """)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with graft_process("serve", "--config", str(tmp_path / "graft.toml"), "--host", "0.0.0.0") as graft:
        graft.read_until("/v1\n")
        match = re.fullmatch(r"Serving tiny with 1 adapter \(blue\) at https://0\.0\.0\.0:(\d+)/v1\n", graft.output)
        assert match is not None, graft.output
        url = f"https://127.0.0.1:{match[1]}"
        with httpx.Client(verify=context, timeout=60) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=http)
            assert {card.id for card in client.models.list()} == {"tiny", "blue"}
            headers = {"authorization": f"Bearer {key}", "origin": "https://chat.example.org"}
            reply = http.get(f"{url}/v1/models", headers=headers)
            assert reply.headers["access-control-allow-origin"] == "https://chat.example.org"
            assert http.get(f"{url}/v1/models").status_code == 401

            def load(path: str) -> httpx.Response:
                body = {"lora_name": "red", "lora_path": path}
                return http.post(f"{url}/v1/load_lora_adapter", json=body, headers=headers)

            assert load("evil/red").status_code == 400
            assert load("../red").status_code == 403
            assert load(str(files.red)).status_code == 403
            missing = load("good/missing")
            assert (missing.status_code, "hub" in missing.text) == (400, True)
            assert str(tmp_path) not in missing.text
            loaded = load("good/red")
            assert loaded.status_code == 200, loaded.text
            assert client.completions.create(model="red", prompt="x", max_tokens=2).choices[0].text is not None
        graft.interrupt()
        assert graft.wait() == 0
        # No keys would have been said to be open to all.
        assert "whoever" not in graft.errors()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_server_that_others_reach_without_keys_says_so(caplog: pytest.LogCaptureFixture, host: str) -> None:
    result = CliRunner().invoke(app, ["serve", "/nowhere/model", "--port", "0", "--host", host])
    assert "/nowhere/model" in result.stderr
    assert ("--api-keys" in caplog.text) == (host == "0.0.0.0")
