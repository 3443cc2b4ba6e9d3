"""Layers shared out by tensors compute what one process does, with every adapter cut right. The ranks are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.boft import layer as boft_layer
from torch import Tensor

from graftlm import LLM
from graftlm.checkpoint import open_checkpoint
from graftlm.distributed.in_process import Fault
from graftlm.distributed.thread_collective import ThreadGroup
from graftlm.errors import AdapterUnsupported, ConfigurationError
from graftlm.kernels.ops import LoraExpand, LoraUpdate
from graftlm.layers.patch import LinearPatch, ModelPatch, Slot
from graftlm.layers.row_parallel import RowParallelLinear
from graftlm.layers.segments import Segment, Segments
from graftlm.models.layout import lay_out
from graftlm.models.read import read_spec
from graftlm.models.tensor_share import share_model
from graftlm.quantization import DenseWeight
from graftlm.quantization.own_memory import with_own_memory
from tests.distributed.rig import (
    OPTIONS,
    answers,
    assert_nothing_is_held,
    assert_same_logits,
    open_pipeline,
    tokens,
)
from tests.parity import family_cases, method_rig
from tests.parity.family_cases import FAMILY_CASES
from tests.parity.quantized_bases import FORMATS
from tests.parity.test_quantized_bases import FAMILIES as QUANTIZED_FAMILIES
from tests.parity.test_vector_methods import PlainFastBlockDiagonal
from tests.tiny import ALL_PROJECTIONS, make_adapter, make_llama, make_model


@pytest.mark.parametrize(("workers", "ranks"), [(None, 2), (None, 3), (2, 2)])
def test_any_number_of_ranks_answers_as_one_process(
    base: Path, adapters: dict[str, Path], local: LLM, workers: int | None, ranks: int
) -> None:
    pipeline = open_pipeline(base, adapters, workers=workers, tensor_parallel=ranks)
    assert_same_logits(pipeline.llm, local, list(adapters))
    assert tokens(answers(pipeline.llm, list(adapters))) == tokens(answers(local, list(adapters)))
    assert [worker.rank for worker in pipeline.llm.workers] == list(range(ranks)) * (workers or 1)
    assert all({"plain", "dora", "ia3", "prefix"} <= set(worker.adapters) for worker in pipeline.llm.workers)


def test_methods_that_transform_inputs_and_outputs_are_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # PEFT would compile a kernel where it finds a compiler.
    monkeypatch.setattr(boft_layer, "get_fbd_cuda", PlainFastBlockDiagonal)
    base = make_llama(tmp_path / "base", attention_bias=True, mlp_bias=True, intermediate_size=128)
    method_rig.make_biases_loud(base)
    causal: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    # A butterfly of blocks lies across the ranks' bounds.
    configs: dict[str, peft.PeftConfig] = {
        "boft": peft.BOFTConfig(**causal, boft_block_size=8, boft_n_butterfly_factor=2, target_modules=["down_proj"]),
        "road": peft.RoadConfig(**causal, variant="road_2", group_size=16, target_modules=["q_proj", "o_proj"]),
        "ia3": peft.IA3Config(**causal, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "loha": peft.LoHaConfig(**causal, r=3, target_modules=["o_proj", "up_proj"]),
        "saved": peft.LoraConfig(**causal, r=4, target_modules=["v_proj"], modules_to_save=["o_proj", "gate_proj"]),
        "biases": peft.LoraConfig(**causal, r=4, target_modules=["o_proj"], bias="all"),
        "oft": peft.OFTConfig(**causal, r=0, oft_block_size=16, target_modules=["o_proj", "gate_proj"]),
    }
    adapters = {name: method_rig.make_adapter(base, tmp_path / name, config) for name, config in configs.items()}
    local = LLM(base, adapters=adapters, **OPTIONS)
    for ranks in (2, 3):
        pipeline = open_pipeline(base, adapters, workers=None, tensor_parallel=ranks)
        names = [name for name in adapters if name != "road" or ranks == 2]
        assert_same_logits(pipeline.llm, local, names)
        assert tokens(answers(pipeline.llm, names)) == tokens(answers(local, names))


def test_an_adapters_own_token_table_is_shared_out_as_the_bases_is(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base")
    adapters = {
        "saved": make_adapter(base, tmp_path / "saved", target_modules=["k_proj"], modules_to_save=["embed_tokens"]),
        "low_rank": make_adapter(base, tmp_path / "low_rank", r=64, target_modules=["embed_tokens"], use_dora=True),
    }
    local = LLM(base, adapters=adapters, **OPTIONS)
    pipeline = open_pipeline(base, adapters, workers=None, tensor_parallel=3)
    assert_same_logits(pipeline.llm, local, list(adapters))
    assert tokens(answers(pipeline.llm, list(adapters))) == tokens(answers(local, list(adapters)))
    work = pipeline.llm.workers[0].work
    assert work is not None
    assert work.adapter_bytes < 0.5 * sum(adapter.num_bytes for adapter in local.adapters.values())


def test_groups_of_outputs_that_lie_across_ranks_are_refused_and_the_others_go_on(base: Path, tmp_path: Path) -> None:
    config = peft.RoadConfig(task_type="CAUSAL_LM", variant="road_1", group_size=64, target_modules=["q_proj"])
    adapters = {
        "wide": method_rig.make_adapter(base, tmp_path / "wide", config),
        "plain": make_adapter(base, tmp_path / "plain"),
    }
    pipeline = open_pipeline(base, adapters, workers=None, tensor_parallel=2)
    with pytest.raises(AdapterUnsupported, match=r"adapter wide: .*layers\.0\.qkv mixes outputs that different ranks"):
        answers(pipeline.llm, ["wide"])
    local = LLM(base, adapters={"plain": adapters["plain"]}, **OPTIONS)
    assert tokens(answers(pipeline.llm, ["plain"])) == tokens(answers(local, ["plain"]))
    assert {worker.adapters for worker in pipeline.llm.workers} == {("plain",)}


FAMILIES = ["falcon_40b", "bloom", "gpt2", "phi3", "gemma2", "opt_post_norm", "gpt_oss", "qwen2_moe", "gemma4_moe"]


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_order_of_heads_and_every_mixture_can_be_divided(family: str, tmp_path: Path) -> None:
    case = FAMILY_CASES[family]
    base = make_model(tmp_path / "base", case.config())
    adapters = {kind: make_adapter(base, tmp_path / kind, **config) for kind, config in case.adapters().items()}
    local = LLM(base, adapters=adapters, **OPTIONS)
    pipeline = open_pipeline(base, adapters, workers=None, tensor_parallel=2)
    assert_same_logits(pipeline.llm, local, list(adapters))
    assert tokens(answers(pipeline.llm, list(adapters))) == tokens(answers(local, list(adapters)))


@pytest.mark.parametrize("kind", ["nf4_head", "int8_head", "gptq", "q4_0"])
def test_stored_quantised_weights_are_divided_as_they_are(kind: str, tmp_path: Path) -> None:
    full = make_model(tmp_path / "full", QUANTIZED_FAMILIES["llama"].config())
    base = FORMATS[kind](full, tmp_path).quantized
    adapters = {
        "plain": make_adapter(full, tmp_path / "plain", target_modules=ALL_PROJECTIONS),
        "dora": make_adapter(full, tmp_path / "dora", target_modules=ALL_PROJECTIONS, use_dora=True, r=3),
    }
    local = LLM(base, adapters=adapters, **OPTIONS)
    pipeline = open_pipeline(base, adapters, workers=None, tensor_parallel=2)
    assert_same_logits(pipeline.llm, local, list(adapters))


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_weights_that_are_quantised_while_loading_are_those_of_one_process(
    base: Path, adapters: dict[str, Path], quantization: str
) -> None:
    chosen = {name: adapters[name] for name in ("plain", "dora")}
    local = LLM(base, adapters=chosen, quantization=quantization, quantize_head=True, **OPTIONS)
    options = {"workers": None, "tensor_parallel": 2, "quantization": quantization, "quantize_head": True}
    pipeline = open_pipeline(base, chosen, **options)
    assert_same_logits(pipeline.llm, local, list(chosen))


@pytest.mark.parametrize(
    ("heads", "key_heads", "ranks"), [(6, 2, 2), (6, 2, 3), (6, 2, 4), (6, 2, 6), (6, 3, 2), (4, 1, 2)], ids=str
)
def test_heads_that_do_not_divide_evenly_are_divided_unevenly(
    heads: int, key_heads: int, ranks: int, tmp_path: Path
) -> None:
    """R109: six heads over four ranks."""
    sizes = {"hidden_size": 48, "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 8}
    base = make_llama(tmp_path / "base", **sizes)
    adapters = {"plain": make_adapter(base, tmp_path / "plain", target_modules=[*ALL_PROJECTIONS, "lm_head"])}
    pipeline = open_pipeline(base, adapters, workers=None, tensor_parallel=ranks)
    local = LLM(base, adapters=adapters, **OPTIONS)
    assert_same_logits(pipeline.llm, local, ["plain"])
    assert tokens(answers(pipeline.llm, ["plain"])) == tokens(answers(local, ["plain"]))


def test_ranks_share_every_large_matrix_out(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "base", hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    family, spec = read_spec(open_checkpoint(base))
    layout = lay_out(spec, family.names)
    shares = [share_model(spec, layout, rank=rank, size=4) for rank in range(4)]
    queries = [share.heads[0].queries for share in shares]
    assert [(part.start, part.stop) for part in queries] == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert [share.heads[0].keys.start for share in shares] == [0, 0, 1, 1]
    down = [share.matrices[layout.layers[0].linears["down"].slot].columns for share in shares]
    assert sum(part.stop - part.start for part in down if part is not None) == 96


@pytest.mark.parametrize(
    ("config", "ranks", "what"),
    [
        (transformers.LlamaConfig(**family_cases.SMALL), 5, "attention heads of layer 0 cannot be divided"),
        (FAMILY_CASES["olmo2"].config(), 2, "its key norm sees all 2 heads at once"),
    ],
    ids=["heads", "norms"],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(
    config: transformers.PreTrainedConfig, ranks: int, what: str, tmp_path: Path
) -> None:
    base = make_model(tmp_path / "base", config)
    with pytest.raises(ConfigurationError, match=what):
        open_pipeline(base, {}, workers=None, tensor_parallel=ranks)


@pytest.mark.parametrize("ranks", [0, -1, True, 1.5])
def test_ranks_that_are_no_number_are_refused(base: Path, ranks: Any) -> None:
    with pytest.raises(ConfigurationError, match="tensor_parallel must be a positive integer"):
        open_pipeline(base, {}, tensor_parallel=ranks)


@pytest.mark.parametrize("kind", ["die", "freeze"])
def test_a_lost_rank_takes_its_stage_along_and_no_token(
    base: Path, adapters: dict[str, Path], local: LLM, kind: Any
) -> None:
    names = ["plain", "dora"]
    # Of the fifth step the second rank.
    faults = [Fault(kind=kind, stage=0, at=at) for at in (2, 10)]
    pipeline = open_pipeline(base, {name: adapters[name] for name in names}, faults, workers=None, tensor_parallel=2)
    num_free_blocks = pipeline.llm.num_free_blocks
    assert tokens(answers(pipeline.llm, names)) == tokens(answers(local, names))
    assert pipeline.pool.pending_faults == []
    assert pipeline.pool.num_taken == 6
    assert_nothing_is_held(pipeline, num_free_blocks)


class RowParallelCase:
    """A layer [12, 10] in two ranks of 5 inputs, with a bias and a low-rank update."""

    def __init__(self, *, loud: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.weight, self.bias = (torch.randn(size, generator=generator) for size in ((7, 10), (12, 10), (12,)))
        self.lora_a = torch.randn(4, 10, generator=generator)
        self.lora_b = torch.randn(12, 4, generator=generator) * (1.0 if loud else 0.0)
        self.expected = self.x @ self.weight.t() + self.bias + self.x @ self.lora_a.t() @ self.lora_b.t()

    def run(self, shrinks: list[Tensor]) -> Tensor:
        """shrinks: the A of each rank, [5, 4]."""
        group, slot = ThreadGroup(2), Slot("layer")

        def rank(index: int) -> Tensor:
            own = slice(5 * index, 5 * index + 5)
            expand = LoraExpand(
                matrix=self.lora_b.t().contiguous(), out_start=0, out_stop=12, rank_start=0, rank_stop=4
            )
            patch = LinearPatch(low_rank=LoraUpdate(shrink=shrinks[index].contiguous(), expands=(expand,)))
            layer = RowParallelLinear(slot, DenseWeight(self.weight[:, own].contiguous()), self.bias, group.join(index))
            return layer(self.x[:, own], Segments([Segment(start=0, stop=7, patch=ModelPatch(linears={slot: patch}))]))

        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(rank, range(2))
        assert torch.equal(first, second)
        return first


def test_a_row_parallel_layer_adds_its_update_once() -> None:
    case = RowParallelCase(loud=True)
    own = [case.lora_a[:, :5].t(), case.lora_a[:, 5:].t()]
    torch.testing.assert_close(case.run(own), case.expected)


def test_the_same_part_of_a_on_every_rank_is_wrong_and_a_silent_adapter_would_not_show_it() -> None:
    """The negative control of all the tests here."""
    loud, silent = RowParallelCase(loud=True), RowParallelCase(loud=False)
    wrong = [loud.lora_a[:, :5].t()] * 2
    assert (loud.run(wrong) - loud.expected).abs().max() > 0.5 * loud.expected.std()
    torch.testing.assert_close(silent.run(wrong), silent.expected)


def test_an_update_that_every_rank_adds_is_counted_as_often() -> None:
    case = RowParallelCase(loud=True)
    update = case.x @ case.lora_a.t() @ case.lora_b.t()
    without = case.run([torch.zeros(5, 4)] * 2)
    assert (without + 2 * update - case.expected).abs().max() > 0.5 * case.expected.std()
    torch.testing.assert_close(without + update, case.expected)


def test_a_part_with_memory_of_its_own_lets_go_of_the_rest() -> None:
    whole = DenseWeight(torch.randn(8, 4))
    part = with_own_memory(whole.part(2, 4))
    assert torch.equal(part.dequantize(), whole.dequantize()[2:4])
    assert part.dequantize().untyped_storage().nbytes() == 2 * 4 * 4
