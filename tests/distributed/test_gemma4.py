"""Gemma 4's small models over workers: inputs that each layer has of its own, keys and values that layers share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import Gemma4TextConfig

from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.distributed.in_process import Fault
from graftlm.errors import ConfigurationError
from graftlm.models.layout import lay_out
from graftlm.models.read import read_spec
from graftlm.models.tensor_share import share_model
from tests.distributed.rig import OPTIONS, answers, assert_same_logits, open_pipeline, tokens
from tests.parity import method_rig
from tests.parity.family_cases import GEMMA4, GEMMA4_PROJECTIONS
from tests.parity.oracle import Oracle, assert_close, prompt_of
from tests.tiny import make_adapter, make_model

# The last two read keys and values of the two before them.
DEEP: dict[str, Any] = {
    **GEMMA4,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gemma4") / "base", Gemma4TextConfig(**DEEP))


@pytest.fixture(scope="module")
def gemma_adapters(gemma: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All of them change what makes the layers' own inputs, or the tokens that these are made of."""
    folder = tmp_path_factory.mktemp("adapters")
    projection = "per_layer_model_projection"
    ia3 = peft.IA3Config(task_type="CAUSAL_LM", target_modules=[projection], feedforward_modules=[])
    return {
        "plain": make_adapter(gemma, folder / "plain", seed=1, target_modules=list(GEMMA4_PROJECTIONS)),
        "dora": make_adapter(gemma, folder / "dora", seed=2, r=3, use_dora=True, target_modules=[projection, "q_proj"]),
        "saved": make_adapter(
            gemma,
            folder / "saved",
            seed=3,
            target_modules=["embed_tokens"],
            modules_to_save=[projection, "per_layer_projection_norm"],
        ),
        "ia3": method_rig.make_adapter(gemma, folder / "ia3", ia3),
    }


@pytest.fixture(scope="module")
def whole(gemma: Path, gemma_adapters: dict[str, Path]) -> LLM:
    return LLM(gemma, adapters=gemma_adapters, **OPTIONS)


@pytest.mark.parametrize(("workers", "layers"), [(2, ()), (3, ()), (2, (1, 5))], ids=str)
def test_layers_with_inputs_of_their_own_can_be_on_any_worker(
    gemma: Path, gemma_adapters: dict[str, Path], whole: LLM, workers: int, layers: Sequence[int]
) -> None:
    pipeline = open_pipeline(gemma, gemma_adapters, workers=workers, worker_layers=layers)
    names, oracle, ids = list(gemma_adapters), Oracle(gemma), prompt_of(20, 4)
    assert_same_logits(pipeline.llm, whole, names)
    for name in (None, *names):
        expected = oracle.logits(ids, None if name is None else gemma_adapters[name])
        assert_close(pipeline.llm.logits(ids, adapter=name), expected, 1e-4)
    assert tokens(answers(pipeline.llm, names)) == tokens(answers(whole, names))
    bytes_held = [worker.work.adapter_bytes for worker in pipeline.llm.workers if worker.work is not None]
    assert len(bytes_held) == workers
    assert min(bytes_held) > 0


@pytest.mark.parametrize(("workers", "layers"), [(None, ()), (2, (1, 5))], ids=str)
def test_ranks_share_out_inputs_of_layers_and_keys_that_others_read(
    gemma: Path, gemma_adapters: dict[str, Path], whole: LLM, workers: int | None, layers: Sequence[int]
) -> None:
    pipeline = open_pipeline(gemma, gemma_adapters, workers=workers, worker_layers=layers, tensor_parallel=2)
    names, oracle, ids = list(gemma_adapters), Oracle(gemma), prompt_of(20, 4)
    assert_same_logits(pipeline.llm, whole, names)
    for name in (None, *names):
        expected = oracle.logits(ids, None if name is None else gemma_adapters[name])
        assert_close(pipeline.llm.logits(ids, adapter=name), expected, 1e-4)
    assert tokens(answers(pipeline.llm, names)) == tokens(answers(whole, names))


def test_ranks_have_keys_of_the_layers_that_lend_them_alone(gemma: Path) -> None:
    """Of a layer that borrows a rank has query heads, and the key heads that the lender's rank has."""
    family, spec = read_spec(open_checkpoint(gemma))
    layout = lay_out(spec, family.names)
    shares = [share_model(spec, layout, rank=rank, size=2) for rank in range(2)]
    lender = spec.layers[4].attention.kv_layer
    assert lender is not None
    for share in shares:
        assert share.heads[4] == share.heads[lender]
        assert len(share.matrices[layout.layers[4].linears["qkv"].slot].rows) == 1
        assert len(share.matrices[layout.layers[lender].linears["qkv"].slot].rows) == 3


def test_a_lost_worker_costs_no_token_there_either(gemma: Path, gemma_adapters: dict[str, Path], whole: LLM) -> None:
    faults = [Fault(kind="die", stage=stage, at=at) for stage, at in ((0, 3), (2, 8))]
    pipeline = open_pipeline(gemma, gemma_adapters, faults, worker_layers=(2, 4))
    assert tokens(answers(pipeline.llm, ["plain", "saved"])) == tokens(answers(whole, ["plain", "saved"]))
    assert pipeline.pool.pending_faults == []


def test_a_projection_that_is_quantised_is_that_of_one_process(gemma: Path, gemma_adapters: dict[str, Path]) -> None:
    chosen = {name: gemma_adapters[name] for name in ("plain", "dora")}
    local = LLM(gemma, adapters=chosen, quantization="nf4", **OPTIONS)
    pipeline = open_pipeline(gemma, chosen, quantization="nf4")
    assert_same_logits(pipeline.llm, local, list(chosen))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"worker_layers": (3, 3)}, r"got: layers 0 to 2; allowed: spans that begin with layer 0, 1 to 2;"),
        ({"workers": 4}, r"more workers than stretches of layers: .*; got: 4; allowed: 1 to 3"),
    ],
)
def test_layers_that_share_keys_and_values_stay_together(gemma: Path, options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        open_pipeline(gemma, {}, **options)
