"""Does a server under everything that clients do stay right, fair and the same size?

64 clients talk to one `graft serve` process over HTTP. 256 adapters of a tiny random model are asked for with Zipf's
popularity (exponent 1.1), and memory holds 32 of them. Clients ask for whole answers and for streams, leave streams in
the middle, drop connections at any moment, set deadlines, read slowly, send what is malformed, and ask for names that
are not there. Every fourth adapter is loaded over HTTP and meanwhile unloaded (by force, too), loaded again, pointed to
other weights and back; the others lie in the adapter folder, and are forgotten and read again.

Every answer is compared with what its adapter's weights say alone: one request at a time, without a prefix cache. While
a name is being pointed elsewhere, both of its weights are right. Greedy and seeded sampling, completions and chats.

    python -m benchmarks.soak [--seconds 600] [--clients 64] [--adapters 256] [--resident 32]

Exits with 1 unless there are no wrong answers, none that were lost, memory after the warm-up grows by less than 1 MB
a minute (by less than 16 MB in a run too short to tell), and of the adapters in the coldest tenth 99 of 100 requests
wait at most 5 times as long for their first token as the median of all requests (not judged below 100 requests).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from benchmarks.served import Served, served
from graftlm import LLM, SamplingParams
from tests.tiny import make_adapter, make_llama

ZIPF_EXPONENT = 1.1
ALLOWED_SLOPE = 1.0
ALLOWED_WAIT_RATIO = 5.0
# Of fewer requests the 99th percentile is the one that fared worst.
LEAST_COLD = 100
# One a second. In less time the heap's own steps, some MB at once, are steeper than any leak that is looked for; then
# only the whole growth is judged.
LEAST_READINGS = 180
ALLOWED_GROWTH = 16.0
# Of the answers to a question. What two adapters say alike would hide that one answered for the other.
ALLOWED_DISTINCT = 0.9
WARM_UP_SECONDS = 60.0
# Long after any answer of the tiny model is due: what has not come by then is lost.
LOST_AFTER_SECONDS = 60.0
MB = 1e6
MAX_LABELS = 101
MODEL_LABEL = re.compile('model_name="([^"]*)"')

SYSTEM = "You are one of many. " * 9


@dataclass(frozen=True, kw_only=True)
class Question:
    """One of the requests that are sent again and again. body: without the model's name."""

    path: str
    body: Mapping[str, Any]

    @property
    def params(self) -> SamplingParams:
        names = ("max_tokens", "temperature", "seed", "ignore_eos")
        return SamplingParams(**{name: self.body[name] for name in names if name in self.body})


def completion(prompt: str, max_tokens: int, **sampling: Any) -> Question:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **sampling}
    return Question(path="/v1/completions", body=body)


QUESTIONS = (
    completion("Good day", 8),
    completion(f"{SYSTEM}Who?", 12),
    completion(f"{SYSTEM}Why?", 12, temperature=1.0, seed=5),
    completion("A long story. " * 22, 20),
    Question(
        path="/v1/chat/completions",
        body={
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello"}],
            "max_tokens": 10,
            "temperature": 0,
            "ignore_eos": True,
        },
    ),
)
MALFORMED: tuple[tuple[str, bytes, frozenset[int]], ...] = (
    ("/v1/completions", b"{", frozenset({400})),
    ("/v1/completions", b"[]", frozenset({400})),
    ("/v1/completions", b'{"model": "tiny"}', frozenset({400})),
    ("/v1/completions", b'{"model": "tiny", "prompt": "x", "max_tokens": -1}', frozenset({400})),
    ("/v1/completions", b'{"model": "tiny", "prompt": [99999]}', frozenset({400})),
    ("/v1/completions", b'{"model": "tiny", "prompt": "x", "temperature": "hot"}', frozenset({400})),
    ("/v1/chat/completions", b'{"model": "tiny", "messages": []}', frozenset({400})),
    ("/v1/completions", b'{"model": "nobody", "prompt": "x"}', frozenset({404})),
    ("/v1/load_lora_adapter", b'{"lora_name": "n0000", "lora_path": "../../etc"}', frozenset({403})),
    ("/v1/load_lora_adapter", b'{"lora_name": "broken", "lora_path": "broken"}', frozenset({400})),
    ("/v1/unload_lora_adapter", b'{"lora_name": "nobody"}', frozenset({404})),
    ("/v1/nothing", b"{}", frozenset({404})),
)


@dataclass(frozen=True, kw_only=True)
class Files:
    """base: the model. folder: adapters that answer by their folders' names. root: versions to load over HTTP, and one
    that is broken. versions: of every adapter's weights, by name; the first is the one it starts with."""

    base: Path
    folder: Path
    root: Path
    versions: Mapping[str, tuple[Path, ...]]


def write_files(folder: Path, num_adapters: int) -> Files:
    base = make_llama(folder / "base")
    pattern = make_adapter(base, folder / "pattern", r=8)
    shapes = load_file(pattern / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def write(path: Path) -> Path:
        path.mkdir(parents=True)
        shutil.copy(pattern / "adapter_config.json", path)
        tensors = {
            name: torch.randn(tensor.shape, generator=generator) * (0.3 if "lora_B" in name else 0.15)
            for name, tensor in shapes.items()
        }
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
        return path

    versions: dict[str, tuple[Path, ...]] = {}
    for index in range(num_adapters):
        name = f"n{index:04}"
        if index % 4 == 3:
            versions[name] = (write(folder / "root" / f"{name}-a"), write(folder / "root" / f"{name}-b"))
        else:
            versions[name] = (write(folder / "adapters" / name),)
    broken = write(folder / "root" / "broken") / "adapter_model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    return Files(base=base, folder=folder / "adapters", root=folder / "root", versions=versions)


@dataclass(frozen=True, kw_only=True)
class References:
    """texts: of each version's answers, in the order of `QUESTIONS`. adapter_bytes: what one takes in memory."""

    texts: Mapping[Path, tuple[str, ...]]
    base_texts: tuple[str, ...]
    adapter_bytes: int


def compute_references(files: Files) -> References:
    """Every version's answer to every question, one request at a time and nothing cached."""
    llm = LLM(files.base, name="tiny", max_num_seqs=1, prefix_cache=False, kv_cache_bytes=1 << 20)

    def answers(adapter: str | None) -> tuple[str, ...]:
        texts = []
        for question in QUESTIONS:
            if "prompt" in question.body:
                [output] = llm.generate([question.body["prompt"]], question.params, adapter=adapter)
            else:
                [output] = llm.chat([question.body["messages"]], question.params, adapter=adapter)
            texts.append(output.outputs[0].text)
        return tuple(texts)

    texts, adapter_bytes = {}, 0
    for paths in files.versions.values():
        for path in paths:
            adapter_bytes = llm.load_adapter("adapter", path).num_bytes
            texts[path] = answers("adapter")
            llm.unload_adapter("adapter")
    references = References(texts=texts, base_texts=answers(None), adapter_bytes=adapter_bytes)
    llm.shutdown()
    for which, column in enumerate(zip(*[*references.texts.values(), references.base_texts], strict=True)):
        if len(set(column)) < ALLOWED_DISTINCT * len(column):
            raise RuntimeError(f"{len(set(column))} different answers to question {which} tell too little")
    return references


class Absent:
    """In place of a version: the name may answer 404. Ended: a forced unload may end the request."""


ABSENT, ENDED = Absent(), Absent()
Outcome = Path | Absent


@dataclass(kw_only=True)
class Name:
    """What a name may answer now, and what each request that runs on it may come to."""

    name: str
    index: int
    versions: tuple[Path, ...]
    possible: set[Outcome] = field(default_factory=set)
    running: list[set[Outcome]] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_loadable(self) -> bool:
        return len(self.versions) > 1

    def may_become(self, *outcomes: Outcome) -> None:
        for allowed in (self.possible, *self.running):
            allowed.update(outcomes)

    @contextlib.contextmanager
    def request(self) -> Any:
        allowed = set(self.possible)
        self.running.append(allowed)
        try:
            yield allowed
        finally:
            # By identity: another request's set may be equal.
            self.running[:] = [other for other in self.running if other is not allowed]


@dataclass(kw_only=True)
class Findings:
    """What happened. waits: (place in the order of popularity, seconds to the first token). sizes: (seconds, bytes)."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    waits: list[tuple[int, float]] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    num_faults: Counter[str] = field(default_factory=Counter)

    def fault(self, kind: str, detail: str) -> None:
        self.num_faults[kind] += 1
        if self.num_faults[kind] <= 10:
            self.faults.append(f"{kind}: {detail}")


class Soak:
    def __init__(self, server: Served, files: Files, references: References, *, seed: int, resident: int) -> None:
        self.server = server
        self.files = files
        self.references = references
        self.findings = Findings()
        self.random = random.Random(seed)
        self.resident = resident
        self.names = [
            Name(name=name, index=index, versions=versions, possible={ABSENT if len(versions) > 1 else versions[0]})
            for index, (name, versions) in enumerate(files.versions.items())
        ]
        self.weights = [(index + 1) ** -ZIPF_EXPONENT for index in range(len(self.names))]
        self.begun = time.monotonic()
        self.stop_at = self.begun
        self.http: aiohttp.ClientSession

    async def run(self, seconds: float, num_clients: int) -> None:
        async with self.session() as self.http:
            for name in self.names:
                if name.is_loadable:
                    await self.load(name, name.versions[0])
            self.begun = time.monotonic()
            self.stop_at = self.begun + seconds
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_clients):
                    tasks.create_task(self.client())
                tasks.create_task(self.observe())
            await self.check_idle()

    def session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=LOST_AFTER_SECONDS)
        return aiohttp.ClientSession(self.server.url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def client(self) -> None:
        acts: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.34, self.ask_whole),
            (0.40, self.ask_stream),
            (0.06, self.leave_stream),
            (0.05, self.drop_connection),
            (0.03, self.ask_with_deadline),
            (0.02, self.read_slowly),
            (0.02, self.ask_base),
            (0.05, self.send_malformed),
            (0.03, self.change_adapter),
        ]
        chances, functions = zip(*acts, strict=True)
        while time.monotonic() < self.stop_at:
            [act] = self.random.choices(functions, chances)
            self.findings.counts[act.__name__] += 1
            try:
                await act()
            except (aiohttp.ClientError, OSError) as error:
                self.findings.fault("lost", f"{act.__name__}: {error!r}")

    def pick(self) -> Name:
        [name] = self.random.choices(self.names, self.weights)
        return name

    def body(self, question: Question, name: Name, **more: Any) -> dict[str, Any]:
        return {**question.body, "model": name.name, **more}

    def judge(self, name: Name, which: int, text: str, allowed: set[Outcome]) -> None:
        expected = {self.references.texts[path][which] for path in allowed if isinstance(path, Path)}
        if text not in expected:
            owner = [str(path.name) for path, texts in self.references.texts.items() if text == texts[which]]
            owner += ["base"] if text == self.references.base_texts[which] else []
            self.findings.fault("wrong", f"{name.name} question {which}: {text!r}; it is what {owner} would say")
        self.findings.counts["answers checked"] += 1

    def judge_refusal(self, name: Name, status: int, content: str, allowed: set[Outcome]) -> None:
        if status == 404 and ABSENT in allowed:
            self.findings.counts["404 while unloaded"] += 1
        elif status == 503 and ENDED in allowed:
            self.findings.counts["ended by a forced unload"] += 1
        else:
            self.findings.fault("lost", f"{name.name}: {status} {content[:300]}")

    async def ask_whole(self, **more: Any) -> None:
        name, which = self.pick(), self.random.randrange(len(QUESTIONS))
        question = QUESTIONS[which]
        with name.request() as allowed:
            status, content = await self.post(question.path, json=self.body(question, name, **more))
            if "timeout" in more and status == 504:
                self.findings.counts["504"] += 1
            elif status != 200:
                self.judge_refusal(name, status, content, allowed)
            else:
                [choice] = json.loads(content)["choices"]
                self.judge(name, which, choice["text"] if "text" in choice else choice["message"]["content"], allowed)

    async def ask_stream(self, *, pause: float = 0.0, **more: Any) -> None:
        name, which = self.pick(), self.random.randrange(len(QUESTIONS))
        question = QUESTIONS[which]
        sent, waited = time.monotonic(), None
        with name.request() as allowed:
            async with self.stream(question, name, **more) as reply:
                if reply.status == 504 and "timeout" in more:
                    self.findings.counts["504"] += 1
                    return
                if reply.status != 200:
                    self.judge_refusal(name, reply.status, await reply.text(), allowed)
                    return
                text, done = "", False
                async for line in reply.content:
                    if not line.strip():
                        continue
                    done = line.strip() == b"data: [DONE]"
                    event = {} if done else json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        self.judge_event(name, event["error"], allowed, has_deadline="timeout" in more)
                        return
                    piece = "".join(map(text_of, event.get("choices", ())))
                    if piece and waited is None:
                        waited = time.monotonic() - sent
                    text += piece
                    if pause:
                        await asyncio.sleep(pause)
            if not done:
                self.findings.fault("lost", f"{name.name}: a stream ended without [DONE]")
                return
            self.judge(name, which, text, allowed)
        if waited is not None and not pause and not more:
            self.findings.waits.append((name.index, waited))

    def judge_event(self, name: Name, error: Mapping[str, Any], allowed: set[Outcome], *, has_deadline: bool) -> None:
        if has_deadline and error["code"] == "deadline_exceeded":
            self.findings.counts["deadline inside a stream"] += 1
        else:
            self.judge_refusal(name, 503 if error["code"] == "engine_closed" else 500, str(error), allowed)

    def stream(
        self, question: Question, name: Name, **more: Any
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.http.post(question.path, json=self.body(question, name, stream=True, **more))

    async def post(self, path: str, **content: Any) -> tuple[int, str]:
        async with self.http.post(path, **content) as reply:
            return reply.status, await reply.text()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(path) as reply:
            return reply.status, await reply.text()

    async def leave_stream(self) -> None:
        name, question = self.pick(), self.random.choice(QUESTIONS)
        leave_after = self.random.randrange(1, 6)
        async with self.stream(question, name) as reply:
            async for _ in reply.content:
                leave_after -= 1
                if not leave_after:
                    break

    async def drop_connection(self) -> None:
        name, question = self.pick(), self.random.choice(QUESTIONS)
        body = self.body(question, name, stream=self.random.random() < 0.5)
        async with self.session() as own:
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(self.random.random() ** 2 * 0.5),
                    own.post(question.path, json=body) as reply,
                ):
                    await reply.read()

    async def ask_with_deadline(self) -> None:
        timeout = 0.001 + self.random.random() ** 2 * 0.5
        await (self.ask_whole(timeout=timeout) if self.random.random() < 0.5 else self.ask_stream(timeout=timeout))

    async def read_slowly(self) -> None:
        await self.ask_stream(pause=0.05)

    async def ask_base(self) -> None:
        which = self.random.randrange(len(QUESTIONS))
        question = QUESTIONS[which]
        status, content = await self.post(question.path, json={**question.body, "model": "tiny"})
        if status != 200:
            self.findings.fault("lost", f"base: {status} {content[:300]}")
            return
        [choice] = json.loads(content)["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        self.findings.counts["answers checked"] += 1
        if text != self.references.base_texts[which]:
            self.findings.fault("wrong", f"base question {which}: {text!r}")

    async def send_malformed(self) -> None:
        path, content, statuses = self.random.choice(MALFORMED)
        status, reply = await self.post(path, data=content, headers={"content-type": "application/json"})
        if status not in statuses:
            self.findings.fault("malformed", f"{path} {content!r}: {status} {reply[:300]}")

    async def change_adapter(self) -> None:
        name = self.pick()
        async with name.lock:
            if not name.is_loadable:
                await self.unload(name)
            elif ABSENT in name.possible or self.random.random() < 0.5:
                await self.load(name, self.random.choice(name.versions))
            else:
                await self.unload(name)

    async def load(self, name: Name, version: Path) -> None:
        replaces = ABSENT not in name.possible
        name.may_become(version)
        body = {"lora_name": name.name, "lora_path": version.name, "load_inplace": replaces}
        status, reply = await self.post("/v1/load_lora_adapter", json=body)
        if status != 200:
            self.findings.fault("lost", f"loading {version.name}: {status} {reply[:300]}")
        name.possible = {version}
        self.findings.counts["pointed to other weights" if replaces else "loaded"] += 1

    async def unload(self, name: Name) -> None:
        force = self.random.random() < 0.3
        if name.is_loadable:
            name.may_become(ABSENT)
        if force:
            name.may_become(ENDED)
        body = {"lora_name": name.name, "force": force}
        status, reply = await self.post("/v1/unload_lora_adapter", json=body)
        # One in the adapter folder that nobody has asked for has nothing to forget.
        if status != 200 and (name.is_loadable or status != 404):
            self.findings.fault("lost", f"unloading {name.name}: {status} {reply[:300]}")
        if name.is_loadable:
            name.possible = {ABSENT}
        name.possible.discard(ENDED)
        self.findings.counts["unloaded by force" if force else "unloaded"] += 1

    async def observe(self) -> None:
        """Memory every second, and what an operator looks at."""
        budget = self.resident * self.references.adapter_bytes
        while time.monotonic() < self.stop_at:
            self.findings.sizes.append((time.monotonic() - self.begun, self.server.resident_bytes))
            metrics = await self.metrics()
            if metrics["graft_adapter_bytes"] > budget:
                self.findings.fault("memory", f"adapters take {metrics['graft_adapter_bytes']} of {budget} bytes")
            if metrics["labels"] > MAX_LABELS:
                self.findings.fault("metrics", f"{metrics['labels']} models have labels")
            for path in ("/health", "/ready"):
                status, content = await self.get(path)
                if status != 200:
                    self.findings.fault("health", f"{path}: {status} {content[:200]}")
            await asyncio.sleep(1)

    async def metrics(self) -> dict[str, float]:
        """Those without labels, and how many models have any: parsing all would take the clients' time."""
        _, text = await self.get("/metrics")
        plain = "\n".join(line for line in text.splitlines() if "{" not in line)
        families = text_string_to_metric_families(plain + "\n")
        values = {sample.name: sample.value for family in families for sample in family.samples}
        return {**values, "labels": len(set(MODEL_LABEL.findall(text)))}

    async def check_idle(self) -> None:
        """Nothing is left of requests that ended, or whose clients left."""
        deadline = time.monotonic() + 10
        while True:
            metrics = await self.metrics()
            left = {
                name: metrics[name]
                for name in ("graft_num_requests_running", "graft_num_requests_waiting", "graft_kv_cache_usage_perc")
                if metrics[name]
            }
            if not left:
                return
            if time.monotonic() > deadline:
                self.findings.fault("held", f"with nobody there: {left}")
                return
            await asyncio.sleep(0.1)


def text_of(choice: Mapping[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def slope_per_minute(sizes: Sequence[tuple[float, int]]) -> float:
    """MB a minute: the median of the slopes between every reading of the first half and its partner half a run later
    (Theil-Sen over such pairs), which a single jump does not move."""
    half = len(sizes) // 2
    slopes = [
        (later - earlier) / MB / (then - now) * 60
        for (now, earlier), (then, later) in zip(sizes[:half], sizes[half:], strict=False)
    ]
    return statistics.median(slopes)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def report(soak: Soak, seconds: float, exit_code: int) -> bool:
    findings = soak.findings
    for name, count in sorted(findings.counts.items()):
        print(f"  {count:8} {name}")
    warm_up = min(WARM_UP_SECONDS, seconds / 2)
    settled = [size for size in findings.sizes if size[0] >= warm_up]
    slope = slope_per_minute(settled) if len(settled) >= LEAST_READINGS else 0.0
    sizes = [size / MB for _, size in settled or findings.sizes]
    coldest = len(soak.names) * 9 // 10
    waits = [wait for _, wait in findings.waits]
    cold = [wait for index, wait in findings.waits if index >= coldest]
    median, p99 = statistics.median(waits), percentile(waits, 0.99)
    cold_p99 = percentile(cold, 0.99) if cold else 0.0
    is_fair = cold_p99 <= ALLOWED_WAIT_RATIO * median or len(cold) < LEAST_COLD
    checks = {
        "wrong answers": (findings.num_faults["wrong"], findings.num_faults["wrong"] == 0),
        "lost answers": (findings.num_faults["lost"], findings.num_faults["lost"] == 0),
        "other faults": (findings.num_faults.total(), findings.num_faults.total() == 0),
        f"memory after {warm_up:.0f} s, MB a minute ({len(settled)} readings, not judged below {LEAST_READINGS})": (
            f"{slope:.2f}",
            slope < ALLOWED_SLOPE,
        ),
        "memory, MB, first settled and last": (
            f"{sizes[0]:.0f} {sizes[-1]:.0f}",
            sizes[-1] - sizes[0] < ALLOWED_GROWTH or len(settled) >= LEAST_READINGS,
        ),
        "wait for the first token, ms, median": (f"{1000 * median:.0f}", True),
        "the same, 99th percentile of all": (f"{1000 * p99:.0f}", True),
        f"the same, of the coldest tenth ({len(cold)} requests)": (f"{1000 * cold_p99:.0f}", True),
        f"that / median (not judged below {LEAST_COLD} requests)": (f"{cold_p99 / median:.2f}", is_fair),
        "exit code after SIGTERM": (exit_code, exit_code == 0),
    }
    for what, (value, is_good) in checks.items():
        print(f"{'ok  ' if is_good else 'FAIL'} {what}: {value}")
    for fault in findings.faults:
        print(f"  {fault}")
    return all(is_good for _, is_good in checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=256)
    parser.add_argument("--resident", type=int, default=32, help="adapters that memory holds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder), options.adapters)
        references = compute_references(files)
        arguments = [
            str(files.base), "--name", "tiny", "--adapter-dir", str(files.folder),
            "--enable-adapter-loading", "--adapter-root", str(files.root),
            "--adapter-memory-bytes", str(options.resident * references.adapter_bytes),
            "--kv-cache-bytes", str(4 << 20), "--max-num-seqs", "32", "--max-num-batched-tokens", "256",
        ]  # fmt: skip
        with served(*arguments) as server:
            soak = Soak(server, files, references, seed=options.seed, resident=options.resident)
            asyncio.run(soak.run(options.seconds, options.clients))
            exit_code = server.stop()
        return 0 if report(soak, options.seconds, exit_code) else 1


if __name__ == "__main__":
    sys.exit(main())
