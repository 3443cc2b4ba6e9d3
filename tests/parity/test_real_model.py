"""SmolLM2-135M-Instruct with trained and random adapters, against transformers and PEFT. The long version, with every
prompt and each adapter in a batch of its own too, is benchmarks/parity_real.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.parity_real import RANDOM_ADAPTERS, Reference, compare, model_file
from graftlm import LLM
from graftlm.demo import demo_adapters

pytestmark = pytest.mark.long

SOME = ("random-r4", "random-r16-rslora", "random-r64")


def test_a_real_model_gives_pefts_tokens_and_logits_with_seven_kinds_of_rows_in_one_batch(tmp_path: Path) -> None:
    reference = Reference(model_file())
    adapters = demo_adapters() | {
        name: reference.write_adapter(tmp_path / name, seed, RANDOM_ADAPTERS[name]) for seed, name in enumerate(SOME)
    }
    assert {"pirate", "extract", "triage"} <= adapters.keys()
    llm = LLM(model_file(), quantization="none", kv_cache_bytes=256 << 20)
    rows = compare(llm, reference, adapters, num_prompts=1, num_generated=0, alone=False)
    assert [row.name for row in rows] == ["base", *adapters]
    assert {row.name: row for row in rows if not row.passed} == {}
