"""Answering a file of requests: many at a time, each written down when it is finished."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from graftlm.cli.batch_file import BatchFile, BatchRow
from graftlm.cli.batch_output import BatchOutput
from graftlm.errors import ConfigurationError, RemoteError

if TYPE_CHECKING:
    import httpx

    from graftlm.cli.api_client import ApiClient

_TOO_MANY_REQUESTS = 429
_NOT_LET_IN = (401, 403)
_RETRY_SECONDS = 1.0


@dataclass(kw_only=True)
class BatchCount:
    """How many rows came to which end. `failed` ones are not written down, so that the next run asks again."""

    skipped: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0

    def __str__(self) -> str:
        parts = [f"{self.answered} answered", f"{self.refused} refused"]
        if self.skipped:
            parts.append(f"{self.skipped} were there already")
        if self.failed:
            parts.append(f"{self.failed} failed: run it again to ask again")
        return ", ".join(parts)


async def run_batch(
    client: ApiClient, source: BatchFile, output: BatchOutput, count: BatchCount, *, concurrency: int
) -> None:
    """Answer every row that `output` does not have yet.

    Args:
        count: grows while it runs; right whenever it ends.
        concurrency: rows that are asked for at a time.

    Raises:
        ConfigurationError: the output has rows that the source has not.
        RemoteError: the server cannot be reached. What was answered is written down.
    """
    known = set(source.row_ids)
    if strangers := sorted(output.finished - known):
        raise ConfigurationError(
            "the output is of another file", got=f"the id {strangers[0]!r}, which is not asked for", do="choose another"
        )
    left = [row_id for row_id in source.row_ids if row_id not in output.finished]
    count.skipped = len(known) - len(left)
    rows = source.rows(left)
    with _progress(total=len(known), begun=count.skipped) as advance:

        async def work() -> None:
            for row in rows:
                await _answer(client, row, output, count)
                advance()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(left))):
                    group.create_task(work())
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None


async def _answer(client: ApiClient, row: BatchRow, output: BatchOutput, count: BatchCount) -> None:
    reply = await client.post(row.url, row.body)
    while reply.status_code == _TOO_MANY_REQUESTS:
        await asyncio.sleep(_seconds_to_wait(reply))
        reply = await client.post(row.url, row.body)
    if reply.status_code in _NOT_LET_IN:
        raise RemoteError(
            "the server does not let this client in", got=f"status {reply.status_code}", do="see --api-key"
        )
    if reply.status_code >= 500:
        count.failed += 1
        return
    output.append(row.record(reply.status_code, reply.headers.get("x-request-id", ""), reply.json()))
    if reply.is_success:
        count.answered += 1
    else:
        count.refused += 1


def _seconds_to_wait(reply: httpx.Response) -> float:
    try:
        return max(float(reply.headers.get("retry-after", "")), 0.0)
    except ValueError:
        return _RETRY_SECONDS


@contextmanager
def _progress(*, total: int, begun: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal; calling what is yielded moves it on by a row."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        yield partial(progress.advance, progress.add_task("rows", total=total, completed=begun))
