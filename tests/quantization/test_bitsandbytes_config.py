"""What quantization_config says about a bitsandbytes checkpoint, and who wins where its tensors disagree."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig as TransformersConfig

from graftlm.errors import CheckpointError
from graftlm.quantization.bitsandbytes import QUANTIZERS, bitsandbytes_format
from graftlm.quantization.bitsandbytes.config import quantization_config
from tests.quantization.bitsandbytes_oracle import CPU, PATH, four_bit, int8, random_matrix
from tests.quantization.memory_tensors import MemoryTensors


@pytest.mark.parametrize(
    ("options", "quantization"),
    [
        ({"load_in_4bit": True}, "fp4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4-double"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}, "fp4"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}, "int8"),
    ],
)
def test_the_configs_transformers_writes_are_read(
    options: dict[str, Any], quantization: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = TransformersConfig(**options).to_dict()
    assert bitsandbytes_format(config).quantization == quantization
    assert not caplog.records


@pytest.mark.parametrize("quantization", list(QUANTIZERS))
def test_transformers_reads_the_configs_that_are_written(quantization: str) -> None:
    config = quantization_config(quantization, skipped_modules=["lm_head"], compute_dtype="bfloat16")
    read = TransformersConfig.from_dict(config)
    assert read.quantization_method() == {"int8": "llm_int8"}.get(quantization, quantization.removesuffix("-double"))
    assert read.bnb_4bit_use_double_quant == quantization.endswith("-double")
    assert read.llm_int8_skip_modules == ["lm_head"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bnb_4bit_quant_type", "af4"),
        ("bnb_4bit_quant_storage", "complex64"),
        ("bnb_4bit_compute_dtype", "int8"),
        ("bnb_4bit_use_double_quant", "yes"),
        ("load_in_4bit", 1),
        ("llm_int8_threshold", "6"),
        ("llm_int8_skip_modules", "lm_head"),
        ("quant_method", "gptq"),
    ],
)
def test_an_unusable_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        bitsandbytes_format({key: value})


def test_null_stands_for_a_default() -> None:
    config = {"load_in_4bit": True, "load_in_8bit": None, "bnb_4bit_quant_type": None, "bnb_4bit_compute_dtype": None}
    assert bitsandbytes_format(config).quantization == "fp4"


def test_two_widths_at_once_are_refused() -> None:
    with pytest.raises(CheckpointError, match="load_in_4bit and load_in_8bit"):
        bitsandbytes_format({"load_in_4bit": True, "load_in_8bit": True})


def test_an_unknown_key_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    bitsandbytes_format({"load_in_4bit": True, "bnb_5bit": True})
    assert "bnb_5bit" in caplog.text


def test_modules_of_one_checkpoint_may_be_stored_in_four_bits_eight_bits_and_plainly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    matrix = random_matrix(8, 64)
    nf4, _, _ = four_bit(matrix, quant_type="nf4")
    tensors = {name.replace(PATH, "a"): value for name, value in nf4.items()}
    tensors |= {name.replace(PATH, "b"): value for name, value in int8(matrix).items()}
    tensors |= {name.replace(PATH, "c"): value for name, value in int8(matrix).items()}
    tensors["d.weight"] = matrix
    file = MemoryTensors(tensors)
    reader = bitsandbytes_format({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    assert [reader.stores(file, path) for path in "abcd"] == [True, True, True, False]
    with caplog.at_level(logging.WARNING):
        formats = [reader.read(file, path, shape=(8, 64), dtype=torch.float32, device=CPU).format for path in "abc"]
    assert formats == ["nf4, blocks of 64", "int8, by row", "int8, by row"]
    (record,) = caplog.records
    assert "tensors of b are int8" in record.getMessage()
