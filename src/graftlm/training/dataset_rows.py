"""Rows of Parquet files and of data sets on the hub, through the `datasets` library where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graftlm.errors import ConfigurationError, TrainingDataError

PARQUET_SUFFIX, HUB_PREFIX = ".parquet", "hub:"


def is_dataset(path: str | Path) -> bool:
    """Whether `datasets` reads it: a Parquet file, or hub:ORGANISATION/NAME[:SPLIT]."""
    return str(path).startswith(HUB_PREFIX) or str(path).endswith(PARQUET_SUFFIX)


def iterate_dataset(path: str | Path) -> Iterator[dict[str, Any]]:
    """Every row as an object, without the columns it has nothing in.

    Raises:
        ConfigurationError: `datasets` is not installed.
        TrainingDataError: the rows cannot be read.
    """
    try:
        import datasets
    except ImportError as cause:
        raise ConfigurationError(
            "Parquet files and data sets on the hub need the datasets library",
            got=str(path),
            do="pip install 'graftlm[train]', or give a JSON Lines file",
        ) from cause
    try:
        # Streamed, so that no second copy of the data is kept in a cache.
        if str(path).startswith(HUB_PREFIX):
            name, _, split = str(path).removeprefix(HUB_PREFIX).partition(":")
            rows = datasets.load_dataset(name, split=split or "train", streaming=True)
        else:
            file = Path(path).expanduser().resolve(strict=True)
            rows = datasets.load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for row in rows:
            yield {key: value for key, value in row.items() if value is not None}
    except Exception as cause:  # what a library of loaders raises has no common base
        raise TrainingDataError("the data cannot be read", got=f"{path}: {str(cause)[:300]}") from cause
