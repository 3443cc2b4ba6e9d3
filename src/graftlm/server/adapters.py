"""Loading and unloading adapters over HTTP: vLLM's two routes. Off unless the server was told which folders clients may
load from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from graftlm.adapters import Adapter
from graftlm.adapters.folder import lies_below
from graftlm.engine.async_llm import AsyncLLM
from graftlm.errors import AdapterError, AdapterFilesNotFound, ConfigurationError, InvalidRequest, ModelNotFound
from graftlm.server.callers import caller_of, require_admin
from graftlm.server.errors import error_reply
from graftlm.server.schemas import LoadAdapterRequest, UnloadAdapterRequest

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


class AdapterRoots:
    """The folders whose content clients may load.

    Args:
        folders: may be symlinks themselves; everything is compared by its real path.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folder.resolve() for folder in folders)

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
        if not allowed:
            raise HTTPException(403, "lora_path is outside the adapter roots; do: ask for an --adapter-root above it")
        if not present:
            raise AdapterFilesNotFound("not found", got=path, allowed="an adapter's folder below an adapter root")
        return present[0]

    def _allows(self, path: Path) -> bool:
        return any(path.is_relative_to(folder) for folder in self._folders)


def permitted_roots(folders: Sequence[str | Path], *, enable_adapter_loading: bool) -> AdapterRoots | None:
    """What clients may load from; None when they may not load at all.

    Raises:
        ConfigurationError: permission without a folder, a folder without permission, or a folder that is none.
    """
    if enable_adapter_loading != bool(folders):
        raise ConfigurationError(
            "loading adapters over HTTP needs both the permission and a folder to load from",
            got="a permission without a folder" if enable_adapter_loading else "a folder without the permission",
            do="give --enable-adapter-loading and --adapter-root DIR, or neither",
        )
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise ConfigurationError("an adapter root is not a folder", got=path)
    return AdapterRoots(paths) if paths else None


def adapter_routes(llm: AsyncLLM, roots: AdapterRoots | None) -> APIRouter:
    """Args: roots: None refuses every call with 403."""
    router = APIRouter(dependencies=[Depends(require_admin)])

    def allowed_roots() -> AdapterRoots:
        if roots is None:
            raise HTTPException(
                403,
                "loading adapters over HTTP is off; do: serve with --enable-adapter-loading --adapter-root DIR",
            )
        return roots

    @router.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterRequest, request: Request) -> Response:
        folder = allowed_roots().locate(body.lora_path)
        if not caller_of(request).may_use(body.lora_name):
            raise HTTPException(403, "this API key may not use this lora_name; do: choose one that its models allow")
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
        allowed_roots()
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
