"""Fetching folders from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from graftlm.errors import GraftError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(source: str | Path) -> bool:
    """Whether `source`, where nothing local is, has the form `owner/name`. In a local folder `owner` a missing `name`
    is a missing local path, and no reason to ask the network."""
    text = str(source)
    return _HUB_ID.fullmatch(text) is not None and ".." not in text and not Path(text).parent.is_dir()


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
