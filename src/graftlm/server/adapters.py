"""Loading and unloading adapters over HTTP: vLLM's two routes. Off unless the server was told which folders clients may
load from."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from graftlm.adapters import Adapter
from graftlm.adapters.files import HUB_FILES
from graftlm.adapters.folder import lies_below
from graftlm.checkpoint.hub import check_download, download, has_hub_form
from graftlm.engine.async_llm import AsyncLLM
from graftlm.errors import AdapterError, AdapterFilesNotFound, ConfigurationError, InvalidRequest, ModelNotFound
from graftlm.server.callers import caller_of, require_admin
from graftlm.server.errors import error_reply
from graftlm.server.json_body import JsonRoute
from graftlm.server.schemas import LoadAdapterRequest, UnloadAdapterRequest

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
NOT_ENABLED = "loading adapters over HTTP is off; do: serve with --enable-adapter-loading --adapter-root DIR"


class AdapterSources:
    """What clients may load adapters from.

    Args:
        folders: may be symlinks themselves; everything is compared by its real path.
        hub_ids: patterns for ids on the Hugging Face hub, such as `my-org/*`.
    """

    def __init__(self, folders: Sequence[Path], hub_ids: Sequence[str]) -> None:
        self._folders = tuple(folder.resolve() for folder in folders)
        self._hub_ids = tuple(hub_ids)

    def fetch(self, path: str, *, max_bytes: int) -> Path:
        """The real path of an adapter folder or weights file: `locate`, or else what an allowed hub id stands for.

        Args:
            max_bytes: most that is downloaded.

        Raises:
            InvalidRequest, HTTPException, AdapterFilesNotFound: as `locate`; the hub has nothing, or cannot be reached.
            AdapterMemoryExceeded: it is too large, which is known before it is downloaded.
        """
        try:
            return self.locate(path)
        except AdapterFilesNotFound:
            if not has_hub_form(path) or not any(fnmatchcase(path, pattern) for pattern in self._hub_ids):
                raise
        check_download(path, HUB_FILES, max_bytes=max_bytes)
        return download(path, HUB_FILES, AdapterFilesNotFound)

    def locate(self, path: str) -> Path:
        """The real path of an adapter folder or weights file, links followed, which lies below a root.

        A relative path is looked for below each root, the first that has it wins. An adapter folder whose files are
        links to outside is outside.

        Raises:
            InvalidRequest: it is a URL or cannot be a path.
            HTTPException: 403, it is outside every root; whether it exists is not told.
            AdapterFilesNotFound: nothing is there.
        """
        if _URL.match(path):
            raise InvalidRequest(
                "lora_path looks like a URL",
                param="lora_path",
                got=path,
                allowed="a folder on the server, below an adapter root",
            )
        try:
            candidates = [(folder / path).resolve() for folder in self._folders]
            inside = [candidate for candidate in candidates if self._allows(candidate)]
            present = [candidate for candidate in inside if candidate.exists()]
            allowed = bool(inside) and (not present or lies_below(present[0], self._folders))
        except (OSError, ValueError, RuntimeError) as cause:
            # A NUL byte, a name longer than the file system takes, a loop of links.
            raise InvalidRequest("lora_path cannot be a path", param="lora_path", got=repr(path)[:120]) from cause
        if not allowed and (self._folders or not has_hub_form(path)):
            raise HTTPException(403, "lora_path is outside the adapter roots; do: ask for an --adapter-root above it")
        if not present:
            raise AdapterFilesNotFound(
                "not found", got=path, allowed="an adapter's folder below an adapter root, or an allowed hub id"
            )
        return present[0]

    def _allows(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)


def permitted_sources(
    folders: Sequence[str | Path], hub_ids: Sequence[str], *, enable_adapter_loading: bool
) -> AdapterSources | None:
    """What clients may load from; None when they may not load at all.

    Raises:
        ConfigurationError: permission without a source, a source without permission, a folder that is none, or a
            pattern that fits no hub id.
    """
    if enable_adapter_loading != bool(folders or hub_ids):
        raise ConfigurationError(
            "loading adapters over HTTP needs both the permission and something to load from",
            got="a permission alone" if enable_adapter_loading else "something to load from without the permission",
            do="give --enable-adapter-loading with --adapter-root DIR or --adapter-hub-id ID, or neither",
        )
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise ConfigurationError("an adapter root is not a folder", got=path)
    for pattern in hub_ids:
        if pattern.count("/") != 1 or pattern.startswith(("/", "*")):
            raise ConfigurationError("an adapter hub id is none", got=repr(pattern), allowed="owner/name, or owner/*")
    return AdapterSources(paths, hub_ids) if enable_adapter_loading else None


def adapter_routes(llm: AsyncLLM, sources: AdapterSources | None) -> APIRouter:
    """Args: sources: None refuses every call with 403."""
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(require_admin)])

    def allowed_sources() -> AdapterSources:
        if sources is None:
            raise HTTPException(403, NOT_ENABLED)
        return sources

    @router.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterRequest, request: Request) -> Response:
        allowed = allowed_sources()
        if not caller_of(request).may_use(body.lora_name):
            raise HTTPException(403, "this API key may not use this lora_name; do: choose one that its models allow")
        max_bytes = llm.config.adapter_memory_bytes
        # Disks and networks are slow.
        folder = await asyncio.to_thread(allowed.fetch, body.lora_path, max_bytes=max_bytes)
        try:
            adapter = await llm.load_adapter(body.lora_name, str(folder), replace=bool(body.load_inplace))
        except AdapterError as error:
            # The client knows the adapter by the path it sent, not by where the server keeps it.
            reply = error_reply(error, request)
            message = reply.message.replace(str(folder), body.lora_path)
            return dataclasses.replace(reply, message=message).response()
        return JSONResponse(_description(adapter, llm.model_name))

    @router.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
        allowed_sources()
        try:
            llm.resolve_model(body.lora_name, may_use=caller_of(request).may_use)
            await llm.unload_adapter(body.lora_name, force=bool(body.force))
        except ModelNotFound as error:
            return dataclasses.replace(error_reply(error, request), param="lora_name").response()
        return JSONResponse({"id": body.lora_name, "object": "adapter", "unloaded": True})

    return router


def _description(adapter: Adapter, base: str) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "object": "adapter",
        "parent": base,
        "digest": adapter.digest,
        "method": adapter.method,
        "ranks": list(adapter.ranks),
        "num_bytes": adapter.num_bytes,
        "bound": adapter.bound,
        "total": adapter.total,
    }
