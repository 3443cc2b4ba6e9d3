"""Bytes that are hardly HTTP, sent in pieces and cut off anywhere."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

DEADLINE_SECONDS = 60
ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/models")
BODY: dict[str, Any] = {
    "model": "red", "prompt": "hello", "messages": [{"role": "user", "content": "hello"}], "input": "hello",
    "tokens": [1, 2], "max_tokens": 2, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}, "n": 2,
    "guided_choice": ["yes", "no"], "response_format": {"type": "json_object"}, "text": {"format": {"type": "text"}},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
}  # fmt: skip
FIELDS = {
    "/v1/completions": ("model", "prompt", "max_tokens", "temperature", "stop", "logit_bias", "n", "guided_choice"),
    "/v1/chat/completions": ("model", "messages", "max_tokens", "temperature", "stop", "n", "tools", "response_format"),
    "/v1/responses": ("model", "input", "temperature", "stop", "text", "tool_choice"),
    "/tokenize": ("model", "prompt"),
    "/detokenize": ("model", "tokens"),
    "/v1/models": (),
}
_WRONG_LINES = (
    b"content-type: text/plain", b"content-type: application/json; charset=utf-16", b"content-encoding: gzip", b": b",
    b"a" * 20_000 + b": b", b"no colon", b"expect: 100-continue", b"transfer-encoding: gzip, chunked",
    b"content-length: 5", b"authorization: Bearer \xff\xfe", b"a: b\r\n folded",
)  # fmt: skip
_END = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
_WRONG_STARTS = (
    b"GET", b"\x16\x03\x01\x02", b"POST /v1/completions", b"PRI * HTTP/2.0\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n",
    *(start + _END for start in (b"BREW /v1/models", b"POST /v1/%00/%ff%2e%2e", b"DELETE /v1/models/../red")),
    *(b"GET /v1/models/" + name + _END for name in (b"%ED%A0%80", b"%00", b"%ff", b"..%2f..%2fetc")),
)  # fmt: skip
JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**70, 1e400, float("nan"), "", "\x00", "\ud800", "x" * 3000, [], [[]], [None], {},
    {"": {}}, {"type": "text"}, [{"role": "user"}],
)  # fmt: skip


def status_of(address: tuple[str, int], pieces: Sequence[bytes], *, whole: bool, leave: bool, pause: float) -> int:
    """The status of the reply to these pieces; 0 for none.

    Args:
        whole: whether they are a request that will be answered; after others the server is told that nothing follows.
        leave: close the connection without listening.
        pause: most seconds between two pieces.
    """
    with socket.create_connection(address, DEADLINE_SECONDS) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                if pause:
                    time.sleep(random.uniform(0, pause))
            if leave:
                return 0
            if not whole:
                connection.shutdown(socket.SHUT_WR)
            reply = b""
            while received := connection.recv(65536):
                reply += received
        except OSError:
            return 0
    head = reply.split(b"\r\n", 1)[0].split()
    return int(head[1]) if len(head) > 1 and head[0].startswith(b"HTTP/") else 0


def send_malformed(url: str, *, cases: int, seed: int, pause: float = 0, key: str | None = None) -> Counter[int]:
    """How often each status came back. The same seed sends the same bytes.

    Args:
        key: that the server wants, in most of the heads that are whole.
    """
    host, port = url.removeprefix("http://").split(":")
    chance = random.Random(seed)
    statuses: Counter[int] = Counter()
    for _ in range(cases):
        make = chance.choice(_KINDS)
        content = make(chance)
        if key is not None and chance.random() < 0.95:
            content = content.replace(b"\r\nhost: x", f"\r\nhost: x\r\nauthorization: Bearer {key}".encode(), 1)
        pieces = _pieces(content, chance)
        whole, leave = make in _WHOLE, chance.random() < 0.1
        if chance.random() < 0.1:
            whole, pieces = False, pieces[: chance.randrange(len(pieces) + 1)]
        statuses[status_of((host, int(port)), pieces, whole=whole, leave=leave, pause=pause)] += 1
    return statuses


def _pieces(request: bytes, chance: random.Random) -> list[bytes]:
    cuts = sorted(chance.randrange(len(request) + 1) for _ in range(chance.randrange(4)))
    return [request[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(request)], strict=True)]


def _content(chance: random.Random) -> tuple[str, bytes]:
    """A route and a body for it, of which a field or two may be anything."""
    route = chance.choice(ROUTES)
    body = {name: BODY[name] for name in FIELDS[route]}
    for _ in range(chance.randrange(3)):
        body[chance.choice([*BODY, "stream", "made_up"])] = chance.choice(JUNK)
    return route, json.dumps(body).encode()


def _head(route: str, *lines: bytes) -> bytes:
    start = f"POST {route} HTTP/1.1".encode()
    return b"\r\n".join([start, b"host: x", b"connection: close", b"content-type: application/json", *lines, b"", b""])


def _valid(chance: random.Random) -> bytes:
    route, content = _content(chance)
    return _head(route, b"content-length: %d" % len(content)) + content


def _mutated_body(chance: random.Random) -> bytes:
    route, content = _content(chance)
    mutated = bytearray(content)
    for _ in range(chance.randrange(1, 6)):
        position = chance.randrange(len(mutated) + 1)
        mutated[position : position + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
    return _head(route, b"content-length: %d" % len(mutated)) + mutated


def _wrong_length(chance: random.Random) -> bytes:
    route, content = _content(chance)
    length = chance.choice([b"-1", b"x", b"0", b"%d" % (len(content) // 2), b"%d" % (len(content) + 5), b"9" * 30, b""])
    return _head(route, b"content-length: " + length) + content


def _chunked(chance: random.Random) -> bytes:
    route, content = _content(chance)
    request = _head(route, b"transfer-encoding: chunked")
    for piece in _pieces(content, chance):
        size = chance.choice([b"%x" % len(piece)] * 8 + [b"zz", b"-1", b"ffffffffffffffffff", b"%x;a=b" % len(piece)])
        request += size + b"\r\n" + piece + chance.choice([b"\r\n"] * 8 + [b"", b"\n"])
    return request + chance.choice([b"0\r\n\r\n", b"0\r\na: b\r\n\r\n", b""])


def _wrong_head(chance: random.Random) -> bytes:
    route, content = _content(chance)
    wrong = chance.choice([*_WRONG_LINES, b"x-request-id: " + chance.randbytes(8).replace(b"\n", b"")])
    lines = [b"content-length: %d" % len(content), wrong]
    return _head(route, *lines) + content


def _wrong_start(chance: random.Random) -> bytes:
    start = chance.choice(_WRONG_STARTS)
    return start + chance.randbytes(chance.randrange(20))


_KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _valid,
    _mutated_body,
    _mutated_body,
    _wrong_length,
    _chunked,
    _wrong_head,
    _wrong_start,
)
# Those that are answered without another byte.
_WHOLE = (_valid, _mutated_body)
