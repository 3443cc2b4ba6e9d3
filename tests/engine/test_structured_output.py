"""Answers of a given form, enforced token by token (R077)."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from graftlm import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutput
from graftlm.errors import InvalidRequest
from tests import tiny
from tests.engine.json_schemas import an_array, an_object, schemas
from tests.engine.rig import BLOCK_BYTES, masks_held, num_preemptions, one, token_ids, watched

PAD = 258
PERSON = an_object({"name": {"type": "string", "maxLength": 6}, "admin": {"type": "boolean"}})
WORDS = ["yes", "no", "yesterday", 'say "ü"\n']


def text_of(output: RequestOutput) -> str:
    (answer,) = output.outputs
    return answer.text


def wanting(seed: int = 0, *, max_tokens: int = 120, structured: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, structured=StructuredOutput(**structured), **more)


def check_json(text: str, schema: Any) -> None:
    # jsonschema reads times without RFC 3339's offset only.
    formats = jsonschema.FormatChecker([name for name in jsonschema.FormatChecker.checkers if name != "time"])
    jsonschema.Draft202012Validator(schema, format_checker=formats).validate(json.loads(text))


def test_answers_of_two_hundred_schemas_parse_and_validate(llm: LLM) -> None:
    cases = list(schemas())
    assert len(cases) >= 200
    params = [wanting(seed, max_tokens=450, structured={"json": schema}) for seed, (_, schema) in enumerate(cases)]
    adapters = [(None, "red", "green", "blue")[seed % 4] for seed in range(len(cases))]
    outputs = llm.generate([f"{name}: " for name, _ in cases], params, adapter=adapters)
    for (name, schema), output in zip(cases, outputs, strict=True):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop", name
        assert answer.stop_reason is None
        check_json(answer.text, schema)


def test_r077_a_random_model_ends_its_json(llm: LLM) -> None:
    outputs = llm.generate(
        ["{"] * 20, [wanting(seed, max_tokens=200, structured={"json": PERSON}) for seed in range(20)]
    )
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        check_json(text_of(output), PERSON)


def test_any_json_object_is_an_object(llm: LLM) -> None:
    outputs = llm.generate(["x"] * 8, [wanting(seed, structured={"json_object": True}) for seed in range(8)])
    ended = [output for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text_of(output)), dict) for output in ended)
    assert all(text_of(output).startswith("{") for output in outputs)


@pytest.mark.parametrize("pattern", ["[a-c]{3}x?", "(ab|cd)+", "[0-9]{1,3}(\\.[0-9]{2})?", "[\u0531-\u0556]{2}"])
def test_the_whole_answer_matches_the_regular_expression(llm: LLM, pattern: str) -> None:
    outputs = llm.generate(["x"] * 6, [wanting(seed, structured={"regex": pattern}) for seed in range(6)])
    for output in outputs:
        whole = output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, text_of(output)) or not whole
    assert any(output.outputs[0].finish_reason == "stop" for output in outputs)


def test_the_answer_is_one_of_the_choices(llm: LLM) -> None:
    params = [wanting(seed, structured={"choice": WORDS}, temperature=3.0) for seed in range(40)]
    assert {text_of(output) for output in llm.generate(["x"] * 40, params)} == set(WORDS)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "go " (DIRECTION ";")~1..2\nDIRECTION: /(north|south) [0-9]/',
        'root ::= "go " d d?\nd ::= ("north" | "south") " " [0-9] ";"',
    ],
)
def test_the_answer_follows_a_lark_or_gbnf_grammar(llm: LLM, grammar: str) -> None:
    outputs = llm.generate(["x"] * 5, [wanting(seed, structured={"grammar": grammar}) for seed in range(5)])
    assert all(re.fullmatch("go ((north|south) [0-9];){1,2}", text_of(output)) for output in outputs)


def test_rows_with_and_without_grammars_do_not_touch_each_other(llm: LLM) -> None:
    kinds: list[StructuredOutput | None] = [
        None,
        StructuredOutput(json=PERSON),
        StructuredOutput(regex="[a-z]{5}"),
        StructuredOutput(choice=["a", "b"]),
        None,
    ]
    params = [SamplingParams(max_tokens=30, seed=seed, structured=kind) for seed, kind in enumerate(kinds)]
    adapters = [None, "red", "green", "blue", "red"]
    together = llm.generate(["x"] * 5, params, adapter=adapters)
    alone = [one(llm, "x", own, adapter) for own, adapter in zip(params, adapters, strict=True)]
    assert [token_ids(output) for output in together] == [token_ids(output) for output in alone]


def test_an_adapters_own_tokenizer_is_the_one_its_grammar_speaks(llama: Path, tmp_path: Path) -> None:
    swapped, longer = tmp_path / "swapped", tmp_path / "longer"
    tiny.make_adapter(llama, swapped)
    tiny.write_tokenizer(swapped)
    content = json.loads((swapped / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["{"] = vocab["{"], vocab["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(content))
    shutil.copytree(swapped, longer)
    content["added_tokens"][-1].update(content="<call>", special=False)
    (longer / "tokenizer.json").write_text(json.dumps(content))
    tiny.edit_json(longer / "tokenizer_config.json", pad_token=...)
    llm = LLM(llama, adapters={"swapped": swapped, "longer": longer}, kv_cache_bytes=64 * BLOCK_BYTES)
    forced, chosen = wanting(structured={"regex": "\\{<call>a\\}"}), wanting(structured={"regex": "\\{(<call>|x)a\\}"})
    base, own, with_added = llm.generate(["x"] * 3, forced, adapter=[None, "swapped", "longer"])
    assert text_of(base) == text_of(own) == text_of(with_added) == "{<call>a}"
    assert token_ids(base)[0] == token_ids(own)[-2] != token_ids(own)[0]
    biased = replace(chosen, logit_bias={PAD: 100.0})
    base, with_added = llm.generate(["x"] * 2, biased, adapter=[None, "longer"])
    assert PAD not in token_ids(base)
    assert text_of(with_added) == "{<call>a}"
    assert token_ids(with_added)[1] == PAD
    llm.shutdown()


@pytest.mark.parametrize("name", ["<s>", "</s>", "<pad>"])
def test_the_name_of_a_special_token_is_text_in_a_form_and_never_that_token(llm: LLM, name: str) -> None:
    answer = one(llm, "x", wanting(structured={"regex": f"a{name}b"})).outputs[0]
    assert answer.text == f"a{name}b"
    assert max(answer.token_ids) < 256


def test_a_lark_grammar_may_ask_for_special_tokens_by_name_or_id(llm: LLM) -> None:
    grammar = 'start: "<s>" <s> "a" <[258]> "b"'
    answer = one(llm, "x", wanting(structured={"grammar": grammar})).outputs[0]
    assert [token_id for token_id in answer.token_ids if token_id >= 256] == [256, PAD]
    assert answer.text == "<s>ab"


def test_a_stop_string_ends_an_answer_inside_its_form(llm: LLM) -> None:
    answer = one(llm, "x", wanting(structured={"regex": "abcdefgh"}, stop=["ef"])).outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abcd", "stop", "ef")
    assert len(answer.token_ids) == 6


def test_max_tokens_cuts_a_form_short(llm: LLM) -> None:
    answer = one(llm, "x", wanting(structured={"regex": "abcdefgh"}, max_tokens=5)).outputs[0]
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("abcde", "length", 5)


def test_logit_bias_chooses_within_the_form_only(llm: LLM) -> None:
    ids = {char: token_ids(one(llm, "x", wanting(structured={"regex": char})))[0] for char in "az"}
    bias = {ids["a"]: 100.0, ids["z"]: 100.0}
    assert text_of(one(llm, "x", wanting(structured={"regex": "[a-f]{8}"}, logit_bias=bias))) == "a" * 8


def test_the_end_of_the_form_ends_the_answer_whatever_min_tokens_and_ignore_eos_say(llm: LLM) -> None:
    longest = wanting(structured={"regex": "[ab]{2,6}"}, min_tokens=20)
    assert len(text_of(one(llm, "x", longest))) == 6
    answer = one(llm, "x", wanting(structured={"regex": "[ab]{4}"}, ignore_eos=True)).outputs[0]
    assert (len(answer.text), len(answer.token_ids), answer.finish_reason) == (4, 4, "stop")


def test_each_of_n_answers_has_a_form_of_its_own(llm: LLM) -> None:
    answers = one(llm, "x", wanting(structured={"json": PERSON}, n=5)).outputs
    assert len({answer.text for answer in answers}) == 5
    for answer in answers:
        check_json(answer.text, PERSON)


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    params = wanting(structured={"regex": "[ab]{3}"}, logprobs=3)
    answer = one(llm, "x", params).outputs[0]
    assert answer.logprobs is not None
    free = one(llm, "x", SamplingParams(max_tokens=1, logprobs=3, temperature=0)).outputs[0].logprobs
    assert free is not None
    assert answer.logprobs[0].top == free[0].top
    assert len(answer.logprobs) == len(answer.token_ids)


def test_preempted_answers_keep_their_place_in_the_form(llama: Path, llm: LLM) -> None:
    schema = an_object({"rows": an_array(PERSON, 2, 3)})
    params = [wanting(seed, structured={"json": schema}, max_tokens=200) for seed in range(6)]
    small = LLM(llama, kv_cache_bytes=24 * BLOCK_BYTES, prefix_cache=False)
    with watched(small) as seen:
        outputs = small.generate([f"prompt {seed}" for seed in range(6)], params)
    assert num_preemptions(seen) >= 3
    expected = llm.generate([f"prompt {seed}" for seed in range(6)], params)
    assert [token_ids(output) for output in outputs] == [token_ids(output) for output in expected]
    for output in outputs:
        check_json(text_of(output), schema)
    small.shutdown()


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose tokens are pieces of JSON, as real ones are."""
    folder = tiny.make_llama(tmp_path_factory.mktemp("merging"), vocab_size=420)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ['{"name": "grace", "admin": true, "customer_identifier":', '{"name":"ada","admin":false,"customer'] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    tiny.edit_json(folder / "config.json", bos_token_id=0, eos_token_id=1, pad_token_id=2)
    tiny.edit_json(folder / "generation_config.json", bos_token_id=0, eos_token_id=1, pad_token_id=2)
    llm = LLM(folder, kv_cache_bytes=128 * BLOCK_BYTES)
    yield llm
    llm.shutdown()


@pytest.mark.parametrize("pattern", ["", None])
def test_tokens_that_must_follow_are_taken_without_steps_and_change_nothing(merging: LLM, pattern: str | None) -> None:
    schema = an_object({**PERSON["properties"], "customer_identifier": {"enum": ["grace", "ada"]}})
    form = {"json": schema, "whitespace_pattern": pattern}
    for seed in range(8):
        with watched(merging) as seen:
            jumping = one(merging, "x", wanting(seed, structured=form))
        # Log-probabilities need the logits of every token.
        stepping = one(merging, "x", wanting(seed, structured=form, logprobs=0))
        assert token_ids(jumping) == token_ids(stepping)
        check_json(text_of(jumping), schema)
        assert len(seen) < len(token_ids(jumping))


def test_a_stream_of_a_form_is_its_answer_in_pieces(llama: Path) -> None:
    async def scenario() -> None:
        engine = AsyncLLM(llama, kv_cache_bytes=64 * BLOCK_BYTES)
        for seed in range(3):
            params = wanting(seed, structured={"json": PERSON})
            pieces = [delta async for delta in engine.stream("x", params)]
            whole = await engine.generate("x", params)
            assert "".join(text_of(piece) for piece in pieces) == text_of(whole)
            assert pieces[-1].outputs[0].finish_reason == "stop"
        await engine.shutdown()

    asyncio.run(scenario())


def test_while_a_grammar_compiles_others_are_answered(llama: Path) -> None:
    # Terminals that refer to each other take the cube of their number to compile, and grammars take turns.
    def slow(length: int) -> str:
        chain = [f'T{index}: ("b" | T{index + 1})* "c"' for index in range(length)]
        return "\n".join(["start: T0", *chain, f'T{length}: "a"'])

    grammars = [slow(length) for length in range(280, 290)]

    async def scenario() -> None:
        engine = AsyncLLM(llama, kv_cache_bytes=64 * BLOCK_BYTES)
        await engine.generate("x", wanting(structured={"regex": "ab"}))
        waiting = asyncio.gather(
            *(engine.generate("x", wanting(structured={"grammar": each}, max_tokens=4)) for each in grammars)
        )
        await asyncio.sleep(0)
        output = await engine.generate("x", SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        known = await engine.generate("x", wanting(structured={"regex": "ab"}))
        assert not waiting.done()
        assert (len(token_ids(output)), text_of(known)) == (2, "ab")
        assert all(set(text_of(each)) <= set("abc") for each in await waiting)
        await engine.shutdown()

    asyncio.run(scenario())


def test_a_mask_that_takes_long_holds_up_nobody_else(llama: Path) -> None:
    free = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    formed = wanting(structured={"regex": "[a-z]{12}"})

    async def scenario() -> None:
        engine = AsyncLLM(llama, kv_cache_bytes=64 * BLOCK_BYTES)
        expected = await engine.generate("x", formed), await engine.generate("y", free)
        with masks_held(engine):
            slow = asyncio.ensure_future(engine.generate("x", formed))
            others = [await engine.generate("y", free) for _ in range(3)]
            assert not slow.done()
        assert token_ids(await slow) == token_ids(expected[0])
        assert [token_ids(output) for output in others] == [token_ids(expected[1])] * 3
        await engine.shutdown()

    asyncio.run(scenario())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unclosed group": ({"regex": "a("}, "unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "no text": ({"regex": ""}, "regex is empty"),
    "a huge expression": ({"regex": "a" * 9000}, "at most 8192"),
    "a keyword that is not enforced": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "one that asks to be ignored": ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "not"),
    "schemas of which both may hold": ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    "no such type": ({"json": {"type": "strng"}}, "strng"),
    "text that is not JSON": ({"json": "{"}, "EOF"),
    "a list": ({"json": [1]}, "list"),
    "a schema that nothing fits": ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "Unsatisfiable"),
    "a schema that is itself": ({"json": {"$ref": "#"}}, "NoExtension"),
    "a schema elsewhere": ({"json": {"$ref": "https://example.org/schema"}}, "example.org"),
    "a deep schema": ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "recursion"),
    "a huge schema": ({"json": {"enum": ["x" * 300_000]}}, "at most 262144"),
    "an unknown rule": ({"grammar": "start: nowhere"}, "nowhere"),
    "parentheses without end": ({"grammar": "start: " + "(" * 50_000}, "nested"),
    "many terminals": ({"grammar": "start: A\n" + "".join(f"A{i}: /a/\n" for i in range(400))}, "300"),
    "multiples that take hours": ({"json": {"type": "integer", "multipleOf": 10**9 + 7}}, "100000"),
    "multiples that do together": (
        {"json": {"allOf": [{"type": "integer", "multipleOf": number} for number in (997, 991, 0.5)]}},
        "9880270",
    ),
    "thousands of optional properties": (
        {"json": {"type": "object", "properties": {f"p{index}": {"type": "null"} for index in range(8000)}}},
        "20000",
    ),
    "no choice": ({"choice": []}, "one or more"),
    "text for choices": ({"choice": "ab"}, "one or more"),
    "two forms": ({"choice": ["a"], "regex": "a"}, "exactly one"),
    "no form": ({}, "exactly one"),
    "blanks without JSON": ({"regex": "a", "whitespace_pattern": " "}, "belongs to JSON"),
    "bad blanks": ({"json_object": True, "whitespace_pattern": "("}, "unclosed group"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_form_that_cannot_be_enforced_is_refused_with_the_reason(llm: LLM, case: str) -> None:
    form, reason = REFUSED[case]
    with pytest.raises(InvalidRequest) as error:
        llm.generate("x", wanting(structured=form))
    assert error.value.param == "structured"
    assert reason in str(error.value)
    assert len(str(error.value)) < 1000


def test_rules_that_refer_to_each_other_thousands_deep_are_no_danger(llm: LLM) -> None:
    rules = "\n".join(["start: r0", *(f"r{index}: r{index + 1}" for index in range(9000)), 'r9000: "a"'])
    assert text_of(one(llm, "x", wanting(structured={"grammar": rules}))) == "a"


def test_a_grammar_that_grows_too_complex_ends_its_own_request_only(llm: LLM) -> None:
    # Each of its optional parts is a place in which the grammar may be after the first token.
    wide = wanting(structured={"grammar": "start: " + '"a"? ' * 7000})
    other = wanting(structured={"regex": "[ab]{40}"})
    expected = text_of(one(llm, "x", other))
    with pytest.raises(InvalidRequest, match="too complex") as error:
        llm.generate("x", wide)
    assert error.value.param == "structured"
    assert text_of(one(llm, "x", other)) == expected
