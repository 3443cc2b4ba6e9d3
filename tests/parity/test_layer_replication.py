"""Adapters that make another stack of the base's layers: with PEFT's logits and tokens, alone and beside all others."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from graftlm import LLM, SamplingParams, merge
from graftlm.errors import (
    AdapterCorrupt,
    AdapterError,
    AdapterIncompatible,
    AdapterUnsupported,
    ContextLengthExceeded,
)
from tests.engine.rig import num_preemptions, watched
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.method_rig import (
    PROMPT,
    Expected,
    assert_adapter_is_peft,
    generate,
    make_adapter,
    make_biases_loud,
    run_peft,
)
from tests.tiny import ALL_PROJECTIONS, edit_json, make_llama, make_model

# PEFT says that it saves the embedding along, and takes lora_bias for unsharded tensors.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

NUM_LAYERS = 3
INVOCATION = [17, 18]
# Keys and values of one token of the base in float32: K and V, 2 heads of 16 in each layer.
KV_BYTES = NUM_LAYERS * 2 * 2 * 16 * 4
CASES: dict[str, dict[str, Any]] = {
    "doubled": {"layer_replication": [[0, 3], [0, 3]]},
    "overlapping": {"layer_replication": [[0, 2], [1, 3]], "target_modules": ALL_PROJECTIONS},
    "reordered": {"layer_replication": [[2, 3], [0, 1], [1, 2]]},
    "shorter": {"layer_replication": [[0, 1], [2, 3]], "target_modules": ALL_PROJECTIONS},
    "one-layer-seven-times": {"layer_replication": [[1, 2]] * 7, "use_rslora": True},
    "dora": {"layer_replication": [[0, 2], [1, 3]], "use_dora": True, "target_modules": ALL_PROJECTIONS},
    "patterns": {
        "layer_replication": [[0, 3], [1, 3]],
        "layers_to_transform": [1, 3, 4],
        "rank_pattern": {r"layers\.4\..*q_proj": 3},
        "alpha_pattern": {r"layers\.1\..*": 40},
    },
    "saved": {
        "layer_replication": [[0, 2], [1, 3]],
        "modules_to_save": ["norm", "lm_head"],
        "bias": "all",
        "lora_bias": True,
    },
    "ends": {"layer_replication": [[0, 2], [1, 3]], "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "activated": {
        "layer_replication": [[0, 2], [1, 3]],
        "alora_invocation_tokens": INVOCATION,
        "trainable_token_indices": [9, 5, 200],
    },
    "whole": {"layer_replication": [[0, 3]]},
    "plain": {},
    "plain-dora": {"use_dora": True, "target_modules": ALL_PROJECTIONS},
}


class Bench:
    """A base, an adapter for each case, and what PEFT computes with each."""

    def __init__(self, folder: Path) -> None:
        self.base = make_llama(folder / "base", num_hidden_layers=NUM_LAYERS, attention_bias=True)
        torch.manual_seed(0)
        make_biases_loud(self.base)
        self.folders = {
            name: make_adapter(self.base, folder / name, peft.LoraConfig(task_type="CAUSAL_LM", **_config(case)))
            for name, case in CASES.items()
        }
        self.expected = {name: run_peft(self.base, path) for name, path in self.folders.items()}
        self.unadapted = run_peft(self.base, None)

    def wanted(self, name: str | None) -> Expected:
        return self.unadapted if name is None else self.expected[name]

    def assert_batch_is_peft(self, llm: LLM, repeats: int = 2) -> None:
        """Every adapter and the base, shuffled in one batch: each row is PEFT's."""
        rows = [None, *CASES] * repeats
        random.Random(1).shuffle(rows)
        answers = generate(llm, rows)
        wrong = [
            (name, answer, self.wanted(name).token_ids)
            for name, answer in zip(rows, answers, strict=True)
            if answer != self.wanted(name).token_ids
        ]
        assert not wrong


@contextmanager
def serving(base: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(base, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def _config(case: dict[str, Any]) -> dict[str, Any]:
    return {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **case}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("replication"))


@pytest.fixture(scope="module")
def llm(bench: Bench) -> Iterator[LLM]:
    with serving(bench.base, adapters=bench.folders, kv_cache_bytes=1024 * KV_BYTES) as llm:
        yield llm


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_with_another_stack_is_peft(name: str, bench: Bench, llm: LLM) -> None:
    assert_adapter_is_peft(name, llm, bench.expected[name], bench.unadapted)


def test_other_stacks_ordinary_adapters_and_the_base_run_in_one_batch(bench: Bench, llm: LLM) -> None:
    bench.assert_batch_is_peft(llm)
    torch.testing.assert_close(llm.logits(PROMPT), bench.unadapted.logits, rtol=1e-4, atol=1e-4)


def test_prompts_in_chunks_give_the_same_tokens(bench: Bench) -> None:
    with serving(
        bench.base, adapters=bench.folders, kv_cache_bytes=1024 * KV_BYTES, max_num_batched_tokens=4, block_size=2
    ) as small:
        bench.assert_batch_is_peft(small, repeats=1)


def test_preempted_requests_go_on_with_the_same_tokens(bench: Bench) -> None:
    """One request of the highest stack fills most of the cache."""
    with (
        serving(
            bench.base, adapters=bench.folders, kv_cache_bytes=72 * KV_BYTES, block_size=4, max_model_len=24
        ) as small,
        watched(small) as seen,
    ):
        bench.assert_batch_is_peft(small)
    assert num_preemptions(seen) > 2


@pytest.mark.parametrize("name", ["doubled", "shorter", "activated"])
def test_r002_a_prefix_in_the_cache_is_the_adapters_own(name: str, bench: Bench) -> None:
    """Blocks of the base, of the stack's first layers and of those above them hold different things."""
    prompt: Any = [{"prompt_token_ids": [*PROMPT, *bench.unadapted.token_ids]}]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"adapters": {name: bench.folders[name]}, "kv_cache_bytes": 128 * KV_BYTES}
    with serving(bench.base, prefix_cache=False, **options) as uncached:
        fresh = {adapter: uncached.generate(prompt, params, adapter=adapter)[0] for adapter in (None, name)}
    with serving(bench.base, block_size=4, **options) as cached:
        for adapter, num_cached in ((None, 0), (name, 0), (name, 20), (None, 20)):
            (output,) = cached.generate(prompt, params, adapter=adapter)
            assert output.outputs[0].token_ids == fresh[adapter].outputs[0].token_ids
            assert output.num_cached_tokens == num_cached


def test_a_stack_takes_as_many_blocks_as_it_fills_and_gives_them_back(bench: Bench) -> None:
    with serving(bench.base, kv_cache_bytes=64 * KV_BYTES, block_size=4, max_model_len=64) as small:
        whole = {"prompt_token_ids": list(range(40))}
        params = SamplingParams(temperature=0, max_tokens=1)
        before = small.logits(PROMPT)
        for _ in range(2):
            small.load_adapter("high", bench.folders["one-layer-seven-times"])
            assert small.adapters["high"].cache_factor == 3
            assert len(small.generate([whole], params)) == 1
            # 16 blocks hold 5 blocks of 4 tokens three times.
            with pytest.raises(ContextLengthExceeded, match="maximum context length is 20 tokens"):
                small.generate([whole], params, adapter="high")
            torch.testing.assert_close(
                small.logits(PROMPT, adapter="high"),
                bench.expected["one-layer-seven-times"].logits,
                rtol=1e-4,
                atol=1e-4,
            )
            small.unload_adapter("high")
            assert not small.adapters
        # Nothing is held: the whole cache is the base's again.
        assert len(small.generate([{"prompt_token_ids": [7] * 63}], params)) == 1
        assert torch.equal(small.logits(PROMPT), before)


def test_weighted_sums_and_merging_are_refused_by_name(bench: Bench, llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(AdapterUnsupported, match=r"shorter cannot be part of a weighted sum.*layer replication"):
        llm.logits(PROMPT, adapter="plain:0.5+shorter:0.5")
    with pytest.raises(AdapterUnsupported, match="cannot be merged: it has other layers than the base"):
        merge(bench.base, bench.folders["shorter"], tmp_path / "merged")


WRONG: dict[str, tuple[Any, type[AdapterError], str]] = {
    "not-a-list": ("0-3", AdapterCorrupt, "is not made of ranges"),
    "not-pairs": ([[0, 1, 2]], AdapterCorrupt, "is not made of ranges"),
    "numbers": ([0, 3], AdapterCorrupt, "is not made of ranges"),
    "no-integers": ([[0.0, 2.0]], AdapterCorrupt, "is not made of ranges"),
    "booleans": ([[False, True]], AdapterCorrupt, "is not made of ranges"),
    "reversed": ([[2, 0]], AdapterCorrupt, "a range without layers"),
    "empty-range": ([[0, 2], [1, 1]], AdapterCorrupt, "a range without layers"),
    "negative": ([[-1, 2]], AdapterCorrupt, "a range without layers"),
    "beyond-the-base": ([[0, 2], [1, 4]], AdapterIncompatible, "layers that this base does not have.*layers below 3"),
    "huge": ([[0, 10**30]], AdapterIncompatible, "layers that this base does not have"),
    "too-high": ([[0, 3]] * 9, AdapterUnsupported, "too high.*at most 24 layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_r014_ranges_that_make_no_stack_are_refused_by_name(name: str, bench: Bench, llm: LLM, tmp_path: Path) -> None:
    value, error, match = WRONG[name]
    folder = Path(shutil.copytree(bench.folders["plain"], tmp_path / name))
    edit_json(folder / "adapter_config.json", layer_replication=value)
    with pytest.raises(error, match=f"layer_replication.*{match}") as caught:
        llm.load_adapter(name, folder)
    assert type(caught.value) is error
    assert name not in llm.adapters


def test_an_initialisation_that_changes_the_base_is_refused(bench: Bench, llm: LLM, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bench.folders["doubled"], tmp_path / "pissa"))
    edit_json(folder / "adapter_config.json", init_lora_weights="pissa")
    with pytest.raises(AdapterUnsupported, match="layer_replication with an initialisation that changes the base"):
        llm.load_adapter("pissa", folder)


# Windows in every layer, projections that are fused on disk, experts.
FAMILY_ADAPTERS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"]},
    "qwen3_moe": {"target_parameters": ["mlp.experts.gate_up_proj"]},
}


@pytest.mark.parametrize("family", FAMILY_ADAPTERS)
def test_families_whose_layers_are_alike_are_peft_too(family: str, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", FAMILY_CASES[family].config())
    config = _config({"layer_replication": [[0, 2], [0, 2], [1, 2]], **FAMILY_ADAPTERS[family]})
    adapter = make_adapter(base, tmp_path / "higher", peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with serving(base, kv_cache_bytes=1 << 22, adapters={"higher": adapter}) as llm:
        assert_adapter_is_peft("higher", llm, run_peft(base, adapter), run_peft(base, None))


@pytest.mark.parametrize(
    ("family", "match"),
    [
        ("gpt2", "PEFT does not find its layers"),
        ("gemma2", "whose layers differ"),
        ("gemma3", "PEFT does not find its layers"),
    ],
)
def test_bases_whose_layers_cannot_be_moved_are_refused(family: str, match: str, bench: Bench, tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", FAMILY_CASES[family].config())
    folder = Path(shutil.copytree(bench.folders["plain"], tmp_path / "moved"))
    edit_json(folder / "adapter_config.json", layer_replication=[[0, 1], [0, 1]])
    with serving(base, kv_cache_bytes=1 << 20) as other, pytest.raises(AdapterUnsupported, match=match):
        other.load_adapter("moved", folder)
