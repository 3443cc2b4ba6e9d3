"""Requests that Schemathesis makes of the server's own OpenAPI description: what is said to be a field is sent with any
value, and with many that are none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis
import schemathesis
from hypothesis import HealthCheck, Phase

# What makes the outcome: a deadline in the body may be too short, and that is the request's own wish.
_ALLOWED = {504: "timeout"}
_SUBJECTS: dict[str, Any] = {
    "prompt": "hello",
    "messages": [{"role": "user", "content": "hello"}],
    "input": "hello",
    "tokens": [1, 2],
}
_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, "b", None]}}, "required": ["a"]}
_FUNCTION: dict[str, Any] = {"name": "f", "parameters": _SCHEMA}
# Forms and tools that are in order, which chance hardly makes.
_FORMS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"structured_outputs": {"regex": "[a-c]{1,9}"}},
        {"guided_json": _SCHEMA},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'start: "a" start | "b"'},
        {"response_format": {"type": "json_object"}},
    ],
    "/v1/chat/completions": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
        {"tools": [{"type": "function", "function": _FUNCTION}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": _FUNCTION}], "response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    "/v1/responses": [
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
        {"tools": [{"type": "function", **_FUNCTION}], "tool_choice": {"type": "function", "name": "f"}},
        {"tools": [{"type": "function", **_FUNCTION}], "text": {"format": {"type": "json_object"}}},
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
    ],
}


def statuses_of(
    url: str, models: list[str], *, cases: int, seed: int, paths: Sequence[str] = (), key: str | None = None
) -> tuple[Counter[int], list[str]]:
    """How often each status came back, and a description of each reply that is the server's fault.

    Args:
        models: names that answer; three of four bodies get one and keep few of their other fields, half of these get
            something to answer, lest all are refused, and half of those a form or tools for it.
        paths: what is asked; everything without them.
        key: that the server wants; one of twenty requests does without it.
        cases: for all operations that have a body together; one without has but a few different requests.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [operation for operation in operations if not paths or operation.path in paths]
    num_bodies = sum(bool(operation.body) for operation in operations)
    statuses: Counter[int] = Counter()
    failures: list[str] = []
    chance = random.Random(seed)
    for operation in operations:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=-(-cases // num_bodies),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy())
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and "model" in case.body and chance.random() < 0.75:
                # Of thirty fields with any value one is always out of range.
                few = {*_SUBJECTS, *chance.sample(sorted(case.body), min(2, len(case.body)))}
                case.body = {name: value for name, value in case.body.items() if name in few}
                case.body["model"] = chance.choice(models)
                if chance.random() < 0.5:
                    case.body |= {name: value for name, value in _SUBJECTS.items() if name in case.body}
                    if chance.random() < 0.5 and case.path in _FORMS:
                        case.body |= chance.choice(_FORMS[case.path])
            reply = case.call(headers=headers if chance.random() < 0.95 else {})
            statuses[reply.status_code] += 1
            wished = isinstance(case.body, dict) and case.body.get(_ALLOWED.get(reply.status_code, "")) is not None
            if reply.status_code >= 500 and not wished:
                failures.append(f"{case.method} {case.path}: {reply.status_code} to {case.body!r:.300}")

        send()
    return statuses, failures
