"""What is killed in the middle of something: the next one goes on at once and reads nothing half written."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from graftlm import LLM, SamplingParams
from graftlm.cli import app
from tests.cli.graft_process import GraftProcess, graft_process
from tests.cli.test_serve import LONG
from tests.tiny import make_adapter, make_llama
from tests.training.peft_loop import completion_rows, write_rows

pytestmark = pytest.mark.long

ATTEMPTS = 20
ASKED: dict[str, Any] = {"prompt": "x", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def wait_for_url(graft: GraftProcess) -> str:
    graft.read_until("/v1\n")
    return graft.output.split()[-1].removesuffix("/v1")


def answer(http: httpx.Client, model: str) -> list[float]:
    """The log-probabilities of what it says."""
    reply = http.post("/v1/completions", json={**ASKED, "model": model})
    assert reply.status_code == 200, reply.text
    logprobs: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    return logprobs


def kill_while_it_loads(graft: GraftProcess, http: httpx.Client, weights: Path) -> None:
    """Load and unload until it is seen to have the file open, and kill it then."""
    with ThreadPoolExecutor(1) as pool:
        for _ in range(ATTEMPTS):
            body = {"lora_name": "large", "lora_path": weights.parent.name}
            load = pool.submit(http.post, "/v1/load_lora_adapter", json=body)
            while not load.done():
                if graft.has_open(weights):
                    graft.kill()
                    assert isinstance(load.exception(), httpx.TransportError)
                    return
            assert load.result().status_code == 200
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": "large"}).status_code == 200
    pytest.fail("the file was never seen to be open")


def test_after_a_kill_during_a_stream_and_a_load_the_next_server_answers_alike(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", max_position_embeddings=16384, intermediate_size=1024, num_hidden_layers=4)
    make_adapter(base, tmp_path / "roots" / "red")
    large = make_adapter(
        base, tmp_path / "roots" / "large", r=512, target_modules=["gate_proj", "up_proj", "down_proj"]
    )
    arguments = [
        "serve", str(base), "--name", "tiny", "--adapter", f"red={tmp_path / 'roots' / 'red'}", "--port", "0",
        "--kv-cache-bytes", "16MiB", "--enable-adapter-loading", "--adapter-root", str(tmp_path / "roots"),
    ]  # fmt: skip
    with graft_process(*arguments) as graft, httpx.Client(base_url=wait_for_url(graft), timeout=60) as http:
        before = answer(http, "red")
        with http.stream("POST", "/v1/completions", json=LONG) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: {")
            kill_while_it_loads(graft, http, large / "adapter_model.safetensors")
            with pytest.raises(httpx.TransportError):
                list(lines)
    with graft_process(*arguments) as graft, httpx.Client(base_url=wait_for_url(graft), timeout=60) as http:
        assert answer(http, "red") == before
        body = {"lora_name": "large", "lora_path": "large"}
        assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert answer(http, "large") not in (before, answer(http, "tiny"))


def partial_files(cache: Path) -> list[Path]:
    """Of weights, not of what is noted beside them."""
    return [path for path in cache.glob("*.partial") if path.is_file()]


def kill_while_it_writes(arguments: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Start servers with empty caches until one was killed with its entry half written; its cache."""
    for attempt in range(ATTEMPTS):
        monkeypatch.setenv("GRAFT_CACHE", str(folder := cache / str(attempt)))
        with graft_process(*arguments) as graft:
            for _ in itertools.count():
                with suppress(FileNotFoundError):
                    if partial_files(folder) or list(folder.glob("*.safetensors")):
                        break
            graft.kill()
        if partial_files(folder):
            assert not list(folder.glob("*.safetensors"))
            return folder
    pytest.fail("the file was never seen half written")


def test_after_a_kill_while_the_quantised_cache_is_written_nothing_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_llama(tmp_path / "base", hidden_size=512, intermediate_size=4096, num_hidden_layers=4)
    with_no_cache = LLM(base, quantization="nf4", quantization_cache=False, kv_cache_bytes=8 << 20)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    [expected] = with_no_cache.generate(["x"], params)
    logprobs = expected.outputs[0].logprobs or ()
    assert len(logprobs) == 8
    with_no_cache.shutdown()
    arguments = [
        "serve",
        str(base),
        "--name",
        "tiny",
        "--quantization",
        "nf4",
        "--port",
        "0",
        "--kv-cache-bytes",
        "8MiB",
    ]
    cache = kill_while_it_writes(arguments, tmp_path / "cache", monkeypatch)
    left = {path: path.read_bytes() for path in partial_files(cache)}
    with graft_process(*arguments) as graft, httpx.Client(base_url=wait_for_url(graft), timeout=60) as http:
        assert answer(http, "tiny") == pytest.approx([token.logprob for token in logprobs], abs=1e-4)
    assert len(list(cache.glob("*.safetensors"))) == 1
    # Whose writer may still live it is not for others to remove; what is a day old is.
    assert {path: path.read_bytes() for path in partial_files(cache)} == left


def kill_while_it_saves(arguments: list[str], outputs: Path) -> Path:
    """Train until a run was killed with a checkpoint half written that was not its first; its output folder."""
    for attempt in range(ATTEMPTS):
        checkpoint = (folder := outputs / str(attempt)) / "checkpoint.pt"
        partial = folder / ".checkpoint.pt.partial"
        with graft_process(*arguments, "--output", str(folder)) as graft:
            while graft.is_running and not (checkpoint.exists() and partial.exists()):
                pass
            graft.kill()
        if partial.exists():
            return folder
    pytest.fail("no checkpoint was seen half written")


def test_after_a_kill_while_a_checkpoint_is_written_training_goes_on_from_the_one_before(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    data = write_rows(tmp_path / "rows.jsonl", completion_rows())
    arguments = [
        "train", str(base), "--data", str(data), "--name", "tuned", "--rank", "512", "--lr", "1e-3", "--steps", "6",
        "--batch-size", "1", "--save-every", "1",
    ]  # fmt: skip
    killed, straight = kill_while_it_saves(arguments, tmp_path / "killed"), tmp_path / "straight"
    num_steps = torch.load(killed / "checkpoint.pt", weights_only=True)["step"]
    assert 1 <= num_steps < 6
    for folder, more in ((killed, ["--resume"]), (straight, [])):
        result = CliRunner().invoke(app, [*arguments, "--output", str(folder), *more])
        assert result.exit_code == 0, result.output
    [resumed, expected] = [load_file(folder / "adapter_model.safetensors") for folder in (killed, straight)]
    torch.testing.assert_close(resumed, expected)
    steps = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    # The write that was cut off is not in the way of the ones after it, and nothing of it is left.
    assert {path.name for path in killed.iterdir()} == {path.name for path in straight.iterdir()}
