"""Functions that a model may call: how each family writes a call, reading calls out of text, and grammars that make a
model write them."""

from graftlm.text.tool_calls.description import tell_tools
from graftlm.text.tool_calls.formats import FORMATS, ToolCallFormat, format_of_template, named_format
from graftlm.text.tool_calls.grammar import Tool, calls_only, json_or_calls, text_or_calls
from graftlm.text.tool_calls.reader import CallArguments, CallBegun, CallGivenUp, ToolCallReader, ToolEvent

__all__ = [
    "FORMATS",
    "CallArguments",
    "CallBegun",
    "CallGivenUp",
    "Tool",
    "ToolCallFormat",
    "ToolCallReader",
    "ToolEvent",
    "calls_only",
    "format_of_template",
    "json_or_calls",
    "named_format",
    "tell_tools",
    "text_or_calls",
]
