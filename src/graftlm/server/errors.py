"""From exceptions to HTTP: the one table of statuses and codes, and the shape OpenAI clients expect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from graftlm.errors import (
    AdapterChanged,
    AdapterCorrupt,
    AdapterError,
    AdapterFilesNotFound,
    AdapterIncompatible,
    AdapterMemoryExceeded,
    AdapterNameInvalid,
    AdapterNameTaken,
    AdapterUnsupported,
    ContextLengthExceeded,
    DeadlineExceeded,
    DrainFailed,
    EngineClosed,
    EngineOverloaded,
    GraftError,
    InvalidRequest,
    ModelNotFound,
    ObjectNotFound,
    StepFailed,
)
from graftlm.server.callers import caller_of
from graftlm.server.request_ids import HEADER, request_id_of

logger = logging.getLogger(__name__)

# The nearest class in an exception's ancestry decides. A name that is taken and files that
# are another adapter's by now are conflicts with the server's state, not faults of the request: no 400.
STATUS_AND_CODE: Mapping[type[Exception], tuple[int, str | None]] = {
    InvalidRequest: (400, None),
    ContextLengthExceeded: (400, "context_length_exceeded"),
    ModelNotFound: (404, "model_not_found"),
    ObjectNotFound: (404, "not_found"),
    AdapterError: (400, "adapter_invalid"),
    AdapterFilesNotFound: (400, "adapter_files_not_found"),
    AdapterCorrupt: (400, "adapter_corrupt"),
    AdapterUnsupported: (400, "adapter_unsupported"),
    AdapterIncompatible: (400, "adapter_incompatible"),
    AdapterNameInvalid: (400, "adapter_name_invalid"),
    AdapterNameTaken: (409, "adapter_name_taken"),
    AdapterChanged: (409, "adapter_changed"),
    AdapterMemoryExceeded: (400, "adapter_memory_exceeded"),
    EngineClosed: (503, "engine_closed"),
    EngineOverloaded: (429, "engine_overloaded"),
    DeadlineExceeded: (504, "deadline_exceeded"),
    StepFailed: (500, "step_failed"),
    DrainFailed: (409, "drain_failed"),
}
CODE_OF_STATUS: Mapping[int, str] = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "route_not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
}
# Codes of errors that have none of their own.
UNFORESEEN = "internal_error"
_INVALID = "invalid_request"
_LONGEST_SHOWN = 120
_CLIENT_CLOSED_REQUEST = 499


class ClientGone(Exception):
    """Nobody is left to read the reply."""


@dataclass(frozen=True, kw_only=True)
class ErrorReply:
    """What a client is told. `type` follows from the status: the request's fault, the server's, or nobody's.

    retry_after_seconds: when it may be worth while to try again; a header.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        if self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        if self.retry_after_seconds is not None:
            headers = {**(headers or {}), "retry-after": str(self.retry_after_seconds)}
        return _ErrorResponse(self, headers)

    def note(self, connection: HTTPConnection) -> None:
        """Let those who count errors know of this one."""
        connection.state.error_code = self.code or _INVALID


class _ErrorResponse(JSONResponse):
    def __init__(self, reply: ErrorReply, headers: Mapping[str, str] | None) -> None:
        super().__init__(reply.body, status_code=reply.status, headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reply.note(HTTPConnection(scope))
        await super().__call__(scope, receive, send)


def error_code_of(connection: HTTPConnection) -> str | None:
    """The code of the error that a request was answered with."""
    return getattr(connection.state, "error_code", None)


def error_reply(error: Exception, connection: HTTPConnection) -> ErrorReply:
    """The reply for any exception. Those nobody foresaw say nothing of the server's inside, and models that whoever
    asks may not use are not named."""
    if isinstance(error, ModelNotFound):
        error = error.told_to(caller_of(connection).may_use)
    for ancestor in type(error).__mro__:
        if ancestor in STATUS_AND_CODE:
            status, code = STATUS_AND_CODE[ancestor]
            param = (
                error.param
                if isinstance(error, InvalidRequest)
                else "model"
                if isinstance(error, ModelNotFound)
                else None
            )
            wait = error.retry_after_seconds if isinstance(error, EngineOverloaded) else None
            return ErrorReply(status=status, message=str(error), param=param, code=code, retry_after_seconds=wait)
    if isinstance(error, HTTPException):
        return ErrorReply(
            status=error.status_code, message=str(error.detail), code=CODE_OF_STATUS.get(error.status_code)
        )
    return ErrorReply(status=500, message="the server failed; its log has the cause; do: try again", code=UNFORESEEN)


def log_failure(error: Exception, connection: HTTPConnection) -> None:
    """Put what is the server's fault into the log, with the cause that the client is not told. The engine has logged
    its own failures with theirs."""
    status = error_reply(error, connection).status
    if isinstance(error, GraftError):
        if status >= 500:
            logger.error("request %s failed: %s", request_id_of(connection), error)
    elif status == 500:
        logger.error("request %s failed", request_id_of(connection), exc_info=error)


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of `app`, routing and parsing included, an OpenAI-shaped error."""
    app.add_exception_handler(GraftError, _reply_to_error)
    app.add_exception_handler(HTTPException, _reply_to_http_exception)
    app.add_exception_handler(RequestValidationError, _reply_to_validation_error)
    app.add_exception_handler(ClientGone, _reply_to_nobody)
    app.add_exception_handler(Exception, _reply_to_surprise)


async def _reply_to_error(request: Request, error: Exception) -> Response:
    log_failure(error, request)
    return error_reply(error, request).response()


async def _reply_to_surprise(request: Request, error: Exception) -> Response:
    # Starlette raises it again behind this reply, and uvicorn logs its traceback then. The reply passes no middleware.
    request_id = request_id_of(request)
    logger.error("request %s failed: %s", request_id, type(error).__name__)
    return error_reply(error, request).response({HEADER: request_id})


async def _reply_to_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _reply_to_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == "Not Found" or error.status_code == 405:
        message = f"{request.method} {request.url.path} is not a route of this server; do: see /v1/models for a start"
        reply = ErrorReply(status=error.status_code, message=message, code=CODE_OF_STATUS[error.status_code])
    else:
        reply = error_reply(error, request)
    return reply.response(error.headers)


async def _reply_to_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # Of the complaints about one body the deepest is the most specific.
    complaint = max(error.errors(), key=lambda complaint: len(complaint["loc"]))
    location = complaint["loc"][1:]
    if complaint["type"] == "json_invalid":
        detail = complaint["ctx"]["error"]
        return ErrorReply(
            status=400, message=_sendable(f"the body cannot be read as JSON: {detail}"), code="json_invalid"
        ).response()
    if not location:
        return _reply_to_bodiless(request, complaint).response()
    return _reply_to_field(location, complaint).response()


def _reply_to_bodiless(request: Request, complaint: Mapping[str, Any]) -> ErrorReply:
    content_type = request.headers.get("content-type")
    if isinstance(complaint["input"], bytes):
        message = (
            f"the body is not declared as JSON; got: content-type {content_type!r}; "
            "do: send the header 'Content-Type: application/json'"
        )
        return ErrorReply(status=415, message=message, code=CODE_OF_STATUS[415])
    message = f"the body is not a JSON object; got: {_shown(complaint['input'])}"
    return ErrorReply(status=400, message=message, code="json_invalid")


def _reply_to_field(location: tuple[str | int, ...], complaint: Mapping[str, Any]) -> ErrorReply:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")
    where = _cut(where)
    match complaint["type"]:
        case "extra_forbidden":
            message, code = f"{where} is not a field of this request; do: leave it out", "unknown_parameter"
        case "missing":
            message, code = f"{where} is missing", "missing_required_parameter"
        case "unsupported":
            message = f"{where} is not supported; got: {_shown(complaint['input'])}; {complaint['msg']}"
            code = "unsupported_parameter"
        case _:
            message = f"{where} is invalid; got: {_shown(complaint['input'])}; allowed: {complaint['msg']}"
            code = "invalid_value"
    return ErrorReply(status=400, message=_sendable(message), param=_sendable(_cut(str(location[0]))), code=code)


def _shown(value: object) -> str:
    # repr of a container is as long as the container: 8 MiB of prompt must not come back as an error message.
    text = repr(value) if isinstance(value, str | int | float | bool | None) else type(value).__name__
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _sendable(text: str) -> str:
    # A JSON string may hold half a surrogate pair, which UTF-8 cannot carry back.
    return text.encode("utf-8", "replace").decode()
