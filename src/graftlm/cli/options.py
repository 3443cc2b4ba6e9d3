"""Command-line options read off the dataclass that owns them: names, defaults and help are written once, there."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from graftlm.cli.byte_size import format_byte_size, parse_byte_size
from graftlm.errors import ConfigurationError

Command = Callable[..., None]
_FIELD = re.compile(r" {4}([a-z0-9_]+(?:, [a-z0-9_]+)*): (.+)")
_CONTINUATION = re.compile(r" {8}(\S.*)")


def options_of(
    owner: type, *, into: str, fields: Sequence[str], defaults: Mapping[str, object] = types.MappingProxyType({})
) -> Callable[[Command], Command]:
    """Give a command one option per field of a dataclass; it receives the values as one dict, its parameter `into`.

    Args:
        owner: a dataclass whose docstring has an Args section.
        defaults: where the command's default is another than the dataclass's.
    """
    named = {field.name: field for field in dataclasses.fields(owner)}
    hints = typing.get_type_hints(owner)
    helps = field_help(owner)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            given = {name: _read(name, values.pop(name)) for name in fields}
            command(**values, **{into: given})

        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        del parameters[into]
        for name in fields:
            default = defaults.get(name, _default(named[name]))
            parameters[name] = _parameter(name, hints[name], default, helps[name])
        wrapper.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
        )
        wrapper.__annotations__ = {}
        return wrapper

    return decorate


def field_help(owner: type) -> dict[str, str]:
    """What the Args section of a class's docstring says of each field."""
    helps: dict[str, str] = {}
    described: list[str] = []
    for line in inspect.cleandoc(owner.__doc__ or "").splitlines():
        first, continued = _FIELD.fullmatch(line), _CONTINUATION.fullmatch(line)
        if first is not None:
            described = first[1].split(", ")
            helps |= dict.fromkeys(described, first[2][0].upper() + first[2][1:])
        elif continued is not None:
            helps |= {name: f"{helps[name]} {continued[1]}" for name in described}
        else:
            described = []
    return {name: text.replace("`", "") for name, text in helps.items()}


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default is not dataclasses.MISSING else None


def _parameter(name: str, hint: object, default: object, text: str) -> inspect.Parameter:
    annotation: Any
    if name == "adapters":
        annotation = Annotated[
            list[str], typer.Option("--adapter", metavar="NAME=PATH", help=f"{text} Repeat it for more.")
        ]
        default = []
    elif name == "fair_shares":
        annotation = Annotated[list[str], typer.Option(metavar="NAME=NUMBER", help=f"{text} Repeat it for more.")]
        default = []
    elif name.endswith("_bytes"):
        annotation = Annotated[str | None, typer.Option(metavar="SIZE", help=f"{text} Such as 2GiB.")]
        default = format_byte_size(default) if isinstance(default, int) else None
    elif (choices := _choices(hint)) is not None:
        # The dataclass itself refuses other words, with a better message.
        annotation = Annotated[str | None, typer.Option(metavar="|".join(choices), help=text)]
    elif hint is bool:
        flag = name.replace("_", "-")
        # What is on can be turned off.
        annotation = Annotated[bool, typer.Option(f"--{flag}/--no-{flag}" if default else f"--{flag}", help=text)]
    elif default == () or default == []:
        annotation = Annotated[list[_element(hint)], typer.Option(help=f"{text} Repeat it for more.")]  # type: ignore[misc]
        default = []
    else:
        annotation = Annotated[hint, typer.Option(help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _choices(hint: object) -> tuple[str, ...] | None:
    """The words of a `Literal`, which may be optional; None for any other type."""
    options = [hint, *typing.get_args(hint)] if typing.get_origin(hint) is types.UnionType else [hint]
    return next((typing.get_args(option) for option in options if typing.get_origin(option) is Literal), None)


def _element(hint: object) -> type:
    [element] = typing.get_args(hint)
    assert isinstance(element, type)
    return element


def _read(name: str, value: Any) -> Any:
    if name == "adapters":
        return parse_adapters(value)
    if name == "fair_shares":
        return parse_shares(value)
    if name.endswith("_bytes") and value is not None:
        return parse_byte_size(value)
    return value


def parse_adapters(entries: Sequence[str]) -> dict[str, str]:
    """NAME=PATH entries as a mapping.

    Raises:
        ConfigurationError: an entry has another form, or two have one name.
    """
    return _parse_pairs(entries, option="--adapter", form="NAME=PATH")


def parse_shares(entries: Sequence[str]) -> dict[str, float]:
    """NAME=NUMBER entries as a mapping.

    Raises:
        ConfigurationError: an entry has another form, or two have one name.
    """
    pairs = _parse_pairs(entries, option="--fair-shares", form="NAME=NUMBER")
    try:
        return {name: float(text) for name, text in pairs.items()}
    except ValueError as cause:
        raise ConfigurationError("--fair-shares cannot be read", got=str(cause), allowed="NAME=NUMBER") from cause


def _parse_pairs(entries: Sequence[str], *, option: str, form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not (name and equals and value):
            raise ConfigurationError(f"{option} cannot be read", got=repr(entry), allowed=form)
        if name in pairs:
            raise ConfigurationError(f"{option} names one adapter twice", got=repr(name), do="give each its own")
        pairs[name] = value
    return pairs
