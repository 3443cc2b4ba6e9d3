"""Ray Serve in front of an engine whose workers are on the same Ray."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from graftlm import LLM, SamplingParams
from graftlm.cli import app
from tests.cli.graft_process import graft_process
from tests.tiny import make_adapter, make_llama

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
DEADLINE_SECONDS = 60.0
NUM_TOKENS = 6
MANY_TOKENS = 16_000


def num_running(http: httpx.Client) -> float:
    families = text_string_to_metric_families(http.get("/metrics").text)
    [family] = [family for family in families if family.name == "graft_num_requests_running"]
    return family.samples[0].value


def status_without_token(port: int) -> grpc.StatusCode:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=DEADLINE_SECONDS)
    return refused.value.code()


def test_ray_serve_answers_as_the_engine_does_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", max_position_embeddings=MANY_TOKENS + 2)
    adapter, key_file = make_adapter(base, tmp_path / "plain", seed=1), tmp_path / "keys.toml"
    made = CliRunner().invoke(app, ["keys", "create", "alice", "--file", str(key_file), "--metrics"])
    key = made.stdout.split()[0]
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    local = LLM(base, adapters={"plain": adapter}, kv_cache_bytes=1 << 20)
    expected = local.generate(["x"], greedy, adapter="plain")[0].outputs[0].text
    ingress = ["--ingress", "ray-serve", "--port", "0", "--api-keys", str(key_file), "--drain-seconds", "0"]
    engine = ["--adapter", f"plain={adapter}", "--workers", "1", "--kv-cache-bytes", "64MiB"]
    with graft_process("serve", str(base), *engine, *ingress) as graft:
        graft.read_until("/v1\n")
        url = re.findall(r"http://127\.0\.0\.1:\d+", graft.output)[0]
        request = {"model": "plain", "prompt": "x", "temperature": 0, "extra_body": {"ignore_eos": True}}
        headers = {"authorization": f"Bearer {key}"}
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=DEADLINE_SECONDS) as client,
            httpx.Client(base_url=url, headers=headers, timeout=DEADLINE_SECONDS) as http,
        ):
            whole = client.completions.create(**request, max_tokens=NUM_TOKENS)
            assert whole.choices[0].text == expected
            with client.completions.create(**request, max_tokens=NUM_TOKENS, stream=True) as events:
                assert "".join(event.choices[0].text for event in events) == expected
            with client.completions.create(**request, max_tokens=MANY_TOKENS, stream=True) as events:
                next(iter(events))
                # What has come so far was not kept back until the end.
                assert num_running(http) == 1
            # Whoever leaves ends the work on the request: all of it would take minutes.
            while num_running(http) > 0:
                pass
        with (
            pytest.raises(openai.AuthenticationError),
            openai.OpenAI(base_url=f"{url}/v1", api_key="other") as stranger,
        ):
            stranger.completions.create(**request)
        processes = graft.descendants()
        listening = {
            connection.laddr
            for process in processes
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        # Ray Serve offers no choice for the port at which its process is called.
        [open_port] = [address.port for address in listening if address.ip not in LOOPBACK]
        assert status_without_token(open_port) is grpc.StatusCode.UNAUTHENTICATED
        graft.interrupt()
        assert graft.wait() == 0
        assert psutil.wait_procs(processes, timeout=DEADLINE_SECONDS)[1] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ingress", "other"], "got: other; allowed: ray-serve"),
        (["--ingress", "ray-serve"], "do: give --workers or --replicas"),
        (["--ingress", "ray-serve", "--workers", "1", "--access-log"], "got: --access-log; do: leave out --ingress"),
    ],
)
def test_an_ingress_that_cannot_be_had_is_refused_at_once(tmp_path: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["serve", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
