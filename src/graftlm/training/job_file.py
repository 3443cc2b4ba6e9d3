"""Training jobs as TOML files, whose keys are the options' names."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftlm.errors import ConfigurationError
from graftlm.training.job import TrainingJob, make_job


def read_job_file(path: str | Path, defaults: Mapping[str, Any]) -> TrainingJob:
    """Read one job. defaults: values of options that the file does not mention.

    Raises:
        ConfigurationError: the file cannot be read, or a value is not usable; the message names the file.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            settings = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as cause:
        raise ConfigurationError("the job file cannot be read", got=f"{path}: {cause}") from cause
    try:
        return make_job({**defaults, **settings})
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error.what}", got=error.got, allowed=error.allowed, do=error.do) from error
