"""GET / and the files it needs. Knows bytes and headers; what the page does is in `assets/`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath

from fastapi import APIRouter, Request
from starlette.responses import Response

_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no text that becomes markup: what a model says cannot run.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    # Asked for each time, and sent again only when it has changed.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One file of the page, and where it is."""

    path: str
    content: bytes
    media_type: str

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'


def _read_assets() -> tuple[Asset, ...]:
    entries = sorted(files(__package__).joinpath("assets").iterdir(), key=lambda entry: entry.name)
    return tuple(
        Asset(
            path="/" if entry.name == _INDEX else f"/playground/{entry.name}",
            content=entry.read_bytes(),
            media_type=_MEDIA_TYPES[PurePath(entry.name).suffix],
        )
        for entry in entries
    )


ASSETS = _read_assets()


def page_routes() -> APIRouter:
    """Every asset by its path, and no other file."""
    router = APIRouter()
    by_path = {asset.path: asset for asset in ASSETS}

    async def get_asset(request: Request) -> Response:
        asset = by_path[request.scope["route"].path]
        headers = {**_HEADERS, "etag": asset.etag}
        if asset.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(asset.content, media_type=asset.media_type, headers=headers)

    for path in by_path:
        router.add_api_route(path, get_asset, methods=["GET", "HEAD"], include_in_schema=False)
    return router
