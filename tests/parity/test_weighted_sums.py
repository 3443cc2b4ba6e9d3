"""Several adapters on one request: what PEFT computes with several active adapters."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from graftlm import LLM, SamplingParams
from graftlm.errors import AdapterUnsupported, InvalidRequest, ModelNotFound
from tests import tiny

PROMPT = list(range(5, 40))
PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("summands")
    return {
        "first": tiny.make_adapter(llama, folder / "first", seed=1, r=4, target_modules=tiny.ALL_PROJECTIONS),
        "second": tiny.make_adapter(
            llama, folder / "second", seed=2, r=8, target_modules=["q_proj", "lm_head", "down_proj"]
        ),
        "dora": tiny.make_adapter(llama, folder / "dora", seed=3, use_dora=True),
    }


@pytest.fixture(scope="module")
def llm(llama: Path, adapters: dict[str, Path]) -> LLM:
    return LLM(llama, name="base", adapters=adapters)


def peft_logits(llama: Path, adapters: dict[str, Path], weights: dict[str, float]) -> torch.Tensor:
    """Logits with several active adapters, each layer's scaling multiplied by the adapter's weight."""
    names = list(weights)
    base = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, adapters[names[0]], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(adapters[name], name)
    model.base_model.set_adapter(names)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name in set(names) & set(module.scaling):
                module.set_scale(name, weights[name])
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize(
    "weights", [{"first": 0.7, "second": 0.3}, {"second": 1.0, "first": 1.0}, {"first": -0.5, "second": 2.0}]
)
def test_a_weighted_sum_equals_pefts_several_active_adapters(
    llm: LLM, llama: Path, adapters: dict[str, Path], weights: dict[str, float]
) -> None:
    expected = peft_logits(llama, adapters, weights)
    logits = llm.logits(PROMPT, adapter=weights)
    assert (logits - llm.logits(PROMPT)).abs().max() > 1e-2
    assert (logits - llm.logits(PROMPT, adapter="first")).abs().max() > 1e-2
    assert (logits - expected).abs().max() <= 1e-4 * (1 + expected.abs().max())


def test_r016_weight_one_is_the_adapter_and_weight_zero_the_base(llm: LLM) -> None:
    assert torch.equal(llm.logits(PROMPT, adapter={"first": 1}), llm.logits(PROMPT, adapter="first"))
    assert torch.equal(llm.logits(PROMPT, adapter={"first": 0}), llm.logits(PROMPT))


def test_r062_sums_of_other_weights_do_not_share_anything_in_a_batch(llm: LLM) -> None:
    choices = [
        "first",
        {"first": 0.5},
        {"first": 0.5, "second": 1},
        None,
        "first:0.5+second:1",
        {"second": 1, "first": 0.5},
    ]
    prompt = {"prompt_token_ids": PROMPT}
    alone = [llm.generate(prompt, PARAMS, adapter=choice)[0].outputs[0].token_ids for choice in choices]
    together = llm.generate([prompt] * len(choices), PARAMS, adapter=choices)
    assert [output.outputs[0].token_ids for output in together] == alone
    assert alone[2] == alone[4]
    assert len({alone[0], alone[2], alone[3]}) == 3


@pytest.mark.parametrize(
    ("choice", "error", "words"),
    [
        ({"first": 0.5, "dora": 0.5}, AdapterUnsupported, "dora cannot be part of a weighted sum"),
        ({"first": 1, "nobody": 1}, ModelNotFound, "nobody"),
        ({"first": float("nan")}, InvalidRequest, "weights finite"),
        ("first:x", InvalidRequest, "not a weighted sum"),
        ("first+first", InvalidRequest, "each name once"),
        ({}, InvalidRequest, "not a choice of adapters"),
        (5, InvalidRequest, "not a choice of adapters"),
    ],
)
def test_what_is_no_sum_is_refused_and_the_engine_goes_on(
    llm: LLM, choice: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        llm.generate({"prompt_token_ids": PROMPT}, PARAMS, adapter=choice)  # type: ignore[arg-type]
    assert [output.finished for output in llm.generate("x", PARAMS, adapter={"first": 1})] == [True]
