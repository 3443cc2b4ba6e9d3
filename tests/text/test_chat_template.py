"""Chat templates: foreign programs that are rendered as transformers does, in a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from graftlm.errors import InvalidRequest
from graftlm.text import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "ok"}]


def with_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template)
    return load_tokenizer(folder)


def rendered_or_refused(tokenizer: Tokenizer, messages: Any) -> tuple[str, str | None]:
    """The text, or the parameter that an InvalidRequest blames."""
    try:
        return tokenizer.render_chat(messages), None
    except InvalidRequest as refused:
        return "", refused.param


def test_r028_everything_transformers_defines_is_defined(byte_level_folder: Path) -> None:
    template = (
        "{{ bos_token + 'x' + eos_token }}{{ pad_token }}{{ unk_token }}|{{ strftime_now('%Y') }}|"
        "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ tools is defined and tools is not none }}|"
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{- message.content | trim -}}{% continue %}never{% endfor %}"
        "{% set ns = namespace(found=1) %}{{ ns.found }}"
        "{% if add_generation_prompt %}<go>{% endif %}"
        "{% generation %}mine{% endgeneration %}"
    )
    tokenizer = with_template(byte_level_folder, template)
    reference = AutoTokenizer.from_pretrained(byte_level_folder)
    for add in (True, False):
        text = tokenizer.render_chat(MESSAGES, add_generation_prompt=add)
        assert text == reference.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=add)
        assert text.startswith("<s>x</s><pad>")
        assert ("<go>" in text) == add


def test_the_last_message_is_continued_as_transformers_does(byte_level: Tokenizer, byte_level_folder: Path) -> None:
    reference = AutoTokenizer.from_pretrained(byte_level_folder)
    text = byte_level.render_chat(MESSAGES, add_generation_prompt=False, continue_final_message=True)
    assert text == reference.apply_chat_template(MESSAGES, tokenize=False, continue_final_message=True)
    assert text.endswith("ok")
    with pytest.raises(InvalidRequest, match="not compatible"):
        byte_level.render_chat(MESSAGES, continue_final_message=True)


def test_a_template_sees_the_variables_it_is_given(byte_level_folder: Path) -> None:
    tokenizer = with_template(byte_level_folder, "{{ 'think' if enable_thinking else 'answer' }}")
    assert tokenizer.render_chat(MESSAGES, template_variables={"enable_thinking": True}) == "think"
    assert tokenizer.render_chat(MESSAGES) == "answer"


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "tools", "messages", "return_tensors", "conversation"])
def test_what_is_no_variable_of_a_template_is_refused(byte_level: Tokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as refused:
        byte_level.render_chat(MESSAGES, template_variables={name: True})
    assert refused.value.param == "chat_template_kwargs"


def test_a_developer_is_the_system_to_templates_that_know_none(byte_level_folder: Path) -> None:
    message = {"role": "developer", "content": "be brief"}
    simple = with_template(byte_level_folder, "{{ messages[0].role }}")
    assert simple.render_chat([message]) == "system"
    assert message["role"] == "developer"
    aware = with_template(byte_level_folder, "{% if messages[0].role == 'developer' %}dev{% endif %}")
    assert aware.render_chat([message]) == "dev"


def test_r024_a_template_without_a_generation_prompt_renders_as_it_is(byte_level_folder: Path) -> None:
    tokenizer = with_template(byte_level_folder, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt=True) == "[user]héllo[assistant]ok"


def test_r074_a_template_that_refuses_a_role_says_so_in_its_own_words(byte_level_folder: Path) -> None:
    tokenizer = with_template(
        byte_level_folder,
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}fine",
    )
    with pytest.raises(InvalidRequest, match="System role not supported") as refused:
        tokenizer.encode_chat([{"role": "system", "content": "be nice"}])
    assert refused.value.param == "messages"
    assert tokenizer.render_chat(MESSAGES) == "fine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 // (messages | length - 2) }}",
        "{{ range(10 ** 9) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7]['content']['x'] }}",
        "{{ no_such_function() }}",
        "{{ messages | no_such_filter }}",
        "{{ '%d' | format('x') }}",
        "{% if %}",
        "{% for m in messages %}",
        "{% include 'other.jinja' %}",
    ],
)
def test_r074_whatever_goes_wrong_in_a_template_is_the_requests_error(byte_level_folder: Path, template: str) -> None:
    tokenizer = with_template(byte_level_folder, template)
    with pytest.raises(InvalidRequest, match="chat template") as refused:
        tokenizer.encode_chat(MESSAGES)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("messages", [[5], ["text"], [None], [{"role": "user"}], [{}]])
def test_r074_messages_a_template_cannot_read_are_refused_or_rendered(byte_level: Tokenizer, messages: Any) -> None:
    text, refused = rendered_or_refused(byte_level, messages)
    assert text.startswith("<s>") or refused == "messages"


def test_a_model_without_a_template_says_so(byte_level_folder: Path) -> None:
    (byte_level_folder / "chat_template.jinja").unlink()
    with pytest.raises(InvalidRequest, match="no chat template") as refused:
        load_tokenizer(byte_level_folder).encode_chat(MESSAGES)
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages|attr('__class__') }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__']['open'](MARKER, 'w') }}",
        "{{ cycler.__init__.__globals__.os.system('touch ' + MARKER) }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ open(MARKER, 'w') }}",
    ],
)
def test_r099_a_template_cannot_leave_its_sandbox(byte_level_folder: Path, tmp_path: Path, attack: str) -> None:
    marker = tmp_path / "marker"
    tokenizer = with_template(byte_level_folder, attack.replace("MARKER", f"'{marker}'"))
    messages = [dict(message) for message in MESSAGES]
    text, refused = rendered_or_refused(tokenizer, messages)
    # An unsafe attribute may also render as undefined: as nothing at all.
    assert text == ""
    assert refused in (None, "messages")
    assert not marker.exists()
    assert messages == MESSAGES
