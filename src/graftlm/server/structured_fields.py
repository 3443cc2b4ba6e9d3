"""Fields that ask for an answer of a certain form, as OpenAI and vLLM spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from graftlm.engine.structured_output import StructuredOutput
from graftlm.errors import InvalidRequest
from graftlm.server.fields import Items, JsonObject, Strict, Text, nothing_but

Schema = JsonObject | bool


class JsonSchema(Strict):
    """A schema under a name. It is enforced, `strict` or not."""

    name: Text
    description: Text | None = None
    definition: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def form(self) -> dict[str, Any] | None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format needs json_schema with the type json_schema, and only then", param="response_format"
            )
        if self.json_schema is not None:
            return _of_schema(self.json_schema.definition)
        return {"json_object": True} if self.type == "json_object" else None


class TextFormat(Strict):
    """`text.format` of a response."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    definition: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None

    def form(self) -> dict[str, Any] | None:
        if self.type == "json_schema":
            return _of_schema(self.definition)
        if self.definition is not None:
            raise InvalidRequest("text.format has a schema without the type json_schema", param="text")
        return {"json_object": True} if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`. What picks its back-end, or asks for less, is refused."""

    json_definition: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Items[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    whitespace_pattern: Text | None = None
    disable_additional_properties: Annotated[Any, nothing_but(None, False)] = None
    disable_any_whitespace: Annotated[Any, nothing_but(None, False)] = None
    disable_fallback: Annotated[Any, nothing_but(None, False)] = None
    structural_tag: Annotated[Any, nothing_but(None)] = None

    def form(self) -> dict[str, Any]:
        names = ("regex", "choice", "grammar", "json_object", "whitespace_pattern")
        return _given({"json": self.json_definition, **{name: getattr(self, name) for name in names}})


class StructuredFields(Strict):
    """What asks for a form; at most one of them may."""

    response_format: ResponseFormat | None = None

    # Not OpenAI's; named as in vLLM, its older spelling included.
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: Text | None = None
    guided_choice: Items[Text] | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    guided_decoding_backend: Annotated[Any, nothing_but(None, "auto", "guidance")] = None

    def forms(self) -> dict[str, dict[str, Any]]:
        """What each field that asks for a form asks for, as arguments of `StructuredOutput`.

        Raises:
            InvalidRequest: a field contradicts itself.
        """
        forms: dict[str, dict[str, Any]] = {}
        if self.response_format is not None and (form := self.response_format.form()) is not None:
            forms["response_format"] = form
        if self.structured_outputs is not None:
            forms["structured_outputs"] = self.structured_outputs.form()
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                forms[f"guided_{kind}"] = {kind: value}
        if self.guided_whitespace_pattern is not None:
            if "guided_json" not in forms:
                raise InvalidRequest(
                    "guided_whitespace_pattern needs guided_json", param="guided_whitespace_pattern", do="leave it out"
                )
            forms["guided_json"]["whitespace_pattern"] = self.guided_whitespace_pattern
        return forms

    @property
    def form_field(self) -> str | None:
        """The field that asks for a form, if one does."""
        return next(iter(self.forms()), None)

    def structured(self) -> StructuredOutput | None:
        """The form that is asked for.

        Raises:
            InvalidRequest: two are, or what is cannot be; `param` is the field.
        """
        forms = self.forms()
        if len(forms) > 1:
            first, second, *_ = forms
            raise InvalidRequest(
                f"{first} and {second} both ask for a form", param=second, allowed="one of them", do="leave one out"
            )
        for field, form in forms.items():
            return structured_output(form, field)
        return None


def structured_output(form: Mapping[str, Any], field: str) -> StructuredOutput:
    """A form, whose faults are those of `field`.

    Raises:
        InvalidRequest
    """
    try:
        return StructuredOutput(**form)
    except InvalidRequest as error:
        raise blamed_on(field, error) from error


def blamed_on(field: str | None, error: BaseException) -> BaseException:
    """An error about the form of an answer, as the client knows the field it sent; any other as it is."""
    if field is None or not isinstance(error, InvalidRequest) or error.param != "structured":
        return error
    what = f"{field}: {error.what}"
    return InvalidRequest(what, param=field, got=error.got, allowed=error.allowed, do=error.do)


def _of_schema(definition: Schema | None) -> dict[str, Any]:
    return {"json_object": True} if definition is None else {"json": definition}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
