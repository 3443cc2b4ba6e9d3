"""Fetching folders from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from graftlm.errors import AdapterMemoryExceeded, GraftError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str | Path) -> bool:
    """Whether `source`, where nothing local is, has the form `owner/name`. In a local folder `owner` a missing `name`
    is a missing local path, and no reason to ask the network."""
    text = str(source)
    return has_hub_form(text) and not Path(text).parent.is_dir()


def has_hub_form(text: str) -> bool:
    """Whether a text is `owner/name`."""
    return _HUB_ID.fullmatch(text) is not None and ".." not in text


def check_download(hub_id: str, patterns: Sequence[str], *, max_bytes: int) -> None:
    """Ask the hub how much there is to fetch, before any of it is. When it cannot be asked there is nothing to fetch.

    Raises:
        AdapterMemoryExceeded: more than `max_bytes`.
    """
    try:
        files = huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns), dry_run=True)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return
    num_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    if num_bytes > max_bytes:
        raise AdapterMemoryExceeded(
            "the adapter on the hub is larger than adapter_memory_bytes",
            got=f"{num_bytes} bytes",
            allowed=f"{max_bytes} bytes",
            do="raise adapter_memory_bytes",
        )


def download(hub_id: str, patterns: Sequence[str], error: type[GraftError]) -> Path:
    """Local folder with the files of `hub_id` that match `patterns`, from the cache when it is there.

    Raises:
        error: the repository does not exist, or the hub cannot be reached and the cache has nothing.
    """
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(patterns)))
    except RepositoryNotFoundError as cause:
        raise error("no such local path, and no such repository on the hub", got=hub_id) from cause
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as cause:
        raise error(
            "no such local path, and the hub cannot be reached", got=hub_id, do="give a folder, or check the network"
        ) from cause
