"""adapter_config.json: every field is read or refused, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftlm import LLM
from graftlm.errors import AdapterCorrupt, AdapterIncompatible, AdapterUnsupported
from tests.adapters.conftest import PROMPT
from tests.parity.oracle import LOUD, Oracle, assert_close, make_even_adapter
from tests.tiny import edit_json, make_llama

HARMLESS: dict[str, dict[str, Any]] = {
    "eva_config_null": {"eva_config": None},
    "exclude_modules_null": {"exclude_modules": None},
    "lora_bias_false": {"lora_bias": False},
    "corda_config_null": {"corda_config": None},
    "unknown_null": {"made_up_flag": None},
    "unknown_false": {"made_up_flag": False},
    "unknown_empty": {"made_up_flag": {}, "other_made_up_flag": [], "third": "", "fourth": 0},
    "every_boolean_null": dict.fromkeys(
        ("fan_in_fan_out", "use_rslora", "use_dora", "lora_bias", "inference_mode", "use_qalora")
    ),
    "other_initialisation": {"init_lora_weights": "gaussian"},
    "dropout": {"lora_dropout": 0.5},
    "fan_in_fan_out_as_for_gpt2": {"fan_in_fan_out": True},
    "no_task_type": {"task_type": None},
    "newer_peft": {"peft_version": "9.9.9"},
}


@pytest.mark.filterwarnings("ignore")  # PEFT warns of what it drops
@pytest.mark.parametrize("changes", HARMLESS.values(), ids=HARMLESS)
def test_r001_fields_that_ask_for_nothing_are_harmless_whoever_wrote_them(
    changes: dict[str, Any], llm: LLM, oracle: Oracle, copy: Callable[..., Path]
) -> None:
    adapter = copy(**changes)
    llm.load_adapter("a", adapter)
    try:
        assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, adapter))
        assert (llm.logits(PROMPT, adapter="a") - llm.logits(PROMPT)).abs().max() > LOUD
    finally:
        llm.unload_adapter("a")


def test_a_config_of_five_keys_is_enough(llm: LLM, oracle: Oracle, copy: Callable[..., Path]) -> None:
    adapter = copy()
    config = adapter / "adapter_config.json"
    kept = ("peft_type", "r", "lora_alpha", "target_modules", "task_type")
    config.write_text(json.dumps({key: value for key, value in json.loads(config.read_text()).items() if key in kept}))
    llm.load_adapter("a", adapter)
    try:
        assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, adapter))
    finally:
        llm.unload_adapter("a")


@pytest.mark.parametrize("value", [True, 1, "yes", [1], {"a": 1}], ids=str)
def test_r001_an_unknown_field_with_a_meaningful_value_is_refused_by_name(
    value: object, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(made_up_flag=value), AdapterUnsupported, "made_up_flag")


REFUSED: dict[str, Any] = {
    "arrow_config": {"top_k": 2},
}


@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED)
def test_r014_r015_a_variant_that_is_not_served_is_refused_by_its_fields_name(
    field: str, value: object, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(**{field: value}), AdapterUnsupported, field)


# What the config promises and the weights file does not hold.
PROMISED: dict[str, tuple[Any, str]] = {
    "use_dora": (True, "lora_magnitude_vector of .* is missing"),
    "lora_bias": (True, "lora_B.bias of .* is missing"),
    "modules_to_save": (["lm_head"], "lm_head"),
    "kasa_config": ({"beta": 1}, "lora_diag of .* is missing"),
    "trainable_token_indices": ([3], "trainable_tokens_delta"),
}


@pytest.mark.parametrize(("field", "value", "match"), [(key, *rest) for key, rest in PROMISED.items()], ids=PROMISED)
def test_r014_r015_what_the_config_promises_must_be_in_the_weights(
    field: str, value: object, match: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(**{field: value}), AdapterCorrupt, match)


@pytest.mark.parametrize("bias", ["All", True, ["none"]], ids=str)
def test_r015_an_unknown_bias_is_refused(bias: object, copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    refuse(copy(bias=bias), AdapterCorrupt, "bias")


@pytest.mark.parametrize("init", ["pissa_niter_16", "corda", "loftq", "lora_ga", "new", 3, ["eva"]], ids=str)
def test_initialisations_that_cannot_be_reproduced_are_refused(
    init: object, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(init_lora_weights=init), AdapterUnsupported, "init_lora_weights")


@pytest.mark.parametrize(
    "peft_type", [None, "XLORA", "POLY", "ADAPTION_PROMPT", "lora", "CARTRIDGE", 1, ["LORA"]], ids=str
)
def test_every_other_method_is_refused_by_its_name(
    peft_type: object, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(
        copy(peft_type=peft_type), AdapterUnsupported, f"peft_type.*{peft_type if peft_type != ['LORA'] else 'LORA'}"
    )


@pytest.mark.parametrize("task_type", ["SEQ_CLS", "SEQ_2_SEQ_LM", "unheard_of", 1, ["CAUSAL_LM"]], ids=str)
def test_r051_every_other_task_is_refused(
    task_type: object, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(task_type=task_type), AdapterUnsupported, "task_type")


WRONG: dict[str, list[Any]] = {
    "r": [0, -1, 8.5, True, "8", [8], {}],
    "lora_alpha": [True, "16", [16], {}, float("nan"), float("inf"), 10**400],
    "use_rslora": [1, 0, "true", [True]],
    "rank_pattern": [["q_proj"], "q_proj", 4, {"q_proj": 0}, {"q_proj": "4"}, {"q_proj": True}, {"q_proj": [4]}],
    "alpha_pattern": [["q_proj"], "q_proj", 4, {"q_proj": "4"}, {"q_proj": False}, {"q_proj": 10**400}],
    "target_modules": [1, True, {"q_proj": 1}, [1], [None], [["q_proj"]]],
    "exclude_modules": [1, True, {"q_proj": 1}, [1]],
    "layers_to_transform": ["0", [None], ["0"], [0.5], True, {"0": 1}],
    "layers_pattern": [1, [1], {"layers": 1}, "layers"],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [pytest.param(field, value, id=f"{field}-{value!r:.20}") for field, values in WRONG.items() for value in values],
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_fields_name(
    field: str, value: object, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(**{field: value}), AdapterCorrupt, field)


BROKEN_PATTERNS = ["(", "*", "a{99999999999999999}", "(" * 5000 + ")" * 5000, "(?<=a+)b", "[z-a]"]


@pytest.mark.parametrize("pattern", BROKEN_PATTERNS, ids=lambda pattern: pattern[:20])
@pytest.mark.parametrize(
    "field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_pattern"]
)
def test_a_broken_regular_expression_is_refused_with_its_fields_name(
    field: str, pattern: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    changes: dict[str, Any] = (
        {field: {pattern: 8}} if field.endswith("_pattern") and field[0] != "l" else {field: pattern}
    )
    if field == "layers_pattern":
        pattern = pattern.replace("*", "(*")  # after PEFT's prefix a star alone has something to repeat
        changes = {"layers_pattern": pattern, "layers_to_transform": [0, 1]}
    refuse(copy(**changes), AdapterCorrupt, field)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_peft_cannot_use_is_refused(
    field: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    # On its own it compiles; PEFT puts a prefix in front, where a global flag is an error.
    refuse(copy(**{field: {"(?i)Q_PROJ": 8}}), AdapterCorrupt, field)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_regular_expression_that_takes_forever_is_given_up_on(
    field: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    pattern = r"(?:(?:.+?)+?\W?)+?[A-Z]"
    refuse(copy(**{field: {pattern: 8} if field.endswith("_pattern") else pattern}), AdapterCorrupt, "takes too long")


@pytest.mark.parametrize("layers", [0, [0]], ids=str)
def test_layers_with_a_regular_expression_as_target_are_refused_as_in_peft(
    layers: int | list[int], copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    config = {"target_modules": r".*\.(q_proj|v_proj)", "layers_to_transform": [1] if layers == 0 else layers}
    refuse(copy(**config), AdapterCorrupt, "layers_to_transform needs target_modules to be a list")


def test_a_group_inside_a_layers_pattern_does_not_shift_the_layers_number(
    llm: LLM, llama: Path, oracle: Oracle, tmp_path: Path
) -> None:
    adapter = make_even_adapter(
        llama, tmp_path / "a", target_modules=["q_proj"], layers_to_transform=[1], layers_pattern=["(layers|h)"]
    )
    llm.load_adapter("a", adapter)
    try:
        assert [module.path for module in llm.adapters["a"].modules] == ["model.layers.1.self_attn.q_proj"]
        assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, adapter))
    finally:
        llm.unload_adapter("a")


@pytest.mark.parametrize("target", ["norm", "input_layernorm"])
def test_targets_that_cannot_be_adapted_are_refused_by_name(
    target: str, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    refuse(copy(target_modules=["q_proj", "v_proj", target]), AdapterUnsupported, f"target_modules.*{target}")


NOT_CONFIGS: dict[str, bytes] = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "text": b'"LORA"',
    "half": b'{"peft_type": "LORA"',
    "not_utf8": b'{"peft_type": "\xff"}',
    "utf16": '{"peft_type": "LORA"}'.encode("utf-16"),
    "deep": b'{"peft_type": ' + b"[" * 100_000,
    "endless_number": b'{"r": 1' + b"0" * 5000 + b"}",
    "yaml": b"peft_type: LORA",
}


@pytest.mark.parametrize("content", NOT_CONFIGS.values(), ids=NOT_CONFIGS)
def test_a_config_that_is_not_a_json_object_is_refused_by_the_files_name(
    content: bytes, copy: Callable[..., Path], refuse: Callable[..., str]
) -> None:
    adapter = copy()
    (adapter / "adapter_config.json").write_bytes(content)
    refuse(adapter, AdapterCorrupt, r"adapter_config\.json is not")


def test_a_config_of_many_megabytes_is_refused_unread(copy: Callable[..., Path], refuse: Callable[..., str]) -> None:
    adapter = copy()
    (adapter / "adapter_config.json").write_bytes(b" " * (5 << 20))
    refuse(adapter, AdapterCorrupt, r"adapter_config\.json is too large")


@pytest.mark.parametrize(
    "name", [None, ..., "no/such-model", "/absent/folder"], ids=["null", "missing", "hub", "folder"]
)
def test_r002_the_base_named_in_the_config_is_not_looked_for(
    name: object, llm: LLM, oracle: Oracle, good: Path, copy: Callable[..., Path], no_network: None
) -> None:
    llm.load_adapter("a", copy(base_model_name_or_path=name))
    try:
        assert_close(llm.logits(PROMPT, adapter="a"), oracle.logits(PROMPT, good))
    finally:
        llm.unload_adapter("a")


OTHER_BASES: dict[str, tuple[dict[str, Any], str]] = {
    "narrower": ({"hidden_size": 32}, r"q_proj has another shape in this base.*lora_A \[rank, 64\]"),
    "more_layers": ({"num_hidden_layers": 3}, r"name no module of this base: .*layers\.2\."),
    "more_kv_heads": ({"num_key_value_heads": 4}, r"v_proj has another shape in this base.*lora_B \[32, rank\]"),
}


@pytest.mark.parametrize(("config", "match"), OTHER_BASES.values(), ids=OTHER_BASES)
def test_r002_r051_an_adapter_of_another_base_is_refused_with_the_tensor_that_does_not_fit(
    config: dict[str, Any], match: str, refuse: Callable[..., str], tmp_path: Path
) -> None:
    other = make_llama(tmp_path / "other", **config)
    refuse(make_even_adapter(other, tmp_path / "adapter"), AdapterIncompatible, match)


def test_a_head_adapter_of_a_larger_vocabulary_is_refused(refuse: Callable[..., str], tmp_path: Path) -> None:
    other = make_llama(tmp_path / "other", vocab_size=300)
    adapter = make_even_adapter(other, tmp_path / "adapter", target_modules=["lm_head"])
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=None)
    refuse(adapter, AdapterIncompatible, r"lm_head has another shape.*lora_B \[300, 8\].*lora_B \[259, rank\]")
