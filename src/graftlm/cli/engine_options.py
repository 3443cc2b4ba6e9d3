"""The options every command that runs a model has: those of `EngineConfig`, and `SamplingParams` for those that
generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated

import typer

from graftlm.cli.options import Command, field_help, options_of
from graftlm.config import EngineConfig
from graftlm.engine.sampling_params import SamplingParams

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=field_help(EngineConfig)["model"])]

engine_options = options_of(
    EngineConfig,
    into="engine",
    fields=[field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"],
)


def sampling_options(*, max_tokens: int | None) -> Callable[[Command], Command]:
    """Args: max_tokens: the command's own default; 16, the API's, is too few for reading."""
    return options_of(
        SamplingParams,
        into="sampling",
        fields=(
            "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "stop", "min_tokens", "ignore_eos",
        ),
        defaults={"max_tokens": max_tokens},
    )  # fmt: skip
