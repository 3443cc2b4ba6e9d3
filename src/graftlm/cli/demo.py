"""`graft demo`: the main job in one go. A base and its adapters answer one prompt in one batch, over HTTP."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from graftlm.config import Quantization
from graftlm.demo import MODEL_NAME, PROMPT, demo_adapters, demo_model, demo_quantization
from graftlm.errors import ConfigurationError

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class StreamedAnswer:
    """One streamed answer and when its tokens came, in seconds."""

    model: str
    text: str
    num_tokens: int
    seconds_to_first_token: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """After the first token, so that the prompt does not count."""
        return (self.num_tokens - 1) / max(self.seconds - self.seconds_to_first_token, 1e-9)


def demo(
    *,
    prompt: Annotated[str, typer.Option(help="What to ask.")] = PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 80,
    quantization: Annotated[
        str | None,
        typer.Option(metavar="|".join(get_args(Quantization)), help="What to quantise the model to while it is read."),
    ] = None,
) -> None:
    """Ask a small real model and three adapters the same thing, in one batch, through a server."""
    try:
        import openai  # noqa: F401  (a missing extra is told before the model loads)
    except ImportError as cause:
        raise ConfigurationError(
            "the demo talks to its server with the openai client, which is not installed",
            do="pip install 'graftlm[demo]'",
        ) from cause
    asyncio.run(_run(prompt, max_tokens, quantization))


async def _run(prompt: str, max_tokens: int, quantization: str | None) -> None:
    from openai import AsyncOpenAI
    from rich.console import Console

    from graftlm import AsyncLLM
    from graftlm.server import create_app
    from graftlm.server.http_server import HTTPServer, bind, url_of

    console = Console()
    model = demo_model()
    console.print(f"Loading {MODEL_NAME} from {model if isinstance(model, str) else model.name} …")
    listener = bind("127.0.0.1", 0)
    started = time.perf_counter()
    llm = AsyncLLM(model, name=MODEL_NAME, adapters=demo_adapters(), **demo_quantization(quantization))
    for adapter in llm.adapters.values():
        console.print(
            f"  adapter {adapter.name}: {adapter.method}, rank {', '.join(map(str, adapter.ranks))}, "
            f"bound {adapter.bound} of {adapter.total} tensors",
            highlight=False,
        )
    console.print(f"Ready after {time.perf_counter() - started:.1f} s at {url_of(listener)}/v1", highlight=False)
    ready = asyncio.Event()
    server = HTTPServer(create_app(llm), llm, on_ready=ready.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await ready.wait()
        async with AsyncOpenAI(base_url=f"{url_of(listener)}/v1", api_key="none") as client:
            models = [llm.model_name, *llm.adapters]
            console.print(f"\nAsking all {len(models)} at once: [bold]{prompt}[/bold]\n", highlight=False)
            answers = await asyncio.gather(*(_ask(client, name, prompt, max_tokens) for name in models))
        console.print(_table(answers))
    finally:
        server.should_exit = True
        await serving


async def _ask(client: AsyncOpenAI, model: str, prompt: str, max_tokens: int) -> StreamedAnswer:
    started = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces, first, num_tokens = [], 0.0, 0
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - started
            pieces.append(chunk.choices[0].delta.content)
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    return StreamedAnswer(
        model=model,
        text="".join(pieces),
        num_tokens=num_tokens,
        seconds_to_first_token=first,
        seconds=time.perf_counter() - started,
    )


def _table(answers: list[StreamedAnswer]) -> Table:
    from rich.table import Column, Table

    table = Table(
        "model", Column("answer", ratio=1), Column("first token", justify="right"), Column("tokens/s", justify="right")
    )
    for answer in answers:
        table.add_row(
            answer.model,
            answer.text.strip(),
            f"{answer.seconds_to_first_token:.2f} s",
            f"{answer.tokens_per_second:.1f}",
            end_section=True,
        )
    return table
