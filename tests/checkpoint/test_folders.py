"""Model folders: what is wrong with one is said in full, and nothing is guessed."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.errors import CheckpointError, InvalidRequest
from tests.parity.oracle import Oracle, prompt_of
from tests.tiny import edit_json, make_llama


@pytest.fixture
def base(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "base"))


def rewrite(base: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = base / "model.safetensors"
    save_file(change(load(path.read_bytes())), path, metadata={"format": "pt"})


def refusal(source: str | Path, match: str, **options: Any) -> str:
    with pytest.raises(CheckpointError, match=match) as caught:
        LLM(source, kv_cache_bytes=1 << 20, **options)
    assert type(caught.value) is CheckpointError
    return str(caught.value)


def test_missing_unknown_and_misshapen_tensors_are_all_listed_by_name(base: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(96, 63)
        return {**tensors, "model.layers.7.mlp.up_proj.weight": torch.ones(2), "score.weight": torch.ones(2)}

    rewrite(base, spoil)
    message = refusal(base, "tensors do not fit its config")
    assert "missing: model.layers.0.self_attn.k_proj.weight, model.norm.weight;" in message
    assert "unknown: model.layers.7.mlp.up_proj.weight, score.weight;" in message
    assert "misshapen: model.layers.1.mlp.up_proj.weight [96, 63] instead of [96, 64]" in message


def test_of_many_missing_tensors_ten_are_named_and_the_rest_counted(base: Path) -> None:
    rewrite(base, lambda tensors: {name: t for name, t in tensors.items() if "layers" not in name})
    assert refusal(base, "missing: .* and 8 more").count("model.layers.") == 10


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "one_layer_fewer_than_the_file": ({"num_hidden_layers": 1}, r"unknown: model\.layers\.1\."),
    "one_layer_more": ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\."),
    "vocabulary": ({"vocab_size": 260}, r"model\.embed_tokens\.weight \[259, 64\] instead of \[260, 64\]"),
    "key_heads": ({"num_key_value_heads": 4}, r"k_proj\.weight \[32, 64\] instead of \[64, 64\]"),
    "bias_that_is_not_there": ({"attention_bias": True}, r"missing: .*q_proj\.bias|missing: .*k_proj\.bias"),
    "head_of_an_untied_model": ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
}


@pytest.mark.parametrize(("changes", "match"), SHAPES.values(), ids=SHAPES)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    changes: dict[str, Any], match: str, base: Path, tied_llama: Path, tmp_path: Path
) -> None:
    folder = base if "tie_word_embeddings" not in changes else Path(shutil.copytree(tied_llama, tmp_path / "tied"))
    edit_json(folder / "config.json", **changes)
    refusal(folder, match)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "other_family": ({"model_type": "mamba"}, "model_type is not supported; got: 'mamba'; allowed: .*llama"),
    "no_family": ({"model_type": None}, "model_type is not supported; got: None"),
    "family_of_another_type": ({"model_type": ["llama"]}, "model_type is not supported"),
    "quick_gelu": ({"hidden_act": "quick_gelu"}, "hidden_act is not supported; got: 'quick_gelu'"),
    "cubic": ({"rope_parameters": {"rope_type": "cubic", "rope_theta": 1e4}}, "rope type.*got: 'cubic'.*yarn"),
    "cubic_v4": ({"rope_parameters": ..., "rope_scaling": {"type": "cubic", "factor": 2.0}}, "rope type.*cubic"),
    "quip": ({"quantization_config": {"quant_method": "quip", "bits": 4}}, "quant_method is unknown; got: .quip"),
    "uneven_heads": ({"num_key_value_heads": 3}, "not a multiple of the number of key-value heads; got: 4, 3"),
    "heads_that_do_not_divide": ({"num_attention_heads": 5, "head_dim": ...}, "hidden_size is not a multiple of"),
    "no_layers": ({"num_hidden_layers": 0}, "num_hidden_layers is not a positive integer"),
    "negative_size": ({"hidden_size": -64}, "hidden_size is not a positive integer"),
    "size_of_text": ({"hidden_size": "64"}, "hidden_size is not a positive integer"),
    "no_heads": ({"num_attention_heads": 0}, "num_attention_heads is not a positive integer"),
    "no_vocabulary": ({"vocab_size": ...}, "vocab_size is not a positive integer; got: None"),
    "eps_of_text": ({"rms_norm_eps": "tiny"}, "rms_norm_eps is not a positive number"),
    "flag_of_text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is not true or false"),
    "dtype_float8": ({"dtype": "float8_e4m3fn"}, "dtype Graft does not compute in; got: float8_e4m3fn"),
    "dtype_of_another_type": ({"dtype": {"self": "float32"}}, "dtype Graft does not compute in"),
}


@pytest.mark.parametrize(("changes", "match"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_config_value_that_is_not_computed_with_is_refused_by_name(
    changes: dict[str, Any], match: str, base: Path
) -> None:
    edit_json(base / "config.json", **changes)
    refusal(base, match)


MALFORMED_ROPE: dict[str, Any] = {
    "linear_without_factor": {"rope_type": "linear", "rope_theta": 1e4},
    "linear_with_factor_of_text": {"rope_type": "linear", "rope_theta": 1e4, "factor": "four"},
    "linear_with_factor_zero": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0},
    "llama3_without_its_numbers": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0},
    "yarn_with_factor_of_text": {"rope_type": "yarn", "factor": "four"},
    "yarn_with_negative_beta": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1},
    "yarn_truncated_by_text": {"rope_type": "yarn", "factor": 4.0, "truncate": "yes"},
    "dynamic_without_factor": {"rope_type": "dynamic"},
    "longrope_without_factors": {"rope_type": "longrope", "long_factor": [1.0] * 8},
    "longrope_with_a_number": {"rope_type": "longrope", "long_factor": 2.0, "short_factor": [1.0] * 8},
    "longrope_with_too_few": {"rope_type": "longrope", "long_factor": [2.0] * 7, "short_factor": [1.0] * 8},
    "longrope_with_zero": {"rope_type": "longrope", "long_factor": [2.0] * 7 + [0], "short_factor": [1.0] * 8},
    "half_a_pair": {"rope_type": "default", "partial_rotary_factor": 0.3125},
    "more_than_a_head": {"rope_type": "default", "partial_rotary_factor": 2.0},
    "setting_nobody_knows": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    "one_for_each_layer_type": {"full_attention": {"rope_type": "default"}},
    "theta_of_text": {"rope_type": "default", "rope_theta": "large"},
    "theta_zero": {"rope_type": "default", "rope_theta": 0},
    "text": "linear",
    "list": ["linear", 4.0],
    "type_of_another_type": {"rope_type": ["linear"], "factor": 4.0},
}


@pytest.mark.parametrize("rope", MALFORMED_ROPE.values(), ids=MALFORMED_ROPE)
def test_malformed_rope_settings_are_refused_by_name(rope: Any, base: Path) -> None:
    edit_json(base / "config.json", rope_parameters=rope)
    refusal(base, "rope|rotary")


def test_config_keys_that_nothing_reads_are_reported(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_json(base / "config.json", seq_length=4096, new_invention={"a": 1}, empty_invention=None, off=False)
    with caplog.at_level("WARNING", logger="graftlm"):
        LLM(base, kv_cache_bytes=1 << 20)
    assert "keys Graft does not read: new_invention, seq_length" in caplog.text
    assert "empty_invention" not in caplog.text


ARITHMETIC_KEYS: dict[str, Any] = {
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "qk_layernorm": True,
    "lm_head_bias": True,
    "rope_local_base_freq": 10_000.0,
    "layer_types_of_mlps": ["dense"],
    "num_experts": 8,
}


@pytest.mark.parametrize("key", ARITHMETIC_KEYS)
def test_an_unknown_key_that_sounds_like_arithmetic_is_refused_by_name(key: str, base: Path) -> None:
    edit_json(base / "config.json", **{key: ARITHMETIC_KEYS[key]})
    refusal(base, f"may change what the model computes; got: {key}; do: remove")


def test_unknown_keys_that_are_switched_off_or_say_only_how_fast_are_read_past(base: Path) -> None:
    edit_json(
        base / "config.json",
        sliding_window=None,
        qk_layernorm=False,
        use_flash_attn=True,
        _attn_implementation_autoset=True,
        attn_pdrop=0.1,
        bias_dropout_fusion=True,
    )
    LLM(base, kv_cache_bytes=1 << 20).shutdown()


AUTO_MAP = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}


def write_hostile_code(base: Path) -> Path:
    """Code that leaves a trace when it is imported."""
    trace = base / "executed"
    (base / "modeling_mine.py").write_text(f"open({str(trace)!r}, 'w')\nclass MineForCausalLM: pass\n")
    (base / "configuration_mine.py").write_text(f"open({str(trace)!r}, 'w')\nclass MineConfig: pass\n")
    return trace


def test_code_in_a_checkpoint_of_a_known_family_is_not_executed(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = write_hostile_code(base)
    edit_json(base / "config.json", auto_map={**AUTO_MAP, "AutoConfig": "configuration_mine.MineConfig"})
    with caplog.at_level("WARNING", logger="graftlm"):
        LLM(base, kv_cache_bytes=1 << 20).shutdown()
    assert "code of its own (auto_map): it is not executed, the model is served as llama" in caplog.text
    assert not trace.exists()


def test_code_in_a_checkpoint_of_an_unknown_family_is_not_executed_and_the_error_says_so(base: Path) -> None:
    trace = write_hostile_code(base)
    edit_json(base / "config.json", model_type="mine", auto_map=AUTO_MAP)
    message = refusal(base, "got: 'mine'; allowed: .*llama.*; do: the code that comes with the checkpoint")
    assert "is never executed" in message
    assert not trace.exists()


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = make_llama(tmp_path, vocab_size=258, pad_token_id=None)
    with caplog.at_level("WARNING", logger="graftlm"):
        llm = LLM(base, kv_cache_bytes=1 << 20)
    assert "the tokenizer has 259 tokens, the model rows for 258" in caplog.text
    with pytest.raises(InvalidRequest, match="258"):
        llm.generate(["a<pad>"])


def test_a_model_with_more_rows_than_the_tokenizer_has_tokens_is_served_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="graftlm"):
        llm = LLM(make_llama(tmp_path, vocab_size=320), kv_cache_bytes=1 << 20)
    assert caplog.text == ""
    assert llm.logits([1, 2, 319]).shape == (3, 320)


def test_a_plain_checkpoint_is_read_without_a_warning(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="graftlm"):
        LLM(base, kv_cache_bytes=1 << 20)
    assert caplog.text == ""


def test_a_head_that_contradicts_tying_is_reported(
    tied_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = Path(shutil.copytree(tied_llama, tmp_path / "base"))
    rewrite(base, lambda tensors: {**tensors, "lm_head.weight": torch.ones(259, 64)})
    with caplog.at_level("WARNING", logger="graftlm"):
        LLM(base, kv_cache_bytes=1 << 20)
    assert "lm_head differs from the embedding: using it untied" in caplog.text


def test_each_missing_file_is_named(base: Path, tmp_path: Path) -> None:
    refusal(tmp_path / "no-such-folder", "no such model")
    (base / "model.safetensors").rename(tmp_path / "weights")
    refusal(base, r"missing model\.safetensors")
    (tmp_path / "weights").rename(base / "model.safetensors")
    (base / "config.json").unlink()
    refusal(base, r"no config\.json")
    refusal(base / "model.safetensors", "this file is not a model")


def test_a_model_without_a_tokenizer_is_refused(base: Path) -> None:
    for file in base.glob("tokenizer*"):
        file.unlink()
    refusal(base, "tokenizer")


@pytest.mark.parametrize(
    "source", ["", "missing", "./missing/model", "x" * 10_000, "~nobody-of-this-name/m", "a\0b"], ids=repr
)
def test_a_path_where_no_model_lies_is_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(refusal(source, "model")) < 1000


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000], ids=lambda content: repr(content[:4])
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_a_json_file_that_is_none_is_refused_by_name(name: str, content: bytes, base: Path) -> None:
    if name.endswith("index.json"):
        (base / "model.safetensors").unlink()
    (base / name).write_bytes(content)
    refusal(base, f"{name} is not")


def shard(base: Path) -> dict[str, Any]:
    LlamaForCausalLM.from_pretrained(base).save_pretrained(base, max_shard_size="100KB")
    (base / "model.safetensors").unlink()
    index: dict[str, Any] = json.loads((base / "model.safetensors.index.json").read_text())
    return index


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/outside.safetensors", "sub/x.safetensors", "..", "", "a\0b", 3, None], ids=repr
)
def test_an_index_that_names_files_outside_the_folder_is_refused(name: object, base: Path) -> None:
    index = shard(base)
    shutil.copy(next(base.glob("model-*.safetensors")), base.parent / "outside.safetensors")
    first = next(iter(index["weight_map"]))
    if isinstance(name, str) and name.startswith("/"):
        name = str(base.parent / "outside.safetensors")
    index["weight_map"][first] = name
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    refusal(base, "names files outside the folder")


def test_a_missing_shard_and_an_index_without_a_map_are_refused(base: Path) -> None:
    index = shard(base)
    first = sorted(set(index["weight_map"].values()))[0]
    content = (base / first).read_bytes()
    (base / first).unlink()
    refusal(base, f"missing {first}")
    (base / first).write_bytes(content)
    for weight_map in ({}, [], None, "x"):
        (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        refusal(base, "has no weight_map")


def test_a_tensor_that_two_shards_hold_is_refused(base: Path) -> None:
    index = shard(base)
    files = sorted(set(index["weight_map"].values()))
    shutil.copy(base / files[0], base / files[1])
    refusal(base, f"is in two files; got: {files[0]}, {files[1]}")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda whole: whole[:-100],
    "half": lambda whole: whole[: len(whole) // 2],
    "empty": lambda whole: b"",
    "long_header": lambda whole: struct.pack("<Q", 2**60) + whole[8:],
    "pickle": lambda whole: b"PK\x03\x04" + whole,
    "lfs_pointer": lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_weights_file_is_refused_by_name(damage: Callable[[bytes], bytes], base: Path) -> None:
    path = base / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refusal(base, r"model\.safetensors is not a readable safetensors file")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool], ids=str)
def test_weights_that_are_codes_and_not_numbers_are_refused_by_name(dtype: torch.dtype, base: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(base, lambda tensors: {**tensors, name: tensors[name].to(dtype)})
    refusal(base, rf"tensor {name} is not stored as plain numbers; got: {str(dtype).removeprefix('torch.')}")


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items(), ids=DTYPES)
def test_r102_without_a_dtype_in_the_config_the_files_own_counts(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", dtype=dtype)
    assert open_checkpoint(base).dtype == name
    edit_json(base / "config.json", dtype=..., torch_dtype=name)
    assert open_checkpoint(base).dtype == name
    edit_json(base / "config.json", torch_dtype=...)
    assert open_checkpoint(base).dtype == name


@pytest.mark.parametrize("stored", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_r102_any_dtype_is_computed_in_any_other(stored: torch.dtype, wanted: str, tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", dtype=stored)
    prompt = prompt_of(40, 1)
    expected = Oracle(base).logits(prompt)
    logits = LLM(base, dtype=wanted, kv_cache_bytes=1 << 20).logits(prompt)
    error = (logits - expected).abs().max()
    assert error < (1e-4 if wanted == "float32" else 0.3)
    assert wanted == "float32" or error > 1e-4


def test_weights_of_several_dtypes_are_read_in_one(base: Path) -> None:
    rewrite(base, lambda tensors: {n: t.bfloat16() if "mlp" in n else t.double() for n, t in tensors.items()})
    prompt = prompt_of(40, 1)
    logits = LLM(base, dtype="float32", kv_cache_bytes=1 << 20).logits(prompt)
    assert (logits - Oracle(base).logits(prompt)).abs().max() < 1e-4


def test_the_weights_file_may_vanish_once_the_engine_stands(base: Path) -> None:
    llm = LLM(base, kv_cache_bytes=1 << 20)
    before = llm.logits(prompt_of(9, 1))
    (base / "model.safetensors").write_bytes(b"")
    assert llm.logits(prompt_of(9, 1)).equal(before)


def test_a_layer_count_that_would_fill_the_memory_is_refused(base: Path) -> None:
    edit_json(base / "config.json", num_hidden_layers=10**9)
    refusal(base, "num_hidden_layers is too large")


def test_what_was_read_of_a_file_does_not_stay_in_memory_while_the_rest_is_read(base: Path) -> None:
    size, count = 32 << 20, 6
    save_file(
        {f"tensor{index}": torch.full((size // 4,), float(index)) for index in range(count)}, base / "model.safetensors"
    )
    checkpoint = open_checkpoint(base)
    first = checkpoint.read("tensor0")
    before, largest = psutil.Process().memory_info().rss, 0
    for index in range(count):
        assert checkpoint.read(f"tensor{index}").sum() == index * (size // 4)
        largest = max(largest, psutil.Process().memory_info().rss - before)
    assert largest < count // 2 * size + (8 << 20)
    assert first.max() == 0
    checkpoint.close()
