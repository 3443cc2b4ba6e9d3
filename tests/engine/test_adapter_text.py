"""An adapter's own tokenizer, chat template and end tokens serve its requests, and nobody else's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from graftlm import LLM, SamplingParams
from graftlm.errors import AdapterCorrupt
from tests import tiny

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "hi"}]
OWN_TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}>"


@pytest.fixture(scope="module")
def plain(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_adapter(llama, tmp_path_factory.mktemp("text") / "plain")


def copy_of(adapter: Path, folder: Path) -> Path:
    return Path(shutil.copytree(adapter, folder))


def test_r027_an_adapters_own_chat_template_renders_its_chats_only(llama: Path, plain: Path, tmp_path: Path) -> None:
    own = copy_of(plain, tmp_path / "own")
    (own / "chat_template.jinja").write_text(OWN_TEMPLATE)
    llm = LLM(llama, name="base", adapters={"own": own, "plain": plain})
    prompts = [output.prompt_token_ids for output in llm.chat([MESSAGES] * 3, PARAMS, adapter=["own", "plain", None])]
    tokenizer = llm._open().tokenizer
    assert tokenizer.decode(prompts[0]) == "[hi]>"
    assert prompts[1] == prompts[2] != prompts[0]


def test_a_template_in_tokenizer_config_is_found_without_a_tokenizer(llama: Path, plain: Path, tmp_path: Path) -> None:
    own = copy_of(plain, tmp_path / "own")
    (own / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": OWN_TEMPLATE, "auto_map": {"x": "evil.py"}})
    )
    llm = LLM(llama, name="base", adapters={"own": own})
    assert llm._open().tokenizer.decode(llm.chat(MESSAGES, PARAMS, adapter="own")[0].prompt_token_ids) == "[hi]>"


def test_an_adapters_own_tokenizer_reads_its_prompts_and_writes_its_answers(
    llama: Path, plain: Path, tmp_path: Path
) -> None:
    own = copy_of(plain, tmp_path / "own")
    tiny.write_tokenizer(own)
    content = json.loads((own / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (own / "tokenizer.json").write_text(json.dumps(content))
    llm = LLM(llama, name="base", adapters={"own": own, "plain": plain})
    swapped, usual = llm.generate(["ab", "ab"], PARAMS, adapter=["own", "plain"])
    assert swapped.prompt_token_ids == tuple(reversed(usual.prompt_token_ids))
    same = llm.generate({"prompt_token_ids": usual.prompt_token_ids}, PARAMS, adapter=["own"])[0]
    assert same.outputs[0].token_ids == usual.outputs[0].token_ids
    translation = str.maketrans("ab", "ba")
    assert same.outputs[0].text == usual.outputs[0].text.translate(translation)


def test_copies_of_the_bases_tokenizer_are_not_loaded_again(llama: Path, plain: Path, tmp_path: Path) -> None:
    folders = {name: copy_of(plain, tmp_path / name) for name in ("one", "two")}
    for folder in folders.values():
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(llama / name, folder / name)
    llm = LLM(llama, name="base", adapters=folders)
    assert all(adapter.text.tokenizer is None for adapter in llm.adapters.values())


def test_r026_an_adapters_own_end_tokens_end_its_answers_only(llama: Path, plain: Path, tmp_path: Path) -> None:
    first = LLM(llama, name="base", adapters={"plain": plain}).generate("hello", PARAMS, adapter="plain")[0]
    token_ids = first.outputs[0].token_ids
    end = next(token for token in token_ids[1:] if token != token_ids[0])
    own = copy_of(plain, tmp_path / "own")
    (own / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 999]}))
    llm = LLM(llama, name="base", adapters={"own": own, "plain": plain})
    params = SamplingParams(max_tokens=8, temperature=0)
    stopped, free = llm.generate(["hello", "hello"], params, adapter=["own", "plain"])
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].token_ids == token_ids[: token_ids.index(end) + 1]
    assert free.outputs[0].token_ids[: len(stopped.outputs[0].token_ids)] == stopped.outputs[0].token_ids
    assert len(free.outputs[0].token_ids) > len(stopped.outputs[0].token_ids)


def test_r023_broken_tokenizer_files_refuse_the_adapter(llama: Path, plain: Path, tmp_path: Path) -> None:
    llm = LLM(llama, name="base")
    for name, content in {
        "tokenizer.json": '{"version": "1.0", "trunc',
        "tokenizer_config.json": "not json",
        "generation_config.json": '{"eos_token_id": "</s>"}',
    }.items():
        broken = copy_of(plain, tmp_path / name)
        (broken / name).write_text(content)
        with pytest.raises(AdapterCorrupt, match="tokenizer files cannot be read"):
            llm.load_adapter("broken", broken)
    assert not llm.adapters
