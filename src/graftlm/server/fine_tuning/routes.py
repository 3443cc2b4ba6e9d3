"""/v1/files and /v1/fine_tuning/jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Request
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.errors import InvalidRequest
from graftlm.server.callers import caller_of, require_admin, resolve_model
from graftlm.server.fine_tuning.file_store import PURPOSE
from graftlm.server.fine_tuning.job import FineTuningJob
from graftlm.server.fine_tuning.schemas import CreateJobRequest
from graftlm.server.fine_tuning.service import FineTuningService
from graftlm.server.json_body import JsonRoute

FILES_PATH = "/v1/files"
MAX_FILE_BYTES = 512 << 20

Limit = Annotated[int, Query(ge=1, le=10_000)]


class _Described(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def body(self) -> dict[str, Any]: ...


def fine_tuning_routes(llm: AsyncLLM, service: FineTuningService | None) -> APIRouter:
    """Args: service: None refuses every call with 403."""
    router = APIRouter(route_class=JsonRoute, dependencies=[Depends(require_admin)])

    def allowed() -> FineTuningService:
        if service is None:
            raise HTTPException(403, "fine-tuning over HTTP is off; do: serve with --fine-tuning DIR")
        return service

    def own_job(job_id: str, request: Request) -> FineTuningJob:
        return allowed().jobs.get(job_id, caller_of(request).owns)

    @router.post(FILES_PATH)
    async def upload_file(request: Request) -> Response:
        files = allowed().files
        async with request.form(max_files=1) as form:
            if unknown := sorted(form.keys() - {"file", "purpose"}):
                raise InvalidRequest("unknown field", param=unknown[0], allowed="file, purpose")
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise InvalidRequest("file is missing", param="file", do="send a multipart form")
            if purpose != PURPOSE:
                raise InvalidRequest("purpose is not offered", param="purpose", got=repr(purpose), allowed=PURPOSE)
            content = await file.read()
        add = partial(files.add, owner=caller_of(request).name)
        stored = await asyncio.to_thread(add, file.filename or "file.jsonl", content)
        return JSONResponse(stored.body)

    @router.get(FILES_PATH)
    async def list_files(
        request: Request, limit: Limit = 10_000, after: str | None = None, purpose: str | None = None
    ) -> Response:
        found = await asyncio.to_thread(allowed().files.newest_first, caller_of(request).owns)
        return _page(found if purpose in (None, PURPOSE) else [], limit, after)

    @router.get(FILES_PATH + "/{file_id}")
    async def get_file(file_id: str, request: Request) -> Response:
        return JSONResponse((await asyncio.to_thread(allowed().files.get, file_id, caller_of(request).owns)).body)

    @router.get(FILES_PATH + "/{file_id}/content")
    async def get_content(file_id: str, request: Request) -> Response:
        return FileResponse(await asyncio.to_thread(allowed().files.path, file_id, caller_of(request).owns))

    @router.delete(FILES_PATH + "/{file_id}")
    async def delete_file(file_id: str, request: Request) -> Response:
        await asyncio.to_thread(allowed().files.delete, file_id, caller_of(request).owns)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    @router.post("/v1/fine_tuning/jobs")
    async def create_job(body: CreateJobRequest, request: Request) -> Response:
        create = allowed().create
        resolve_model(request, llm, body.model)
        job = await asyncio.to_thread(create, body, caller_of(request))
        return JSONResponse(job.body)

    @router.get("/v1/fine_tuning/jobs")
    async def list_jobs(request: Request, limit: Limit = 20, after: str | None = None) -> Response:
        return _page(allowed().jobs.newest_first(caller_of(request).owns), limit, after)

    @router.get("/v1/fine_tuning/jobs/{job_id}")
    async def get_job(job_id: str, request: Request) -> Response:
        return JSONResponse(own_job(job_id, request).body)

    @router.get("/v1/fine_tuning/jobs/{job_id}/events")
    async def list_events(job_id: str, request: Request, limit: Limit = 20, after: str | None = None) -> Response:
        own_job(job_id, request)
        return _page(await asyncio.to_thread(allowed().jobs.events, job_id), limit, after)

    @router.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
    async def list_checkpoints(job_id: str, request: Request, limit: Limit = 10, after: str | None = None) -> Response:
        own_job(job_id, request)
        return _page(await asyncio.to_thread(allowed().jobs.checkpoints, job_id), limit, after)

    def switch(verb: str, do: Callable[[FineTuningService], Callable[[str], FineTuningJob]]) -> None:
        @router.post(f"/v1/fine_tuning/jobs/{{job_id}}/{verb}")
        async def switch_job(job_id: str, request: Request) -> Response:
            own_job(job_id, request)
            return JSONResponse((await asyncio.to_thread(do(allowed()), job_id)).body)

    switch("cancel", lambda service: service.cancel)
    switch("pause", lambda service: service.pause)
    switch("resume", lambda service: service.resume)
    return router


def _page(items: Sequence[_Described], limit: int, after: str | None) -> Response:
    """A part of a list, as OpenAI's clients turn pages: what comes after an id.

    Raises:
        InvalidRequest: there is no such id in the list.
    """
    start = 0
    if after is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise InvalidRequest("after is not in the list", param="after", got=repr(after)[:100])
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    return JSONResponse(
        {
            "object": "list",
            "data": [item.body for item in shown],
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": start + limit < len(items),
        }
    )
