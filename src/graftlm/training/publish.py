"""Loading a trained adapter into a server that runs: requests in flight finish on the version they started with."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from graftlm.errors import ConfigurationError, PublishFailed

KEY_VARIABLE = "GRAFT_API_KEY"
# Loading reads and checks the whole adapter.
_LOAD_SECONDS = 300.0
_PROBE_SECONDS = 10.0


def check_server(url: str) -> None:
    """Raise unless a server answers there: it is better known before the training than after.

    Raises:
        ConfigurationError
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError("publish is no address", got=url, allowed="http://HOST:PORT of a graft serve")
    try:
        httpx.get(f"{_root(url)}/health", timeout=_PROBE_SECONDS).raise_for_status()
    except httpx.HTTPError as cause:
        raise ConfigurationError(
            "no server answers where the adapter is to be published", got=f"{url}: {cause}", do="start graft serve"
        ) from cause


def publish(url: str, name: str, folder: str | Path) -> str:
    """Let a server answer under `name` with the adapter in `folder`, in the place of what it answered with so far.

    An API key is taken from the environment variable GRAFT_API_KEY.

    Args:
        url: of a `graft serve --enable-adapter-loading`, an adapter root of which holds the folder.

    Returns: the digest of what is served now.
    Raises:
        PublishFailed: the server refuses it or does not answer; the adapter stays on disk.
    """
    path = Path(folder).expanduser().resolve()
    key = os.environ.get(KEY_VARIABLE)
    try:
        reply = httpx.post(
            f"{_root(url)}/v1/load_lora_adapter",
            json={"lora_name": name, "lora_path": str(path), "load_inplace": True},
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_LOAD_SECONDS,
        )
        reply.raise_for_status()
        digest: str = reply.json()["digest"]
    except httpx.HTTPStatusError as cause:
        raise PublishFailed(
            f"the server does not load {name}", got=f"{cause.response.status_code}: {cause.response.text[:300]}"
        ) from cause
    except (httpx.HTTPError, ValueError, KeyError) as cause:
        raise PublishFailed(f"the server gives no answer about {name}", got=f"{url}: {cause}") from cause
    return digest


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
