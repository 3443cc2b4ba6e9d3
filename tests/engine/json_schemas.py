"""Two hundred small JSON schemas of the kinds that JSONSchemaBench (arXiv 2501.10868) is made of: its function calls,
Kubernetes objects, package manifests and API types, each bounded, so that any model can finish it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

Schema = dict[str, Any]

WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,4}$"}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}
SCALARS: dict[str, Schema] = {
    "word": WORD,
    "small": SMALL,
    "flag": {"type": "boolean"},
    "nothing": {"type": "null"},
    "short": {"type": "string", "maxLength": 3},
    "colour": {"enum": ["red", "green", "dark blue"]},
    "mixed": {"enum": [1, "one", None, True, [1], {"a": 1}]},
    "constant": {"const": {"kind": "Pod", "version": 1}},
}
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration"]
PATTERNS = ["^[A-Z]{3}-[0-9]{2,4}$", "^(a|bc)+d?$", "[0-9]$", "^v[0-9]\\.[0-9]$", "^\\S{1,3}$", '^[^"\\\\]{2}$']


def an_object(properties: Schema, *, required: list[str] | None = None, **more: Any) -> Schema:
    names = list(properties) if required is None else required
    settings = {"additionalProperties": False, **more}
    return {"type": "object", "properties": properties, "required": names, **settings}


def an_array(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def schemas() -> Iterator[tuple[str, Schema]]:
    """Name and schema of each."""
    for name, schema in SCALARS.items():
        yield name, schema
        yield f"object of {name}", an_object({name: schema})
        yield f"optional {name}", an_object({name: schema, "id": SMALL}, required=["id"])
        yield f"array of {name}", an_array(schema, 1, 3)
        yield f"nested {name}", an_object({"spec": an_object({"items": an_array(schema, 0, 2)})})
        yield f"{name} or null", {"anyOf": [schema, {"type": "null"}]}
        yield f"map of {name}", {**A_MAP, "patternProperties": {"^[a-z]{1,4}$": schema}}
        yield f"reference to {name}", {"$ref": "#/$defs/it", "$defs": {"it": schema}}
    for low, high in product((-1000, -7, 0, 3), (3, 12, 999)):
        yield f"integer {low} to {high}", {"type": "integer", "minimum": low, "maximum": high}
        yield f"number {low} to {high}", an_object({"x": {"type": "number", "minimum": low, "maximum": high}})
    for low, high in ((0, 10), (-5, 5), (99, 101)):
        yield f"between {low} and {high}", {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for factor in (2, 3, 5, 10):
        yield f"multiple of {factor}", {"type": "integer", "minimum": 0, "maximum": 200, "multipleOf": factor}
    for name in FORMATS:
        yield f"format {name}", {"type": "string", "format": name, "maxLength": 40}
        yield f"object with {name}", an_object({"at": {"type": "string", "format": name, "maxLength": 40}, "n": SMALL})
    for pattern in PATTERNS:
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern, "maxLength": 6}
        yield f"array of {pattern}", an_array({"type": "string", "pattern": pattern, "maxLength": 6}, 2, 2)
    for low, high in ((0, 0), (0, 1), (1, 4), (3, 3), (5, 8)):
        yield f"string of {low} to {high}", {"type": "string", "minLength": low, "maxLength": high}
        yield f"array of {low} to {high}", an_array(SMALL, low, high)
        yield f"matrix of {low} to {high}", an_array(an_array({"type": "boolean"}, low, high), 1, 2)
    for one, other in product(("word", "small", "flag", "constant"), repeat=2):
        if one != other:
            yield f"{one} or {other}", {"anyOf": [SCALARS[one], SCALARS[other]]}
            yield f"either {one} or {other}", an_object({"v": {"oneOf": [SCALARS[one], SCALARS[other]]}})
    for first, second in product(("word", "small", "flag"), repeat=2):
        yield f"tuple of {first} and {second}", {**TUPLE, "prefixItems": [SCALARS[first], SCALARS[second]]}
    for kind in (["string", "null"], ["integer", "boolean"], ["boolean", "null", "integer"]):
        yield f"types {kind}", an_object({"v": {"type": kind, "maxLength": 3, "minimum": 0, "maximum": 50}})
    for depth in range(2, 12):
        yield f"depth {depth}", nested(depth)
    for count in (1, 2, 4, 8, 12):
        yield f"{count} properties", an_object({f"p{index}": {"type": "boolean"} for index in range(count)})
        yield f"{count} optional", an_object({f"p{index}": SMALL for index in range(count)}, required=[])
    yield "merged", {"allOf": [an_object({"a": WORD}, additionalProperties=True), {"required": ["a"]}, NO_OTHERS]}
    yield "tree", TREE
    yield "list", LIST
    yield "tagged union", {"anyOf": [tagged("circle", "radius"), tagged("square", "side")]}
    yield (
        "function call",
        an_object({"name": {"const": "get_weather"}, "arguments": an_object(WEATHER, required=["city"])}),
    )
    yield (
        "definitions",
        an_object({"a": {"$ref": "#/definitions/w"}, "b": {"$ref": "#/definitions/w"}}, definitions=WORDS),
    )


def nested(depth: int) -> Schema:
    return SMALL if depth == 0 else an_object({"in": nested(depth - 1)})


def tagged(kind: str, size: str) -> Schema:
    return an_object({"kind": {"const": kind}, size: SMALL})


A_MAP: Schema = {"type": "object", "additionalProperties": False, "maxProperties": 2}
TUPLE: Schema = {"type": "array", "items": False, "minItems": 2, "maxItems": 2}
NO_OTHERS: Schema = {"properties": {"a": {}}, "additionalProperties": False}
WEATHER: Schema = {
    "city": WORD,
    "unit": {"enum": ["celsius", "fahrenheit"]},
    "days": {"type": "integer", "maximum": 9, "minimum": 1},
}
WORDS: Schema = {"w": WORD}
TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {"node": an_object({"value": SMALL, "children": an_array({"$ref": "#/$defs/leaf"}, 0, 2)}), "leaf": SMALL},
}
LIST: Schema = {
    "$ref": "#/$defs/cell",
    "$defs": {"cell": an_object({"head": SMALL, "tail": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/cell"}]}})},
}
