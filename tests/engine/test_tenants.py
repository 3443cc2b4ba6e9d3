"""Requests on somebody's account: whose share of the engine they use up, and whose cached prompts they find."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from graftlm import AsyncLLM, SamplingParams
from graftlm.engine.request_stream import RequestStream
from graftlm.engine.tenant import Tenant
from tests.engine.rig import held

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


async def finishing_order(llama: Path, **options: Any) -> list[str]:
    """Who is answered when: alice has sent six requests before bob sends his first."""
    llm = AsyncLLM(llama, kv_cache_bytes=1 << 20, max_num_seqs=1, **options)
    finished: list[str] = []

    async def collect(tenant: str, stream: RequestStream) -> None:
        await stream.collect()
        finished.append(tenant)

    try:
        with held(llm):
            streams = [
                (name, await llm.add_request("hello", PARAMS, tenant=Tenant(name=name)))
                for name in [*["alice"] * 6, "bob"]
            ]
        await asyncio.gather(*(collect(name, stream) for name, stream in streams))
    finally:
        await llm.shutdown()
    return finished


def test_fair_scheduling_is_between_tenants_whatever_their_adapter(llama: Path) -> None:
    fair = asyncio.run(finishing_order(llama, scheduling="fair"))
    # On a tie whoever came first is first.
    assert fair.index("bob") == 1
    assert asyncio.run(finishing_order(llama)).index("bob") == 6


def test_tenants_find_only_what_those_with_their_salt_have_computed(llama: Path) -> None:
    async def cached() -> list[int]:
        llm = AsyncLLM(llama, kv_cache_bytes=1 << 20)
        try:
            found = []
            for salt in ("a", "b", "a", "b", ""):
                tenant = Tenant(name=f"of {salt}", cache_salt=salt)
                stream = await llm.add_request("a prompt of several blocks " * 2, PARAMS, tenant=tenant)
                found.append((await stream.collect()).num_cached_tokens)
            return found
        finally:
            await llm.shutdown()

    first, other, again, other_again, nobody = asyncio.run(cached())
    assert first == other == nobody == 0
    assert again == other_again > 0
