"""Does anything that is sent to the server make it fail, or leave something behind?

Schemathesis sends what the server's own OpenAPI description allows and much that it does not, with an API key and often
with forms and tools; then come bytes that are hardly HTTP, cut into pieces with pauses between them and broken off.
Shown are the statuses, and at the end what is left: running requests, blocks, open files, threads, and memory against
the middle of the run.

    python benchmarks/http_robustness.py [--generated 2000] [--malformed 5000] [--seed 0]
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

import psutil

from graftlm import AsyncLLM
from graftlm.server.api_keys import digest_of
from graftlm.server.key_file import KeyFile

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.server.generated_requests import statuses_of
from tests.server.live_server import LiveServer, serving
from tests.server.malformed_requests import send_malformed
from tests.server.test_disconnect import wait_until
from tests.tiny import make_adapter, make_llama

PAUSE_SECONDS = 0.002
KEY = "graft-for-all"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", type=int, default=2000)
    parser.add_argument("--malformed", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        base = make_llama(Path(folder) / "base")
        red = make_adapter(base, Path(folder) / "red")
        llm = AsyncLLM(base, name="tiny", adapters={"red": red}, max_model_len=48, kv_cache_bytes=1 << 20)
        keys = Path(folder) / "keys.toml"
        keys.write_text(f'[keys.all]\nsha256 = "{digest_of(KEY)}"\nmodels = ["*"]\nadmin = true\nmetrics = true\n')
        with serving(llm, adapter_roots=[Path(folder)], keys=KeyFile(keys)) as live:
            live.http.headers["authorization"] = f"Bearer {KEY}"
            return run(llm, live, arguments)


def run(llm: AsyncLLM, live: LiveServer, arguments: argparse.Namespace) -> int:
    expected = live.text(model="red", prompt="hello")
    num_free_blocks = llm.num_free_blocks
    statuses, failures = statuses_of(live.url, ["tiny", "red"], cases=arguments.generated, seed=arguments.seed, key=KEY)
    show(f"{statuses.total()} generated requests", statuses)
    for failure in failures:
        print(" ", failure)
    process = psutil.Process()

    def sent(seed: int) -> Counter[int]:
        statuses = send_malformed(live.url, cases=arguments.malformed // 2, seed=seed, pause=PAUSE_SECONDS, key=KEY)
        wait_until(lambda: llm.num_unfinished_requests == 0)
        return statuses

    malformed = sent(arguments.seed)
    # Its own connection may have been closed by one side meanwhile.
    alive = live.text(model="red", prompt="hello") == expected
    memory, files, threads = process.memory_info().rss, process.num_fds(), threading.active_count()
    malformed += sent(arguments.seed + 1)
    show(f"{malformed.total()} malformed requests", malformed)
    alive = alive and live.text(model="red", prompt="hello") == expected
    wait_until(lambda: llm.num_free_blocks == num_free_blocks)
    print(
        f"alive with the same answer: {alive}; over the second half of the malformed requests: memory "
        f"{(process.memory_info().rss - memory) / 2**20:+.1f} MiB, files {process.num_fds() - files:+d}, "
        f"threads {threading.active_count() - threads:+d}"
    )
    return 0 if alive and not failures and max(malformed) < 500 else 1


def show(title: str, statuses: Counter[int]) -> None:
    shown = ", ".join(f"{status or 'none'}: {count}" for status, count in sorted(statuses.items()))
    print(f"{title}; status: count = {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
