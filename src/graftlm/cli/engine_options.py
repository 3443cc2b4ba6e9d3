"""The options every command that runs a model has: those of `EngineConfig`, and `SamplingParams` for those that
generate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from graftlm.cli.options import Command, field_help, options_of
from graftlm.config import EngineConfig
from graftlm.engine.sampling_params import SamplingParams
from graftlm.errors import ConfigurationError

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=field_help(EngineConfig)["model"])]

engine_options = options_of(
    EngineConfig,
    into="engine",
    fields=[field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"],
)


def check_no_engine_options(engine: Mapping[str, Any], *, why: str) -> None:
    """Raises ConfigurationError: an option is given that there is no engine for."""
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    given = [name for name, value in engine.items() if value and value != defaults[name]]
    if given:
        raise ConfigurationError(
            f"these options are an engine's: {why}",
            got=", ".join(f"--{name.replace('_', '-')}" for name in given),
            do="leave them out, or give a model",
        )


def given_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options that ask for something, as fields of a request.

    Raises:
        InvalidRequest: a value is out of range.
    """
    plain = SamplingParams()
    asked = SamplingParams(**sampling)
    return {name: value for name, value in sampling.items() if getattr(asked, name) not in (getattr(plain, name), [])}


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
