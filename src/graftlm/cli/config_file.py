"""A command's options from a TOML file, whose keys are the flags' names in snake_case. Flags that are given win."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from graftlm.errors import ConfigurationError

OPTION = "config"


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager option --config: what the file says is the default of what the command line does not.

    Raises:
        ConfigurationError: the file cannot be read, or has a key or value that is none of the command's.
    """
    if path is not None:
        parameters = {_key_of(parameter): parameter for parameter in context.command.params}
        del parameters[OPTION]
        context.default_map = {
            parameters[key].name: _checked(path, key, value, parameters[key])
            for key, value in _settings(path, parameters).items()
        }
    return path


def _settings(path: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            settings = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as cause:
        raise ConfigurationError("the config file cannot be read", got=f"{path}: {cause}") from cause
    for key in settings:
        if key not in parameters:
            close = difflib.get_close_matches(key, parameters, n=3)
            raise ConfigurationError(
                f"{path}: there is no such option",
                got=key,
                allowed=", ".join(close or sorted(parameters)),
                do="write the flag's name in snake_case",
            )
    return settings


def _key_of(parameter: Any) -> str:
    """Of `--adapter-root` it is `adapter_root`; of an argument its name."""
    name: str = parameter.opts[0]
    return name.removeprefix("--").replace("-", "_")


def _checked(path: Path, key: str, value: object, parameter: Any) -> object:
    """A value as the command line has it: its parser judges numbers and paths."""
    if parameter.param_type_name == "option" and parameter.is_flag:
        if not isinstance(value, bool):
            raise _refused(path, key, value, "true or false")
        return value
    if not parameter.multiple:
        return _text(path, key, value)
    if isinstance(value, dict) and "=" in (parameter.metavar or ""):
        value = [f"{name}={_text(path, key, entry)}" for name, entry in value.items()]
    if not isinstance(value, list):
        raise _refused(path, key, value, "a list")
    return [_text(path, key, entry) for entry in value]


def _text(path: Path, key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _refused(path, key, value, "a string or a number")
    return str(value)


def _refused(path: Path, key: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{path}: {key} cannot be this", got=repr(value)[:100], allowed=allowed)
