"""What an application and its engine are made of, for a process elsewhere to make both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from graftlm.engine.async_llm import AsyncLLM
from graftlm.server.app import create_app
from graftlm.server.key_file import KeyFile
from graftlm.server.traces import open_traces


@dataclass(frozen=True, kw_only=True)
class AppRecipe:
    """An application with an engine of its own, which ends with it. Can be pickled.

    Args:
        model, engine: what `AsyncLLM` gets.
        app: options of `create_app` that can be pickled.
        api_keys: file of API keys. otlp_endpoint: collector of traces.
        drain_seconds: that running requests get to finish when the application ends.
    """

    model: str
    engine: Mapping[str, Any]
    app: Mapping[str, Any]
    api_keys: Path | None = None
    otlp_endpoint: str | None = None
    drain_seconds: float = 10

    def build(self) -> FastAPI:
        """Load the model and make the application; its lifespan ends the engine.

        Raises:
            GraftError: as `AsyncLLM` and `create_app` do.
        """
        keys = None if self.api_keys is None else KeyFile(self.api_keys)
        traces = None if self.otlp_endpoint is None else open_traces(self.otlp_endpoint)
        llm = AsyncLLM(self.model, **self.engine)
        app = create_app(llm, keys=keys, traces=traces, **self.app)

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            yield
            await llm.shutdown(drain_seconds=self.drain_seconds)
            if traces is not None:
                traces.shutdown()

        app.router.lifespan_context = lifespan
        return app
