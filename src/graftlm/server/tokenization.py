"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from graftlm.engine.async_llm import AsyncLLM
from graftlm.server.callers import resolve_model
from graftlm.server.json_body import JsonRoute
from graftlm.server.schemas import DetokenizeRequest, TokenizeRequest


def tokenization_routes(llm: AsyncLLM) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    def adapter_of(request: Request, model: str | None) -> str | None:
        return None if model is None else resolve_model(request, llm, model)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        body.check()
        adapter = adapter_of(request, body.model)
        if body.messages is not None:
            messages = [message.for_template() for message in body.messages]
            token_ids = await llm.apply_chat_template(messages, adapter=adapter, **body.template_options())
        else:
            add_special_tokens = body.add_special_tokens is not False
            token_ids = await llm.tokenize(body.prompt or "", adapter=adapter, add_special_tokens=add_special_tokens)
        entries = await llm.tokens_of(token_ids, adapter=adapter) if body.return_token_strs else None
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": llm.max_model_len,
                "tokens": list(token_ids),
                "token_strs": None if entries is None else list(entries),
            }
        )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Special tokens are part of the text: it is that of all ids. An id beyond the vocabulary has none."""
        adapter = adapter_of(request, body.model)
        text = await llm.detokenize(body.tokens, adapter=adapter, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    return router
